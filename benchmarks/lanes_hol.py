"""`lanes_hol*`: how long lookups of 1,024 keys take during a burst of puts, against how long they take alone.

Four callers put 1,024 records of 1 MiB at the same time, 256 each in batches of 64, and a lookup of 1,024 keys is due
every 20 ms, even if the previous one has not ended; every second key is stored.  A lookup is timed from the moment at
which it was due, so delays of the event loop count too.  All calls go through the layers that a server has around an
adapter.  A round is a second of lookups alone, then a burst, whose records are deleted; a first burst puts the records
that lookups ask for.

Sketch: `fs` and `disk` answer `exists` from memory on the event loop, so a lookup waits only for a core, which each of
the four writing threads needs for microseconds a record: so the p99 is that of lookups alone, or a little more on two
cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import uvloop

from benchmarks.common import figure, median_spread, percentile, scratch, sized
from kvstrata.clock import SystemClock
from kvstrata.errors import StorageError
from kvstrata.measure.l2 import Records, Work
from kvstrata.native.core import Hold
from kvstrata.tiers.base import Ask, Item, Outcome, Presence
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.tier import Tier, limits_of
from kvstrata.types import KEY_BYTES

ROUNDS = sized(5, 1)
RECORDS, BATCH = sized((1024, 64), (16, 4))
CALLERS = 4
RECORD_BYTES = 1 << 20
LOOKUP_KEYS = 1024
LOOKUP_EVERY_S = 0.02
IDLE_S = 1.0
OWN = {"lookup": 1, "retrieve": 1, "store": 4}
TARGET = 3.0
DEADLINE_MS = 60_000
"""Deadline of puts; other programs may use the disk too."""


class Lookups(NamedTuple):
    """Seconds of each answered lookup, and the number of lookups with an UNKNOWN key, for example after a deadline."""

    answered: list[float]
    unknown: int


class Round(NamedTuple):
    """Lookups alone, lookups during the burst, and the seconds and bytes of the burst's puts."""

    idle: Lookups
    burst: Lookups
    put_s: float
    put_bytes: int


