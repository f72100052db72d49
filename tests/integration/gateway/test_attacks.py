"""What a stranger without a key sends to keep others out: their requests are answered meanwhile, counted one by one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway.envoy.configuration import connections, heap_bytes
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import ScriptedEngine
from tests.integration.gateway.conftest import Start, at_rest, envoy_mb, status_of
from tests.integration.gateway.test_door import HEAD, bearer, tenants
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = [pytest.mark.integration, pytest.mark.long]

HALF = min(10_000, connections(GatewaySettings()) - 500)
"""With 20,000 open files a gateway has 9,616 connections; more are closed at once, whoever opens them."""
OTHERS = 50
BODY = b'{"model": "m", "messages": []}'


@contextlib.contextmanager
def attack(gateway: GatewayProcess, once: Callable[[socket.socket], None], threads: int) -> Iterator[None]:
    """Do `once` on connections without end, beside whatever is done meanwhile."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", gateway.port), 5) as line,
            ):
                while not over.is_set():
                    once(line)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for one in running:
        one.start()
    try:
        yield
    finally:
        over.set()
        for one in running:
            one.join()


async def others_are_answered(gateway: GatewayProcess) -> None:
    """Each on a connection of its own."""
    for _ in range(OTHERS):
        async with aiohttp.ClientSession() as session:
            send = session.post(gateway.url + CHAT, json=ask(), headers=bearer("red"))
            assert await status_of(send) == 200


async def test_thousands_of_half_requests_keep_nobody_out_and_end_by_themselves(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    engine = ScriptedEngine()
    gateway = await start(engine, tenants=tenants(tmp_path), timeouts={"silence_s": 5})
    kinds = (b"", b"POST ", HEAD, HEAD + b"content-length: 100\r\n\r\n{")
    half = []
    try:
        for number in range(HALF):
            half.append(socket.create_connection(("127.0.0.1", gateway.port)))
            half[-1].sendall(kinds[number % len(kinds)])
        await others_are_answered(gateway)
        assert await envoy_mb(gateway, session) < 1_500
        poll = select.poll()
        for one in half:
            poll.register(one, select.POLLRDHUP)
        left = HALF
        while left:
            ended = await asyncio.to_thread(poll.poll, 60_000)
            assert ended, f"{left} stay open"
            left -= len(ended)
            for fd, _ in ended:
                poll.unregister(fd)
    finally:
        for one in half:
            one.close()
    assert len(engine.got) == OTHERS
    await at_rest(gateway, session)


async def test_bodies_that_come_byte_by_byte_keep_nobody_out_and_live_while_they_come(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    engine = ScriptedEngine()
    gateway = await start(engine, tenants=tenants(tmp_path), timeouts={"silence_s": 2})

    def dribble(line: socket.socket) -> None:
        line.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(200):
            line.sendall(b"1\r\n{\r\n")
            select.select([line], [], [], 0.01)

    async def slowly() -> AsyncIterator[bytes]:
        for at in range(len(BODY)):
            yield BODY[at : at + 1]
            await asyncio.sleep(0.2)  # the whole takes three times the longest silence

    with attack(gateway, dribble, 100):
        slow = asyncio.create_task(
            status_of(session.post(gateway.url + CHAT, data=slowly(), headers=bearer("blue")))
        )
        await others_are_answered(gateway)
        assert await slow == 200
    assert len(engine.got) == OTHERS + 1 and BODY in [got.body for got in engine.got]
    await at_rest(gateway, session)


async def test_long_bodies_of_one_tenant_that_never_end_take_bounded_memory_and_leave_room_for_others(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    engine = ScriptedEngine()
    gateway = await start(engine, tenants=tenants(tmp_path))
    limit_mb = heap_bytes() // 8 >> 20
    key = b"authorization: " + bearer("red")["Authorization"].encode()
    head = HEAD + key + b"\r\ncontent-length: %d\r\n\r\n{" % (64 << 20)

    def send(line: socket.socket) -> None:
        with contextlib.suppress(OSError):
            line.sendall(head + bytes(60 << 20))

    with contextlib.ExitStack() as stack:
        for _ in range(limit_mb // 64 + 4):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            await asyncio.to_thread(send, line)
        assert await envoy_mb(gateway, session) < limit_mb + 300
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head)
        refusal = await reader.readuntil(b"}}")
        assert b" 503 " in refusal and b"retry-after: 1" in refusal and b'"overloaded"' in refusal
        writer.close()
        image = json.dumps(ask(user="x" * (20 << 20))).encode()
        headers = {**bearer("blue"), "Content-Type": "application/json"}
        assert await status_of(session.post(gateway.url + CHAT, data=image, headers=headers)) == 200
    await at_rest(gateway, session)
    headers = {**bearer("red"), "Content-Type": "application/json"}
    assert await status_of(session.post(gateway.url + CHAT, data=image, headers=headers)) == 200


def frame(kind: int, stream: int, content: bytes, flags: int = 0) -> bytes:
    """One of HTTP/2."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


async def test_thousands_of_half_bodies_on_one_connection_of_http_2_take_little_memory(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    engine = ScriptedEngine()
    gateway = await start(engine, tenants=tenants(tmp_path), timeouts={"silence_s": 5})
    idle_mb = await envoy_mb(gateway, session)
    fields = {b":method": b"POST", b":path": CHAT.encode(), b":scheme": b"http", b":authority": b"a"}
    fields[b"content-length"] = b"65000"
    head = b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in fields.items())
    half = b"".join(
        frame(1, stream, head, flags=4) + 4 * frame(0, stream, bytes(15_000)) for stream in range(1, 2_001, 2)
    )
    windows = frame(4, 0, b"") + frame(8, 0, struct.pack(">I", 1 << 30))
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            await asyncio.to_thread(line.sendall, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + windows + half)
        await others_are_answered(gateway)
        assert await envoy_mb(gateway, session) < idle_mb + 100
    assert len(engine.got) == OTHERS
    await at_rest(gateway, session)


@pytest.mark.parametrize(
    "text", [b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n", HEAD[:-19] + b"content-length: 30\r\n\r\n" + BODY]
)
async def test_pipelines_that_nobody_reads_keep_nobody_out(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, text: bytes
) -> None:
    engine = ScriptedEngine()
    gateway = await start(engine, tenants=tenants(tmp_path))
    block = text * 1_000
    with attack(gateway, lambda line: line.sendall(block), 20):
        await others_are_answered(gateway)
        assert await envoy_mb(gateway, session) < 600
    assert len(engine.got) == OTHERS
    await at_rest(gateway, session)
