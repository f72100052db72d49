"""process/http_connections.py with real sockets: silent and slow clients lose their connection; probes get through."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from fastapi import Request
from fastapi.responses import Response

from kvstrata.config.common_model import ListenSettings
from kvstrata.process import http_connections
from kvstrata.process.http import make_base
from kvstrata.process.http_gate import Access
from kvstrata.process.http_thread import make_port
from kvstrata.process.listen import Listener

SOON_S = 0.05
GET = "GET {} HTTP/1.1\r\nhost: localhost\r\n{}\r\n"


class Port:
    """A served port. `/hold` waits for `release`; `/large` answers 64 MiB."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.listener.setblocking(False)
        self.release = asyncio.Event()
        self.held = asyncio.Semaphore(0)

    async def start(self) -> None:
        app, _ = make_base("test", lambda: (True, ""))

        @app.get("/hold")
        async def hold() -> dict[str, bool]:
            self.held.release()
            await self.release.wait()
            return {"held": True}

        @app.get("/large")
        async def large() -> Response:
            return Response(bytes(64 << 20))

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response("metrics")

        @app.post("/echo")
        async def echo(request: Request) -> Response:
            return Response(await request.body())

        self.served = await make_port(lambda: app, Access(ListenSettings(), ""))
        self.task = asyncio.create_task(self.served.serve(Listener(self.listener, 0)))

    async def connect(self, text: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        writer.write(text.encode())
        return reader, writer

    async def ask(self, path: str) -> int:
        """Send one request on a connection of its own; return the status code of its answer."""
        reader, writer = await self.connect(GET.format(path, "connection: close\r\n"))
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return int(answer.split()[1])

    async def close(self) -> None:
        self.release.set()
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    port = Port()
    await port.start()
    yield port
    await port.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes that the server sends until it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(65_536), 30):
            data += part
    return data


async def test_silent_connections_keep_no_request_out_and_the_oldest_one_is_closed(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "max_connections", lambda: 10)
    silent = [await port.connect() for _ in range(40)]
    for path in ("/healthz", "/readyz", "/metrics"):
        assert await port.ask(path) == 200
    assert await ended(silent[0][0]) == b""
    stats = port.served.stats()
    assert stats["connections"] <= 10
    assert stats["closed_idle"] >= 30
    for _, writer in silent:
        writer.close()


async def test_requests_under_way_are_bounded_and_probes_are_not(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "MAX_REQUESTS", 3)
    holding = [await port.connect(GET.format("/hold", "")) for _ in range(3)]
    for _ in holding:
        await port.held.acquire()
    assert await port.ask("/hold") == 503
    for path in ("/healthz", "/readyz", "/metrics"):
        assert await port.ask(path) == 200
    assert (port.served.stats()["requests"], port.served.stats()["refused"]) == (3, 1)
    port.release.set()
    for reader, writer in holding:
        assert b'"held"' in await reader.readuntil(b"}")
        writer.close()
    async with asyncio.timeout(30):
        while port.served.stats()["requests"]:  # noqa: ASYNC110 (an answer arrives before its request has ended)
            await asyncio.sleep(0.001)
    assert await port.ask("/hold") == 200


async def test_a_connection_with_a_request_under_way_is_not_closed_for_a_new_one(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "max_connections", lambda: 4)
    reader, writer = await port.connect(GET.format("/hold", ""))
    await port.held.acquire()
    silent = [await port.connect() for _ in range(12)]
    assert await port.ask("/healthz") == 200
    port.release.set()
    assert b'"held"' in await reader.readuntil(b"}")
    for _, one in [*silent, (None, writer)]:
        one.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GET /healthz HTTP/1.1\r\nhost:",
        "POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nabc",
        GET.format("/healthz", "") + "GET /he",
    ],
    ids=["nothing", "half a header", "half a body", "half a second request"],
)
async def test_a_connection_is_closed_if_its_request_does_not_arrive_whole_in_time(
    port: Port, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(http_connections, "REQUEST_S", SOON_S)
    reader, writer = await port.connect(text)
    await ended(reader)
    assert port.served.stats()["closed_late"] == 1
    writer.close()


async def test_an_idle_connection_between_requests_is_not_closed_as_late(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "REQUEST_S", SOON_S)
    reader, writer = await port.connect(GET.format("/hold", ""))
    await port.held.acquire()
    late, other = await port.connect()
    await ended(late)  # so more time has passed than a request may take to arrive
    port.release.set()
    assert b'"held"' in await reader.readuntil(b"}")
    late, third = await port.connect()
    await ended(late)
    writer.write(GET.format("/healthz", "").encode())
    assert b'"ok"' in await reader.readuntil(b"}")
    for one in (writer, other, third):
        one.close()


async def test_a_client_that_does_not_read_its_answer_is_disconnected(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "STALLED_S", SOON_S)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    deaf.connect(port.listener.getsockname())
    deaf.sendall(GET.format("/large", "").encode())
    async with asyncio.timeout(30):
        while not port.served.stats()["closed_stalled"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await port.ask("/healthz") == 200
    deaf.close()
