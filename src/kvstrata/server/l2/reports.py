"""Reports that adapters make by themselves: operations that have ended, and records dropped because of a cap."""

from __future__ import annotations

import asyncio

from kvstrata.observability.metrics import ServerCounters
from kvstrata.server.chunk_history import ChunkHistory
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tiers import TierSet
from kvstrata.storage.wrap.metrics import OpReport


class TierReports:
    """Passes on the reports of the tiers in the set, and drops the reports of removed tiers."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tiers: TierSet,
        store: StoreController,
        history: ChunkHistory,
        counters: ServerCounters,
    ) -> None:
        self._loop = loop
        self._tiers = tiers
        self._store = store
        self._history = history
        self._counters = counters

    def operation(self, report: OpReport) -> None:
        """Count one finished operation of a tier."""
        if self._tiers.get(report.adapter) is not None:
            self._counters.l2_operation(
                report.adapter, report.operation, report.seconds, report.moved_bytes, report.outcomes
            )

    def dropped(self, tier: str, key: bytes) -> None:
        """Note that a tier dropped this record to stay below its cap. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._dropped, tier, key)

    def _dropped(self, tier: str, key: bytes) -> None:
        if self._tiers.get(tier) is not None:
            self._store.dropped(tier, [key])
            self._history.dropped(tier, key)
