"""A connection to a server's socket whose messages and descriptors a test chooses, and attaches over it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from kvstrata.memory import linux
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.rpc.wire import AttachReply
from kvstrata.session.attach import process_locks
from kvstrata.session.zmtp import Connection

HANG_S = 120.0


class RawLine:
    """A ZMTP connection that blocks."""

    def __init__(self, socket_dir: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        linux.connect(self.socket, os.fspath(socket_dir / RPC_SOCKET), HANG_S)
        self.socket.settimeout(HANG_S)
        self.link = Connection(self.socket, b"DEALER", max_frame_bytes=1 << 20, max_unsent_bytes=1 << 20)
        self._messages: list[bytes] = []

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message with copies of these descriptors."""
        self.link.send(message, fds)
        while self.link.unsent_bytes:
            self.link.flush()

    def receive(self) -> tuple[bytes, list[int]]:
        """The next message, and the descriptors that have come. Raises ConnectionError."""
        fds: list[int] = []
        while not self._messages:
            received = self.link.receive_with_fds(8)
            self._messages += received.messages
            fds += received.fds
        return self._messages.pop(0), fds

    def ended(self) -> bool:
        """Read until the server closes the connection; return whether it did."""
        try:
            while True:
                self.receive()
        except ConnectionError:
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()


def raw_attach(socket_dir: Path, messages: Sequence[bytes], fds: Sequence[str] = ("self",)) -> AttachReply:
    """Send messages as they are, the first with these descriptors, and close; return the reply to the last.

    Descriptors: self (our pidfd), parent (the parent's), thread (a pidfd of our thread), null (no pidfd), or the pid of
    another process.
    """
    opened = {
        "self": lambda: os.pidfd_open(os.getpid()),
        "parent": lambda: os.pidfd_open(os.getppid()),
        "thread": lambda: os.pidfd_open(os.getpid(), linux.PIDFD_THREAD),
        "null": lambda: os.open(os.devnull, os.O_RDONLY),
    }
    held = process_locks().held()
    sent = [opened[kind]() if kind in opened else os.pidfd_open(int(kind)) for kind in fds]
    with RawLine(socket_dir) as line:
        for message in messages:
            line.send(message, sent)
            linux.close_all(sent)
            sent = []
            reply, received = line.receive()
            # Closing any descriptor of a lock file would drop this process's locks on it.
            linux.close_all([fd for fd in received if linux.file_id(fd) not in held])
    return msgspec.msgpack.decode(reply, type=AttachReply)


def lock_files() -> int:
    """How many descriptors of lock files this process has open."""
    held = {tuple(file) for file in process_locks().held()}
    count = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            count += linux.file_id(int(entry.name)) in held
        except OSError:
            continue
    return count
