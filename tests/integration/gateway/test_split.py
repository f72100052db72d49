"""A real gateway splits requests between two simulated engines of one real server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.harness.gateway_process import GatewayProcess
from tests.harness.server_process import ServerProcess
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import at_rest, client
from tests.integration.testing.test_engine_sim import Sim, config

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

CHUNK = 16
SERVER = {"chunk_tokens": CHUNK}
LONG, SHORT, SLOW_US = 4_000, 64, 200
"""Tokens of prompts, and what each costs the prefilling engine: 0.8 s for a long prompt, in four steps."""
ANSWERS = 6
"""Answers beside which a long prompt is computed elsewhere."""
fresh = itertools.count(1)


def prompt(tokens: int) -> list[int]:
    first = 10_000 * next(fresh)
    return list(range(first, first + tokens))


class Scene:
    """A prefilling and a decoding engine of one server, and a gateway."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        flags = "--max-num-batched-tokens", "1000", "--prefill-token-us", str(SLOW_US), "--model", "m"
        transfer = "--kv-transfer-config", config(server, await_siblings=True)
        self.server = server
        self.prefill, self.decode = (Sim(*flags, *transfer) for _ in range(2))
        engines = [
            {"url": one.url, "name": role, "role": role, "instance": "one"}
            for one, role in ((self.prefill, "prefill"), (self.decode, "decode"))
        ]
        self.gateway = GatewayProcess(folder, [], split="kvstrata", engines=engines)
        self.session: aiohttp.ClientSession

    async def ask(self, tokens: list[int], url: str = "", **more: Any) -> Any:
        body = {"model": "m", "prompt": tokens, "max_tokens": 3, **more}
        async with self.session.post(f"{url or self.gateway.url}/v1/completions", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            return text if more else json.loads(text)

    async def alone(self, tokens: list[int]) -> str:
        """What the decoding engine answers by itself."""
        return str((await self.ask(tokens, self.decode.url))["choices"][0]["text"])

    async def engine(self, name: str) -> Any:
        rows = (await self.gateway.status(self.session))["engines"]
        return next(row for row in rows if row["name"] == name)

    async def sent(self) -> int:
        """Prompts that the prefilling engine was sent."""
        return int((await self.engine("prefill"))["sent"])

    def promises(self) -> Any:
        return self.server.get("/v1/status")["promises"]

    async def until_waits(self) -> None:
        async def waits() -> object:
            return (await asyncio.to_thread(self.promises))["waits_now"]

        await eventually_async("the decoding engine waits", waits)

    async def at_rest(self) -> None:
        """Nothing is under way in the gateway, at the engines and at the server."""
        await at_rest(self.gateway, self.session)

        async def nothing() -> bool:
            left = await asyncio.to_thread(self.promises)
            running = [await requests_at(self.session, one.url) for one in (self.prefill, self.decode)]
            return not any([left["live"], left["waits_now"], *running])

        await eventually_async("nothing is left", nothing)

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """The decoding engine answers others all the while."""
        endless = {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
        tasks = [asyncio.ensure_future(self.ask(prompt(SHORT), **endless)) for _ in range(ANSWERS)]

        async def answers() -> bool:
            row = await self.engine("decode")
            return bool(row["in_flight"] - row["waiting"] >= ANSWERS)

        try:
            await eventually_async("the decoding engine answers", answers)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def requests_at(session: aiohttp.ClientSession, url: str) -> float:
    """Requests that a simulated engine has; 0 if it was killed."""
    try:
        async with session.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
    except aiohttp.ClientError:
        return 0.0
    counts = [
        line for line in lines if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))
    ]
    return sum(float(line.split()[-1]) for line in counts)


@pytest_asyncio.fixture(loop_scope="module")
async def scene(server: ServerProcess, tmp_path: Path) -> AsyncIterator[Scene]:
    made = await asyncio.to_thread(Scene, server, tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        for sim in (made.prefill, made.decode):
            stack.callback(sim.process.wait)
            stack.callback(sim.process.kill)
        made.session = await stack.enter_async_context(client())
        await asyncio.to_thread(made.gateway.start)
        stack.callback(made.gateway.kill)

        async def attached() -> bool:
            rows = (await asyncio.to_thread(server.get, "/v1/status"))["engines"]
            return len([row for row in rows if row]) >= 2

        await eventually_async("both engines are attached", attached)
        yield made


async def test_long_prompts_are_computed_by_the_other_engine_and_short_ones_are_not(scene: Scene) -> None:
    async with scene.busy():
        before = await scene.sent()
        await scene.ask(prompt(SHORT))
        assert await scene.sent() == before
        tokens = prompt(LONG)
        answer = await scene.ask(tokens)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= LONG - CHUNK
        assert await scene.sent() == before + 1
    await scene.gateway.until_sample(scene.session, 'prefills_total{outcome="computed"}', before + 1)
    assert answer["choices"][0]["text"] == await scene.alone(tokens)
    await scene.at_rest()


async def test_the_answer_is_right_when_the_prefilling_engine_is_killed_in_mid_prefill(scene: Scene) -> None:
    async with scene.busy():
        tokens = prompt(LONG)
        asking = asyncio.ensure_future(scene.ask(tokens))
        await scene.until_waits()
        scene.prefill.process.kill()
        answer = await asking
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < LONG - CHUNK
    assert answer["choices"][0]["text"] == await scene.alone(tokens)
    await scene.gateway.until_sample(scene.session, 'prefills_total{outcome="broken"}', 1)
    await scene.at_rest()


async def test_nothing_is_left_at_either_engine_when_the_client_goes(scene: Scene) -> None:
    async with scene.busy():
        asking = asyncio.ensure_future(scene.ask(prompt(LONG)))
        await scene.until_waits()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await scene.gateway.until_sample(scene.session, 'prefills_total{outcome="cancelled"}', 1)
    await scene.at_rest()
