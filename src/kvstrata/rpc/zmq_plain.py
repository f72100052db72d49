"""A blocking connection to a server's RPC socket, one request at a time: for tools and benchmarks, not for engines."""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from kvstrata.errors import InternalError, Unavailable, from_wire
from kvstrata.rpc import wire
from kvstrata.rpc.frame import prove


class PlainConnection:
    """A connection over the local socket, for one thread and one request at a time.

    If `secret` is set, each frame proves the session that has this secret; otherwise requests have no session.
    """

    def __init__(self, rpc_socket: Path, timeout_s: float) -> None:
        """Connect in the background; an absent server shows only when a request gets no answer within `timeout_s`."""
        self._path = rpc_socket
        self._timeout_s = timeout_s
        self.secret = b""
        self._seq = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        """The socket, for callers that count frames rather than answers."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, round(1000 * timeout_s))
        self.socket.setsockopt(zmq.SNDTIMEO, round(1000 * timeout_s))
        self.socket.connect(f"ipc://{rpc_socket}")

    def frame(self, request: wire.AnyRequest) -> bytes:
        """The frame of a request."""
        message = wire.encode(request)
        return prove(self.secret, message) if self.secret else message

    def next_seq(self) -> int:
        """A number for the next request."""
        self._seq += 1
        return self._seq

    def ask(self, request: wire.AnyRequest) -> wire.AnyReply:
        """Send a request; returns its reply. Raises the error that the server answers, or Unavailable if no answer
        arrives in time.

        After Unavailable the answer may still arrive, so the connection must not be used any more.
        """
        try:
            self.socket.send(self.frame(request))
            frame = self.socket.recv()
        except zmq.Again:
            raise Unavailable(f"no answer from {self._path.parent} within {self._timeout_s:g} s") from None
        try:
            reply = wire.decode_reply(frame)
        except msgspec.MsgspecError as error:
            raise InternalError(f"invalid reply from the server: {error}") from None
        if isinstance(reply, wire.Error):
            raise from_wire(reply.code, reply.message, field=reply.field)
        return reply

    def close(self) -> None:
        """Disconnect."""
        self.socket.close()
        self._context.term()
