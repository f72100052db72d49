"""Store controller: from chunks that became visible in L1 to puts on the tiers.

    committed, touched ─▶ waiting ─▶ a turn of the loop: each tier's planner ─▶ TierPuts.offer (puts.py) ─▶ the adapter

Invariants
1. A chunk that waits for a put is pinned by a hold.  The bytes pinned this way never exceed the backlog; a
   chunk that would exceed it is skipped and can be evicted.
2. For each tier, every key ends as stored, already there, or skipped; a skip has a reason, which is counted and passed
   to `skipped`.
3. `committed` and `touched` never block and never wait.  No turn of the loop looks at more than `KEYS_PER_TURN`
   keys; the others wait for later turns.

tiers/decisions.py decides whether a chunk is put at all.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.errors import StorageError
from kvstrata.native.core import Pool
from kvstrata.server.cluster.events import TierNews
from kvstrata.server.l2.puts import KEYS_PER_TURN, StoreLimits, TierPuts
from kvstrata.storage.config import StorePolicy
from kvstrata.tiers.decisions import Backlog, Skip
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import Tier, TierState


class StoreController:
    """Puts chunks of L1 to the tiers. All methods belong to the event loop.

    `skipped(key, reason)` is called for every chunk that a tier will not get, with the reason's short word.
    `news`: of each controller.
    """

    def __init__(
        self,
        pool: Pool,
        tiers: TierSet,
        limits: StoreLimits,
        skipped: Callable[[bytes, str], None],
        *,
        news: Sequence[TierNews] = (),
    ) -> None:
        self.limits = limits
        self._pool = pool
        self._puts: dict[str, TierPuts] = {}
        self.wants_touches = False
        """Whether any tier gets chunks because they are used again."""
        """By name of the tier; a tier that is only read has none."""
        self._skipped = skipped
        self._news = news
        self._backlog = Backlog(limits.backlog_bytes)
        self._waiting: collections.deque[tuple[bytes, bool]] = collections.deque()
        self._turn_scheduled = False
        self._takes_up = False
        """Whether the next turn of the loop will queue more of the chunks that the backlog had no room for."""
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._stopping = False
        self._clear_lock = asyncio.Lock()
        tiers.use(self._join)

    # -- from requests and the pool ------------------------------------------------------------------------

    def committed(self, keys: Sequence[bytes]) -> None:
        """Queue chunks that a worker stored and that are visible now."""
        self._take(keys, touched=False)

    def touched(self, keys: Sequence[bytes]) -> None:
        """Queue chunks of L1 that a lookup used again."""
        if self.wants_touches:
            self._take(keys, touched=True)

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Note chunks that were evicted from L1. Chunks that an `on_evict` policy would have put count as skipped."""
        for puts in self._puts.values():
            for key in keys:
                puts.left_l1(key)

    def dropped(self, name: str, keys: Sequence[bytes] | None) -> None:
        """Note that the tier does not have these chunks any more (its cap, a delete, a corrupt copy). None: any."""
        puts = self._puts.get(name)
        if puts is not None and keys is None:
            puts.emptied()
        elif puts is not None and keys is not None:
            puts.planner.gone(keys)
            for news in self._news:
                news.tier_lost(name, keys)

    def found(self, name: str, keys: Sequence[bytes]) -> None:
        """Note that these records were loaded from the tier."""
        if name in self._puts:
            for news in self._news:
                for key in keys:
                    news.tier_got(name, key)

    def _join(self, tier: Tier) -> None:
        """Take in an open tier of the set: it gets chunks from now on, unless it is only read."""
        if not tier.capabilities.takes_puts:
            return
        tier.users["puts"] = puts = self._puts[tier.name] = TierPuts(
            tier,
            pool=self._pool,
            backlog=self._backlog,
            limits=self.limits,
            skipped=self._skipped,
            news=self._news,
            progressed=self._note_progress,
        )
        self.wants_touches |= puts.planner.policy is StorePolicy.SECOND_TOUCH

    # -- the end, and clear --------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Returns when no chunk waits, is in flight or waits for a retry."""
        while not self._is_quiet():
            self._quiet.clear()
            await self._quiet.wait()

    async def stop(self, drain_s: float) -> None:
        """Take no more chunks, give puts under way `drain_s` seconds, then skip the rest. Idempotent."""
        self._stopping = True
        for puts in self._puts.values():
            puts.stopping = True
        try:
            await asyncio.wait_for(self.idle(), drain_s)
        except TimeoutError:
            pass  # the remaining chunks are skipped and counted below
        while self._waiting:
            key, _ = self._waiting.popleft()
            for puts in self._puts.values():
                puts.skip(key, Skip.STOPPING)
        for puts in self._puts.values():
            puts.drop_queued(Skip.STOPPING)
        await asyncio.gather(*(puts.dismiss() for puts in self._puts.values()))

    @property
    def undone(self) -> int:
        """Puts that wait or are under way, and those that were given up because the server stops."""
        return len(self._waiting) + sum(puts.undone for puts in self._puts.values())

    async def clear(self) -> int:
        """Skip the chunks that wait and remove the records of every tier. Returns the number of records.

        Raises StorageError when tiers cannot be cleared; the others are cleared then.
        """
        async with self._clear_lock:
            for puts in self._puts.values():
                puts.drop_queued(Skip.CLEARED)
            self._note_progress()
            removed = 0
            wrong: list[StorageError] = []
            for puts in list(self._puts.values()):
                try:
                    removed += await puts.clear()
                except StorageError as error:
                    wrong.append(error)
        if wrong:
            raise StorageError("; ".join(error.message for error in wrong), field=wrong[0].field)
        return removed

    def stats(self) -> dict[str, Any]:
        """Numbers for status and metrics."""
        return {
            "backlog_bytes": self._backlog.pinned_bytes,
            "backlog_limit_bytes": self._backlog.limit_bytes,
            "adapters": {name: puts.stats() for name, puts in self._puts.items()},
        }

    # -- deciding ------------------------------------------------------------------------------------------

    def _take(self, keys: Sequence[bytes], *, touched: bool) -> None:
        room = self.limits.max_waiting_keys - len(self._waiting)
        for key in keys[room:]:
            for puts in self._puts.values():
                puts.skip(key, Skip.QUEUE_FULL)
        self._waiting.extend((key, touched) for key in keys[:room])
        if not self._turn_scheduled:
            self._turn()

    def _turn(self) -> None:
        """Look at some of the waiting keys, and again in the next turn of the loop if more are left."""
        self._turn_scheduled = False
        for _ in range(min(KEYS_PER_TURN, len(self._waiting))):
            key, touched = self._waiting.popleft()
            for puts in self._puts.values():
                if self._stopping:
                    puts.skip(key, Skip.STOPPING)
                elif puts.planner.touched(key) if touched else puts.planner.committed(key):
                    puts.offer(key)
        if not self._stopping:
            self._clean_ahead()
        if self._waiting:
            self._turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._note_progress()

    def _clean_ahead(self) -> None:
        """Offer the pool's next victims to the tiers whose policy is `on_evict`."""
        eager = [
            puts
            for puts in self._puts.values()
            if puts.planner.policy is StorePolicy.ON_EVICT and puts.tier.state is TierState.ACTIVE
        ]
        if not eager:
            return
        pool = self._pool
        need_bytes = self.limits.evict_ahead.need_bytes(pool.stats()["used_bytes"], pool.extents_bytes)
        if need_bytes:
            for key in pool.victims_preview(need_bytes):
                for puts in eager:
                    if puts.planner.leaving(key):
                        puts.offer(key)

    def _is_quiet(self) -> bool:
        return not self._waiting and not self._takes_up and not any(puts.busy for puts in self._puts.values())

    def _note_progress(self) -> None:
        if self._is_quiet() and not self._stopping:
            for puts in self._puts.values():
                puts.take_up_unpinned()
            # Still quiet: all chunks that were taken up had left L1, so take up more in the next turn of the loop.
            if self._is_quiet() and any(puts.has_unpinned for puts in self._puts.values()):
                self._takes_up = True
                asyncio.get_running_loop().call_soon(self._go_on)
        if self._is_quiet():
            self._quiet.set()

    def _go_on(self) -> None:
        self._takes_up = False
        self._note_progress()
