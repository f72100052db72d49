"""ZMTP 3.1 (RFC 37) over a unix stream, spoken by both ends of a session without libzmq.

`Codec` is sans-IO: it takes received bytes and gives whole messages.  `Connection` puts it on a socket.

    GREETING ──the other side's 64 bytes──▶ HANDSHAKE ──its READY──▶ OPEN

Rules:

1. Security is NULL: the socket's file has mode 0600, and the kernel identifies the process at the other end.
2. A message has one frame.  A message of several frames is returned as an empty one, which is invalid in the protocol,
   so that its sender gets an error.
3. Both directions are bounded.  A frame above `max_frame_bytes` raises NotZmtp as soon as its header has arrived, and
   `send` refuses bytes beyond `max_unsent_bytes`; the caller then closes the connection.
4. Descriptors travel with the first byte of a message.  They are received by `receive_with_fds` only; the kernel closes
   those that arrive while `receive` is used.

Not here: reconnecting, and the content of messages.
"""

from __future__ import annotations

import array
import collections
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

READ_BYTES = 64 << 10
MAX_COMMAND_BYTES = 4_096
MAX_PING_CONTEXT_BYTES = 16
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a ZMTP frame."""
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING_BYTES = 64
PEERS = {b"DEALER": (b"ROUTER",), b"ROUTER": (b"DEALER", b"REQ", b"ROUTER")}
"""Types of sockets that a socket of ours may talk to, by its own type."""
_LONG_HEADER = struct.Struct(">BQ")
_FD_BYTES = array.array("i").itemsize


class NotZmtp(ConnectionError):
    """The other side sent bytes that this protocol does not allow."""


def header(body_bytes: int, flags: int = 0) -> bytes:
    """The bytes before the body of a ZMTP frame."""
    if body_bytes < 256:
        return bytes((flags, body_bytes))
    return _LONG_HEADER.pack(flags | LONG, body_bytes)


def command(name: bytes, body: bytes) -> bytes:
    """A ZMTP command."""
    content = bytes((len(name),)) + name + body
    return header(len(content), COMMAND) + content


def ready(kind: bytes) -> bytes:
    """READY of a socket of this type, without an identity."""
    properties = ((b"Socket-Type", kind), (b"Identity", b""))
    body = b"".join(
        bytes((len(name),)) + name + struct.pack(">I", len(value)) + value for name, value in properties
    )
    return command(b"READY", body)


class Codec:
    """One side of one connection. `kind`: DEALER or ROUTER."""

    __slots__ = ("_greeted", "_kind", "_open", "_read", "_skips", "answers", "max_frame_bytes", "opening")

    def __init__(self, kind: bytes, max_frame_bytes: int) -> None:
        self._kind = kind
        self.max_frame_bytes = max_frame_bytes
        """A longer frame raises NotZmtp. May be changed at any time."""
        as_server = kind == b"ROUTER"
        self.opening = SIGNATURE + bytes((3, 1)) + b"NULL".ljust(20, b"\0") + bytes((as_server,)) + bytes(31)
        self.opening += ready(kind)
        """The first bytes to send."""
        self.answers: list[bytes] = []
        """PONGs to send, for the caller to take out."""
        self._greeted = False
        self._open = False
        self._read = bytearray()
        """Received bytes that are not a whole frame yet."""
        self._skips = False
        """Inside a message of several frames."""

    @property
    def is_open(self) -> bool:
        """Whether the other side has sent its READY."""
        return self._open

    @property
    def partial_bytes(self) -> int:
        """Bytes of a frame that has arrived in part."""
        return len(self._read)

    def receive(self, data: bytes) -> list[bytes]:
        """Take received bytes; returns the messages that are whole now. Raises NotZmtp."""
        if self._open and not self._read and not self._skips and len(data) > 1:
            # Most reads bring one short message, or the whole of a long one.
            if data[0] == 0 and data[1] + 2 == len(data):
                return [data[2:]]
            if data[0] == LONG and len(data) < READ_BYTES and len(data) > _LONG_HEADER.size:
                length = _LONG_HEADER.unpack_from(data)[1]
                if length + _LONG_HEADER.size == len(data) and length <= self.max_frame_bytes:
                    return [data[_LONG_HEADER.size :]]
        read = self._read
        read += data
        if not self._greeted and not self._greet():
            return []
        messages: list[bytes] = []
        at = 0
        while (found := self._frame_at(at)) is not None:
            flags, body, at = found
            if flags & COMMAND:
                self._on_command(body)
            elif not self._open:
                raise NotZmtp("a message before READY")
            elif flags & MORE:
                self._skips = True
            else:
                messages.append(b"" if self._skips else body)
                self._skips = False
        del read[:at]
        return messages

    def _greet(self) -> bool:
        """Check as much of the greeting as has arrived; returns whether it is complete."""
        read = self._read
        if (
            read[:1] != SIGNATURE[:1]
            or (len(read) > 9 and read[9] != 0x7F)
            or (len(read) > 10 and read[10] < 3)
        ):
            raise NotZmtp("no ZMTP 3 greeting")
        if len(read) < GREETING_BYTES:
            return False
        if read[12:32].rstrip(b"\0") != b"NULL":
            raise NotZmtp("another security mechanism than NULL")
        self._greeted = True
        del read[:GREETING_BYTES]
        return True

    def _frame_at(self, at: int) -> tuple[int, bytes, int] | None:
        """(flags, body, where the next frame begins) of the frame at `at`; None if it is not complete."""
        read = self._read
        if len(read) < at + 2:
            return None
        flags = read[at]
        if flags & ~(MORE | LONG | COMMAND) or flags & (MORE | COMMAND) == MORE | COMMAND:
            raise NotZmtp(f"a frame with flags {flags}")
        if flags & LONG:
            if len(read) < at + _LONG_HEADER.size:
                return None
            length, begins = _LONG_HEADER.unpack_from(read, at)[1], at + _LONG_HEADER.size
        else:
            length, begins = read[at + 1], at + 2
        if length > (MAX_COMMAND_BYTES if flags & COMMAND else self.max_frame_bytes):
            raise NotZmtp(f"a frame of {length} bytes")
        if len(read) < begins + length:
            return None
        with memoryview(read) as view:
            return flags, bytes(view[begins : begins + length]), begins + length

    def _on_command(self, body: bytes) -> None:
        name, content = (body[1 : 1 + body[0]], body[1 + body[0] :]) if body else (b"", b"")
        if not self._open:
            if name != b"READY":
                raise NotZmtp(f"{name!r} instead of READY")  # ERROR: the other side refuses the connection
            if _property(content, b"socket-type") not in PEERS[self._kind]:
                raise NotZmtp("a socket of another type than DEALER or ROUTER")
            self._open = True
        elif name == b"PING":
            self.answers.append(command(b"PONG", content[2 : 2 + MAX_PING_CONTEXT_BYTES]))


def _property(metadata: bytes, wanted: bytes) -> bytes:
    """The value of a property of READY; empty if it is not there. Raises NotZmtp for metadata that is cut off."""
    at = 0
    while at < len(metadata):
        name_ends = at + 1 + metadata[at]
        if name_ends + 4 > len(metadata):
            raise NotZmtp("READY is cut off")
        name = metadata[at + 1 : name_ends]
        at = name_ends + 4 + int.from_bytes(metadata[name_ends : name_ends + 4], "big")
        if at > len(metadata):
            raise NotZmtp("READY is cut off")
        if name.lower() == wanted:
            return metadata[name_ends + 4 : at]
    return b""


class WithFds(NamedTuple):
    """Messages, and the descriptors that came with the bytes just read; these belong to the receiver."""

    messages: list[bytes]
    fds: list[int]
    fds_lost: bool
    """The kernel dropped descriptors: more came than allowed, or this process has no free numbers."""


class Connection:
    """A codec on a connected unix stream socket, which it owns. Not thread-safe.

    A method that finds the other side's end, or bytes that are no ZMTP, raises OSError (NotZmtp is one); the caller
    closes the connection.  While the socket blocks or has a timeout, so do the methods.
    """

    __slots__ = ("_codec", "_unsent", "max_unsent_bytes", "socket", "unsent_bytes")

    def __init__(
        self, sock: socket.socket, kind: bytes, *, max_frame_bytes: int, max_unsent_bytes: int
    ) -> None:
        """Greets the other side at once. May raise OSError, but not if the other side has closed its end already: what
        it said before that can still be received."""
        self.socket = sock
        self._codec = Codec(kind, max_frame_bytes)
        self._unsent: collections.deque[bytes | memoryview] = collections.deque()
        self.unsent_bytes = 0
        """Bytes that the socket had no room for; `flush` sends them."""
        self.max_unsent_bytes = max_unsent_bytes
        with contextlib.suppress(BrokenPipeError):
            self._put(self._codec.opening)

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""
        return self.socket.fileno()

    @property
    def is_open(self) -> bool:
        """Whether the other side has finished the ZMTP handshake."""
        return self._codec.is_open

    @property
    def partial_bytes(self) -> int:
        """Bytes of a message that has arrived in part."""
        return self._codec.partial_bytes

    def allow_frames(self, max_bytes: int) -> None:
        """Receive frames of up to `max_bytes` from now on."""
        self._codec.max_frame_bytes = max_bytes

    def receive(self) -> list[bytes]:
        """Read once; returns the messages that are whole. Raises BlockingIOError when nothing has arrived."""
        return self._take(self.socket.recv(READ_BYTES))

    def receive_with_fds(self, max_fds: int) -> WithFds:
        """As `receive`, with descriptors."""
        space = socket.CMSG_SPACE(max_fds * _FD_BYTES)
        data, ancillary, flags, _ = self.socket.recvmsg(READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
        try:
            return WithFds(self._take(data), list(fds), bool(flags & socket.MSG_CTRUNC))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def send(self, message: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a message, or as much as the socket has room for. Returns False, and sends nothing, if too many bytes
        are unsent because the other side does not read.

        With `fds`, copies of which travel with the message, nothing may be unsent; too little room raises
        BlockingIOError.
        """
        if self.unsent_bytes and self.unsent_bytes + len(message) > self.max_unsent_bytes:
            return False
        self._put(header(len(message)) + message, fds)
        return True

    def flush(self) -> None:
        """Send unsent bytes, as far as the socket has room."""
        while self._unsent:
            data = self._unsent.popleft()
            self.unsent_bytes -= len(data)
            if not self._put_first(data):
                return

    def close(self) -> None:
        """Close the socket; unsent bytes are dropped. Idempotent."""
        self.socket.close()
        self._unsent.clear()
        self.unsent_bytes = 0

    def _take(self, data: bytes) -> list[bytes]:
        if not data:
            raise ConnectionResetError("the other side has closed the connection")
        codec = self._codec
        messages = codec.receive(data)
        if codec.answers:
            answers, codec.answers = codec.answers, []
            for answer in answers:
                if self.unsent_bytes > self.max_unsent_bytes:
                    raise NotZmtp("PINGs without reading the PONGs")
                self._put(answer)
        return messages

    def _put(self, data: bytes, fds: Sequence[int] = ()) -> None:
        if fds:
            assert not self._unsent, "bytes before the descriptors are unsent"
            sent = socket.send_fds(self.socket, [data], list(fds), socket.MSG_NOSIGNAL)
            if sent < len(data):
                self._unsent.append(memoryview(data)[sent:])
                self.unsent_bytes += len(data) - sent
        elif self._unsent:
            self._unsent.append(data)
            self.unsent_bytes += len(data)
        else:
            self._put_first(data)

    def _put_first(self, data: bytes | memoryview) -> bool:
        """Send bytes before the unsent ones, and keep what the socket has no room for. Returns whether all went."""
        try:
            sent = self.socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return True
        self._unsent.appendleft(memoryview(data)[sent:])
        self.unsent_bytes += len(data) - sent
        return False
