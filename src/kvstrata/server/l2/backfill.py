"""Backfills: all chunks of L1 are offered to one tier once, a few at a time, so that they do not fill the backlog."""

from __future__ import annotations

import asyncio

from kvstrata.native.pool import Pool
from kvstrata.observability.logging import EventLog
from kvstrata.process.lane import PoolLane
from kvstrata.server.l2.store import StoreController

BACKFILL_KEYS = 8
"""Chunks of L1 offered to a tier at a time."""


class Backfills:
    """At most one backfill for each tier. Belongs to the event loop; the caller starts, ends and awaits the tasks."""

    def __init__(self, pool: Pool, lane: PoolLane, store: StoreController) -> None:
        self._pool = pool
        self._lane = lane
        self._store = store
        self._running: dict[str, asyncio.Task[None]] = {}
        self._left: dict[str, int] = {}
        self._log = EventLog("adapters")

    def left(self, name: str) -> int:
        """Chunks that this tier has not been offered yet."""
        return self._left.get(name, 0)

    def begun(self, name: str, task: asyncio.Task[None]) -> None:
        """Note that `task` runs `run(name)`."""
        self._left[name] = 0
        self._running[name] = task

    def end(self, name: str) -> None:
        """Offer nothing more to this tier. The cancelled task is left for the caller to await."""
        self._left.pop(name, None)
        if (running := self._running.pop(name, None)) is not None:
            running.cancel()

    async def run(self, name: str) -> None:
        """Offer all chunks that L1 has now, except leased ones."""
        pool = self._pool
        keys = await asyncio.shield(self._lane.run(pool.victims_preview, pool.extents_bytes))
        for at in range(0, len(keys), BACKFILL_KEYS):
            self._left[name] = len(keys) - at
            await self._store.idle_of(name)
            self._store.offer(name, keys[at : at + BACKFILL_KEYS])
        del self._left[name]
        self._log.info("l2_adapter_backfilled", adapter=name, chunks=len(keys))
