"""The port of the gateway: uvicorn on httptools, with the bounds of process/http_connections.py.

A head, trailers or extensions of chunks that take too much end the connection.  Trailers are passed over: as headers
they would reach engines without having been looked at.

A client whose host is gone without a word (power, network) is found by TCP's own probes after KEPT_ALIVE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvstrata.config.gateway_model import GatewayHttpSettings
from kvstrata.gateway.engine_link import Answer
from kvstrata.process.http_connections import Bounds, Timed

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive

SPARE_FILES = 128
"""Descriptors for everything but clients and engines."""
IDLE_S = 75
"""Time between two requests of a connection."""
KEPT_ALIVE_S, PROBE_S, PROBES = 60, 10, 3
MAX_HEAD_BYTES = 64 << 10
"""Bytes of a request that are no body, in a row."""
MAX_HEADERS = 256
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class GatewayProtocol(Timed, HttpToolsProtocol):
    """A client's connection."""

    source: Answer | None = None
    """The answer whose parts are written."""
    _in_head = False
    _bare_bytes = 0
    """Bytes in a row that have ended no head, and brought no body."""
    _moves = False
    """Whether the bytes that are being read do."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEPT_ALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)

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
        super().on_body(body)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()
        self.arriving()
        self.bounds.busy(self)
        self.scope["state"]["connection"] = self

    def on_message_complete(self) -> None:
        self._moves = True
        super().on_message_complete()
        self.arrived()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:
            self.bounds.idle(self)

    def write_part(self, part: bytes) -> None:
        """Write a part of an answer's body whose head has been sent by ASGI's `send`.

        The same as `send` without a task that waits; `source` is paused while the client does not read.  The answer
        must have chunked coding.
        """
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.source is not None:
            self.source.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.source is not None:
            self.source.resume()

    async def cut(self, receive: Receive) -> None:
        """Cut the connection, so that the client sees that an answer is not whole; returns once that is done."""
        self.transport.abort()
        while (await receive())["type"] != "http.disconnect":
            pass


def make_server(app: ASGIApp, settings: GatewayHttpSettings) -> tuple[uvicorn.Server, Bounds]:
    """A uvicorn server, and the bounds of its port."""
    bounds = Bounds(
        lambda: most_connections(settings.max_connections),
        arrival_s=settings.arrival_s,
        stalled_s=settings.stalled_s,
    )

    def protocol(*arguments: Any, **more: Any) -> GatewayProtocol:
        return GatewayProtocol(bounds, *arguments, **more)

    config = uvicorn.Config(
        app,
        ws="none",
        http=protocol,  # type: ignore[arg-type]  # a factory, which uvicorn calls as it would a class
        log_config=None,
        log_level="error",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
    )
    config.load()
    return _Server(config), bounds


def most_connections(wanted: int) -> int:
    """How many clients may be connected: each needs a descriptor, and its request another one to an engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft < 0 else max(8, min(wanted, (soft - SPARE_FILES) // 2))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield
