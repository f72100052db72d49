"""The server's own work on its pool: check adopted chunks, offer them to L2, evict ahead of need, see to its memory.

It runs on the engine's `own_lane`, so that no number of requests can refuse or delay it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstrata.observability.logging import EventLog

if TYPE_CHECKING:
    from kvstrata.server.engine import Engine
    from kvstrata.server.l2.store import StoreController

ROUND_S = 0.1
"""Rest between two rounds, once all adopted chunks are checked."""
VERIFY_BYTES = 64 << 20
"""Adopted bytes that one round checks."""
MISSING_S = 1.0
"""Between two attempts to get memory of L1 that the file system refused."""
ADOPTED_KEYS = 2
"""Adopted chunks that are offered to L2 at a time."""


class Housekeeping:
    """See the module. Belongs to the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unverified = 1
        self._offering: asyncio.Task[None] | None = None
        self._log = EventLog("server")
        self._missing_bytes = 0
        self._looked_s = float("-inf")

    async def run(self) -> None:
        """One round after the other, until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(0.0 if self._unverified else ROUND_S)

    async def round(self) -> None:
        """Do what is due now."""
        engine, pool, lane = self._engine, self._engine.pool, self._engine.own_lane
        if self._unverified:
            self._unverified = await asyncio.shield(lane.run(pool.verify_next, VERIFY_BYTES))
            engine.drain_events()  # what was verified; the pool keeps so many events and no more
        offering = self._offering is not None and not self._offering.done()
        if engine.verified and engine.store is not None and not offering:
            self._offering = engine.supervisor.spawn(
                self._put_adopted(engine.store), "puts of adopted chunks"
            )
        await asyncio.shield(lane.run(pool.evict_to_watermark))
        await self._see_to_memory()
        await engine.borrowed.drop_due()

    async def _see_to_memory(self) -> None:
        """Ask again for memory that L1 did not get, and say when some begins or ceases to be missing."""
        engine = self._engine
        now_s = engine.clock.monotonic_s()
        if now_s - self._looked_s < MISSING_S:
            return
        self._looked_s = now_s
        missing_bytes = await asyncio.shield(engine.own_lane.run(engine.pool.retry_missing))
        if missing_bytes and not self._missing_bytes:
            self._log.warning(
                "l1_memory_missing",
                missing_bytes=missing_bytes,
                extents_bytes=engine.pool.extents_bytes,
                advice="the file system of L1 is full and L1 uses what it got: free space there (/dev/shm), enlarge "
                "it, or lower --l1-size-gb",
            )
        elif self._missing_bytes and not missing_bytes:
            self._log.info("l1_memory_complete", extents_bytes=engine.pool.extents_bytes)
        self._missing_bytes = missing_bytes

    async def _put_adopted(self, store: StoreController) -> None:
        """Offer what a killed server may not have put to L2 yet; what L2 has is answered from its index.

        Leased chunks too: nobody writes what is verified.  In small parts, so that they never fill the backlog.
        """
        verified = self._engine.verified
        chunks = 0
        while verified:
            await store.idle()
            keys = [verified.popleft() for _ in range(min(ADOPTED_KEYS, len(verified)))]
            store.committed(keys)
            chunks += len(keys)
        self._log.info("adopted_chunks_offered_to_l2", chunks=chunks)
