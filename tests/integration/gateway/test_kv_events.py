"""A real gateway hears the KV events of engines, also of several ranks and of one that lies. Prompts are token ids."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import zmq

from kvstrata.testing.engine_sim.kv_events import BlockRemoved, BlockStored, KVEventBatch
from tests.harness import amount
from tests.harness.daemon import free_port, free_ports
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async
from tests.integration.gateway.conftest import at_rest, resident_mb, status_of

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


async def test_what_engines_hold_is_known_from_their_events(sims, session, start):
    seed = amount.seed()
    draw = random.Random(seed)
    # Computed before the gateway comes.
    held = {one.name: [drawn(draw) for _ in range(4)] for one in sims}
    for one in sims:
        for prompt in held[one.name]:
            await cached(session, one.url, prompt)
    gateway = await start(urls=[one.url for one in sims], policy="ttft")

    def whole(status: dict[str, Any]) -> bool:
        page = status["kv_events"]
        return len(page) == 3 and all(is_whole(row) and row["blocks"] for row in page.values())

    await gateway.until(session, "all events were heard", whole)
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
    assert await status_of(session.post(sims[0].url + "/reset_prefix_cache")) == 200
    await sims[1].kill()
    await sims[1].start(session)
    empty = [one.name for one in sims[:2]]
    await gateway.until(
        session,
        "what is gone is forgotten",
        lambda status: [status["kv_events"].get(name, {}).get("blocks") for name in empty] == [0, 0],
    )
    again = await known_of(gateway, session, held[sims[2].name][0])
    assert again[sims[2].name] >= len(held[sims[2].name][0]) // 16 * 16, seed
    for one in sims[:2]:
        # What was lost is computed anew somewhere, and then known there.
        assert one.name not in await known_of(gateway, session, held[one.name][1]), seed
        prompt = held[one.name][1]
        await eventually_async("it is known", lambda prompt=prompt: known_of(gateway, session, prompt))
    samples = await gateway.samples(session)
    assert not any("mistaken_prefixes" in name for name in samples), seed
    await at_rest(gateway, session)


async def test_a_burst_of_one_new_prefix_is_computed_once_per_engine(sims, session, start):
    gateway = await start(urls=[one.url for one in sims], policy="ttft")
    draw = random.Random(amount.seed())
    prefix = [draw.randrange(256) for _ in range(4_000)]
    prompts = [[*prefix, *drawn(draw)[:100]] for _ in range(12)]
    hits = await asyncio.gather(*(cached(session, gateway.url, prompt) for prompt in prompts))
    # The simulated engine, as vLLM, lets requests that are admitted in one step compute the same prefix.
    assert sum(hit >= 3_984 for hit in hits) >= 6, hits

    # Each decision says why, what was expected and what came, and is made again from its record.
    await at_rest(gateway, session)
    page = await operators(gateway, session, "/gateway/decisions")
    assert len(page["decisions"]) == len(prompts)
    for row in page["decisions"]:
        assert row["decision"]["engine"] in {one.name for one in sims} and row["decision"]["alternatives"]
        assert row["observed"]["cached_tokens"] in hits and row["observed"]["ttft_s"] > 0
        again = await operators(gateway, session, f"/gateway/decisions/{row['request']}")
        assert again["equal"] and again["again"] == row["decision"]
    assert await status_of(session.get(f"{gateway.url}/gateway/decisions")) == 401
    with pytest.raises(aiohttp.ClientResponseError, match="404"):
        await operators(gateway, session, "/gateway/decisions/none")


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
    body = {"model": "m", "prompt": prompt, "max_tokens": 1}
    assert await status_of(session.post(sim.url + COMPLETIONS, json=body, headers={RANK: str(rank)})) == 200


async def until_ranks(gateway: GatewayProcess, session: aiohttp.ClientSession, sim: Sim, count: int) -> None:
    """Wait until the gateway knows so many ranks of the engine, and hears each whole."""
    names = [f"{sim.name}@{rank}" for rank in range(count)] if count > 1 else [sim.name]

    def known(status: dict[str, Any]) -> bool:
        page = status["kv_events"]
        return sorted(page) == names and all(map(is_whole, page.values()))

    await gateway.until(session, f"{count} ranks are heard", known)


async def sent(gateway: GatewayProcess, session: aiohttp.ClientSession) -> dict[str, int]:
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
        await at_rest(gateway, session)
        before = await sent(gateway, session)
        assert await known_of(gateway, session, longer) == {f"{sim.name}@{rank}": len(prompt) // 16 * 16}, (
            seed
        )
        after = Counter(await sent(gateway, session))
        assert after - Counter(before) == {f"{sim.name}@{rank}": 1}, seed
        await at_rest(gateway, session)  # a request that Envoy has not yet told the end of counts as load
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

    def counted(status: dict[str, Any]) -> bool:
        [row] = status["engines"]
        ranks = [rank["in_flight"] for rank in row["ranks"]]
        return row["in_flight"] == sum(ranks) == 12 and min(ranks) >= 3

    await gateway.until(session, "every rank has its share", counted)
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
    gateway = await start(urls=[sim.url], policy="ttft")
    await until_ranks(gateway, session, sim, RANKS)
    for ranks in (1, 2):
        await sim.kill()
        await gateway.until(session, "it is down", lambda status: status["engines"][0]["state"] == "down")
        await at_rest(gateway, session)
        sim.ranks = ranks
        await sim.start(session)
        await until_ranks(gateway, session, sim, ranks)
        for _ in range(3):
            assert await cached(session, gateway.url, [2] * 400) >= 0


async def test_ranks_whose_number_contradicts_the_settings_are_not_heard_but_serve(sim, session, start):
    gateway = await start(policy="ttft", engines=[{"url": sim.url, "data_parallel_size": RANKS - 1}])
    for number in range(4):
        await cached(session, gateway.url, [number] * 400)
    assert len(await sent(gateway, session)) == RANKS - 1 and not await heard(gateway, session)
    assert "3 data-parallel ranks publish events, but data_parallel_size is 2" in gateway.log.read_text()


SIZE = 16
MOST_MB = 700


def stored(names: list[Any], parent: Any, tokens: list[Any]) -> BlockStored:
    return BlockStored(names, parent, tokens, SIZE, None, "GPU", None, group_idx=0)


def lies(draw: random.Random) -> Iterator[bytes]:
    """Batches of an engine that wants to do harm."""

    def batch(*events: Any) -> bytes:
        return msgspec.msgpack.encode(KVEventBatch(0.0, list(events), 0))

    last: Any = None
    while True:
        name = draw.getrandbits(60)
        yield b"\xc1 no msgpack"
        yield b"\x91" * 5_000
        yield batch(stored([name], None, ["a"] * SIZE))
        yield batch(stored([name], None, [-1] * SIZE))
        yield batch(stored([name], None, [1 << 40] * SIZE))
        yield batch(stored([name, name + 1], None, [1] * SIZE))
        yield batch(stored([name], name, [1] * SIZE), stored([name], name, [2] * SIZE))  # its own parent
        yield batch(stored([name, name + 1, name], name + 1, [1] * 3 * SIZE))
        yield batch(stored([os.urandom(1_000_000)], None, [1] * SIZE))
        yield batch(BlockRemoved([draw.getrandbits(60) for _ in range(50_000)], "GPU"))
        yield batch(*[BlockRemoved([1], "GPU")] * 70_000)
        yield batch(stored(list(range(40_000)), None, [7] * 40_000 * SIZE))
        if draw.random() < 0.05:  # which ends the connection
            yield bytes(16 << 20)
        names = [draw.getrandbits(60) for _ in range(2_000)]
        tokens = [draw.randrange(1 << 16) for _ in range(2_000 * SIZE)]
        yield batch(stored(names, last, tokens))
        last = names[-1]


class Liar(ScriptedEngine):
    """An engine whose publisher floods, with gaps, and repeats without an end what it has never said."""

    def __init__(self) -> None:
        super().__init__()
        self.events = free_ports(2)
        self._context = zmq.Context()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liar")
        self.said = 0

    async def __aenter__(self) -> Self:
        self._thread.start()
        return await super().__aenter__()

    async def __aexit__(self, *exception: object) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)
        await super().__aexit__(*exception)

    async def _answer(self, got: Got, line: Line) -> None:
        if got.target == "/kv_event_sources":
            source = {"enable_kv_cache_events": True, "publisher": "zmq"}
            source |= {"endpoint": f"tcp://*:{self.events}", "replay_endpoint": f"tcp://*:{self.events + 1}"}
            await line.answer({"0": source})
        else:
            await super()._answer(got, line)

    def _run(self) -> None:
        draw = random.Random(1)
        published, replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        published.set_hwm(100)
        replay.set_hwm(100)
        published.bind(f"tcp://127.0.0.1:{self.events}")
        replay.bind(f"tcp://127.0.0.1:{self.events + 1}")
        number, clients = 0, set()
        for lie in lies(draw):
            if self._stopping.is_set():
                break
            number = max(0, number + draw.choice((-3, 0, 1, 1, 1, 1 << 50))) % (1 << 60)
            frames = (number.to_bytes(8, "big"), lie)
            published.send_multipart((b"", *frames))
            self.said += 1
            while replay.poll(0):
                clients.add(replay.recv_multipart()[0])
            for client in clients:
                try:
                    replay.send_multipart((client, b"", b"", *frames), zmq.NOBLOCK)
                except zmq.ZMQError:
                    continue
        self._context.destroy(linger=0)


async def test_an_engine_that_floods_lies_harms_nobody_else(session, tmp_path):
    seed = amount.seed()
    draw = random.Random(seed)
    sound, liar = Sim(), Liar()
    await sound.start(session)
    gateway = GatewayProcess(tmp_path, [], policy="ttft")
    try:
        async with liar:
            gateway.settings["engines"] = [{"url": sound.url}, {"url": liar.url}]
            await asyncio.to_thread(gateway.start)
            for _ in range(4):
                prompt, said = drawn(draw), liar.said
                await cached(session, sound.url, prompt)

                async def exact(prompt: list[int] = prompt) -> bool:
                    known = await known_of(gateway, session, [*prompt, 1])
                    return known.get(sound.name) == len(prompt) // SIZE * SIZE

                await eventually_async("the sound engine's blocks are known", exact)
                await eventually_async("the liar has said more", lambda said=said: liar.said > said + 50)
            page = await heard(gateway, session)
            assert page[sound.name]["whole"] and not page[sound.name]["gaps"], seed
            row = page[liar.name]
            assert row["malformed"] + row["restarts"] + row["gaps"] > 0, row
            assert resident_mb(gateway.pid) < MOST_MB
            await at_rest(gateway, session)
        assert "kv_events_failed" not in gateway.log.read_text()
    finally:
        gateway.kill()
        await sound.kill()


async def test_an_engine_whose_events_cannot_be_heard_is_not_taken_for_empty(session, tmp_path):
    async with ScriptedEngine() as engine:
        gateway = GatewayProcess(tmp_path, [engine.url], policy="ttft")
        gateway.settings["engines"][0]["kv_events"] = f"tcp://127.0.0.1:{free_port()}"
        await asyncio.to_thread(gateway.start)
        try:
            await gateway.until(
                session, "it tries to listen", lambda status: engine.name in status["kv_events"]
            )
            assert not (await heard(gateway, session))[engine.name]["connected"]
            prompt = list(range(2_000))
            await known_of(gateway, session, prompt)
            await known_of(gateway, session, prompt)
            [first] = (await operators(gateway, session, "/gateway/decisions"))["decisions"][:1]
            record = (await operators(gateway, session, f"/gateway/decisions/{first['request']}"))["record"]
            # What it was sent is all that is known of it, and counts as long as without events.
            assert [copy["certainty"] for copy in record["knowledge"]["copies"]] == ["degraded"]
        finally:
            gateway.kill()
