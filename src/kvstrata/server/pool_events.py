"""Passes the events of the pool on: to explain, and to the cluster's controllers.

Pool.events() ─▶ drain ─┬─▶ news (at once, in order)
                        └─▶ EVENTS_PER_TURN in each turn of the loop ─▶ history, verified
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Sequence

from kvstrata.clock import Clock
from kvstrata.native.core import Pool
from kvstrata.observability.explain import Explainer
from kvstrata.observability.logging import EventLog
from kvstrata.server.cluster.events import TierNews
from kvstrata.types import PoolEvent

EVENTS_PER_TURN = 512
_LEAVES_L1 = frozenset({PoolEvent.EVICTED, PoolEvent.CLEARED, PoolEvent.REMOVED})


class PoolEvents:
    """Reads the events of the pool and passes them on. Belongs to the event loop."""

    def __init__(
        self,
        pool: Pool,
        explainer: Explainer,
        news: Sequence[TierNews],
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._explainer = explainer
        self._news = news
        self._clock = clock
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque()
        self._lost = 0
        self._drained = asyncio.Event()
        """Set at the next `drain`, which replaces it by a new one."""
        self._log = EventLog("instance")
        self.verified: collections.deque[bytes] = collections.deque()
        """Adopted chunks that were verified and not offered to tiers yet; housekeeping takes them."""

    def drain(self) -> None:
        """Read the pool's events since the last call. Called at every heartbeat, and sometimes in between."""
        drained, self._drained = self._drained, asyncio.Event()
        drained.set()
        idle = not self._waiting
        events = self._pool.events()
        if events:  # else none was lost either
            if self._pool.events_lost != self._lost:
                self._lost = self._pool.events_lost
                self._explainer.events_lost()
                for news in self._news:
                    news.pool_events_lost()
            for news in self._news:
                news.pool_events(events)
            self._waiting.extend((kind, key) for kind, key, _ in events)
        if idle and self._waiting:
            self._tell()

    async def next_drain(self) -> None:
        """Wait for the next call of `drain`."""
        await self._drained.wait()

    def _tell(self) -> None:
        """Pass on the oldest events, and the others in later turns of the loop."""
        explainer, now_ms = self._explainer, self._clock.unix_ms()
        for _ in range(min(len(self._waiting), EVENTS_PER_TURN)):
            kind, key = self._waiting.popleft()
            if kind in _LEAVES_L1:
                explainer.left_l1(key, kind, now_ms)
            elif kind == PoolEvent.CORRUPT:
                explainer.corrupt(key, now_ms)
                self._log.repeated(logging.WARNING, "corrupt", "chunk_corrupt", key=key)
            elif kind == PoolEvent.VERIFIED:
                self.verified.append(key)
            elif kind == PoolEvent.INSERTED:
                explainer.inserted(key)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._tell)
