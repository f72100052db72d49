"""Measures how long lookups in one storage adapter take, both while nothing is put and during a burst of puts.

A lookup asks `exists` for LOOKUP_KEYS keys at once (at most twice the number of records), as the server does for a
prompt; every second key is stored, the others are not.  A lookup begins every LOOKUP_EVERY_S seconds, even if the
previous one has not ended, and is timed from the moment at which it was due, so delays of the event loop count too.

A round is IDLE_S seconds of lookups alone, then a burst: several callers put their shares of the records at the same
time, each of them one batch after another.  After the burst its records are deleted.  A first burst, the warm-up, puts
the records that lookups ask for; they stay until `Work.end`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from kvstrata.errors import StorageError
from kvstrata.measure.l2 import Records, Work
from kvstrata.native.pool import Hold
from kvstrata.storage.base import Presence, PutItem, PutStatus
from kvstrata.storage.stack import Stack
from kvstrata.types import KEY_BYTES

LOOKUP_KEYS = 1024
LOOKUP_EVERY_S = 0.02
IDLE_S = 1.0


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

    `callers` puts run at the same time. `moved(bytes)` is called after each of them.
    """

    def __init__(
        self,
        built: Stack,
        records: Records,
        *,
        callers: int,
        batch: int,
        moved: Callable[[int], None],
    ) -> None:
        super().__init__(built, records, batch)
        self._callers = callers
        self._moved = moved
        self._asked: list[bytes] = []

    async def warm_up(self) -> None:
        """Put the records that lookups ask for from now on. Raises what `run` raises."""
        await self._burst()
        asked = self._records.keys[: LOOKUP_KEYS // 2]
        self._asked = [key for stored in asked for key in (stored, secrets.token_bytes(KEY_BYTES))]

    async def run(self) -> Round:
        """Run one round.

        Raises Refused if a record was not put, StorageError if one was not deleted or not found, InternalError if a
        key that was never stored is found, Interrupted after `stop`.
        """
        idle, _ = await self._looked_up_during(asyncio.sleep(IDLE_S))
        self._go_on()
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
                self._go_on()
                items = [PutItem(self._records.keys[n], holds[n]) for n in numbers[at : at + self._batch]]
                outcomes = await self._adapter.put(items)
                self._all("put", [(o.status is PutStatus.STORED, o.status.name, o.reason) for o in outcomes])
                self._moved(len(items) * self._records.record_bytes)

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
            found = await self._adapter.exists(self._asked)
            took_s = time.perf_counter() - due_s
            if all(each.presence is not Presence.UNKNOWN for each in found):
                times.append(took_s)
                self._check_found(found)

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
