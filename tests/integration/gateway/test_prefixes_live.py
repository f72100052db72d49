"""A real gateway with the policy `ttft` before simulated engines: conversations go where their prefix is."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.harness import amount
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.waiting import eventually_async
from tests.integration.gateway.test_faults import at_rest
from tests.integration.gateway.test_proxy import CHAT

pytestmark = pytest.mark.integration

ENGINES, CONVERSATIONS, TURNS = 3, 8, 4


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    """URLs of simulated engines, ten times as fast as the engine that they simulate."""
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(ENGINES):
            port = free_port()
            command = ["-m", "kvstrata", "sim", "--port", str(port), "--model", "m", "--speed", "10"]
            process = subprocess.Popen(
                [sys.executable, *command], stderr=subprocess.DEVNULL, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            urls.append(f"http://127.0.0.1:{port}")
        yield urls


async def talk(gateway: GatewayProcess, session: aiohttp.ClientSession, draw: random.Random) -> list[float]:
    """A conversation; returns the share of each turn's prompt that its engine had cached."""
    words = ["".join(draw.choices("abcdefgh", k=7)) for _ in range(400)]
    messages: list[dict[str, Any]] = []
    shares = []
    for _ in range(TURNS):
        text = " ".join(draw.choices(words, k=draw.randrange(300, 900)))
        messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": messages, "max_tokens": 20}
        async with session.post(gateway.url + CHAT, json=body) as response:
            document = await response.json()
            assert response.status == 200, document
        messages.append(document["choices"][0]["message"])
        usage = document["usage"]
        shares.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) / usage["prompt_tokens"])
    return shares


async def test_a_conversation_finds_its_prefix_and_conversations_spread(engines, session, tmp_path):
    seed = amount.seed()
    gateway = GatewayProcess(tmp_path, engines, policy="ttft")
    await asyncio.to_thread(gateway.start)
    try:

        async def all_up() -> bool:
            return all(row["state"] == "up" for row in (await gateway.status(session))["engines"])

        await eventually_async("all engines are up", all_up)
        # One at a time: beside others, a prompt may rightly go where it delays nobody.
        for number in range(CONVERSATIONS):
            first, *later = await talk(gateway, session, random.Random(seed + number))
            assert first == 0 and min(later) > 0.2, (seed, number, later)
        await asyncio.gather(
            *(talk(gateway, session, random.Random(seed - number)) for number in range(1, 13))
        )
        sent = [row["sent"] for row in (await gateway.status(session))["engines"]]
        assert min(sent) >= TURNS, (seed, sent)
        samples = await gateway.samples(session)
        assert not any("mistaken_prefixes" in name for name in samples), seed
        await at_rest(gateway, session)
    finally:
        gateway.kill()


async def test_a_prefix_that_an_engine_has_lost_is_noticed(engines, session, tmp_path):
    gateway = GatewayProcess(tmp_path, engines[:1], policy="ttft")
    await asyncio.to_thread(gateway.start)
    try:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 9_000}], "max_tokens": 2}
        for _ in range(2):
            async with session.post(gateway.url + CHAT, json=body) as response:
                assert response.status == 200
            async with session.post(engines[0] + "/reset_prefix_cache") as response:
                assert response.status == 200
        name = engines[0].removeprefix("http://")
        await gateway.until_sample(session, f'mistaken_prefixes_total{{engine="{name}"}}', 1)
    finally:
        gateway.kill()
