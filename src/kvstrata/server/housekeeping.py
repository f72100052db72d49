"""The instance's own work on L1: verify adopted chunks, offer them to L2, evict ahead of need, get memory.

It runs on a lane of its own, so that requests cannot crowd it out, however many they are.
"""

from __future__ import annotations

import asyncio
import collections

from kvstrata.clock import Clock
from kvstrata.native.core import Pool
from kvstrata.observability.logging import EventLog
from kvstrata.process.lane import PoolLane
from kvstrata.process.supervisor import Supervisor
from kvstrata.server.pool_events import PoolEvents
from kvstrata.tiers.puts import StoreController
from kvstrata.tiers.tails import TailPuts

TICK_S = 0.1
"""Interval of heartbeats in the index. To readers, a heartbeat older than 1 s means a dead server."""
ROUND_S = 0.1
"""Pause between two rounds, once all adopted chunks are verified."""
VERIFY_BYTES = 64 << 20
"""Adopted bytes that one round verifies."""
MISSING_S = 1.0
"""Pause between two attempts to get the memory that L1's file system refused."""
SUMMARY_S = 60.0
ADOPTED_KEYS = 2
"""Adopted chunks that are offered to L2 at a time."""


async def heartbeat(pool: Pool, events: PoolEvents) -> None:
    """Write the heartbeats that readers of the index look at, and read the pool's events, until cancelled."""
    while True:
        pool.heartbeat()
        events.drain()
        await asyncio.sleep(TICK_S)


class EvictionSummary:
    """Logs how much was evicted, and why, unless nothing was. `look` may be called on any one thread."""

    def __init__(self, pool: Pool, now_s: float) -> None:
        self._pool = pool
        self._log = EventLog("server")
        self._logged_s = now_s
        self._logged: collections.Counter[str] = collections.Counter()

    def look(self, now_s: float) -> None:
        """Log the evictions since the last line, if that is SUMMARY_S ago."""
        seconds = now_s - self._logged_s
        if seconds < SUMMARY_S:
            return
        stats = self._pool.stats()
        counted = collections.Counter(
            {"chunks": stats["evicted_entries"], "bytes": stats["evicted_bytes"], **stats["evictions"]}
        )
        newly = counted - self._logged
        self._logged_s, self._logged = now_s, counted
        if newly["chunks"]:
            causes = {cause: newly[cause] for cause in newly if cause not in ("chunks", "bytes")}
            self._log.info(
                "evicted",
                chunks=newly["chunks"],
                bytes=newly["bytes"],
                in_s=round(seconds),
                causes=" ".join(f"{cause}:{count}" for cause, count in causes.items()),
            )


class Housekeeping:
    """The instance's own work on L1. Belongs to the event loop."""

    def __init__(
        self,
        pool: Pool,
        lane: PoolLane,
        events: PoolEvents,
        store: StoreController,
        clock: Clock,
        supervisor: Supervisor,
        tails: TailPuts | None = None,
    ) -> None:
        """`tails` wait to be put."""
        self._tails = tails
        self._pool = pool
        self._lane = lane
        self._events = events
        self._store = store
        self._clock = clock
        self._supervisor = supervisor
        self._unverified = 1
        self._offering: asyncio.Task[None] | None = None
        self._log = EventLog("server")
        self._missing_bytes = 0
        self._looked_s = float("-inf")
        self._evictions = EvictionSummary(pool, clock.monotonic_s())

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(0.0 if self._unverified else ROUND_S)

    async def round(self) -> None:
        """Run one round: do all work that is due."""
        lane, events = self._lane, self._events
        if self._unverified:
            self._unverified = await asyncio.shield(lane.run(self._pool.verify_next, VERIFY_BYTES))
            events.drain()  # now, because the pool keeps a bounded number of events
        offering = self._offering is not None and not self._offering.done()
        if events.verified and not offering:
            self._offering = self._supervisor.job(self._put_adopted(), "puts of adopted chunks")
        if self._tails is not None:
            self._tails.tick()
        await asyncio.shield(lane.run(self._evict))
        await self._see_to_memory()

    def _evict(self) -> None:
        self._pool.evict_to_watermark()
        self._evictions.look(self._clock.monotonic_s())

    async def _see_to_memory(self) -> None:
        """Ask again for memory that L1 did not get, and log when memory starts or ceases to be missing."""
        now_s, extents_bytes = self._clock.monotonic_s(), self._pool.extents_bytes
        if now_s - self._looked_s < MISSING_S:
            return
        self._looked_s = now_s
        missing_bytes = await asyncio.shield(self._lane.run(self._pool.retry_missing))
        if missing_bytes and not self._missing_bytes:
            self._log.warning(
                "l1_memory_missing",
                missing_bytes=missing_bytes,
                extents_bytes=extents_bytes,
                advice="the file system of L1 is full and L1 uses what it got: free space there (/dev/shm), enlarge "
                "it, or lower --l1-size-gb",
            )
        elif self._missing_bytes and not missing_bytes:
            self._log.info("l1_memory_complete", extents_bytes=extents_bytes)
        self._missing_bytes = missing_bytes

    async def _put_adopted(self) -> None:
        """Offer verified chunks to L2, since the killed server may not have put them; L2 knows the chunks that it has.

        Leased chunks are offered too, since nobody writes to a verified chunk.  The chunks are offered a few at a time,
        so that they never fill the backlog.
        """
        verified, store = self._events.verified, self._store
        chunks = 0
        while verified:
            await store.idle()
            for key in [verified.popleft() for _ in range(min(ADOPTED_KEYS, len(verified)))]:
                if self._tails is not None and self._pool.is_tail(key):
                    self._tails.committed([key])
                    continue
                store.committed([key])
                chunks += 1
        self._log.info("adopted_chunks_offered_to_l2", chunks=chunks)
