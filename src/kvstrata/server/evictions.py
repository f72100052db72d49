"""One line of the log for all evictions from L1 in a minute."""

from __future__ import annotations

import collections

from kvstrata.native.pool import Pool
from kvstrata.observability.logging import EventLog

SUMMARY_S = 60.0


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
