"""A real gateway hears the KV events of simulated engines: what they computed before it came, and what is gone.

Prompts are token ids, of which the gateway knows which blocks they make.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.harness import amount
from tests.harness.daemon import free_port, free_ports
from tests.harness.gateway_process import GatewayProcess
from tests.harness.waiting import eventually_async
from tests.integration.gateway.test_faults import at_rest

pytestmark = pytest.mark.integration

COMPLETIONS = "/v1/completions"
NUMBERS = itertools.count()


class Sim:
    """A simulated engine that publishes KV events; started again it has the same ports and empty caches."""

    def __init__(self, ranks: int = 1, port: int = 0) -> None:
        """`port`: 0 takes a free one."""
        self.ranks = ranks
        self.port, self.events = port or free_port(), free_ports(2 * ranks)
        self.replay = self.events + ranks
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"127.0.0.1:{self.port}"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        command = ["-m", "kvstrata", "sim", "--port", str(self.port), "--model", "m", "--speed", "10"]
        command += ["--adapter", "a", "--kv-events-endpoint", f"tcp://127.0.0.1:{self.events}"]
        command += ["--kv-events-replay-endpoint", f"tcp://127.0.0.1:{self.replay}"]
        command += ["--data-parallel-size", str(self.ranks)]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stderr=subprocess.DEVNULL, start_new_session=True
        )

        async def up() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}/health") as response:
                    return response.status == 200
            return False

        await eventually_async("the engine answers", up)

    async def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.wait()
            self.process = None


@pytest_asyncio.fixture
async def sims(session: aiohttp.ClientSession) -> AsyncIterator[list[Sim]]:
    engines = [Sim() for _ in range(3)]
    try:
        await asyncio.gather(*(one.start(session) for one in engines))
        yield engines
    finally:
        for one in engines:
            await one.kill()


async def cached(session: aiohttp.ClientSession, url: str, prompt: list[int], **more: Any) -> int:
    """Ask for one token; returns how many tokens of the prompt the engine had cached."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, **more}
    async with session.post(url + COMPLETIONS, json=body) as response:
        document = await response.json()
        assert response.status == 200, document
    return int((document["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


async def operators(gateway: GatewayProcess, session: aiohttp.ClientSession, path: str) -> Any:
    """A page for operators."""
    headers = {"Authorization": f"Bearer {gateway.token}"}
    async with session.get(gateway.url + path, headers=headers, raise_for_status=True) as response:
        return await response.json()


async def known_of(
    gateway: GatewayProcess, session: aiohttp.ClientSession, prompt: list[int], **more: Any
) -> dict[str, int]:
    """Send a prompt; returns how many of its tokens the gateway knew each engine to have."""
    word = f"request-{next(NUMBERS)}"
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, **more}
    headers = {"X-Request-ID": word}
    async with session.post(gateway.url + COMPLETIONS, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
    record = (await operators(gateway, session, f"/gateway/decisions/{word}"))["record"]
    return dict(record["knowledge"]["cached"])


def drawn(draw: random.Random) -> list[int]:
    return [draw.randrange(256) for _ in range(draw.randrange(300, 3_000))]


async def heard(gateway: GatewayProcess, session: aiohttp.ClientSession) -> dict[str, Any]:
    return dict((await gateway.status(session))["kv_events"])


def is_whole(row: dict[str, Any]) -> bool:
    """Whether all that an engine has told was taken in."""
    return bool(row["whole"] and row["connected"] and row["phase"] == "in_order")


async def test_what_engines_hold_is_known_from_their_events(sims, session, tmp_path):
    seed = amount.seed()
    draw = random.Random(seed)
    # Computed before the gateway comes.
    held = {one.name: [drawn(draw) for _ in range(4)] for one in sims}
    for one in sims:
        for prompt in held[one.name]:
            await cached(session, one.url, prompt)
    gateway = GatewayProcess(tmp_path, [one.url for one in sims], policy="ttft")
    await asyncio.to_thread(gateway.start)
    try:

        async def whole() -> bool:
            page = await heard(gateway, session)
            return len(page) == 3 and all(is_whole(row) and row["blocks"] for row in page.values())

        await eventually_async("all events were heard", whole)
        for name, prompts in held.items():
            for prompt in prompts:
                longer = [*prompt, *drawn(draw)[:200]]
                known = await known_of(gateway, session, longer)
                assert known[name] == len(prompt) // 16 * 16, seed
        # Another salt and an adapter have other KV: nothing of them is anywhere.
        prompt = held[sims[0].name][0]
        assert not await known_of(gateway, session, prompt, cache_salt="s")
        assert not await known_of(gateway, session, prompt, model="a")

        # One engine empties its cache, another one dies and comes back empty.
        async with session.post(sims[0].url + "/reset_prefix_cache") as response:
            assert response.status == 200
        await sims[1].kill()
        await sims[1].start(session)

        async def forgotten() -> bool:
            page = await heard(gateway, session)
            return all(one.name in page and not page[one.name]["blocks"] for one in sims[:2])

        await eventually_async("what is gone is forgotten", forgotten)
        again = await known_of(gateway, session, held[sims[2].name][0])
        assert again[sims[2].name] >= len(held[sims[2].name][0]) // 16 * 16, seed
        for one in sims[:2]:
            # What was lost is computed anew somewhere, and then known there.
            assert one.name not in await known_of(gateway, session, held[one.name][1]), seed

            async def known_again(one: Sim = one) -> bool:
                return bool(await known_of(gateway, session, held[one.name][1]))

            await eventually_async("the blocks are known", known_again)
        samples = await gateway.samples(session)
        assert not any("mistaken_prefixes" in name for name in samples), seed
        await at_rest(gateway, session)
    finally:
        gateway.kill()


async def test_a_burst_of_one_new_prefix_is_computed_once_per_engine(sims, session, tmp_path):
    gateway = GatewayProcess(tmp_path, [one.url for one in sims], policy="ttft")
    await asyncio.to_thread(gateway.start)
    try:
        draw = random.Random(amount.seed())
        prefix = [draw.randrange(256) for _ in range(4_000)]
        prompts = [[*prefix, *drawn(draw)[:100]] for _ in range(12)]
        hits = await asyncio.gather(*(cached(session, gateway.url, prompt) for prompt in prompts))
        # The simulated engine, as vLLM, lets requests that are admitted in one step compute the same prefix.
        assert sum(hit >= 3_984 for hit in hits) >= 6, hits

        # Each decision says why, what was expected and what came, and is made again from its record.
        page = await operators(gateway, session, "/gateway/decisions")
        assert len(page["decisions"]) == len(prompts)
        for row in page["decisions"]:
            assert row["decision"]["engine"] in {one.name for one in sims} and row["decision"]["alternatives"]
            assert row["observed"]["cached_tokens"] in hits and row["observed"]["ttft_s"] > 0
            again = await operators(gateway, session, f"/gateway/decisions/{row['request']}")
            assert again["equal"] and again["again"] == row["decision"]
        async with session.get(f"{gateway.url}/gateway/decisions") as response:
            assert response.status == 401
        with pytest.raises(aiohttp.ClientResponseError, match="404"):
            await operators(gateway, session, "/gateway/decisions/none")
    finally:
        gateway.kill()


async def test_a_request_whose_class_cannot_be_met_is_refused_at_once(sims, session, tmp_path):
    classes = [{"name": "fast", "ttft_ms": 400, "shed": True}, {"name": "patient", "ttft_ms": 400}]
    gateway = GatewayProcess(tmp_path, [sims[0].url], policy="ttft", slo=classes)
    await asyncio.to_thread(gateway.start)
    draw = random.Random(amount.seed())

    async def ask(slo: str) -> tuple[int, str]:
        prompt = [draw.randrange(256) for _ in range(30_000)]
        body = {"model": "m", "prompt": prompt, "max_tokens": 1}
        headers = {"X-SLO-Class": slo}
        async with session.post(gateway.url + COMPLETIONS, json=body, headers=headers) as response:
            if response.status == 429:
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "slo_unreachable"
            else:
                await response.read()
            return response.status, response.headers.get("Retry-After", "")

    try:
        for _ in range(2):
            assert (await ask("fast"))[0] == 200, "nothing is refused by an idle engine"
        statuses = [status for status, _ in await asyncio.gather(*(ask("fast") for _ in range(12)))]
        assert statuses.count(200) + statuses.count(429) == 12 and statuses.count(429) >= 4, statuses
        patient = await asyncio.gather(*(ask("patient") for _ in range(12)))
        assert {status for status, _ in patient} == {200}
        await at_rest(gateway, session)
        assert (await ask("fast"))[0] == 200
        await gateway.until_sample(session, 'slo_requests_total{slo="fast",tenant=""}', 15)
    finally:
        gateway.kill()
