"""A gateway that does not run for a while, though clocks go on: nothing ends by that, and nothing is learned of it."""

from __future__ import annotations

import asyncio
import signal

import aiohttp
import pytest

from tests.harness.scripted_engine import Got, Line, ScriptedEngine, delta
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import Start
from tests.integration.gateway.test_faults import at_rest
from tests.integration.gateway.test_residency_live import operators

pytestmark = pytest.mark.integration

PAUSE_S = 2.5
LIMIT_S = 1.5
"""Of the waits that a pause must not end."""
USAGE = {"prompt_tokens": 2_000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.silence
async def test_a_pause_ends_no_request_and_changes_no_rate(
    start: Start, session: aiohttp.ClientSession
) -> None:
    arrived, finish = asyncio.Semaphore(0), asyncio.Event()

    async def answers(got: Got, line: Line) -> None:
        stream = got.document.get("stream")
        if stream:
            await line.begin()
            await line.event(delta("a"))
        arrived.release()
        await finish.wait()
        if stream:
            await line.event({"id": "x", "choices": [], "usage": USAGE})
            await line.end()
        else:
            await line.answer({"choices": [], "usage": USAGE})

    engine = ScriptedEngine(behaviour=answers)
    gateway = await start(
        engine,
        policy="ttft",
        timeouts={"first_byte_s": LIMIT_S, "silence_s": LIMIT_S},
        health={"timeout_s": LIMIT_S, "failures": 1, "abandon_s": LIMIT_S},
    )

    async def ask(stream: bool) -> int:
        body = {"model": "m", "prompt": list(range(2_000)), "stream": stream}
        async with session.post(f"{gateway.url}/v1/completions", json=body) as response:
            assert await response.read()
            return response.status

    asked = [asyncio.create_task(ask(stream)) for stream in (False, True, False, True)]
    for _ in asked:
        await arrived.acquire()
    await asyncio.sleep(0.2)  # so that the first parts of the streams have been read
    gateway.signal(signal.SIGSTOP)
    await asyncio.sleep(PAUSE_S)
    finish.set()
    await asyncio.sleep(0.1)
    gateway.signal(signal.SIGCONT)
    assert await asyncio.gather(*asked) == [200] * 4
    probes = engine.probes

    async def probed() -> bool:
        return engine.probes >= probes + 3

    await eventually_async("it is probed again", probed)
    log = gateway.log.read_text()
    assert "engine_down" not in log and " paused " in log
    await ask(False)
    decision = (await operators(gateway, session, "/gateway/decisions"))["decisions"][0]["request"]
    record = (await operators(gateway, session, f"/gateway/decisions/{decision}"))["record"]
    [load] = record["fleet"]["engines"]
    assert load["prefill_tokens_s"] == 10_000, "what is assumed until something has been measured"
    await at_rest(gateway, session)
