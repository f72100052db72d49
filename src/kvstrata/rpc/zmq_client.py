"""The client's side of an RPC connection: ZMTP 3 (RFC 37) over a unix socket, and a wait over it and plain descriptors.

It is spoken without libzmq, which would hand each message to a thread of its own: a lookup would wait twice more for a
sleeping thread.  A `Dealer` is always in one of three states:

    DOWN ──connect, send greeting and READY──▶ GREETING ──the server's greeting and READY──▶ OPEN
      ▲                                            │                                           │
      └──────────── hang-up, or bytes that are no ZMTP; the next try comes after a pause ──────┘

Frames that are sent before it is OPEN wait, and survive a reconnect; a frame on its way when a connection ends is lost.

Not thread-safe: everything here belongs to one I/O thread.  Other threads wake it through an eventfd.
"""

from __future__ import annotations

import collections
import enum
import math
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvstrata.rpc.wire import MAX_MESSAGE_BYTES

QUEUED_FRAMES = 4096
"""Most frames that wait to be sent, and most that have arrived before reading pauses."""
RECONNECT_S = 0.02
RECONNECT_MAX_S = 0.2
MAX_FRAME_BYTES = 2 * MAX_MESSAGE_BYTES
"""A longer frame from the server ends the connection."""
READ_BYTES = 64 << 10
PART_S = 0.0005
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a ZMTP frame."""
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + bytes((3, 1)) + b"NULL".ljust(20, b"\0") + bytes(32)
"""Version 3.1, no security (the socket's file is 0600), this side is no server."""
LONG_HEADER = struct.Struct(">BQ")
MAX_PING_CONTEXT_BYTES = 16


def header(body_bytes: int, flags: int = 0) -> bytes:
    """The bytes before the body of a ZMTP frame."""
    if body_bytes < 256:
        return bytes((flags, body_bytes))
    return LONG_HEADER.pack(flags | LONG, body_bytes)


def command(name: bytes, body: bytes) -> bytes:
    """A ZMTP command."""
    content = bytes((len(name),)) + name + body
    return header(len(content), COMMAND) + content


def metadata(name: bytes, value: bytes) -> bytes:
    """A property of READY."""
    return bytes((len(name),)) + name + struct.pack(">I", len(value)) + value


READY = command(b"READY", metadata(b"Socket-Type", b"DEALER") + metadata(b"Identity", b""))


class NotZmtp(Exception):
    """The server sent bytes that this protocol does not allow."""


class Step(enum.Enum):
    """How far a connection has come."""

    DOWN = enum.auto()
    GREETING = enum.auto()
    OPEN = enum.auto()


class Dealer:
    """One connection to a ROUTER at `path`. It reconnects by itself, and keeps queued frames meanwhile."""

    def __init__(self, path: Path) -> None:
        """Try to connect; an absent server is not an error."""
        self._path = str(path)
        self._step = Step.DOWN
        self._socket: socket.socket | None = None
        self._pause_s = RECONNECT_S
        self._retry_s = 0.0
        self._greeted = False
        """The server's greeting is complete."""
        self._read = bytearray()
        """Received bytes that are not a whole frame yet."""
        self._skips = False
        """Inside a message of several frames, all of which are dropped."""
        self._frames: collections.deque[bytes] = collections.deque()
        self._unsent: collections.deque[bytes] = collections.deque()
        """Frames to be sent, with their headers."""
        self._rest = memoryview(b"")
        """The part of the last frame that the socket had no room for."""
        self.tend(time.monotonic())

    @property
    def has_frames(self) -> bool:
        """Whether `receive` returns something."""
        return bool(self._frames)

    @property
    def has_part(self) -> bool:
        """Whether a frame has arrived in part."""
        return bool(self._read)

    @property
    def due_s(self) -> float:
        """When `tend` tries to connect; inf while there is a connection."""
        return self._retry_s if self._socket is None else math.inf

    @property
    def watched(self) -> tuple[int, int]:
        """The descriptor of the connection (-1: none), and the events of `poll` that it waits for."""
        if self._socket is None:
            return -1, 0
        writes = self._rest or (self._unsent and self._step is Step.OPEN)
        return self._socket.fileno(), select.POLLIN | (select.POLLOUT if writes else 0)

    def tend(self, now_s: float) -> None:
        """Connect, if that is due."""
        if self._socket is not None or now_s < self._retry_s:
            return
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._socket.connect(self._path)
        except OSError:  # no server, a full backlog, or no free descriptor
            self._lose()
            return
        self._step = Step.GREETING
        self._write(GREETING + READY)

    def progress(self) -> None:
        """Read and write what the connection allows; call it when `poll` reports the descriptor."""
        if self._rest or self._unsent:
            self._flush()
        try:
            while (
                self._socket is not None
                and len(self._frames) < QUEUED_FRAMES
                and self._take(self._socket.recv(READ_BYTES))
            ):
                pass
        except BlockingIOError:
            pass
        except (OSError, NotZmtp):
            self._lose()

    def try_send(self, frame: bytes) -> bool:
        """Queue one frame; returns False if the queue is full because the server reads nothing. Never blocks."""
        if len(self._unsent) >= QUEUED_FRAMES:
            return False
        whole = header(len(frame)) + frame
        if self._step is Step.OPEN and not self._rest and not self._unsent:
            self._write(whole)
        else:
            self._unsent.append(whole)
        return True

    def receive(self, limit: int) -> list[bytes]:
        """Up to `limit` frames that have arrived, oldest first. Messages of more than one frame are dropped."""
        if self._socket is not None:
            self.progress()
        return [self._frames.popleft() for _ in range(min(limit, len(self._frames)))]

    def close(self) -> None:
        """Close the connection and drop queued frames. Idempotent."""
        self._lose()
        self._retry_s = math.inf
        self._frames.clear()
        self._unsent.clear()

    def _lose(self) -> None:
        """Close the connection; the next try comes after a pause."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._step = Step.DOWN
        self._greeted = self._skips = False
        self._read.clear()
        self._rest = memoryview(b"")
        self._retry_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, RECONNECT_MAX_S)

    def _write(self, data: bytes) -> None:
        """Send bytes, and keep the rest if the socket has no room for all."""
        assert self._socket is not None and not self._rest
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose()
            return
        if sent < len(data):
            self._rest = memoryview(data)[sent:]

    def _flush(self) -> None:
        rest, self._rest = self._rest, memoryview(b"")
        if rest:
            self._write(bytes(rest))
        while self._unsent and self._step is Step.OPEN and not self._rest:
            self._write(self._unsent.popleft())

    def _take(self, data: bytes) -> bool:
        """Handle received bytes; returns whether more may be waiting. Raises NotZmtp or ConnectionError."""
        if not data:
            raise ConnectionResetError
        read = self._read
        read += data
        if not self._greeted:
            if len(read) < len(GREETING):
                return True
            if read[0] != 0xFF or read[9] != 0x7F or read[10] < 3 or read[12:32].rstrip(b"\0") != b"NULL":
                raise NotZmtp
            self._greeted = True
            del read[: len(GREETING)]
        at = 0
        while (found := _frame_at(read, at)) is not None:
            flags, body, at = found
            self._handle(flags, body)
        del read[:at]
        return len(data) == READ_BYTES

    def _handle(self, flags: int, body: bytes) -> None:
        if flags & COMMAND:
            self._obey(body)
        elif self._step is not Step.OPEN:
            raise NotZmtp
        elif flags & MORE or self._skips:
            self._skips = bool(flags & MORE)
        else:
            self._frames.append(body)

    def _obey(self, body: bytes) -> None:
        name, content = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if self._step is Step.GREETING:
            if name != b"READY":
                raise NotZmtp  # ERROR, with which the server refuses the connection
            self._step = Step.OPEN
            self._pause_s = RECONNECT_S
            self._flush()
        elif name == b"PING" and len(self._unsent) < QUEUED_FRAMES:
            self._unsent.append(command(b"PONG", content[2 : 2 + MAX_PING_CONTEXT_BYTES]))
            self._flush()


def _frame_at(read: bytearray, at: int) -> tuple[int, bytes, int] | None:
    """(flags, body, where the next frame begins) of the frame at `at`; None if it is not complete.

    Raises NotZmtp for flags that do not exist and for a frame above MAX_FRAME_BYTES.
    """
    if len(read) < at + 2:
        return None
    flags = read[at]
    if flags & ~(MORE | LONG | COMMAND) or flags & (MORE | COMMAND) == MORE | COMMAND:
        raise NotZmtp
    if flags & LONG:
        if len(read) < at + LONG_HEADER.size:
            return None
        length, begins = LONG_HEADER.unpack_from(read, at)[1], at + LONG_HEADER.size
    else:
        length, begins = read[at + 1], at + 2
    if length > MAX_FRAME_BYTES:
        raise NotZmtp
    if len(read) < begins + length:
        return None
    with memoryview(read) as view:
        return flags, bytes(view[begins : begins + length]), begins + length


class Waiter:
    """Waits for frames on the present Dealer and for readable descriptors, up to a time limit."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._dealer: Dealer | None = None
        self._polled = (-1, 0)
        """The Dealer's descriptor and events as `poll` knows them."""

    def connect(self, path: Path) -> Dealer:
        """Open a Dealer and watch it; at most one at a time."""
        assert self._dealer is None, "disconnect first"
        self._dealer = Dealer(path)
        return self._dealer

    def disconnect(self) -> None:
        """Close the present Dealer, if any."""
        if self._dealer is not None:
            self._register((-1, 0))
            self._dealer.close()
            self._dealer = None

    def watch(self, fd: int) -> None:
        """Report `fd` whenever it is readable."""
        if fd == self._polled[0]:
            self._polled = (-1, 0)  # the Dealer has lost its connection, and `fd` has the same number
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop reporting `fd`. Call this before closing the descriptor."""
        self._poll.unregister(fd)

    def wait(self, timeout_s: float) -> tuple[bool, Iterable[int]]:
        """Wait at most `timeout_s`; returns whether frames have arrived, and the readable descriptors.

        Once a part of a frame has arrived, the wait goes on for up to `PART_S` more: libzmq sends a frame of more than
        8 kB in parts, and after each of them the caller would look through all of its work in vain.
        """
        descriptors = self._wait_once(timeout_s)
        dealer = self._dealer
        if dealer is not None and dealer.has_part and not dealer.has_frames and not descriptors:
            descriptors = self._wait_once(min(timeout_s, PART_S))
        return dealer is not None and dealer.has_frames, descriptors

    def _wait_once(self, timeout_s: float) -> Sequence[int]:
        dealer = self._dealer
        if dealer is not None:
            now_s = time.monotonic()
            dealer.tend(now_s)
            timeout_s = 0.0 if dealer.has_frames else min(timeout_s, dealer.due_s - now_s)
            self._register(dealer.watched)
        of_dealer = self._polled[0]
        descriptors = []
        for fd, _ in self._poll.poll(max(0.0, 1000 * timeout_s)):
            if fd != of_dealer:
                descriptors.append(fd)
            elif dealer is not None:
                dealer.progress()
        return descriptors

    def close(self) -> None:
        """Close everything; unsent frames are lost."""
        self.disconnect()

    def _register(self, wanted: tuple[int, int]) -> None:
        (before, _), (fd, events) = self._polled, wanted
        if wanted == self._polled:
            return
        if before not in (-1, fd):
            self._poll.unregister(before)
        if fd != -1:
            self._poll.register(fd, events)
        self._polled = wanted