class Burst(Work):
    """Runs rounds on one open adapter. Each put takes up to `batch` records; the pool of `records` has room for all.

    `callers` puts run at the same time.
    """

    def __init__(
        self,
        tier: Tier,
        records: Records,
        *,
        callers: int,
        batch: int,
    ) -> None:
        super().__init__(tier, records, batch)
        self._callers = callers
        self._asked: list[bytes] = []

    async def warm_up(self) -> None:
        """Put the records that lookups ask for from now on. Raises what `round` raises."""
        await self._burst()
        asked = self._records.keys[: LOOKUP_KEYS // 2]
        self._asked = [key for stored in asked for key in (stored, secrets.token_bytes(KEY_BYTES))]

    async def round(self) -> Round:
        """Run one round.

        Raises Refused if a record was not put, StorageError if one was not deleted or not found, InternalError if a
        key that was never stored is found.
        """
        idle, _ = await self._looked_up_during(asyncio.sleep(IDLE_S))
        put_s, burst = await self._burst()
        if left := await self._delete(self._records.keys):
            raise StorageError(
                f"{self._adapter.name}: {left} of {self._records.count} records were not deleted"
            )
        return Round(idle, burst, put_s, self._records.count * self._records.record_bytes)

    async def _burst(self) -> tuple[float, Lookups]:
        """Put the records under fresh keys; return the seconds of the puts, and the lookups meanwhile."""
        records = self._records
        records.seal()
        numbers = range(records.count)
        holds = records.committed(numbers)  # this copies the records, so it is not timed
        with contextlib.ExitStack() as own:
            for hold in holds:
                own.callback(hold.drop)
            self._stored += records.keys
            lookups, put_s = await self._looked_up_during(self._put(holds))
        await records.forget(numbers)
        return put_s, lookups

    async def _put(self, holds: Sequence[Hold]) -> None:
        """Put all records: each caller puts its share, all callers at the same time."""

        async def share(caller: int) -> None:
            numbers = range(caller, self._records.count, self._callers)
            for at in range(0, len(numbers), self._batch):
                items = [Item(self._records.keys[n], holds[n]) for n in numbers[at : at + self._batch]]
                self._all("put", Outcome.STORED, await self._adapter.put(items))

        await _all_of([share(caller) for caller in range(self._callers)])

    async def _looked_up_during(self, work: Coroutine[Any, Any, None]) -> tuple[Lookups, float]:
        """Run `work`; return the lookups that were due before it ended, and the seconds that it took.

        Before `warm_up` has stored records, no lookups run.
        """
        loop = asyncio.get_running_loop()
        ended = threading.Event()
        times: list[float] = []
        lookups: list[asyncio.Task[None]] = []

        async def look_up(due_s: float) -> None:
            ask = Ask()
            found = await self._adapter.exists(b"".join(self._asked), ask)
            took_s = time.perf_counter() - due_s
            if Presence.UNKNOWN not in found:
                times.append(took_s)
                self._check_found(found, ask.reason)

        def begin(due_s: float) -> None:
            lookups.append(loop.create_task(look_up(due_s)))

        def tick() -> None:
            due_s = time.perf_counter()
            loop.call_soon_threadsafe(begin, due_s)
            while not ended.wait(max(0.0, due_s + LOOKUP_EVERY_S - time.perf_counter())):
                due_s += LOOKUP_EVERY_S
                loop.call_soon_threadsafe(begin, due_s)

        # A thread starts the lookups, because the loop's timers are late by up to a millisecond.
        ticker = threading.Thread(target=tick, name="lookups")
        begun_s = time.perf_counter()
        if self._asked:
            ticker.start()
        try:
            await work
        finally:
            took_s = time.perf_counter() - begun_s
            ended.set()
            if self._asked:
                await loop.run_in_executor(None, ticker.join)
            await _all_of(lookups)
        return Lookups(times, len(lookups) - len(times)), took_s


async def _all_of(awaited: Sequence[Coroutine[Any, Any, None] | asyncio.Task[None]]) -> None:
    """Wait until all have ended; then raise the exception of the first in `awaited` that failed, if one did."""
    outcomes = await asyncio.gather(*awaited, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def measured(entry: Mapping[str, Any]) -> list[Round]:
    """Run all rounds with an adapter."""
    records = Records(RECORD_BYTES, RECORDS, RECORDS)
    config = configure_tier(entry, 0)
    tier = Tier(config, limits_of(config, records.pool.extents_bytes), SystemClock())
    with contextlib.ExitStack() as ends:
        ends.callback(records.close)
        try:
            await tier.open(records.context(), must=True)
            work = Burst(tier, records, callers=CALLERS, batch=BATCH)
            try:
                await work.warm_up()
                return [await work.round() for _ in range(ROUNDS)]
            finally:
                await work.end()
        finally:
            await tier.close()


def burst(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Measure an adapter; return lookups of all rounds together, alone and in the burst, and the rates of the puts."""
    rounds = uvloop.run(measured({**entry, "deadline_ms": DEADLINE_MS}))

    def of(taken: Sequence[Lookups]) -> dict[str, Any]:
        ms = [1e3 * seconds for each in taken for seconds in each.answered]
        shares = {f"p{100 * share:.0f}": percentile(ms, share) for share in (0.5, 0.95, 0.99)}
        return {
            "ms": {**shares, "greatest": max(ms), "calls": len(ms)},
            "unknown": sum(each.unknown for each in taken),
        }

    idle, beside = of([each.idle for each in rounds]), of([each.burst for each in rounds])
    rate, spread = median_spread([each.put_bytes / each.put_s / 1e9 for each in rounds])
    found = {
        "idle": idle,
        "burst": {**beside, "gb_per_s": {"median": rate, "least": spread[0], "greatest": spread[1]}},
        "p99_ratio": beside["ms"]["p99"] / idle["ms"]["p99"],
    }
    print(json.dumps({"adapter": entry["type"], **found}), flush=True)
    return found


def hol_figure(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figure for the p99 of lookups during the burst."""
    idle, put = found["idle"]["ms"], found["burst"]
    return figure(
        name,
        value=put["ms"]["p99"],
        unit="ms",
        ratio=found["p99_ratio"],
        ratio_to="the p99 alone",
        target=f"≤ {TARGET:g} × the p99 alone",
        ok=found["p99_ratio"] <= TARGET,
        idle_ms=idle,
        burst_ms=put["ms"],
        put_gb_per_s=put["gb_per_s"],
    )


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    with scratch("lanes") as folder:
        fs = burst({"type": "fs", "base_path": str(folder / "fs"), "min_free_gb": 0, "per_op_workers": OWN})
        disk = burst(
            {"type": "disk", "base_path": str(folder / "disk"), "capacity_gb": 8, "per_op_workers": OWN}
        )
    return [hol_figure("lanes_hol_fs", fs), hol_figure("lanes_hol_disk", disk)]
