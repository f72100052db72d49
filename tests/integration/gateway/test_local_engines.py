"""A real gateway finds the engines of its host by itself, among other things that listen, as they come and go."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import pytest

from tests.harness.daemon import free_ports
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start
from tests.integration.gateway.test_residency_live import COMPLETIONS, Sim

pytestmark = pytest.mark.integration

PORTS = 8


async def names(gateway: GatewayProcess, session: aiohttp.ClientSession) -> dict[str, str]:
    """The state of each engine that the gateway knows."""
    return {one["name"]: one["state"] for one in (await gateway.status(session))["engines"]}


async def until(gateway: GatewayProcess, session: aiohttp.ClientSession, *sims: Sim) -> None:
    """Wait until the gateway has exactly these engines, and they serve."""
    wanted = {one.name: "up" for one in sims}

    async def there() -> bool:
        return await names(gateway, session) == wanted

    await eventually_async(f"the engines are {sorted(wanted)}", there)


async def answers(url: str, session: aiohttp.ClientSession) -> None:
    """Ask for a token."""
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}
    async with session.post(url + COMPLETIONS, json=body) as response:
        assert response.status == 200, await response.text()


async def test_three_engines_are_found_as_they_come_and_go_and_nothing_else_is_taken_for_one(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    first = free_ports(PORTS)
    sims = [Sim(port=first + number) for number in range(3)]
    local = {"engines_from": {"local": {"first_port": first, "last_port": first + PORTS - 1}}}

    async def no_engine(got: Got, line: Line) -> None:
        await line.answer({"hello": "world"})

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await writer.drain()

    web, quiet = (
        ScriptedEngine(behaviour=no_engine),
        await asyncio.start_server(silent, "127.0.0.1", first + 4),
    )
    web.port = first + 3
    try:
        await web.start()
        await asyncio.gather(*(one.start(session) for one in sims[:2]))
        health = {"health": {"timeout_s": 1.0}}
        gateway = await start(urls=[sims[0].url], http={"port": first + 5}, **local, **health)
        assert gateway.ready["engines"] == 2
        other = GatewayProcess(tmp_path / "other", [], http={"port": first + 6}, **local, **health)
        await asyncio.to_thread(other.start)
        try:
            await until(other, session, *sims[:2])
            await sims[2].start(session)
            for one in (gateway, other):
                await until(one, session, *sims)
            for _ in range(4):
                await answers(gateway.url, session)
            await sims[1].kill()
            await until(other, session, sims[0], sims[2])
            await answers(gateway.url, session)
            await answers(other.url, session)
            await sims[1].start(session)
            await until(other, session, *sims)
            assert web.got and all(got.target == "/version" for got in web.got)
        finally:
            other.kill()
    finally:
        quiet.close()
        await web.stop()
        for one in sims:
            await one.kill()
