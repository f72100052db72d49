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
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common import figure, median_spread, percentile, sized
from benchmarks.hosted import Extents, MooncakeClient, Way, beside_mooncake, keys_of
from benchmarks.mooncake import EXISTS, ITEMS, PAYLOAD_BYTES
from kvstrata.native.core import names_of
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.host.parent import HostedAdapter
from kvstrata.tiers.media.mooncake.adapter import KEY_PREFIX

STORES, STORE_ITEMS = sized((4, 256), (4, 16))
LOOKUP_EVERY_S, LOAD_EVERY_S = 0.02, 0.2
RUNS = sized(5, 1)
AVERAGE_TARGET, P99_TARGET = 30, 10
WAYS = ("pool", "bare_lanes", "shared", "per_op")
PER_OP = {"lookup": 1, "retrieve": 1, "store": 2}


class Pool(MooncakeClient):
    """Threads that call the bare client: four for all kinds of calls, or some for each kind."""

    def __init__(self, extents: Extents, setup: dict[str, Any], own: dict[str, int] | None = None) -> None:
        super().__init__(setup, extents, verifies=False)
        calls = {"lookup": "batch_is_exist", "retrieve": "batch_get_into", "store": "batch_put_from"}
        self._threads = {calls[kind]: ThreadPoolExecutor(count) for kind, count in (own or {}).items()}
        self._others = ThreadPoolExecutor(4)

    async def _call(self, name: str, keys: list[bytes], *arguments: Any) -> Any:
        call, threads = getattr(self._store, name), self._threads.get(name, self._others)
        names = names_of(KEY_PREFIX, keys)
        return await asyncio.get_running_loop().run_in_executor(threads, call, names, *arguments)


async def one_round(way: Way, number: int, loaded: list[bytes]) -> dict[str, float]:
    """Run a round; return the seconds of lookups and loads (average and p99) and of all puts together."""
    keys = keys_of(number, STORES * STORE_ITEMS)
    lookups: list[float] = []
    loads: list[float] = []
    done = asyncio.Event()

    async def look_up(due_s: float) -> None:
        await way.exists(keys[:EXISTS])  # not all are stored yet
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
            assert await way.load(loaded)
            loads.append(time.perf_counter() - begun_s)
            await asyncio.sleep(max(0.0, begun_s + LOAD_EVERY_S - time.perf_counter()))

    beside = [asyncio.create_task(look_ups()), asyncio.create_task(load())]
    begun_s = time.perf_counter()
    parts = [keys[begin : begin + STORE_ITEMS] for begin in range(0, len(keys), STORE_ITEMS)]
    assert all(await asyncio.gather(*(way.put(part) for part in parts)))
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
    ways: dict[str, Way] = {"pool": pool, "bare_lanes": Pool(extents, setup, PER_OP)}
    for place, (name, fields) in enumerate((("shared", {}), ("per_op", {"per_op_workers": PER_OP}))):
        entry = {"type": "mooncake_store", **setup, **fields}
        ways[name] = Way(HostedAdapter(configure_tier(entry, place), kill_ms=600_000), extents)
        await ways[name].open()
    loaded = keys_of(1 << 30, ITEMS)
    extents.seal(loaded)
    assert await pool.put(loaded)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(RUNS + 1):
        for place, (name, way) in enumerate(ways.items()):
            times = await one_round(way, number * len(ways) + place, loaded)
            if number:
                found[name].append(times)
            await pool.delete(keys_of(number * len(ways) + place, STORES * STORE_ITEMS))
    return found


def run() -> list[dict[str, Any]]:
    """Measure the figure."""
    rounds = beside_mooncake("benchmarks.mooncake_hol", segment_mb=2048)

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
