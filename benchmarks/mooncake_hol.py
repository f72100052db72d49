"""`mooncake_hol`: lookups and loads during a burst of puts into a Mooncake store, with four ways to share threads.

As in the published experiment, a round is four puts of 256 records of 1 MiB (1,024 keys) at the same time.  Meanwhile
1,024 keys are looked up every 20 ms, each lookup timed from the moment at which it was due, and 64 records of 1 MiB
are loaded every 200 ms.  A load begins only after the load before it has ended: lanes serve loads before puts, so loads
that overlap could starve the puts.

Four ways take turns: a plain pool of four threads that call the bare client in the order of arrival, as if there were
no per-operation workers; the bare client with threads 1/1/2 for lookups, loads and puts; the adapter with four shared
workers, one of which stays free of puts; and the adapter with `per_op_workers` 1/1/2.  The second one is the floor
(`floor_ratio`): it does what the last one does, without an adapter.  All transfers go over tcp on the loopback, where
the two cores also do the network card's work.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common import ROOT, figure, median_spread, percentile, scratch, sized
from benchmarks.hosted import Extents, keys_of
from benchmarks.mooncake import EXISTS, ITEMS, PAYLOAD_BYTES
from kvstrata.tiers.base import Ask, Item, Outcome
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.host.parent import HostedAdapter
from kvstrata.tiers.media.mooncake.adapter import KEY_PREFIX
from tests.harness import mooncake

STORES, STORE_ITEMS = sized((4, 256), (4, 16))
LOOKUP_EVERY_S, LOAD_EVERY_S = 0.02, 0.2
RUNS = sized(5, 1)
AVERAGE_TARGET, P99_TARGET = 30, 10
WAYS = ("pool", "bare_lanes", "shared", "per_op")
PER_OP = {"lookup": 1, "retrieve": 1, "store": 2}


class Way:
    """One of the WAYS to reach the store. Extents and sizes are the same for all ways."""

    def __init__(self, extents: Extents) -> None:
        self.extents = extents

    async def put(self, keys: list[bytes]) -> None:
        """Put a record under each key; the same 64 sealed extents are the source for all keys."""
        raise NotImplementedError

    async def exists(self, keys: list[bytes]) -> None:
        """Look all keys up."""
        raise NotImplementedError

    async def load(self, keys: list[bytes]) -> None:
        """Load 64 records."""
        raise NotImplementedError


class Pool(Way):
    """Four threads that call the bare client."""

    def __init__(self, extents: Extents, setup: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore

        super().__init__(extents)
        self.store = MooncakeDistributedStore()
        assert self.store.setup(dict(setup)) == 0
        assert self.store.register_buffer(extents.map.address, extents.length) == 0
        self._threads = ThreadPoolExecutor(4)

    async def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def put(self, keys: list[bytes]) -> None:
        sources = [self.extents.address(i % ITEMS, for_put=True) for i in range(len(keys))]
        lengths = [self.extents.record_bytes] * len(keys)
        assert set(await self._run(self.store.batch_put_from, names_of(keys), sources, lengths)) == {0}

    async def exists(self, keys: list[bytes]) -> None:
        await self._run(self.store.batch_is_exist, names_of(keys))

    async def load(self, keys: list[bytes]) -> None:
        places = [self.extents.address(i, for_put=False) for i in range(len(keys))]
        lengths = [self.extents.record_bytes] * len(keys)
        assert await self._run(self.store.batch_get_into, names_of(keys), places, lengths) == lengths


class BareLanes(Pool):
    """The bare client with threads of its own for each kind of call, as many as the adapter's lanes have."""

    def __init__(self, extents: Extents, setup: dict[str, Any]) -> None:
        super().__init__(extents, setup)
        self._own = {kind: ThreadPoolExecutor(count) for kind, count in PER_OP.items()}
        self._kinds = {"batch_is_exist": "lookup", "batch_get_into": "retrieve", "batch_put_from": "store"}

    async def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        threads = self._own[self._kinds[call.__name__]]
        return await asyncio.get_running_loop().run_in_executor(threads, call, *arguments)


class Adapter(Way):
    """The adapter in its host."""

    def __init__(self, extents: Extents, adapter: HostedAdapter) -> None:
        super().__init__(extents)
        self.adapter = adapter

    async def put(self, keys: list[bytes]) -> None:
        items = [Item(key, self.extents.hold(i % ITEMS, key, for_put=True)) for i, key in enumerate(keys)]
        await self.adapter.put(items)
        assert {item.outcome for item in items} == {Outcome.STORED}, items[:3]

    async def exists(self, keys: list[bytes]) -> None:
        await self.adapter.exists(b"".join(keys), Ask())

    async def load(self, keys: list[bytes]) -> None:
        items = [Item(key, self.extents.hold(i, key, for_put=False)) for i, key in enumerate(keys)]
        await self.adapter.load(items)
        assert {item.outcome for item in items} == {Outcome.LOADED}, items[:3]


