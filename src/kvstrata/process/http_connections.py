"""Bounds of an HTTP port, so that no client can use up the port, or the process's descriptors.

1. A port has at most MAX_CONNECTIONS connections, and at most a quarter of the descriptors that the process may open.
   A further connection closes the one that has been idle longest: without a whole request under way.
2. A request must arrive within REQUEST_S of its connection's start, or of its own first byte.  A client that reads
   nothing of its answer for STALLED_S is cut.  `timeout_keep_alive` of uvicorn bounds the time between requests.
3. At most MAX_REQUESTS whole requests are under way; further ones get 503 at once.  Probes and `/metrics` do not
   count, nor does a request that still arrives.
4. A connection over a unix socket of a process of another user, root excepted, is cut (process/http_unix.py).
5. Since whole requests under way are fewer than the connections allowed, there is always an idle connection to close,
   and a probe always gets through.
6. A request that has not ended when its answer has ends its connection, and so does a body of more than MAX_PARTS
   parts that are shorter than PART_BYTES on average: each part costs as much as a long one.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstrata.errors import Unavailable
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience
from kvstrata.process.http_gate import CLOSE, METRICS, PROBES, refuse
from kvstrata.process.http_unix import is_ours

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_CONNECTIONS = 512
DESCRIPTORS_SHARE = 4
MAX_REQUESTS = 64
REQUEST_S = 15.0
STALLED_S = 30.0
MAX_PARTS, PART_BYTES = 1_024, 1_024


class Bounds:
    """The connections of one port, and its requests under way."""

    def __init__(
        self,
        most: Callable[[], int] | None = None,
        *,
        arrival_s: float | None = None,
        stalled_s: float | None = None,
    ) -> None:
        """`most`: how many connections the port may have now; the times are those of rule 2. None: the usual ones."""
        self._most = most
        self._arrival_s = arrival_s
        self._stalled_s = stalled_s
        self._connections: dict[Timed, None] = {}
        self._idle: dict[Timed, None] = {}
        """Connections without a whole request under way, the longest idle first."""
        self._requests = 0
        self._closed = {"idle": 0, "late": 0, "stalled": 0, "stranger": 0}
        self._refused = 0
        self._log = EventLog("http")

    def stats(self) -> dict[str, int]:
        """Counts for status and metrics."""
        return {
            "connections": len(self._connections),
            "requests": self._requests,
            "refused": self._refused,
            **{f"closed_{why}": count for why, count in self._closed.items()},
        }

    @property
    def arrival_s(self) -> float:
        """Time for a request to arrive."""
        return patience(REQUEST_S) if self._arrival_s is None else self._arrival_s

    @property
    def stalled_s(self) -> float:
        """Time for a client to read something."""
        return patience(STALLED_S) if self._stalled_s is None else self._stalled_s

    def opened(self, connection: Timed) -> None:
        """A connection was accepted."""
        self._connections[connection] = None
        if len(self._connections) > (self._most or max_connections)():
            self.close(next(iter(self._idle), connection), "idle")
        if connection in self._connections:
            self._idle[connection] = None

    def busy(self, connection: Timed) -> None:
        """A whole request of this connection is under way."""
        self._idle.pop(connection, None)

    def idle(self, connection: Timed) -> None:
        """No whole request of this connection is under way any more."""
        if connection in self._connections:
            self._idle.setdefault(connection)

    def gone(self, connection: Timed) -> None:
        """The connection has ended. Idempotent."""
        self._connections.pop(connection, None)
        self._idle.pop(connection, None)

    def close(self, connection: Timed, why: str) -> None:
        """Cut a connection, for one of the reasons in `stats`."""
        self.gone(connection)
        self._closed[why] += 1
        self._log.repeated(
            logging.WARNING, why, "connection_closed", why=why, connections=len(self._connections)
        )
        connection.transport.abort()

    def limited(self, app: ASGIApp) -> ASGIApp:
        """`app` with bounded requests."""
        free = {*PROBES, METRICS}

        async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in free:
                await app(scope, receive, send)
            elif self._requests >= MAX_REQUESTS:
                self._refused += 1
                self._log.repeated(logging.WARNING, "refused", "request_refused", under_way=self._requests)
                message = f"{MAX_REQUESTS} requests are under way; ask again"
                await refuse(send, {}, 503, Unavailable.code, message, [(b"retry-after", b"1"), CLOSE])
            else:
                self._requests += 1
                try:
                    await app(scope, receive, send)
                finally:
                    self._requests -= 1

        return bounded


class Timed(asyncio.Protocol):
    """The time limits of a connection, which uvicorn lacks; a base before uvicorn's own protocol."""

    def __init__(self, bounds: Bounds, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.bounds = bounds
        self.transport: asyncio.Transport
        self.loop: asyncio.AbstractEventLoop
        self._arrival: asyncio.TimerHandle | None = None
        """Timer that runs while a request arrives."""
        self._stall: asyncio.TimerHandle | None = None
        """Timer that runs while the client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX and not is_ours(connection):
            self.bounds.close(self, "stranger")
            return
        self.arriving()
        self.bounds.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.arrived()
        self._stop_stall()
        self.bounds.gone(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.bounds.stalled_s, self.bounds.close, self, "stalled")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def arriving(self) -> None:
        """A request arrives: it has `arrival_s` from the first such call on."""
        if self._arrival is None:
            self._arrival = self.loop.call_later(self.bounds.arrival_s, self.bounds.close, self, "late")

    def arrived(self) -> None:
        """No request is arriving any more."""
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None


class _Parts(h11.Connection):
    """h11's connection, which counts the parts of a body."""

    _parts = _part_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._parts += 1
            self._part_bytes += len(event.data)
            if self._parts > MAX_PARTS + self._part_bytes // PART_BYTES:
                self._parts = self._part_bytes = 0
                raise h11.RemoteProtocolError("the body comes in too many small parts")
        elif isinstance(event, h11.Request):
            self._parts = self._part_bytes = 0
        return event


class BoundedProtocol(Timed, H11Protocol):
    """uvicorn's connection on h11, with bounds."""

    def __init__(self, bounds: Bounds, *arguments: Any, **more: Any) -> None:
        super().__init__(bounds, *arguments, **more)
        self.conn = _Parts(h11.SERVER, self.config.h11_max_incomplete_event_size)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, unless its answer has begun; its application then writes to nobody."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """Start and stop the timer, and mark the connection busy or idle, by the bytes that have arrived so far."""
        if self.transport.is_closing():
            return
        under_way = self.cycle is not None and not self.cycle.response_complete
        between = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if whole or (between and self.cycle is not None):
            self.arrived()
        else:
            self.arriving()
        if under_way and whole:
            self.bounds.busy(self)
        else:
            self.bounds.idle(self)


def protocol_of(bounds: Bounds) -> Callable[..., BoundedProtocol]:
    """The factory by which uvicorn makes connections."""

    def make(*arguments: Any, **more: Any) -> BoundedProtocol:
        return BoundedProtocol(bounds, *arguments, **more)

    return make


def max_connections() -> int:
    """How many connections one port may have: at most a share of this process's descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else max(8, min(MAX_CONNECTIONS, soft // DESCRIPTORS_SHARE))
