"""Engines that lie about their caches over KV events: others are known exactly all the same, in bounded memory."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import msgspec
import pytest
import zmq

from kvstrata.testing.engine_sim.kv_events import BlockRemoved, BlockStored, KVEventBatch
from tests.harness import amount
from tests.harness.daemon import free_port, free_ports
from tests.harness.gateway_process import GatewayProcess
from tests.harness.scripted_engine import Got, Line, ScriptedEngine
from tests.harness.waiting import eventually_async
from tests.integration.gateway.test_faults import at_rest, resident_mb
from tests.integration.gateway.test_residency_live import Sim, cached, drawn, heard, known_of, operators

pytestmark = pytest.mark.integration

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)
        await super().__aexit__(kind, error, trace)

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

                async def more(said: int = said) -> bool:
                    return liar.said > said + 50

                await eventually_async("the liar has said more", more)
            page = await heard(gateway, session)
            assert page[sound.name]["whole"] and not page[sound.name]["gaps"], seed
            row = page[liar.name]
            assert row["malformed"] + row["restarts"] + row["gaps"] > 0, row
            assert resident_mb(gateway.pid) < MOST_MB
            await at_rest(gateway, session)
        assert "kv_events_crashed" not in gateway.log.read_text()
    finally:
        gateway.kill()
        await sound.kill()


async def test_an_engine_whose_events_cannot_be_heard_is_not_taken_for_empty(session, tmp_path):
    async with ScriptedEngine() as engine:
        gateway = GatewayProcess(tmp_path, [engine.url], policy="ttft")
        gateway.settings["engines"][0]["kv_events"] = f"tcp://127.0.0.1:{free_port()}"
        await asyncio.to_thread(gateway.start)
        try:

            async def listens() -> bool:
                return engine.name in await heard(gateway, session)

            await eventually_async("the gateway tries to listen", listens)
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
