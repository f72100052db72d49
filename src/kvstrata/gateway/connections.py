"""The port of the gateway: uvicorn on httptools, with the bounds of process/http_connections.py.

A connection's socket can be lent to the thread that passes an answer on (splicing.py).  Meanwhile it is neither read,
written nor closed here: whatever would close it makes the thread stop, and closes it afterwards.

A client whose host is gone without a word (power, network) is found by TCP's own probes after KEPT_ALIVE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvstrata.config.gateway_model import GatewayHttpSettings
from kvstrata.process.http_connections import Bounds, Connection
from kvstrata.process.http_connections import make_server as make_http_server

if TYPE_CHECKING:
    from starlette.types import ASGIApp

MAX_CONNECTIONS = 16_384
"""A further connection closes the one that has been idle longest."""
SPARE_FILES = 128
"""Descriptors for everything but clients and engines."""
IDLE_S = 75
"""Time between two requests of a connection."""
KEPT_ALIVE_S, PROBE_S, PROBES = 60, 10, 3


class _LentTransport:
    """Stands for a transport whose socket is lent: closing it waits."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.closes = False

    def is_closing(self) -> bool:
        """Whether the connection will be closed when the socket is back."""
        return self.closes

    def close(self) -> None:
        """Close the connection when the socket is back, which is soon."""
        self.closes = True
        self._stop()

    abort = close


class _Flow(FlowControl):
    """uvicorn's flow control, which leaves a lent socket alone."""

    lent = False

    def resume_reading(self) -> None:
        if not self.lent:
            super().resume_reading()


class GatewayConnection(Connection):
    """A client's connection."""

    _own: asyncio.Transport | None = None
    """The transport while its socket is lent."""
    _descriptor = -1
    _leaving: Callable[[], object] | None = None
    """Called when the client goes before its answer has ended."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._gone = asyncio.Event()
        connection = transport.get_extra_info("socket")
        self._descriptor = connection.fileno()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEPT_ALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._gone.set()
        if self._answered is not None:
            self._answered.disconnected = not self._answered.response_complete
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving()

    @contextlib.contextmanager
    def leaving(self, call: Callable[[], object]) -> Iterator[None]:
        """Call `call` when the client goes meanwhile, or at once if it has gone."""
        if self._gone.is_set():
            call()
        self._leaving = call
        try:
            yield
        finally:
            self._leaving = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def lend(self, stop: Callable[[], None]) -> int | None:
        """Lend the socket; None if something is still to be written. `stop` makes its user end soon."""
        transport, flow = self.transport, self.flow
        if transport.is_closing() or transport.get_write_buffer_size() or not isinstance(flow, _Flow):
            return None
        flow.pause_reading()
        flow.lent = True
        self._own, self.transport = transport, cast(asyncio.Transport, _LentTransport(stop))
        return self._descriptor

    def taken_back(self) -> None:
        """The socket is used no longer."""
        lent, own, flow = self.transport, self._own, self.flow
        if own is None or not isinstance(lent, _LentTransport) or not isinstance(flow, _Flow):
            return
        self._own, self.transport = None, own
        flow.lent = False
        if lent.closes:
            self.transport.abort()
        else:
            flow.resume_reading()

    def head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """The head of an answer in chunked coding, which the caller writes, with its body."""
        cycle = self._answered
        assert cycle is not None
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"transfer-encoding: chunked\r\n\r\n")
        return b"".join(lines)

    def answered(self) -> None:
        """The answer was written to its end by somebody else."""
        cycle = self._answered
        assert cycle is not None
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    async def cut(self) -> None:
        """Cut the connection, so that the client sees that an answer is not whole; returns once that is done."""
        self.transport.abort()
        await self._gone.wait()


def make_server(app: ASGIApp, settings: GatewayHttpSettings) -> tuple[uvicorn.Server, Bounds]:
    """A uvicorn server, and the bounds of its port."""
    bounds = Bounds(most_connections, arrival_s=settings.stalled_s, stalled_s=settings.stalled_s)

    server = make_http_server(
        app, GatewayConnection, bounds, proxy_headers=False, server_header=False, timeout_keep_alive=IDLE_S
    )
    return server, bounds


def most_connections() -> int:
    """How many clients may be connected: each needs a descriptor, and its request another one to an engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else max(8, min(MAX_CONNECTIONS, (soft - SPARE_FILES) // 2))
