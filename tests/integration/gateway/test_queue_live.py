"""A real gateway's queue: who waits, who leaves, and what tenants may use."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine, chat
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start
from tests.integration.gateway.test_door import bearer, tenants
from tests.integration.gateway.test_faults import at_rest
from tests.integration.gateway.test_proxy import CHAT, ask

pytestmark = pytest.mark.integration


class Held:
    """An engine whose answers begin when the test says so."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.engine = ScriptedEngine(behaviour=self.behave)

    async def behave(self, got: Got, line: Line) -> None:
        """Answer a chat, once that may be."""
        await self.open.wait()
        await chat(got, line)


async def queued(gateway: GatewayProcess, session: aiohttp.ClientSession, count: int) -> None:
    """Wait until so many requests wait in the gateway."""

    async def are() -> bool:
        return bool((await gateway.status(session))["queue"]["requests"] == count)

    await eventually_async(f"{count} requests wait", are)


async def test_requests_wait_here_while_the_engine_has_enough_and_a_client_that_leaves_waits_no_longer(
    start: Start, session: aiohttp.ClientSession
) -> None:
    held = Held()
    gateway = await start(
        held.engine,
        policy="ttft",
        slo=[{"name": "quick", "ttft_ms": 300, "shed": True}],
        queue={"enabled": True, "ahead_s": 0.0, "max_requests": 3},
    )

    async def sent(slo: str = "") -> tuple[int, str]:
        body = ask(stream=True)
        async with session.post(gateway.url + CHAT, json=body, headers={"X-SLO-Class": slo}) as response:
            text = await response.text()
            return response.status, text

    assert (await sent())[0] == 200, "this measures the engine's rate"
    await at_rest(gateway, session)
    held.open.clear()
    tasks = [asyncio.create_task(sent()) for _ in range(4)]
    await queued(gateway, session, 2)

    async def both_sent() -> bool:
        return len(held.engine.got) == 3

    await eventually_async("the engine has as many as it may have", both_sent)
    status, text = await sent("quick")
    assert status == 429 and "slo_unreachable" in text, "its deadline has passed in the queue"
    leaver = asyncio.create_task(sent())
    await queued(gateway, session, 3)
    status, text = await sent()
    assert status == 429 and "queue_full" in text
    leaver.cancel()
    await queued(gateway, session, 2)
    held.open.set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 4
    assert len(held.engine.got) == 5
    await at_rest(gateway, session)
    await queued(gateway, session, 0)
    await gateway.until_sample(session, 'queue_seconds_count{tenant=""}', 4)


async def test_a_tenants_tokens_are_limited_and_those_that_the_answer_tells_count(start, session, tmp_path):
    engine = ScriptedEngine()
    limits = {"red": {"tokens_per_s": 0.001, "tokens_burst": 30}}
    gateway = await start(engine, tenants=tenants(tmp_path, **limits))

    async def status_of(name: str, **more: Any) -> tuple[int, str]:
        async with session.post(gateway.url + CHAT, json=ask(**more), headers=bearer(name)) as response:
            document = await response.json()
            return response.status, document.get("error", {}).get("code", "")

    assert await status_of("red") == (200, "")
    await at_rest(gateway, session)
    found = await gateway.samples(session)
    used = found['kvstrata_gateway_tenant_used_tokens{tenant="red"}']
    assert 15.9 < used <= 16, "11 of the prompt and 5 of the answer, as the engine tells"
    long = {"messages": [{"role": "user", "content": "word " * 30}]}
    assert await status_of("red", **long) == (429, "tenant_tokens")
    assert await status_of("blue", **long) == (200, "")
