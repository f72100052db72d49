"""How long lookups of one storage adapter take while it stores nothing, and while it stores much.

A lookup asks `exists` for LOOKUP_KEYS keys at once, as the server does for a prompt (for twice as many as there are
records, where that is less): every second one is stored, and nobody has the others.  One begins every LOOKUP_EVERY_S
seconds, whether or not the one before has ended, and is timed from the moment at which it was due: what holds up the
event loop counts too.

A round is IDLE_S seconds of lookups alone, then a burst: callers that store their shares of the records at the same
time, each batch after batch.  Then these are deleted.  A first round stores what is looked up, and warms up.
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
from kvstrata.storage.registry import ConfiguredAdapter
from kvstrata.types import KEY_BYTES

LOOKUP_KEYS = 1024
LOOKUP_EVERY_S = 0.02
IDLE_S = 1.0


class Lookups(NamedTuple):
    """Seconds of each one that was answered, and how many were UNKNOWN: past the deadline, say."""

    answered: list[float]
    unknown: int


class Round(NamedTuple):
    """Lookups alone and in the burst, and what the burst stored in how long."""

    idle: Lookups
    burst: Lookups
    put_s: float
    put_bytes: int


class Burst(Work):
    """Rounds over one open adapter, in calls of `batch` records; the records' pool has room for all of them.

    `moved(bytes)` is called after each put.
    """

    def __init__(
        self,
        built: ConfiguredAdapter,
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
        """Store what is looked up from now on. Raises as `run`."""
        await self._burst()
        there = self._records.keys[: LOOKUP_KEYS // 2]
        self._asked = [key for stored in there for key in (stored, secrets.token_bytes(KEY_BYTES))]

    async def run(self) -> Round:
        """One round. Raises StorageError for what the adapter refuses, InternalError for wrong answers."""
        idle, _ = await self._looked_up_during(asyncio.sleep(IDLE_S))
        self._go_on()
        put_s, burst = await self._burst()
        if left := await self._delete(self._records.keys):
            raise StorageError(
                f"{self._adapter.name}: {left} of {self._records.count} records were not deleted"
            )
        return Round(idle, burst, put_s, self._records.count * self._records.record_bytes)

    async def _burst(self) -> tuple[float, Lookups]:
        """Store the records under fresh keys; how long it took, and the lookups meanwhile."""
        records = self._records
        records.seal()
        numbers = range(records.count)
        holds = records.committed(numbers)  # before: it copies
        with contextlib.ExitStack() as own:
            for hold in holds:
                own.callback(hold.drop)
            self._stored += records.keys
            lookups, put_s = await self._looked_up_during(self._put(holds))
        await records.forget(numbers)
        return put_s, lookups

    async def _put(self, holds: Sequence[Hold]) -> None:
        """Every caller its share."""

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
        """The lookups that were due before `work` ended, and its seconds; none before there is a record."""
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

        # A thread: the loop's own timers are late by up to a millisecond.
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


async def _all_of(works: Sequence[Coroutine[Any, Any, None] | asyncio.Task[None]]) -> None:
    """Wait for all of them, whatever one raises; then raise the first of it."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
