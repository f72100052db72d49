"""Whatever clients and engines do together, the gateway's counts come back to zero and it goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from tests.harness import amount
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Behaviour, Got, Line, ScriptedEngine, chat, delta
from tests.integration.gateway.conftest import Start
from tests.integration.gateway.test_door import HEAD, KEYS, bearer, tenants
from tests.integration.gateway.test_faults import FAILURES, at_rest
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration

REQUESTS = 400


async def breaks(got: Got, line: Line) -> None:
    """Break an answer off."""
    await line.begin()
    await line.event(delta("a"))
    line.cut()


async def waits(got: Got, line: Line) -> None:
    """Answer nothing, until the other end goes."""
    await line.gone()


async def much(got: Got, line: Line) -> None:
    """Answer with more than anybody reads."""
    await line.begin()
    for _ in range(200):
        await line.part(b"data: " + b"x" * 65_536 + b"\n\n")
    await line.end()


BEHAVIOURS: list[Behaviour] = [*FAILURES.values(), breaks, waits, much, *[chat] * 8]


async def reads(
    gateway: GatewayProcess, session: aiohttp.ClientSession, name: str, draw: random.Random
) -> None:
    """A client that reads its answer."""
    with contextlib.suppress(aiohttp.ClientError):
        body = ask(draw.random() < 0.5)
        async with session.post(gateway.url + CHAT, json=body, headers=bearer(name)) as response:
            await response.read()


async def leaves(
    gateway: GatewayProcess, session: aiohttp.ClientSession, name: str, draw: random.Random
) -> None:
    """A client that goes at any moment."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(draw.random() * 0.1):
            await reads(gateway, session, name, draw)


async def half(
    gateway: GatewayProcess, session: aiohttp.ClientSession, name: str, draw: random.Random
) -> None:
    """A client that sends a piece of a request."""
    text = (
        HEAD
        + b"authorization: Bearer "
        + KEYS[name].encode()
        + b'\r\ncontent-length: 14\r\n\r\n{"model": "m"}'
    )
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(text[: draw.randrange(len(text) + 1)])
        await writer.drain()
        if draw.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


CLIENTS: list[Callable[..., Awaitable[None]]] = [reads, reads, leaves, half]


async def test_counts_come_back_to_zero(start: Start, session: aiohttp.ClientSession, tmp_path: Path) -> None:
    seed = amount.seed()
    draw = random.Random(seed)

    async def anything(got: Got, line: Line) -> None:
        await draw.choice(BEHAVIOURS)(got, line)

    engines = [ScriptedEngine(behaviour=anything) for _ in range(3)]
    limits = {"max_in_flight": 40, "requests_per_s": 1_000}
    gateway = await start(
        *engines,
        tenants=tenants(tmp_path, red=limits, blue={}),
        timeouts={"first_byte_s": 1, "silence_s": 1},
        http={"arrival_s": 2, "stalled_s": 2},
        max_in_flight=60,
        health={"failures": 5},
    )
    tasks = []
    for number in range(REQUESTS):
        client = draw.choice(CLIENTS)
        tasks.append(asyncio.create_task(client(gateway, session, draw.choice(list(KEYS)), draw)))
        if number % 50 == 49:
            gateway.settings["engines"] = [{"url": engine.url} for engine in draw.sample(engines, 2)]
            gateway.write()
            gateway.signal(signal.SIGHUP)
        await asyncio.sleep(draw.random() * 0.01)
    await asyncio.gather(*tasks)
    await at_rest(gateway, session)
    for engine in engines:
        engine.behaviour = chat
    async with session.post(gateway.url + CHAT, json=ask(), headers=bearer("blue")) as response:
        assert response.status == 200, seed
    await asyncio.sleep(0.3)  # a page of metrics is up to 0.25 s old
    samples = await gateway.samples(session)
    counted = sum(
        value for name, value in samples.items() if name.startswith("kvstrata_gateway_requests_total")
    )
    received = sum(
        value for name, value in samples.items() if name.startswith("kvstrata_gateway_slo_requests_total")
    )
    assert counted == received > REQUESTS / 4, seed
    log = gateway.log.read_text()
    assert "Traceback" not in log and "request_crashed" not in log, seed
