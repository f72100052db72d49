"""The client's side of a ZMQ connection: a DEALER socket, and a wait over this socket and plain descriptors.

Not thread-safe: everything here belongs to one I/O thread.  Other threads wake it through an eventfd.
"""

from __future__ import annotations

from collections.abc import Iterable

import zmq

from kvstrata.errors import Unavailable
from kvstrata.rpc.wire import MAX_MESSAGE_BYTES

SEND_QUEUE_MESSAGES = 4096
RECONNECT_MS = 20
RECONNECT_MAX_MS = 200


class Dealer:
    """One connection to `endpoint`. libzmq reconnects by itself, and keeps queued frames meanwhile."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        """Raises Unavailable if libzmq refuses the endpoint; an absent server is not an error."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, SEND_QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise Unavailable(f"cannot connect to {endpoint}: {error}", field="socket_dir") from error

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket, for Waiter only."""
        return self._socket

    def try_send(self, frame: bytes) -> bool:
        """Queue one frame; returns False if the queue is full because the server reads nothing. Never blocks."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, limit: int) -> list[bytes]:
        """Up to `limit` frames that have arrived, oldest first. Messages of more than one frame are dropped."""
        frames: list[bytes] = []
        while len(frames) < limit:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) == 1:
                frames.append(parts[0])
        return frames

    def close(self) -> None:
        """Close the connection and drop queued frames. Idempotent."""
        self._socket.close()


class Waiter:
    """Waits for frames on the present Dealer and for readable descriptors, up to a time limit."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._dealer: Dealer | None = None

    def connect(self, endpoint: str) -> Dealer:
        """Open a Dealer and watch it; at most one at a time. Raises Unavailable."""
        assert self._dealer is None, "disconnect first"
        self._dealer = Dealer(self._context, endpoint)
        self._poller.register(self._dealer.socket, zmq.POLLIN)
        return self._dealer

    def disconnect(self) -> None:
        """Close the present Dealer, if any."""
        if self._dealer is not None:
            self._poller.unregister(self._dealer.socket)
            self._dealer.close()
            self._dealer = None

    def watch(self, fd: int) -> None:
        """Report `fd` whenever it is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop reporting `fd`. Call this before closing the descriptor."""
        self._poller.unregister(fd)

    def wait(self, timeout_s: float) -> tuple[bool, Iterable[int]]:
        """Wait at most `timeout_s`; returns whether frames have arrived, and the readable descriptors."""
        ready = self._poller.poll(max(0, round(timeout_s * 1000 + 0.5)))
        descriptors = [item for item, _ in ready if isinstance(item, int)]
        return len(descriptors) < len(ready), descriptors

    def close(self) -> None:
        """Close everything; unsent frames are lost."""
        self.disconnect()
        self._context.destroy(linger=0)
