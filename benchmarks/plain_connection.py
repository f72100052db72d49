"""A blocking connection to a server's socket without an attach, one request at a time, for benchmarks."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec

from kvstrata.errors import InternalError, Unavailable, from_wire
from kvstrata.rpc import wire
from kvstrata.session.zmtp import Connection

MAX_REPLY_BYTES = 16 << 20


class PlainConnection:
    """A connection for one thread and one request at a time. `link`: one that is attached, instead of a new one."""

    def __init__(self, path: Path, timeout_s: float, link: Connection | None = None) -> None:
        """Connect. Raises Unavailable."""
        self._path = path
        self._timeout_s = timeout_s
        self._seq = 0
        self._messages: list[bytes] = []
        if link is None:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout_s)
            try:
                sock.connect(str(path))
                link = Connection(
                    sock, b"DEALER", max_frame_bytes=MAX_REPLY_BYTES, max_unsent_bytes=MAX_REPLY_BYTES
                )
            except OSError as error:
                sock.close()
                raise Unavailable(f"no server answers at {path}: {error.strerror}") from None
        self._link = link
        link.socket.settimeout(timeout_s)

    def next_seq(self) -> int:
        """A number for the next request."""
        self._seq += 1
        return self._seq

    def send(self, message: bytes) -> None:
        """Send a message. Raises Unavailable."""
        try:
            self._link.send(message)
            while self._link.unsent_bytes:
                self._link.flush()
        except OSError as error:
            raise Unavailable(f"{self._path.parent}: {error}") from None

    def receive(self) -> bytes:
        """The next message. Raises Unavailable if none arrives in time; the connection must not be used any more."""
        ends_s = time.monotonic() + self._timeout_s
        try:
            while not self._messages:
                if time.monotonic() > ends_s:
                    raise TimeoutError
                self._messages += self._link.receive()
        except TimeoutError:
            raise Unavailable(f"no answer from {self._path.parent} within {self._timeout_s:g} s") from None
        except OSError as error:
            raise Unavailable(f"{self._path.parent}: {error}") from None
        return self._messages.pop(0)

    def ask(self, request: wire.AnyRequest) -> wire.AnyReply:
        """Send a request; returns its reply. Raises the error that the server answers, or Unavailable."""
        self.send(wire.encode(request))
        try:
            reply = wire.decode_reply(self.receive())
        except msgspec.MsgspecError as error:
            raise InternalError(f"invalid reply from the server: {error}") from None
        if isinstance(reply, wire.Error):
            raise from_wire(reply.code, reply.message, field=reply.field)
        return reply

    def close(self) -> None:
        """Disconnect."""
        self._link.close()