def names_of(keys: list[bytes]) -> list[str]:
    """Return the names that the adapter gives to these keys."""
    return [KEY_PREFIX + key.hex() for key in keys]


async def one_round(way: Way, number: int, loaded: list[bytes]) -> dict[str, float]:
    """Run a round; return the seconds of lookups and loads (average and p99) and of all puts together."""
    keys = keys_of(number, STORES * STORE_ITEMS)
    lookups: list[float] = []
    loads: list[float] = []
    done = asyncio.Event()

    async def look_up(due_s: float) -> None:
        await way.exists(keys[:EXISTS])
        lookups.append(time.perf_counter() - due_s)

    async def look_ups() -> None:
        begun_s, tasks = time.perf_counter(), []
        while not done.is_set():
            due_s = begun_s + len(tasks) * LOOKUP_EVERY_S
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(look_up(due_s)))
        await asyncio.gather(*tasks)

    async def load() -> None:
        while not done.is_set():
            begun_s = time.perf_counter()
            await way.load(loaded)
            loads.append(time.perf_counter() - begun_s)
            await asyncio.sleep(max(0.0, begun_s + LOAD_EVERY_S - time.perf_counter()))

    beside = [asyncio.create_task(look_ups()), asyncio.create_task(load())]
    begun_s = time.perf_counter()
    parts = [keys[begin : begin + STORE_ITEMS] for begin in range(0, len(keys), STORE_ITEMS)]
    await asyncio.gather(*(way.put(part) for part in parts))
    stores_s = time.perf_counter() - begun_s
    done.set()
    await asyncio.gather(*beside)
    return {
        "lookup_avg": statistics.fmean(lookups),
        "lookup_p99": percentile(lookups, 0.99),
        "load_avg": statistics.fmean(loads),
        "load_p99": percentile(loads, 0.99),
        "stores": stores_s,
    }


async def measure(setup: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Return RUNS rounds of each way; a warm-up round of each comes first."""
    extents = Extents(ITEMS, PAYLOAD_BYTES)
    pool = Pool(extents, setup)
    ways: dict[str, Way] = {"pool": pool, "bare_lanes": BareLanes(extents, setup)}
    for place, (name, fields) in enumerate((("shared", {}), ("per_op", {"per_op_workers": PER_OP}))):
        entry = {"type": "mooncake_store", **setup, **fields}
        adapter = HostedAdapter(configure_tier(entry, place), kill_ms=600_000)
        await adapter.open(extents.context())
        ways[name] = Adapter(extents, adapter)
    loaded = keys_of(1 << 30, ITEMS)
    extents.seal(loaded)
    await pool.put(loaded)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(RUNS + 1):
        for place, (name, way) in enumerate(ways.items()):
            times = await one_round(way, number * len(ways) + place, loaded)
            if number:
                found[name].append(times)
            names = names_of(keys_of(number * len(ways) + place, STORES * STORE_ITEMS))
            await asyncio.to_thread(pool.store.batch_remove, names, True)
    return found


def run() -> list[dict[str, Any]]:
    """Measure the figure in a process that finds Mooncake's libraries."""
    with scratch("mooncake-hol") as folder, mooncake.cluster(folder, segment_mb=2048) as (master, _):
        command = [sys.executable, "-m", "benchmarks.mooncake_hol", json.dumps(master.setup())]
        done = subprocess.run(
            command, env=mooncake.environment(), cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=1200
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with {done.returncode}")
    rounds = json.loads(done.stdout)

    def ratio(part: str, way: str = "per_op") -> float:
        pairs = zip(rounds["pool"], rounds[way], strict=True)
        return median_spread([pool[part] / ours[part] for pool, ours in pairs])[0]

    value, spread = median_spread([times["lookup_avg"] * 1e3 for times in rounds["per_op"]])
    ratios = {part: ratio(part) for part in rounds["per_op"][0]}
    table = {
        way: {part: median_spread([times[part] * 1e3 for times in rounds[way]]) for part in ratios}
        for way in WAYS
    }
    return [
        figure(
            "mooncake_hol",
            value=value,
            unit="ms",
            ratio=ratios["lookup_avg"],
            ratio_to="the same lookups through a plain pool of 4 threads over the bare client",
            target=f"average ≥ {AVERAGE_TARGET} ×, p99 ≥ {P99_TARGET} × lower; loads and stores not slower",
            ok=ratios["lookup_avg"] >= AVERAGE_TARGET
            and ratios["lookup_p99"] >= P99_TARGET
            and ratios["load_avg"] >= 1
            and ratios["stores"] >= 0.95,
            spread=spread,
            ratios=ratios,
            floor_ratio=ratio("lookup_avg", "bare_lanes"),
            ms=table,
        )
    ]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))), flush=True)
    os._exit(0)  # the bare client's threads may crash an interpreter that exits normally
