"""The HTTP port with real sockets: what a stranger sends needs no turn of the process's loop, and silent and slow
clients lose their connection while probes get through.

Where a test's own sockets block, the process's loop, on which the test runs, stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest

from kvstrata.config.common_model import ListenSettings
from kvstrata.process import http_connections, http_gate, operations
from kvstrata.process.http_gate import Access
from kvstrata.process.http_thread import Port, make_port
from kvstrata.process.listen import Listener
from kvstrata.process.operations import Reply, operation, operations_of

TOKEN = "t" * 32
BEARER = f"authorization: Bearer {TOKEN}\r\n"
CHUNKED = "transfer-encoding: chunked\r\n\r\n"
ONE_BYTE_CHUNKS = "1\r\nx\r\n" * 5_000
WAIT_S = 30
SOON_S = 0.05
WHOLE = 'POST /echo HTTP/1.1\r\ncontent-length: 15\r\nconnection: close\r\n\r\n{"text": "abc"}'
GET = "GET {} HTTP/1.1\r\nhost: localhost\r\n" + BEARER + "{}\r\n"


class Echo(msgspec.Struct):
    """What is answered as it came."""

    text: str


@operation("GET", "/file", here=True, public=True)
def file(parts: Process) -> Reply:
    """Uses nothing of the process."""
    parts.threads.append(threading.current_thread())
    return Reply(b"file")


@operation("POST", "/file", here=True, public=True)
def post_file(parts: Process) -> Reply:
    """Uses nothing of the process."""
    return file(parts)


@operation("GET", "/metrics")
def metrics(parts: Process) -> Reply:
    """A long answer."""
    return Reply(bytes(16 << 20))


@operation("POST", "/echo")
async def echo(parts: Process, ask: Echo) -> Reply:
    """The text of the request."""
    parts.threads.append(threading.current_thread())
    return Reply(ask.text.encode())


@operation("GET", "/hold")
async def hold(parts: Process) -> dict[str, bool]:
    """Waits for `release`."""
    parts.held.release()
    try:
        await parts.release.wait()
    except asyncio.CancelledError:
        parts.cancelled += 1
        raise
    return {"held": True}


OPERATIONS = [
    operations.healthz.operation,
    operations.readyz.operation,
    *operations_of(sys.modules[__name__]),
]


class Process:
    """A port with a token. `/hold` waits for `release`; `/file` needs no loop."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.listener.setblocking(False)
        self.threads: list[threading.Thread] = []
        """Threads on which operations ran."""
        self.held, self.release = asyncio.Semaphore(0), asyncio.Event()
        self.cancelled = 0

    async def start(self) -> None:
        access = Access(ListenSettings(), TOKEN, public=["/file"])
        self.port: Port = await make_port("test", OPERATIONS, self, access)
        self.task = asyncio.create_task(self.port.serve(Listener(self.listener, 0)))
        assert await self.status_of("/file") == 200  # which imports FastAPI
        self.threads.clear()

    def readiness(self) -> tuple[bool, str]:
        return True, ""

    def send(self, text: str, head: str = "") -> socket.socket:
        """Send a request that goes on with `text` behind its first header; blocks the process's loop."""
        first, _, rest = text.partition("\r\n")
        link = socket.create_connection(self.listener.getsockname(), WAIT_S)
        link.sendall(f"{first}\r\nhost: localhost\r\n{head}{rest}".encode())
        return link

    async def ask(self, text: str, head: str = "") -> bytes:
        """The answer to a request, up to the end of its connection, while the loop goes on."""
        return await asyncio.to_thread(lambda: read(self.send(text, head)))

    async def connect(self, text: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        writer.write(text.encode())
        return reader, writer

    async def status_of(self, path: str) -> int:
        """Send one request on a connection of its own; return the status code of its answer."""
        reader, writer = await self.connect(GET.format(path, "connection: close\r\n"))
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        return status(answer)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    process = Process()
    await process.start()
    yield process
    await process.stop()


def read(link: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    with link:
        parts = []
        try:
            while part := link.recv(65_536):
                parts.append(part)
        except ConnectionError:
            pass
        return b"".join(parts)


def status(answer: bytes) -> int:
    return int(answer.split()[1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET /v1/status HTTP/1.1\r\nconnection: close\r\n\r\n", 401),
        ("GET /file HTTP/1.1\r\nconnection: close\r\n\r\n", 200),
        ("GET /file HTTP/1.1\r\norigin: http://evil.example\r\nconnection: close\r\n\r\n", 403),
        (f"GET /healthz HTTP/1.1\r\n{CHUNKED}{ONE_BYTE_CHUNKS}", 400),
        ("GET /healthz HTTP/1.1\r\nconnection: close\r\ncontent-length: 3\r\n\r\nabc", 400),
        (f"POST /echo HTTP/1.1\r\n{CHUNKED}{ONE_BYTE_CHUNKS}", 400),
        (f"POST /file HTTP/1.1\r\n{CHUNKED}{ONE_BYTE_CHUNKS}", 400),
        ("POST /echo HTTP/1.1\r\ncontent-length: 100\r\n\r\nabc", 401),
        (f"POST /echo HTTP/1.1\r\n{CHUNKED}", 401),
        ("POST /file HTTP/1.1\r\ncontent-length: 70000\r\n\r\nabc", 413),
        (f"POST /echo HTTP/1.1\r\n{BEARER}content-length: {60 << 20}\r\n\r\nabc", 413),
        ("nothing of HTTP\r\n\r\n", 400),
    ],
)
async def test_what_a_stranger_sends_is_answered_while_the_loop_stands_still(process, caplog, text, expected):
    """Each of these connections ends by itself: those whose request did not end when its answer did, too."""
    answer = read(process.send(text))
    assert status(answer) == expected
    assert expected != 413 or json.loads(answer.partition(b"\r\n\r\n")[2])["field"] == "body"
    assert threading.current_thread() not in process.threads
    assert not caplog.records


async def test_probes_wait_for_one_turn_of_the_loop(process: Process) -> None:
    text = "GET /healthz HTTP/1.1\r\nconnection: close\r\n\r\n"
    links = [process.send(text) for _ in range(3)]
    assert status(read(process.send("GET /file HTTP/1.1\r\nconnection: close\r\n\r\n"))) == 200
    for link in links:
        link.setblocking(False)
        with pytest.raises(BlockingIOError):
            link.recv(1)
    for link in links:
        link.settimeout(WAIT_S)
        assert status(await asyncio.to_thread(read, link)) == 200


async def test_routes_run_on_the_process_s_loop_and_get_whole_bodies(process: Process) -> None:
    said = "x" * 59_988
    body = f'{{"text": "{said}"}}'
    chunks = "".join(f"3e8\r\n{body[at : at + 1000]}\r\n" for at in range(0, 60_000, 1000)) + "0\r\n\r\n"
    close = f"{BEARER}connection: close\r\n"
    for text in (f"content-length: 60000\r\n\r\n{body}", CHUNKED + chunks):
        answer = await process.ask(f"POST /echo HTTP/1.1\r\n{text}", close)
        assert (status(answer), answer.endswith(b"\r\n\r\n" + said.encode())) == (200, True)
    assert process.threads == [threading.current_thread()] * 2


async def test_a_reader_of_the_metrics_that_does_not_read_keeps_no_other_one_out(process: Process) -> None:
    ask = f"GET /metrics HTTP/1.1\r\nhost: localhost\r\n{BEARER}"
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    deaf.connect(process.listener.getsockname())
    deaf.sendall(f"{ask}\r\n".encode() * 3)
    answer = await process.ask("GET /metrics HTTP/1.1\r\nconnection: close\r\n\r\n", BEARER)
    assert (status(answer), len(answer) > 16 << 20) == (200, True)
    deaf.close()


async def test_half_requests_keep_no_whole_one_out(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gate, "MAX_REQUESTS", 2)
    monkeypatch.setattr(http_connections, "max_connections", lambda: 8)
    half = "POST {} HTTP/1.1\r\ncontent-length: 100\r\n\r\nabc"
    links = [process.send(half.format("/file")) for _ in range(10)]
    links += [process.send(half.format("/echo"), BEARER) for _ in range(10)]
    assert (await process.ask(WHOLE, BEARER)).endswith(b"abc")
    assert process.port.numbers[0].refused == 0
    for link in links:
        link.close()


async def test_large_bodies_that_arrive_are_bounded_in_all(process, monkeypatch):
    monkeypatch.setattr(http_gate, "MAX_ARRIVING_BYTES", 100_000)
    length, part = "content-length: 200000\r\nconnection: close\r\n\r\n", "x" * 130_000
    first = await asyncio.to_thread(process.send, f"POST /echo HTTP/1.1\r\n{length}{part}", BEARER)
    answers = [await process.ask(f"POST /echo HTTP/1.1\r\n{length}{part}{part[:70_000]}", BEARER)]
    assert [status(answer) for answer in answers] == [503]
    assert (await process.ask(WHOLE, BEARER)).endswith(b"abc")
    first.close()


async def test_another_token_holds_from_now_on(process: Process) -> None:
    process.port.set_token("u" * 32)
    assert status(await process.ask(WHOLE, BEARER)) == 401
    assert status(await process.ask(WHOLE, BEARER.replace("t" * 32, "u" * 32))) == 200


async def test_a_stop_ends_the_routes_that_run_and_cuts_their_connections(process, caplog):
    assert await process.status_of("/file") == 200
    link = await asyncio.to_thread(process.send, "GET /hold HTTP/1.1\r\n\r\n", BEARER)
    half = await asyncio.to_thread(
        process.send, "POST /echo HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc", BEARER
    )
    await asyncio.wait_for(process.held.acquire(), WAIT_S)
    await process.stop()
    assert process.cancelled == 1
    read(link), read(half)
    [thread] = process.threads
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert not caplog.records


@pytest.mark.parametrize("garbage", [b"", b"nothing of HTTP\r\n\r\n"])
async def test_nothing_is_logged_of_a_client_that_goes_while_requests_wait_behind_the_one_that_is_answered(
    process, caplog, garbage
):
    _, writer = await process.connect(GET.format("/hold", "") * 2)
    await process.held.acquire()
    writer.write(garbage) if garbage else writer.transport.abort()
    async with asyncio.timeout(WAIT_S):
        while process.port.numbers[0].connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        process.release.set()
        while process.port.numbers[0].requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await process.status_of("/file") == 200
    assert not caplog.records


# -- connections that are silent, slow or too many


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes that the server sends until it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(65_536), WAIT_S):
            data += part
    return data


async def test_silent_connections_keep_no_request_out_and_the_oldest_one_is_closed(process, monkeypatch):
    monkeypatch.setattr(http_connections, "max_connections", lambda: 10)
    silent = [await process.connect() for _ in range(40)]
    for path in ("/healthz", "/readyz", "/metrics"):
        assert await process.status_of(path) == 200
    assert await ended(silent[0][0]) == b""
    bounds = process.port.numbers[0]
    assert bounds.connections <= 10
    assert bounds.closed["idle"] >= 30
    for _, writer in silent:
        writer.close()


async def test_requests_under_way_are_bounded_and_probes_are_not(process, monkeypatch):
    monkeypatch.setattr(http_gate, "MAX_REQUESTS", 3)
    holding = [await process.connect(GET.format("/hold", "")) for _ in range(3)]
    for _ in holding:
        await process.held.acquire()
    assert await process.status_of("/hold") == 503
    for path in ("/healthz", "/readyz", "/metrics"):
        assert await process.status_of(path) == 200
    assert (process.port.numbers[0].requests, process.port.numbers[0].refused) == (3, 1)
    process.release.set()
    for reader, writer in holding:
        assert b'"held"' in await reader.readuntil(b"}")
        writer.close()
    async with asyncio.timeout(WAIT_S):
        while process.port.numbers[0].requests:  # noqa: ASYNC110 (an answer arrives before its request has ended)
            await asyncio.sleep(0.001)
    assert await process.status_of("/hold") == 200


async def test_a_connection_with_a_request_under_way_is_not_closed_for_a_new_one(process, monkeypatch):
    monkeypatch.setattr(http_connections, "max_connections", lambda: 4)
    reader, writer = await process.connect(GET.format("/hold", ""))
    await process.held.acquire()
    silent = [await process.connect() for _ in range(12)]
    assert await process.status_of("/healthz") == 200
    process.release.set()
    assert b'"held"' in await reader.readuntil(b"}")
    for _, one in [*silent, (None, writer)]:
        one.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GET /healthz HTTP/1.1\r\nhost:",
        f"POST /echo HTTP/1.1\r\nhost: localhost\r\n{BEARER}content-length: 100\r\n\r\nabc",
        GET.format("/healthz", "") + "GET /he",
    ],
    ids=["nothing", "half a header", "half a body", "half a second request"],
)
async def test_a_connection_is_closed_if_its_request_does_not_arrive_whole_in_time(
    process: Process, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(http_connections, "REQUEST_S", SOON_S)
    reader, writer = await process.connect(text)
    await ended(reader)
    assert process.port.numbers[0].closed["late"] == 1
    writer.close()


async def test_an_idle_connection_between_requests_is_not_closed_as_late(process, monkeypatch):
    reader, writer = await process.connect(GET.format("/hold", ""))
    await process.held.acquire()
    monkeypatch.setattr(http_connections, "REQUEST_S", SOON_S)
    late, other = await process.connect()
    await ended(late)  # so more time has passed than a request may take to arrive
    process.release.set()
    assert b'"held"' in await reader.readuntil(b"}")
    late, third = await process.connect()
    await ended(late)
    writer.write(GET.format("/healthz", "").encode())
    assert b'"ok"' in await reader.readuntil(b"}")
    for one in (writer, other, third):
        one.close()


async def test_a_client_that_does_not_read_its_answer_is_disconnected(process, monkeypatch):
    monkeypatch.setattr(http_connections, "STALLED_S", SOON_S)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    deaf.connect(process.listener.getsockname())
    deaf.sendall(GET.format("/metrics", "").encode())
    async with asyncio.timeout(WAIT_S):
        while not process.port.numbers[0].closed["stalled"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await process.status_of("/healthz") == 200
    deaf.close()
