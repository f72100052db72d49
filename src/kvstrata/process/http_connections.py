"""Bounds of an HTTP port, so that no client can use up the port, or the process's descriptors.

1. A port has at most MAX_CONNECTIONS connections, and at most a quarter of the descriptors that the process may open. A
   further connection closes the one that has been idle longest, that is, without a complete request under way.
2. A request must arrive within REQUEST_S of its connection's start, or of its own first byte.  A client that reads
   nothing of its answer for STALLED_S is disconnected.  KEEP_ALIVE_S bounds the time between requests.
3. Since whole requests under way are fewer than the connections allowed, there is always an idle connection to close,
   and a probe always gets through.
4. A head, trailers or chunk extensions that are too long end the connection.  Trailers are ignored: as headers they
   would reach the application unchecked.
5. If the answer ends before its request, the connection is closed.  So it is if a body has more than MAX_PARTS parts
   that are shorter than PART_BYTES on average: each part costs as much as a long one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter, gauge
from kvstrata.patience import patience

if TYPE_CHECKING:
    from starlette.types import ASGIApp

MAX_CONNECTIONS = 512
DESCRIPTORS_SHARE = 4
REQUEST_S = KEEP_ALIVE_S = 15
STALLED_S = 30.0
MAX_PARTS, PART_BYTES = 1_024, 1_024
MAX_HEAD_BYTES = 64 << 10
"""Maximum number of bytes of a request, in a row, that are no body."""
MAX_HEADERS = 256
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Bounds(Numbers):
    """The connections of one port, and its whole requests under way, which the gate counts (http_gate.py)."""

    connections = gauge("Open connections of the HTTP port.", lambda self: len(self._connections))
    closed = counter(
        "Connections closed by the HTTP port: idle (to make room for new ones, the longest idle first), late (a "
        "request took too long to arrive), or stalled (the client did not read the response).",
        "reason",
        name="closed_connections",
    )
    requests = gauge("Requests in progress on the HTTP port, not counting probes.")
    refused = counter(
        "Requests answered with 503 because too many were in progress.", name="refused_requests"
    )

    def __init__(self) -> None:
        self._connections: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        """Connections without a whole request under way, the longest idle first."""
        self.arriving_bytes = 0
        """Bytes of bodies that arrive, beside the first of each."""
        self.closed.update(idle=0, late=0, stalled=0)
        self._log = EventLog("http")

    def opened(self, connection: Connection) -> None:
        """A connection was accepted."""
        self._connections[connection] = None
        if len(self._connections) > max_connections():
            self.close(next(iter(self._idle), connection), "idle")
        if connection in self._connections:
            self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        """A whole request of this connection is under way."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """No whole request of this connection is under way any more."""
        if connection in self._connections:
            self._idle.setdefault(connection)

    def gone(self, connection: Connection) -> None:
        """The connection has ended. Idempotent."""
        self._connections.pop(connection, None)
        self._idle.pop(connection, None)

    def close(self, connection: Connection, why: str) -> None:
        """Cut a connection, for one of the reasons of `closed`."""
        self.gone(connection)
        self.closed[why] += 1
        self._log.repeated(
            logging.WARNING, why, "connection_closed", why=why, connections=len(self._connections)
        )
        connection.transport.abort()


class Connection(HttpToolsProtocol):
    """uvicorn's connection on httptools, with bounds."""

    _arrival: asyncio.TimerHandle | None = None
    """Timer that runs while a request arrives."""
    _stall: asyncio.TimerHandle | None = None
    """Timer that runs while the client does not read."""
    _in_head = False
    _bare_bytes = 0
    """Bytes in a row that have ended no head, and brought no body."""
    _moves = False
    """Whether the bytes that are being read do."""
    _answered: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the last one that arrived, which may wait behind it."""
    _parts = _part_bytes = 0
    """Number of parts, and of bytes, of the arriving body."""

    def __init__(self, bounds: Bounds, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.bounds = bounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arriving()
        self.bounds.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._stop_stall()
        self.bounds.gone(self)
        self._mute()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self._cut_in(STALLED_S, "stalled")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()

    def data_received(self, data: bytes) -> None:
        self._moves = False
        super().data_received(data)
        self._bare_bytes = 0 if self._moves else self._bare_bytes + len(data)
        if self._bare_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(TOO_LARGE)
                self.transport.close()
            else:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self._in_head, self._parts, self._part_bytes = True, 0, 0
        super().on_message_begin()
        self._arriving()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")  # which the parser takes for a request that is not HTTP
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._moves = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._moves = True
        self._parts, self._part_bytes = self._parts + 1, self._part_bytes + len(body)
        if self._parts > MAX_PARTS + self._part_bytes // PART_BYTES:
            raise ValueError("the body comes in too many small parts")  # which is answered as not HTTP
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._moves = True
        super().on_message_complete()
        self._arrived()
        if self.cycle is not None and not self.cycle.response_complete:
            self.bounds.busy(self)  # only now, so that a half request is closed for a new connection

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, and mute its application; abort if its answer has begun already."""
        cycle = self._answered
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        self._mute()
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        if self._answered is not None and self._answered.more_body:
            self.transport.close()
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:
            self.bounds.idle(self)

    def _mute(self) -> None:
        """From now on no application writes to this connection; uvicorn mutes only the last request that arrived."""
        for cycle in (self._answered, self.cycle):
            if cycle is not None:
                cycle.disconnected = True

    def _arriving(self) -> None:
        """A request arrives: it has REQUEST_S from the first such call on."""
        if self._arrival is None:
            self._arrival = self._cut_in(REQUEST_S, "late")

    def _cut_in(self, limit_s: float, why: str) -> asyncio.TimerHandle:
        return self.loop.call_later(patience(limit_s), self.bounds.close, self, why)

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def make_server(app: ASGIApp, bounds: Bounds) -> uvicorn.Server:
    """A server of one port, which leaves signals to the process."""
    config = uvicorn.Config(
        app,
        ws="none",
        http=functools.partial(Connection, bounds),  # type: ignore[arg-type]  # uvicorn calls it as it would a class
        log_config=None,  # uvicorn's lines go where ours go, by the root logger
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    return _Server(config)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


def max_connections() -> int:
    """Maximum number of connections of one port: a share of this process's file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else max(8, min(MAX_CONNECTIONS, soft // DESCRIPTORS_SHARE))
