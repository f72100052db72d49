"""A process that attaches as an engine's worker does, and carries out one operation at a time for a test.

Bytes travel as base64.  One process may have several sessions, by name.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from kvstrata.memory import linux
from kvstrata.native.core import ExtentsMap
from kvstrata.rpc.wire import PROTOCOL_VERSION, AttachRequest
from kvstrata.session.attach import Attachment, attach, process_locks
from kvstrata.types import LayoutIdentity, Role, Slice, facts_digest
from tests.harness.attach_server import decode, encode
from tests.harness.child import serve
from tests.harness.raw_line import RawLine

FACTS: dict[str, Any] = {"payload_bytes": 4096, "sections": [2048, 2048]}


def make_request(
    *,
    session: bytes,
    group: bytes = b"g" * 16,
    role: str = "worker",
    model: str = "m",
    facts: dict[str, Any] | None = None,
    layers: tuple[int, int] = (0, 2),
    engine_slices: int = 1,
    protocol: int = PROTOCOL_VERSION,
    token: str = "",
    registers_memory: bool = False,
) -> AttachRequest:
    """Return an attach request that a server accepts unless an argument makes it wrong."""
    facts = facts or FACTS
    is_scheduler = role == "scheduler"
    part = Slice(layers=layers, kv_heads=(0, 1), layout=facts_digest(facts))
    return AttachRequest(
        protocol=protocol,
        session=session,
        group=group,
        role=Role(role),
        layout=LayoutIdentity(model=model, kv_dtype="bf16", chunk_tokens=256),
        engine_slices=engine_slices,
        slice=None if is_scheduler else part,
        facts=None if is_scheduler else facts,
        token=token,
        registers_memory=registers_memory,
    )


def closed(attachment: Attachment) -> bool:
    try:
        attachment.link.receive()
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return False


class Worker:
    def __init__(self) -> None:
        self._attachments: dict[str, Attachment] = {}
        self._maps: dict[str, ExtentsMap] = {}

    def attach(self, socket_dir: str, session: str, timeout_s: float = 30.0, **request: Any) -> int:
        if "layers" in request:
            request["layers"] = tuple(request["layers"])
        if "group" in request:
            request["group"] = decode(request["group"])
        attachment = attach(
            Path(socket_dir), make_request(session=decode(session), **request), process_locks(), timeout_s
        )
        self._attachments[session] = attachment
        return attachment.row

    def map(self, session: str) -> None:
        """Map the extents as the client does, and close the descriptors."""
        attachment = self._attachments[session]
        self._maps[session] = ExtentsMap(attachment.extents_fd, attachment.extents_bytes)
        attachment.close_pool_fds()

    def write(self, session: str, offset: int, data: str) -> None:
        body = decode(data)
        self._maps[session].view(offset, len(body))[:] = body

    def read(self, session: str, offset: int, length: int) -> str:
        return encode(bytes(self._maps[session].view(offset, length)))

    def try_write_index(self, session: str) -> str:
        """Try to map the index for writing; return the error's text, "" when the map succeeded."""
        import mmap

        fd = self._attachments[session].index_fd
        try:
            mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            return os.strerror(error.errno or 0)
        return ""

    def wait_server_closed(self, session: str) -> bool:
        attachment = self._attachments[session]
        import select

        select.select([attachment], [], [], 60)
        return closed(attachment)

    def server_closed(self, session: str) -> bool:
        return closed(self._attachments[session])

    def close(self, session: str) -> None:
        self._attachments.pop(session).close()

    def goodbye(self, session: str) -> bool:
        return self._attachments.pop(session).goodbye(30.0)

    def fork(self) -> int:
        """Fork a child that stays alive; return its pid."""
        if (pid := os.fork()) == 0:
            while True:
                signal.pause()
        return pid

    def open_lock_files(self) -> int:
        held = {tuple(file) for file in process_locks().held()}
        count = 0
        for entry in os.scandir("/proc/self/fd"):
            try:
                count += linux.file_id(int(entry.name)) in held
            except OSError:
                continue
        return count

    def raw(self, socket_dir: str, messages: list[str], fds: list[str]) -> list[str]:
        """Send messages as they are, the first with descriptors of the named kinds; return the replies.

        Kinds: self (our pidfd), parent (the parent's), thread (a pidfd of our thread), null (no pidfd), pid:NUMBER.
        """
        makers = {
            "self": lambda: os.pidfd_open(os.getpid()),
            "parent": lambda: os.pidfd_open(os.getppid()),
            "thread": lambda: os.pidfd_open(os.getpid(), linux.PIDFD_THREAD),
            "null": lambda: os.open(os.devnull, os.O_RDONLY),
        }
        held = process_locks().held()
        sent = [os.pidfd_open(int(kind[4:])) if kind.startswith("pid:") else makers[kind]() for kind in fds]
        replies = []
        with RawLine(Path(socket_dir)) as line:
            for message in messages:
                line.send(decode(message), sent)
                linux.close_all(sent)
                sent = []
                reply, received = line.receive()
                # Closing any descriptor of a lock file would drop this process's locks on it.
                linux.close_all([fd for fd in received if linux.file_id(fd) not in held])
                replies.append(encode(reply))
        return replies


if __name__ == "__main__":
    worker = Worker()
    serve({name: getattr(worker, name) for name in dir(worker) if not name.startswith("_")})
