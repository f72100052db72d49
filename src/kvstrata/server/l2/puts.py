"""The puts of one tier: chunks that are pinned and queued, in flight, or waiting for a retry.

    offer ─▶ pin ─▶ queue ─▶ batch ─▶ put ─┬─▶ stored, or already there
                     ▲                     ├─▶ skipped, with a reason
                     └── retry timer ◀─────┘ throttled

Invariants
1. A chunk is pinned from `_pin` to `_end`: by our hold until the put is given to the adapter, then by the adapter's.
   During that time its bytes count in the backlog.
2. A put is given to the adapter once, with its hold.  A retry takes a new hold; a chunk that was evicted meanwhile is
   skipped.
3. Every chunk that is offered ends as stored, already there, or skipped; a skip has a reason, which is counted and
   passed to `skipped`.
4. A batch whose put crashes, by a mistake of ours, ends alone: the rest of its chunks are skipped.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstrata import failpoints
from kvstrata.native.core import Hold, Pool
from kvstrata.server.cluster.events import TierNews
from kvstrata.storage.base import Presence, PutItem, PutOutcome, PutStatus
from kvstrata.tiers.decisions import Backlog, EvictAhead, PutPlanner, RetryRule, Skip
from kvstrata.tiers.tier import Tier

log = logging.getLogger(__name__)

KEYS_PER_TURN = 64
"""Holds taken in one turn of the loop (about a microsecond each)."""
UNPINNED_KEYS = 65_536
"""Keys per tier that are kept for a put once the backlog is empty."""

_THERE = (PutStatus.STORED, PutStatus.EXISTS)


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one instance's puts."""

    backlog_bytes: int
    """L1 bytes that may be pinned for puts."""
    batch_bytes: int = 64 << 20
    """Maximum number of bytes of a batch; never more than a quarter of `backlog_bytes`."""
    batches_in_flight: int = 2
    """Batches that one tier puts at a time."""
    max_waiting_keys: int = 65_536
    """Maximum number of committed keys that wait for a turn of the loop."""
    retry: RetryRule = RetryRule()
    evict_ahead: EvictAhead = EvictAhead()


class Pending(NamedTuple):
    """A chunk pinned for one put."""

    key: bytes
    hold: Hold
    length_bytes: int
    attempts: int


