"""Reports that adapters make by themselves: operations that have ended, and records dropped because of a cap.

The log has a line when a tier has no room for a put, and one when it has stored again.
"""

from __future__ import annotations

import asyncio
import logging

from kvstrata.observability.logging import EventLog
from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.reasons import FULL
from kvstrata.server.chunk_history import ChunkHistory
from kvstrata.server.l2.store import StoreController
from kvstrata.storage.wrap.deadline import OpReport

FULL_REASONS = frozenset({FULL, "capacity", "disk_full", "no_room"})
"""Reasons of puts for which the medium had no room."""


class TierReports:
    """Passes on the reports of the tiers."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: StoreController,
        history: ChunkHistory,
        counters: ServerCounters,
    ) -> None:
        self._loop = loop
        self._store = store
        self._history = history
        self._counters = counters
        self._full: set[str] = set()
        """Names of the tiers that had no room for their last put."""
        self._log = EventLog("adapters")

    def operation(self, report: OpReport) -> None:
        """Count one finished operation of a tier."""
        self._counters.l2_operation(
            report.adapter, report.operation, report.seconds, report.moved_bytes, report.outcomes
        )
        if report.operation == "put":
            self._note_room(report)

    def dropped(self, tier: str, key: bytes) -> None:
        """Note that a tier dropped this record to stay below its cap. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._dropped, tier, key)

    def _dropped(self, tier: str, key: bytes) -> None:
        self._store.dropped(tier, [key])
        self._history.dropped(tier, key)

    def _note_room(self, report: OpReport) -> None:
        """Log that a tier is full, or has room again, if that has changed."""
        name = report.adapter
        reason = next((word for word in map(_reason, report.outcomes) if word in FULL_REASONS), "")
        if reason and name not in self._full:
            self._full.add(name)
            self._log.repeated(
                logging.WARNING, f"full {name}", "tier_full", adapter=name, reason=reason,
                meaning="it gets no new chunks until it has room; its records are served",
            )  # fmt: skip
        elif not reason and name in self._full and report.moved_bytes:
            self._full.discard(name)
            self._log.repeated(logging.INFO, f"room {name}", "tier_has_room", adapter=name)


def _reason(word: str) -> str:
    """The reason in the word of an outcome, `status:reason`."""
    return word.partition(":")[2]
