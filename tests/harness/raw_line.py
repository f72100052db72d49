"""A connection to a server's socket whose messages and descriptors a test chooses."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvstrata.memory import linux
from kvstrata.memory.paths import RPC_SOCKET
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
