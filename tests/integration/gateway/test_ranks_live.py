"""Engines with several data-parallel ranks: each rank has a queue and a cache, and the gateway chooses among ranks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from tests.harness import amount
from tests.harness.gateway_process import GatewayProcess
from tests.harness.waiting import eventually_async
from tests.integration.gateway.test_faults import at_rest
from tests.integration.gateway.test_residency_live import (
    COMPLETIONS,
    Sim,
    cached,
    drawn,
    heard,
    is_whole,
    known_of,
)

pytestmark = pytest.mark.integration

RANKS = 3
RANK = "X-data-parallel-rank"


@pytest_asyncio.fixture
async def sim(session: aiohttp.ClientSession) -> AsyncIterator[Sim]:
    engine = Sim(ranks=RANKS)
    try:
        await engine.start(session)
        yield engine
    finally:
        await engine.kill()


async def compute(session: aiohttp.ClientSession, sim: Sim, rank: int, prompt: list[int]) -> None:
    """Let a rank compute a prompt, without the gateway."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1}
    async with session.post(sim.url + COMPLETIONS, json=body, headers={RANK: str(rank)}) as response:
        assert response.status == 200


async def until_ranks(gateway: GatewayProcess, session: aiohttp.ClientSession, sim: Sim, count: int) -> None:
    """Wait until the gateway knows so many ranks of the engine, and hears each whole."""
    names = [f"{sim.name}@{rank}" for rank in range(count)] if count > 1 else [sim.name]

    async def known() -> bool:
        page = await heard(gateway, session)
        return sorted(page) == names and all(map(is_whole, page.values()))

    await eventually_async(f"{count} ranks are heard", known)


async def sent(gateway: GatewayProcess, session: aiohttp.ClientSession) -> dict[str, int]:
    """How many requests each rank was sent."""
    rows = (await gateway.status(session))["engines"]
    return {rank["name"]: rank["sent"] for row in rows for rank in row["ranks"]}


async def test_a_request_goes_to_the_rank_that_has_its_prompt(sim, session, start):
    seed = amount.seed()
    draw = random.Random(seed)
    held = [(rank, drawn(draw)) for rank in range(RANKS) for _ in range(3)]
    for rank, prompt in held:
        await compute(session, sim, rank, prompt)
    gateway = await start(urls=[sim.url], policy="ttft")
    await until_ranks(gateway, session, sim, RANKS)
    draw.shuffle(held)
    for rank, prompt in held:
        longer = [*prompt, *drawn(draw)[:100]]
        before = await sent(gateway, session)
        assert await known_of(gateway, session, longer) == {f"{sim.name}@{rank}": len(prompt) // 16 * 16}, (
            seed
        )
        after = Counter(await sent(gateway, session))
        assert after - Counter(before) == {f"{sim.name}@{rank}": 1}, seed
        # The engine really answers by this rank: what it computed last is found there again.
        assert await cached(session, gateway.url, longer) == (len(longer) - 1) // 16 * 16, seed
    await at_rest(gateway, session)


async def test_queues_are_counted_by_rank_and_a_client_cannot_choose_one(sim, session, start):
    gateway = await start(urls=[sim.url], policy="ttft")
    await until_ranks(gateway, session, sim, RANKS)
    draw = random.Random(1)

    async def ask(header: str) -> int:
        prompt = [draw.randrange(256) for _ in range(4_000)]
        body = {"model": "m", "prompt": prompt, "max_tokens": 200, "ignore_eos": True}
        async with session.post(
            gateway.url + COMPLETIONS, json=body, headers={RANK: header, "Connection": RANK}
        ) as response:
            await response.read()
            return response.status

    # A rank that the engine does not have would be refused by it.
    waiting = [asyncio.create_task(ask("7")) for _ in range(12)]

    async def counted() -> bool:
        [row] = (await gateway.status(session))["engines"]
        ranks = [rank["in_flight"] for rank in row["ranks"]]
        return row["in_flight"] == sum(ranks) == 12 and min(ranks) >= 3

    await eventually_async("every rank has its share", counted)
    assert await asyncio.gather(*waiting) == [200] * 12
    for rank in range(RANKS):
        await gateway.until_sample(session, f'engine_in_flight{{engine="{sim.name}@{rank}"}}', 0)
    samples = await gateway.samples(session)
    assert f'kvstrata_gateway_engine_in_flight{{engine="{sim.name}"}}' not in samples
    assert samples[f'kvstrata_gateway_engine_up{{engine="{sim.name}"}}'] == 1
    async with session.get(sim.url + "/metrics") as response:
        text = await response.text()
    for rank in range(RANKS):
        assert f'vllm:generation_tokens_total{{engine="{rank}",model_name="m"}} 800.0' in text
    await at_rest(gateway, session)


async def test_an_engine_that_comes_back_with_other_ranks_is_divided_anew(sim, session, start):
    gateway = await start(urls=[sim.url], policy="ttft", health={"timeout_s": 1, "failures": 1})
    await until_ranks(gateway, session, sim, RANKS)

    async def long() -> int:
        body = {"model": "m", "prompt": [1] * 3_000, "max_tokens": 10_000, "ignore_eos": True}
        async with session.post(gateway.url + COMPLETIONS, json=body) as response:
            await response.read()
            return response.status

    cut = [asyncio.create_task(long()) for _ in range(6)]

    async def under_way() -> bool:
        return bool((await gateway.status(session))["gateway"]["in_flight"] == 6)

    await eventually_async("requests are under way", under_way)
    await sim.kill()
    assert all(
        isinstance(one, (int, Exception)) and one != 200
        for one in await asyncio.gather(*cut, return_exceptions=True)
    )

    async def down() -> bool:
        return bool((await gateway.status(session))["engines"][0]["state"] == "down")

    for ranks in (1, 2):
        await eventually_async("the engine is down", down)
        await at_rest(gateway, session)
        sim.ranks = ranks
        await sim.start(session)
        await until_ranks(gateway, session, sim, ranks)
        for _ in range(3):
            assert await cached(session, gateway.url, [2] * 400) >= 0
        await sim.kill()


async def test_ranks_whose_number_contradicts_the_settings_are_not_heard_but_serve(sim, session, tmp_path):
    gateway = GatewayProcess(tmp_path, [sim.url], policy="ttft")
    gateway.settings["engines"][0]["data_parallel_size"] = RANKS - 1
    await asyncio.to_thread(gateway.start)
    try:
        for number in range(4):
            await cached(session, gateway.url, [number] * 400)
        assert len(await sent(gateway, session)) == RANKS - 1 and not await heard(gateway, session)
        assert "3 data-parallel ranks publish events, but data_parallel_size is 2" in gateway.log.read_text()
    finally:
        gateway.kill()
