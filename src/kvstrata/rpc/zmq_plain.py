"""A blocking connection to a server's RPC socket: one question, one answer.  For tools and figures, not engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvstrata.errors import WIRE_ERRORS, InternalError, Unavailable
from kvstrata.rpc import wire


class PlainConnection:
    """Over the local socket; no session is attached by it.  One thread, one request at a time."""

    def __init__(self, rpc_socket: Path, timeout_s: float) -> None:
        """Connects in the background: an absent server shows as an answer that does not come within `timeout_s`."""
        self._path = rpc_socket
        self._timeout_s = timeout_s
        self._seq = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        """For callers that count frames rather than answers."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, round(1000 * timeout_s))
        self.socket.setsockopt(zmq.SNDTIMEO, round(1000 * timeout_s))
        self.socket.connect(f"ipc://{rpc_socket}")

    def next_seq(self) -> int:
        """A number for the next request."""
        self._seq += 1
        return self._seq

    def ask(self, request: wire.AnyRequest) -> wire.AnyReply:
        """The reply. Raises Unavailable without one in time, else the error that the server named.

        After Unavailable the answer may still come, and the connection is of no use any more.
        """
        try:
            self.socket.send(wire.encode(request))
            frame = self.socket.recv()
        except zmq.Again:
            raise Unavailable(f"no answer from {self._path.parent} within {self._timeout_s:g} s") from None
        try:
            reply = wire.decode_reply(frame)
        except msgspec.MsgspecError as error:
            raise InternalError(f"a reply that is none of the protocol: {error}") from None
        if isinstance(reply, wire.Error):
            raise WIRE_ERRORS.get(reply.code, InternalError)(reply.message, field=reply.field)
        return reply

    def status(self) -> dict[str, Any]:
        """The status document."""
        reply = self.ask(wire.Status(wire.NO_SESSION, self.next_seq()))
        if not isinstance(reply, wire.Document):
            raise InternalError(f"no status: {reply!r:.200}")
        return reply.body

    def close(self) -> None:
        """Disconnect."""
        self.socket.close()
        self._context.term()