class TierPuts:
    """The puts of one tier. Belongs to the event loop."""

    def __init__(
        self,
        tier: Tier,
        *,
        pool: Pool,
        backlog: Backlog,
        limits: StoreLimits,
        skipped: Callable[[bytes, str], None],
        news: Sequence[TierNews],
        progressed: Callable[[], None],
    ) -> None:
        """All tiers share `backlog`. `progressed` is called whenever a batch has ended."""
        self.tier = tier
        self.name = tier.name
        self.planner = PutPlanner(tier.config.policy)
        self.stopping = False
        """Whether a throttled put is skipped instead of tried again."""
        self._pool = pool
        self._backlog = backlog
        self._limits = limits
        self._batch_bytes = min(limits.batch_bytes, limits.backlog_bytes // 4)
        self._skipped = skipped
        self._news = news
        self._progressed = progressed
        self._queue: collections.deque[Pending] = collections.deque()
        self._queued: set[bytes] = set()
        """Keys in the queue, in flight or waiting for a retry."""
        self._retrying: dict[bytes, tuple[asyncio.TimerHandle, Pending]] = {}
        self._unpinned: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        """Keys skipped because the backlog was full. Once the backlog is empty, those still in L1 are put after all."""
        self._batches: dict[asyncio.Task[None], list[Pending]] = {}
        """The chunks of each batch in flight that have not ended."""
        self._begins = False
        """Whether batches will be begun in the next turn of the loop."""
        self._not_clearing = asyncio.Event()
        """Set except while the tier is being cleared."""
        self._not_clearing.set()
        self._n_clears = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._stored_bytes = 0

    @property
    def _in_flight(self) -> int:
        return sum(map(len, self._batches.values()))

    @property
    def busy(self) -> bool:
        """Whether anything waits for the tier or is in flight to it."""
        return bool(self._queue or self._retrying or self._in_flight)

    @property
    def undone(self) -> int:
        """Chunks that wait for the tier or are in flight to it, and those given up because the server stops."""
        waiting = len(self._queue) + len(self._retrying)
        return waiting + self._in_flight + self._counts[f"skipped:{Skip.STOPPING}"]

    @property
    def has_unpinned(self) -> bool:
        """Whether chunks wait because the backlog had no room for them."""
        return bool(self._unpinned)

    def stats(self) -> dict[str, Any]:
        """Numbers for status and metrics."""
        return {
            "policy": str(self.planner.policy),
            "queued": len(self._queue),
            "retrying": len(self._retrying),
            "in_flight": self._in_flight,
            "stored_bytes": self._stored_bytes,
            "outcomes": dict(self._counts),
        }

    # -- offers --------------------------------------------------------------------------------------------

    def offer(self, key: bytes) -> None:
        """Pin a chunk and queue it, or skip it."""
        if key in self._queued:
            return
        pinned = self._pin(key)
        if isinstance(pinned, Pending):
            self._enqueue(pinned)
            return
        if pinned is Skip.BACKLOG:
            self._unpinned[key] = None
            if len(self._unpinned) > UNPINNED_KEYS:
                self._unpinned.popitem(last=False)
        self.skip(key, pinned)

    def skip(self, key: bytes, reason: str) -> None:
        """Count and report that the tier does not get this chunk."""
        self._counts[f"skipped:{reason}"] += 1
        self._skipped(key, str(reason))

    def left_l1(self, key: bytes) -> None:
        """Note that the chunk was evicted; it counts as skipped if the policy would have put it before its eviction."""
        if self.planner.left(key) and key not in self._queued:
            self.skip(key, Skip.EVICTED)

    def take_up_unpinned(self) -> None:
        """Queue chunks that the backlog had no room for, now that the backlog is empty."""
        for _ in range(min(KEYS_PER_TURN, len(self._unpinned))):
            key, _ = self._unpinned.popitem(last=False)
            pinned = self._pin(key)
            if pinned is Skip.BACKLOG:
                self._unpinned[key] = None
                self._unpinned.move_to_end(key, last=False)
                break
            if isinstance(pinned, Pending):
                self._counts["taken_up"] += 1
                self._enqueue(pinned)

    def drop_queued(self, reason: Skip) -> None:
        """Skip every chunk that waits. Puts in flight go on."""
        for timer, _ in self._retrying.values():
            timer.cancel()
        waiting = [*self._queue, *(again for _, again in self._retrying.values())]
        self._queue.clear()
        self._retrying.clear()
        self._unpinned.clear()
        for pending in waiting:
            pending.hold.drop()
            self._end(pending)
            self.skip(pending.key, reason)

    def _pin(self, key: bytes, attempts: int = 0) -> Pending | Skip:
        """Hold and count a chunk for one put, which ends in `_end`; or return why it cannot be put."""
        hold, backlog = self._pool.hold(key), self._backlog
        if hold is None:
            return Skip.EVICTED
        if not backlog.admit(key, hold.length):
            hold.drop()
            return Skip.BACKLOG
        return Pending(key, hold, hold.length, attempts)

    def _enqueue(self, pending: Pending) -> None:
        self._unpinned.pop(pending.key, None)
        self._queued.add(pending.key)
        self._queue.append(pending)
        self._begin_soon()

    # -- batches -------------------------------------------------------------------------------------------

    def _begin_soon(self) -> None:
        if not self._begins:
            self._begins = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Put batches of what is queued, as many at a time as the limit allows."""
        self._begins = False
        while self._queue and len(self._batches) < self._limits.batches_in_flight:
            batch = self._take_batch()
            task = asyncio.create_task(self._put_batch(batch), name=f"put-{self.name}")
            self._batches[task] = batch
            task.add_done_callback(self._batch_ended)

    def _batch_ended(self, task: asyncio.Task[None]) -> None:
        batch = self._batches.pop(task)
        reason = Skip.STOPPING
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s crashed", task.get_name(), exc_info=error)
            traceback.clear_frames(error.__traceback__)  # they refer to holds
            self._counts["crashed"] += 1
            reason = Skip.CRASHED
        for pending in batch:
            if pending.key in self._queued and pending.key not in self._retrying:
                self._end(pending)
                self.skip(pending.key, reason)
        self._begin()
        self._progressed()

    async def dismiss(self) -> None:
        """End the batches in flight. A put that the adapter has not answered counts as skipped."""
        tasks = list(self._batches)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take_batch(self) -> list[Pending]:
        """Take chunks from the queue, which has some."""
        batch = [self._queue.popleft()]
        batch_bytes = batch[0].length_bytes
        while self._queue and len(batch) < self.tier.capabilities.max_batch:
            batch_bytes += self._queue[0].length_bytes
            if batch_bytes > self._batch_bytes:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _put_batch(self, batch: list[Pending]) -> None:
        """Put one batch and count its outcomes. Afterwards the batch is empty, and nothing here refers to its holds."""
        outcomes: list[PutOutcome] = []
        n_clears = self._n_clears
        failpoints.hit("put.started")
        try:
            outcomes = await self.tier.put([PutItem(p.key, p.hold) for p in batch])
            failpoints.hit("put.stored")
            if self._n_clears != n_clears or not self._not_clearing.is_set():
                outcomes = await self._cleared_too(batch, outcomes)
        finally:  # even when cancelled: the adapter ends the holds, and this ends the counting
            outcomes = outcomes or [PutOutcome(PutStatus.FAILED, Skip.STOPPING)] * len(batch)
            for status, reason in outcomes:
                self._ended(batch[0], status, reason)
                del batch[0]
            self._progressed()

    def _ended(self, pending: Pending, status: PutStatus, reason: str) -> None:
        """Count the outcome of one put, or prepare its retry."""
        self._end(pending)
        if status in _THERE:
            self._counts[status.name.lower()] += 1
            self._stored_bytes += pending.length_bytes if status is PutStatus.STORED else 0
            self.planner.stored(pending.key)
            for news in self._news:
                news.tier_got(self.name, pending.key)
            return
        attempts = pending.attempts + 1
        delay_s = self._limits.retry.delay_s(attempts) if status is PutStatus.THROTTLED else None
        if delay_s is None or self.stopping:
            self.skip(pending.key, reason or status.name.lower())
            return
        self._counts["throttled"] += 1
        again = self._pin(pending.key, attempts)
        if isinstance(again, Skip):
            self.skip(pending.key, again)
        else:
            self._queued.add(pending.key)
            timer = asyncio.get_running_loop().call_later(delay_s, self._retry, pending.key)
            self._retrying[pending.key] = (timer, again)

    def _retry(self, key: bytes) -> None:
        _, pending = self._retrying.pop(key)
        self._queue.append(pending)
        self._begin_soon()

    def _end(self, pending: Pending) -> None:
        """Stop counting the pin of a put that has ended."""
        self._backlog.release(pending.key)
        self._queued.discard(pending.key)

    # -- clear ---------------------------------------------------------------------------------------------

    async def clear(self) -> int:
        """Remove every record. Returns how many. Raises StorageError; then all plans stay as they were.

        A put that is under way meanwhile has its records deleted when it ends (`_cleared_too`).
        """
        self._not_clearing.clear()
        try:
            removed = await self.tier.clear()
            self.emptied()
        finally:
            self._n_clears += 1
            self._not_clearing.set()
        return removed

    def emptied(self) -> None:
        """Note that the tier has no records any more."""
        self.planner.forget()
        for news in self._news:
            news.tier_emptied(self.name)

    async def _cleared_too(self, batch: list[Pending], outcomes: list[PutOutcome]) -> list[PutOutcome]:
        """Delete the records of a batch, which were cleared meanwhile. Returns the corrected outcomes.

        Only the adapter knows whether a put or the clear came first. A record that cannot be deleted counts as stored.
        """
        await self._not_clearing.wait()
        keys = [pending.key for pending in batch]
        await self.tier.delete(keys)
        gone = [
            key
            for key, found in zip(keys, await self.tier.exists(keys), strict=True)
            if found.presence is Presence.ABSENT
        ]
        self.planner.gone(gone)
        for news in self._news:
            news.tier_lost(self.name, gone)
        return [
            PutOutcome(PutStatus.FAILED, Skip.CLEARED)
            if outcome.status in _THERE and key in gone
            else outcome
            for key, outcome in zip(keys, outcomes, strict=True)
        ]
