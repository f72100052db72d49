"""Two hosts, four engines, a controller and a gateway that splits, while each of them is killed or stopped: answers are
those of an engine alone, no block ever holds other KV than its own, and nothing is held afterwards.

The engines are simulated: each block of KV begins with a key of all tokens before it.  `FLEET_REQUESTS=1000` tries so
many requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.harness import amount
from tests.harness.cluster import Cluster
from tests.harness.daemon import free_port
from tests.harness.gateway_process import GatewayProcess
from tests.harness.waiting import HANG_S, eventually_async
from tests.integration.gateway.conftest import at_rest, client
from tests.integration.testing.test_engine_sim import Sim, config

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(7_200)]

REQUESTS = int(os.environ.get("FLEET_REQUESTS", "60"))
CHUNK, L1_MB, ANSWERS, STOPPED_S = 16, 128, 6, 1.0
FLAGS = ("--model", "m", "--max-num-batched-tokens", "500", "--prefill-token-us", "200", "--step-us", "20000")
WHO = ("", "prefill", "decode", "server", "controller", "gateway")
MOMENTS = ("promised", "waiting", "half stored", "first token")
CUT = (aiohttp.ClientError, ConnectionError)


class Engine:
    """A simulated engine that is started again at its address."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.server, self.port = cluster.servers[number % 2], free_port()
        self.role = "prefill" if number < 2 else "decode"
        self.place = {
            "url": f"http://127.0.0.1:{self.port}",
            "name": f"{self.role}-{number % 2}",
            "role": self.role,
            "instance": f"instance-{number % 2}",
        }
        self.lines: list[str] = []
        self.start()

    def start(self) -> None:
        transfer = "--kv-transfer-config", config(self.server)
        self.sim = Sim(*FLAGS, *transfer, "--port", str(self.port))
        assert self.sim.process.stderr is not None
        threading.Thread(target=self.lines.extend, args=(self.sim.process.stderr,), daemon=True).start()

    def kill(self) -> None:
        self.sim.process.kill()
        self.sim.process.wait()

    def signal(self, number: int) -> None:
        self.sim.process.send_signal(number)


