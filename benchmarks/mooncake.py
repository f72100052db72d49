"""`mooncake_put`, `mooncake_load`, `exists_1024_mooncake`: the adapter in its host against the bare client.

A master and a holder run on this machine, and all transfers go over tcp on the loopback: 64 records of 1 MiB a batch,
and 1,024 small records for `exists`.  In each round three ways take turns, so that a busy machine slows all alike: the
adapter in its host; the bare client in this process; and a bare process, which is the floor (`floor_ratio`).  The bare
process blocks on a socket, calls the bare client, verifies the loaded records as the adapter does, and answers with a
byte for each record.  No adapter that verifies and that runs in a process of its own can be faster.

Sketch: before a put the adapter asks which records exist (one call, 0.1 ms), after a load it verifies 64 MiB (3 ms at
20 GB/s), and its host costs two messages a batch, in addition to 30 to 90 ms of transfer.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.common import ROOT, compared, median_spread, scratch, sized
from benchmarks.hosted import ORDERS, BareProcess, Extents, keys_of, serve_bare
from kvstrata.native.core import CopyOutcome, Verifier, names_of, record_bytes
from kvstrata.tiers.base import Ask, Item, Outcome, Presence
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.host.parent import HostedAdapter
from kvstrata.tiers.media.mooncake.adapter import KEY_PREFIX, VERIFIERS
from tests.harness import mooncake

ITEMS = sized(64, 8)
PAYLOAD_BYTES = 1 << 20
SMALL_BYTES = 4096
EXISTS = 1024
WARM_UP, ROUNDS = sized((3, 42), (1, 2))
EXISTS_ROUNDS = sized(300, 5)
MOVE_TARGET, EXISTS_TARGET = 0.95, 1.2


class Round(NamedTuple):
    """Seconds of the same work by the adapter, by the bare client, and by a bare process with such a client."""

    ours: float
    raw: float
    floor: float


class Bare:
    """The bare client."""

    def __init__(self, setup: dict[str, Any], extents: Extents) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._extents = extents
        self._store = MooncakeDistributedStore()
        assert self._store.setup(dict(setup)) == 0
        assert self._store.register_buffer(extents.map.address, extents.length) == 0
        self._verifier = Verifier(min(VERIFIERS, os.cpu_count() or 1) - 1)

    def put(self, keys: list[bytes]) -> bool:
        """Put the sealed records; returns whether all are stored."""
        sources = [self._extents.address(i, for_put=True) for i in range(len(keys))]
        lengths = [self._extents.record_bytes] * len(keys)
        return set(self._store.batch_put_from(names_of(KEY_PREFIX, keys), sources, lengths)) == {0}

    def load(self, keys: list[bytes], *, verified: bool) -> bool:
        """Load records; returns whether all are there, and sound."""
        places = [self._extents.address(i, for_put=False) for i in range(len(keys))]
        lengths = [self._extents.record_bytes] * len(keys)
        loaded = self._store.batch_get_into(names_of(KEY_PREFIX, keys), places, lengths) == lengths
        if not verified:
            return loaded
        outcomes = self._verifier.verify_stored(list(zip(places, lengths, keys, strict=True)))
        return loaded and set(outcomes) == {CopyOutcome.OK}

    def exists(self, keys: list[bytes]) -> bool:
        """Whether all records are there."""
        return set(self._store.batch_is_exist(names_of(KEY_PREFIX, keys))) == {1}

    def remove(self, keys: list[bytes]) -> bool:
        """Remove records; returns whether all were there."""
        return set(self._store.batch_remove(names_of(KEY_PREFIX, keys), True)) == {0}


async def serve(setup: dict[str, Any], payload_bytes: int, channel_fd: int, extents_fd: int) -> None:
    """Body of the bare process."""
    bare = Bare(setup, Extents(ITEMS, payload_bytes, extents_fd))
    load = functools.partial(bare.load, verified=True)
    calls = {"put": bare.put, "load": load, "exists": bare.exists, "remove": bare.remove}
    await serve_bare(channel_fd, calls)


class Bench:
    """An open adapter in its host, a bare client in this process and a bare process, on the same extents."""

    def __init__(self, setup: dict[str, Any], payload_bytes: int) -> None:
        self.extents = Extents(ITEMS, payload_bytes)
        self.adapter = HostedAdapter(configure_tier({"type": "mooncake_store", **setup}, 0), kill_ms=600_000)
        self.bare = Bare(setup, self.extents)
        words = [json.dumps(setup), str(payload_bytes)]
        self.process = BareProcess("benchmarks.mooncake", words, self.extents)

    async def close(self) -> None:
        """End both processes."""
        await self.adapter.close()
        self.process.end()

    async def ours(self, keys: list[bytes]) -> tuple[float, float]:
        """Return the seconds of a put and of a load by the adapter."""
        puts = [Item(key, self.extents.hold(i, key, for_put=True)) for i, key in enumerate(keys)]
        begun_s = time.perf_counter()
        await self.adapter.put(puts)
        put_s = time.perf_counter() - begun_s
        assert {item.outcome for item in puts} == {Outcome.STORED}, puts
        loads = [Item(key, self.extents.hold(i, key, for_put=False)) for i, key in enumerate(keys)]
        begun_s = time.perf_counter()
        await self.adapter.load(loads)
        load_s = time.perf_counter() - begun_s
        assert {item.outcome for item in loads} == {Outcome.LOADED}, loads
        assert await self.adapter.delete(b"".join(keys)) == len(keys)
        return put_s, load_s

    async def raw(self, keys: list[bytes]) -> tuple[float, float]:
        """Return the seconds of a put and of a load by the bare client, which verifies nothing."""
        bare = self.bare
        times = timed(bare.put, keys), timed(functools.partial(bare.load, verified=False), keys)
        assert bare.remove(keys)
        return times

    async def floor(self, keys: list[bytes]) -> tuple[float, float]:
        """Return the seconds of a put and of a load by the bare process."""
        ask = self.process.ask
        times = timed(functools.partial(ask, "put"), keys), timed(functools.partial(ask, "load"), keys)
        assert ask("remove", keys)
        return times

    async def move(self) -> tuple[list[Round], list[Round]]:
        """Measure rounds of puts and of loads."""
        ways, puts, loads = (self.ours, self.raw, self.floor), [], []
        for number in range(WARM_UP + ROUNDS):
            times: dict[int, tuple[float, float]] = {}
            for place in ORDERS[number % len(ORDERS)]:
                keys = keys_of(len(ways) * number + place, ITEMS)
                self.extents.seal(keys)
                times[place] = await ways[place](keys)
            puts.append(Round(*(times[place][0] for place in range(len(ways)))))
            loads.append(Round(*(times[place][1] for place in range(len(ways)))))
        return puts[WARM_UP:], loads[WARM_UP:]

    async def exists(self) -> list[Round]:
        """Measure rounds of `exists` for EXISTS stored records."""
        keys = keys_of(1 << 20, EXISTS)
        for begin in range(0, EXISTS, ITEMS):
            part = keys[begin : begin + ITEMS]
            self.extents.seal(part)
            holds = [self.extents.hold(i, key, for_put=True) for i, key in enumerate(part)]
            await self.adapter.put([Item(key, hold) for key, hold in zip(part, holds, strict=True)])
        ask = functools.partial(self.process.ask, "exists")
        rounds = []
        for number in range(WARM_UP + EXISTS_ROUNDS):
            times: dict[int, float] = {}
            for place in ORDERS[number % len(ORDERS)]:
                if place:
                    times[place] = timed(self.bare.exists if place == 1 else ask, keys)
                    continue
                begun_s = time.perf_counter()
                found = await self.adapter.exists(b"".join(keys), Ask())
                times[place] = time.perf_counter() - begun_s
                assert set(found) == {Presence.PRESENT}
            rounds.append(Round(times[0], times[1], times[2]))
        return rounds[WARM_UP:]


def timed(call: Callable[[list[bytes]], bool], keys: list[bytes]) -> float:
    """Return the seconds of a call that must return true."""
    begun_s = time.perf_counter()
    done = call(keys)
    seconds = time.perf_counter() - begun_s
    assert done
    return seconds


async def measure(setup: dict[str, Any]) -> dict[str, list[Round]]:
    """Return all rounds by figure."""
    found: dict[str, list[Round]] = {}
    bench = Bench(setup, PAYLOAD_BYTES)
    await bench.adapter.open(bench.extents.context())
    found["mooncake_put"], found["mooncake_load"] = await bench.move()
    await bench.close()
    bench = Bench(setup, SMALL_BYTES)
    await bench.adapter.open(bench.extents.context())
    found["exists_1024_mooncake"] = await bench.exists()
    await bench.close()
    return found


def run() -> list[dict[str, Any]]:
    """Measure the figures in a process that finds Mooncake's libraries."""
    with scratch("mooncake") as folder, mooncake.cluster(folder, segment_mb=512) as (master, _):
        command = [sys.executable, "-m", "benchmarks.mooncake", json.dumps(master.setup())]
        done = subprocess.run(
            command, env=mooncake.environment(), cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=600
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with {done.returncode}")
    rounds = {name: [Round(*pair) for pair in pairs] for name, pairs in json.loads(done.stdout).items()}
    gb = ITEMS * record_bytes(1, PAYLOAD_BYTES) / 1e9

    def median(name: str, ratio: Callable[[Round], float]) -> float:
        return median_spread([ratio(one) for one in rounds[name]])[0]

    figures = [
        compared(
            name,
            [gb / one.ours for one in rounds[name]],
            "GB/s",
            f"raw {raw_call} of the same records",
            [gb / one.raw for one in rounds[name]],
            least=MOVE_TARGET,
            floor_ratio=median(name, lambda one: one.raw / one.floor),
            ratio_to_floor=median(name, lambda one: one.floor / one.ours),
        )
        for name, raw_call in (("mooncake_put", "batch_put_from"), ("mooncake_load", "batch_get_into"))
    ]
    name = "exists_1024_mooncake"
    return [
        *figures,
        compared(
            name,
            [one.ours * 1e3 for one in rounds[name]],
            "ms",
            "raw batch_is_exist of the same keys",
            [one.raw * 1e3 for one in rounds[name]],
            most=EXISTS_TARGET,
            floor_ratio=median(name, lambda one: one.floor / one.raw),
            ratio_to_floor=median(name, lambda one: one.ours / one.floor),
        ),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        asyncio.run(serve(json.loads(sys.argv[1]), *map(int, sys.argv[2:])))
    else:
        print(json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))), flush=True)
    os._exit(0)  # the bare clients' threads may crash an interpreter that exits normally
