"""A client of the RPC protocol with nothing between the test and the wire: it attaches, sends and receives frames.

Blocking, one thread.  It knows no retries and no breaker; tests decide what is sent, lost or repeated.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from kvstrata.memory.attach.client import Attachment, attach, process_locks
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.native.copying import RecordSpec, record_bytes, seal_record
from kvstrata.native.hashing import chain_keys, storage_keys
from kvstrata.native.pool import ExtentsMap
from kvstrata.rpc import wire
from kvstrata.types import (
    KEY_BYTES,
    Extent,
    LayoutIdentity,
    RequestIdentity,
    Role,
    Slice,
    facts_digest,
    unpack_extents,
)

R = TypeVar("R", bound=wire.Reply)

HANG_S = 30.0
"""A reply that takes so long has been lost; no test waits for this."""
CHUNK_TOKENS = 16
PAYLOAD_BYTES = 60_000
SECTIONS = [20_000, 40_000]
RECORD_BYTES = record_bytes(len(SECTIONS), PAYLOAD_BYTES)


class RpcError(Exception):
    """An error reply."""

    def __init__(self, reply: wire.Error) -> None:
        super().__init__(f"{reply.code}: {reply.message}")
        self.code = reply.code
        self.field = reply.field
        self.message = reply.message
        self.retryable = reply.retryable
        self.seq = reply.seq


def layout(model: str = "tiny", **fields: Any) -> LayoutIdentity:
    """A layout identity for tests."""
    return LayoutIdentity(model=model, kv_dtype="bf16", chunk_tokens=CHUNK_TOKENS, **fields)


FACTS: dict[str, Any] = {"payload_bytes": PAYLOAD_BYTES, "sections": SECTIONS}


def part(first_head: int = 0, end_head: int = 8, facts: dict[str, Any] = FACTS) -> Slice:
    """A slice for tests."""
    return Slice(layers=(0, 2), kv_heads=(first_head, end_head), layout=facts_digest(facts))


class RpcClient:
    """One session. `group` None makes an engine of its own."""

    def __init__(
        self,
        socket_dir: Path,
        *,
        role: Role = Role.CLIENT,
        group: bytes | None = None,
        slice_held: Slice | None = None,
        engine_slices: int = 1,
        identity: LayoutIdentity | None = None,
        token: str = "",
        facts: dict[str, Any] | None = None,
        registers_memory: bool = False,
    ) -> None:
        self.socket_dir = socket_dir
        self.facts = facts or FACTS
        self.session = secrets.token_bytes(16)
        self.group = group or secrets.token_bytes(16)
        self.role = role
        self.slice = None if role is Role.SCHEDULER else slice_held or part(facts=self.facts)
        self.layout = identity or layout()
        self.engine_slices = engine_slices
        self.token = token
        self.registers_memory = registers_memory
        self.seq = 0
        self.epoch = 0
        self.attachment: Attachment | None = None
        self.extents: ExtentsMap | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._early: dict[int, wire.AnyReply] = {}

    # --- connections -------------------------------------------------------------------------------------

    def attach(self) -> Attachment:
        """Attach, or attach again, and map the pool."""
        self.detach()
        self.attachment = attach(
            self.socket_dir,
            wire.AttachRequest(
                protocol=wire.PROTOCOL_VERSION,
                session=self.session,
                group=self.group,
                role=self.role,
                layout=self.layout,
                engine_slices=self.engine_slices,
                slice=self.slice,
                facts=None if self.slice is None else self.facts,
                old_epoch=self.epoch,
                registers_memory=self.registers_memory,
                token=self.token,
            ),
            process_locks(),
        )
        self.extents = ExtentsMap(self.attachment.extents_fd, self.attachment.extents_bytes)
        self.epoch = self.attachment.epoch
        return self.attachment

    def detach(self) -> None:
        """Close the attach connection; the process lives."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None
        if self.extents is not None:
            self.extents.close()
            self.extents = None

    def connect(self, endpoint: str | None = None) -> None:
        """Open the RPC connection, or another one in place of it."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint or f"ipc://{self.socket_dir / RPC_SOCKET}")

    def close(self) -> None:
        """Detach and disconnect. The process lives on, so what the session owns stays."""
        self.detach()
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()

    def goodbye(self) -> None:
        """Give the row back, then close."""
        assert self.attachment is not None
        if self.extents is not None:
            self.extents.close()
            self.extents = None
        assert self.attachment.goodbye(HANG_S)
        self.attachment = None
        self.close()

    def replace(self) -> None:
        """After `goodbye`: another process takes the place of the one that is gone."""
        self.session = secrets.token_bytes(16)
        self.seq = self.epoch = 0
        self._context = zmq.Context()
        self._socket = None
        self.attach()
        self.connect()

    def __enter__(self) -> Self:
        self.attach()
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.attachment is not None:
            with contextlib.suppress(AssertionError):
                self.goodbye()
                return
        self.close()

    # --- frames ------------------------------------------------------------------------------------------

    def send_frames(self, *frames: bytes) -> None:
        """Send whatever."""
        assert self._socket is not None
        self._socket.send_multipart(frames)

    def receive_frames(self, timeout_s: float = HANG_S) -> list[bytes]:
        """The next message."""
        assert self._socket is not None
        if not self._socket.poll(int(timeout_s * 1000)):
            raise TimeoutError(f"no reply within {timeout_s:g} s")
        return self._socket.recv_multipart()

    def next_seq(self) -> int:
        """A new request's number."""
        self.seq += 1
        return self.seq

    def send(self, request: wire.Request) -> int:
        """Send one request; returns its seq."""
        self.send_frames(wire.encode(request))
        return request.seq

    def receive(self, seq: int | None = None, timeout_s: float = HANG_S) -> wire.AnyReply:
        """The reply to `seq` (others are kept), or the next one."""
        if seq is not None and seq in self._early:
            return self._early.pop(seq)
        while True:
            frames = self.receive_frames(timeout_s)
            assert len(frames) == 1, frames
            reply = wire.decode_reply(frames[0])
            if seq is None or reply.seq == seq:
                return reply
            self._early[reply.seq] = reply

    def ask(self, request: wire.Request, expected: type[R]) -> R:
        """Send and wait. Raises RpcError for an error reply."""
        return self.expect(self.send(request), expected)

    def expect(self, seq: int, expected: type[R]) -> R:
        """The reply to a request sent before."""
        reply = self.receive(seq)
        if isinstance(reply, wire.Error):
            raise RpcError(reply)
        assert isinstance(reply, expected), reply
        return reply

    # --- operations --------------------------------------------------------------------------------------

    def identify(self, **fields: str) -> wire.IdentifyReply:
        """Declare a request identity."""
        return self.ask(
            wire.Identify(self.session, self.next_seq(), RequestIdentity(**fields)), wire.IdentifyReply
        )

    def ping(self, live: list[int] | None = None) -> wire.Pong:
        """A ping."""
        return self.ask(wire.Ping(self.session, self.next_seq(), live), wire.Pong)

    def lookup_request(
        self,
        identity: int,
        chain: bytes,
        *,
        deadline_ms: int = 5_000,
        request_id: str = "",
        probe: bytes = b"",
    ) -> wire.Lookup:
        """A lookup to send."""
        groups = [wire.Group(wire.Rule.PREFIX, chain)]
        return wire.Lookup(self.session, self.next_seq(), deadline_ms, identity, request_id, groups, probe)

    def lookup(self, identity: int, chain: bytes, **more: Any) -> wire.LookupReply:
        """A lookup and its reply."""
        return self.ask(self.lookup_request(identity, chain, **more), wire.LookupReply)

    def release(self, leases: Sequence[tuple[bytes, int]], *, group: bool = False) -> int:
        """How many shares ended."""
        request = wire.Release(self.session, self.next_seq(), list(leases), group)
        return self.ask(request, wire.Ok).count

    def cancel(self, target: int) -> int:
        """How many requests were undone or stopped."""
        return self.ask(wire.Cancel(self.session, self.next_seq(), target), wire.Ok).count

    def reserve(
        self,
        identity: int,
        chain: bytes,
        *,
        parent: bytes = b"",
        record: int = RECORD_BYTES,
        probe: bytes = b"",
    ) -> tuple[int, wire.ReserveReply]:
        """(seq of the reserve, its reply)."""
        seq = self.next_seq()
        request = wire.Reserve(self.session, seq, 5_000, identity, parent, chain, record, probe)
        return seq, self.ask(request, wire.ReserveReply)

    def commit(self, reservation: int, indices: list[int]) -> bytes:
        """One wire.CommitOutcome per index."""
        request = wire.Commit(self.session, self.next_seq(), reservation, indices)
        return self.ask(request, wire.CommitReply).outcomes

    def abort(self, reservation: int, indices: list[int] | None = None) -> int:
        """How many extents were given back."""
        return self.ask(wire.Abort(self.session, self.next_seq(), reservation, indices), wire.Ok).count

    def status(self) -> dict[str, Any]:
        """The instance's status."""
        return self.ask(wire.Status(self.session, self.next_seq()), wire.Document).body

    def explain(self, request_id: str) -> dict[str, Any]:
        """Why a lookup missed."""
        return self.ask(wire.Explain(self.session, self.next_seq(), request_id), wire.Document).body

    # --- bytes -------------------------------------------------------------------------------------------

    def write(self, extent: Extent, root: bytes, chain_key: bytes, parent: bytes, fill: bytes) -> None:
        """Write a sealed record whose payload repeats `fill` (payload first, then the header)."""
        assert self.extents is not None and self.slice is not None
        digest = self.slice.digest()
        view = self.extents.view(extent.offset_bytes, extent.length_bytes)
        header = RECORD_BYTES - PAYLOAD_BYTES
        view[header:RECORD_BYTES] = payload(fill)
        spec = RecordSpec(
            storage_keys(chain_key, digest),
            root,
            digest,
            storage_keys(parent, digest) if parent else bytes(KEY_BYTES),
            CHUNK_TOKENS,
        )
        seal_record(self.extents.address + extent.offset_bytes, extent.length_bytes, spec, SECTIONS)

    def read(self, extent: Extent) -> bytes:
        """The payload in an extent."""
        assert self.extents is not None
        view = self.extents.view(extent.offset_bytes, extent.length_bytes)
        return bytes(view[RECORD_BYTES - PAYLOAD_BYTES : RECORD_BYTES])

    def store(
        self, identity: wire.IdentifyReply, chain: bytes, *, parent: bytes = b"", probe: bytes = b""
    ) -> bytes:
        """Reserve, write and commit chunks; each payload repeats its chain key. Returns the reserve's outcomes."""
        seq, reply = self.reserve(identity.identity_id, chain, parent=parent, probe=probe)
        written = []
        before = parent
        for index, extent in enumerate(unpack_extents(reply.extents)):
            key = chain[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            if reply.outcomes[index] == wire.ReserveOutcome.RESERVED:
                self.write(extent, identity.root, key, before, key)
                written.append(index)
            before = key
        if written:
            assert set(self.commit(seq, written)) == {wire.CommitOutcome.COMMITTED}
        return reply.outcomes


def until(client: RpcClient, happened: Callable[[dict[str, Any]], bool]) -> None:
    """Ask for the status until it holds; what a request set going may end a little after its reply."""
    end_s = time.monotonic() + HANG_S
    while not happened(status := client.status()):
        assert time.monotonic() < end_s, status


def payload(fill: bytes) -> bytes:
    """What `write` puts into a record."""
    return (fill * (PAYLOAD_BYTES // len(fill) + 1))[:PAYLOAD_BYTES]


def chain_of(root: bytes, n_chunks: int, first_token: int = 0) -> bytes:
    """Chain keys of a prompt of consecutive token numbers."""
    tokens = list(range(first_token, first_token + n_chunks * CHUNK_TOKENS))
    return chain_keys(root, tokens, CHUNK_TOKENS)


def keys_of(chain: bytes) -> Iterator[bytes]:
    """One by one."""
    return (chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES))


def open_descriptors() -> set[str]:
    """What this process has open, for leak checks."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found