class Fleet:
    """All processes, and answers that run at the decoding engines all the while."""

    def __init__(self, cluster: Cluster, folder: Path, session: aiohttp.ClientSession) -> None:
        self.cluster, self.session = cluster, session
        self.engines = [Engine(cluster, number) for number in range(4)]
        self.gateway = GatewayProcess(
            folder / "gateway", [], split="kvstrata", engines=[one.place for one in self.engines],
            controllers={"urls": [f"tcp://127.0.0.1:{cluster.controller.ports['reply']}"], "name": "gateway"},
        )  # fmt: skip
        self.gateway.start()
        self.prefills: Counter[str] = Counter()
        """What became of prefills, of all gateways that were killed."""

    def close(self) -> None:
        self.gateway.kill()
        for engine in self.engines:
            engine.kill()

    async def ask(self, url: str, prompt: list[int], **more: Any) -> str:
        """The whole text of an answer."""
        return "".join([part async for part in self.parts(url, prompt, **more)])

    async def parts(self, url: str, prompt: list[int], **more: Any) -> AsyncIterator[str]:
        """The parts of an answer as they come, the first for its head.  Raises ClientError if it is cut or refused."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 3, "stream": True, **more}
        alone = {"Connection": "close"}  # a kept one may have ended with the process that was killed there
        async with self.session.post(
            f"{url}/v1/completions", json=body, headers=alone, raise_for_status=True
        ) as reply:
            yield ""
            async for line in reply.content:
                text = line.decode().removeprefix("data: ").strip()
                if text == "[DONE]":
                    return
                if text:
                    yield json.loads(text)["choices"][0]["text"]
        raise aiohttp.ClientPayloadError("cut before its end")

    @contextlib.asynccontextmanager
    async def busy(self, draw: random.Random) -> AsyncIterator[None]:
        """Answers that begin anew whenever they are cut, so that long prompts are worth a split."""

        async def endless() -> None:
            while True:
                with contextlib.suppress(*CUT):
                    await self.ask(self.gateway.url, said(draw, 64), max_tokens=100_000, ignore_eos=True)
                await asyncio.sleep(0.1)

        tasks = [asyncio.ensure_future(endless()) for _ in range(2 * ANSWERS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def statuses(self) -> list[Any]:
        return [await asyncio.to_thread(one.get, "/v1/status") for one in self.cluster.servers]

    async def one(self, prompt: list[int], who: Any, how: str, when: str) -> tuple[str | None, bool]:
        """The answer to a prompt while somebody is struck, None if it was cut; whether it had begun."""
        before = sum(page["pool"]["entries"]["ready"] for page in await self.statuses()) if who else 0
        got: list[str] = []

        async def answer() -> str:
            async for part in self.parts(self.gateway.url, prompt):
                got.append(part)
            return "".join(got)

        asking = asyncio.ensure_future(answer())

        async def reached() -> object:
            if when == "first token" or asking.done():
                return any(got) or asking.done()
            pages = await self.statuses()
            if when == "half stored":
                return sum(page["pool"]["entries"]["ready"] for page in pages) > before
            return any(page["promises"]["live" if when == "promised" else "waits_now"] for page in pages)

        if who:
            await eventually_async(when, reached)
            who = await self.strike(who, how)
        text = None
        with contextlib.suppress(*CUT):
            text = await asyncio.wait_for(asking, HANG_S)
        if who and how == "killed":
            await asyncio.to_thread(who.start)
        return text, bool(got)

    async def strike(self, who: Any, how: str) -> Any:
        """Kill or stop somebody, and say whom: of the prefilling engines one that computes."""
        if who in self.engines[:2]:
            who = next(iter([one for one in self.engines[:2] if await self.requests_at(one)]), who)
        if how == "stopped":
            who.signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            who.signal(signal.SIGCONT)
            return who
        if who is self.gateway:
            self.prefills += await self.counted()
        await asyncio.to_thread(who.kill)
        return who

    async def counted(self) -> Counter[str]:
        samples = await self.gateway.samples(self.session)
        return Counter({name: int(value) for name, value in samples.items() if "_prefills_total" in name})

    async def ends_well(self) -> None:
        """Nobody promises, waits, leases or runs anything."""
        await at_rest(self.gateway, self.session)

        async def nothing() -> bool:
            held = [
                page["promises"]["live"] + page["promises"]["waits_now"] + page["pool"]["leased_bytes"]
                for page in await self.statuses()
            ]
            return not any([*held, *[await self.requests_at(one) for one in self.engines]])

        await eventually_async("nothing is held", nothing)

    async def requests_at(self, engine: Engine) -> float:
        async with self.session.get(f"{engine.place['url']}/metrics") as response:
            lines = (await response.text()).splitlines()
        running = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
        return sum(float(line.split()[-1]) for line in lines if line.startswith(running))


def said(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, 32_000) for _ in range(count)]


async def test_answers_are_right_whoever_of_a_fleet_is_killed_or_stopped_at_any_moment(
    tmp_path: Path,
) -> None:
    seed = amount.seed()
    draw, other = random.Random(seed), random.Random(-seed - 1)
    with Cluster(tmp_path, l1_mb=L1_MB, chunk_tokens=CHUNK) as cluster:
        async with client() as session:
            fleet = await asyncio.to_thread(Fleet, cluster, tmp_path, session)
            try:
                async with fleet.busy(other):
                    struck = await all_of(fleet, draw)
                await fleet.ends_well()
                assert not [line for one in fleet.engines for line in one.lines if "other KV" in line]
                told = fleet.prefills + await fleet.counted()
                print(f"seed {seed}: {dict(struck)}, {dict(told)}")
                assert sum(told.values()) >= REQUESTS // 10, (
                    "too few were split: beside other work, fewer are worth it"
                )
            finally:
                await asyncio.to_thread(fleet.close)


async def all_of(fleet: Fleet, draw: random.Random) -> Counter[str]:
    """Send all requests; return how many answers each kind of strike cut."""
    struck: Counter[str] = Counter()
    for number in range(REQUESTS):
        who = draw.choice(WHO)
        chosen: dict[str, Any] = {
            "": None,
            "server": fleet.cluster.servers[draw.randrange(2)],
            "controller": fleet.cluster.controller,
            "gateway": fleet.gateway,
        }
        victim = chosen.get(who, fleet.engines[draw.randrange(2) + 2 * (who == "decode")])
        how, when = draw.choice(["killed", "stopped"]), draw.choice(MOMENTS)
        prompt = said(draw, draw.randrange(1_000, 2_500))
        text, begun = await fleet.one(prompt, victim, how, when)
        case = f"{number}: {who} {how} {when}"
        if text is None:
            assert (who, how) in (("decode", "killed"), ("gateway", "killed")), case
            assert who == "gateway" or begun, case
            struck[f"{who} {how}, cut"] += 1
        else:
            alone = await fleet.ask(fleet.engines[3].place["url"], prompt, cache_salt=f"alone {number}")
            assert text == alone, case
            struck[f"{who} {how}" if who else "nobody"] += 1
    return struck
