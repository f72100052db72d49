"""The server's end of the channel to an adapter host: sending never blocks, and each received frame is handed on."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from kvstrata.storage.host.channel import MAX_FRAME_BYTES

QUEUE_BYTES = 1 << 20
"""Bytes that may wait to be sent before `is_full`."""
FRAMES_AT_A_TIME = 16
"""Frames of one child that are read before the loop turns to other work."""
LAST_FRAMES = 10_000
"""Most frames that `read_last` reads; a socket buffers fewer."""


class Pipe:
    """The pipe to one child. Belongs to the event loop."""

    def __init__(self, sock: socket.socket, take: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        """`take(frame)` gets each frame; `ended()` is called when no more frames can come. Either may close the pipe.

        The pipe owns `sock`, and closes it in `close`.
        """
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = sock
        self._take = take
        self._ended = ended
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._writes_later = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self.read)

    @property
    def is_full(self) -> bool:
        """Whether more than QUEUE_BYTES wait to be sent, because the child does not read."""
        return self._queued_bytes > QUEUE_BYTES

    def close(self) -> None:
        """Read and send nothing more. Idempotent."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None

    def send(self, frame: bytes) -> None:
        """Send a frame now, or once the socket has room; frames keep their order. `close` discards unsent frames."""
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        if len(self._queue) == 1:
            self._write()

    def _write(self) -> None:
        if self._socket is None:
            return
        try:
            while self._queue:
                self._socket.send(self._queue[0])
                self._queued_bytes -= len(self._queue.popleft())
        except BlockingIOError:
            self._writes_later = True
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self.read_last()
            return
        if self._writes_later:
            self._writes_later = False
            self._loop.remove_writer(self._socket)

    def read(self) -> None:
        """Read some frames; the loop calls again while there are more."""
        for _ in range(FRAMES_AT_A_TIME):
            if not self._read_one():
                return

    def read_last(self) -> None:
        """Read the frames that the child sent before it closed the channel."""
        for _ in range(LAST_FRAMES):
            if not self._read_one():
                break
        if self._socket is not None:
            self._ended()

    def _read_one(self) -> bool:
        if self._socket is None:
            return False
        try:
            frame = self._socket.recv(MAX_FRAME_BYTES + 1)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # Raised once if the child ended without reading all requests; the frames that it sent can still be read.
            return True
        except OSError:
            frame = b""
        if not frame:
            self._ended()
            return False
        self._take(frame)
        return self._socket is not None
