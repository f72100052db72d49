"""The puts of one tier: chunks that are pinned and queued, in flight, or waiting for a retry.

    offer ─▶ pin ─▶ queue ─▶ batch ─▶ put ─┬─▶ stored, or already there
                     ▲                     ├─▶ skipped, with a reason
                     └── retry timer ◀─────┘ throttled

Invariants
1. A chunk is pinned from `_pin` to `_end`: by our hold until the put is given to the adapter, then by the adapter's.
   During that time its bytes count in the backlog and for its tenant.
2. A put is given to the adapter once, with its hold.  A retry takes a new hold; a chunk that was evicted meanwhile is
   skipped.
3. Every chunk that is offered ends as stored, already there, or skipped; a skip has a reason, which is counted and
   passed to `skipped`.
4. A worker that crashes, by a mistake of ours, skips the rest of its batch and is replaced after a pause, which grows
   while the crashes go on (Pauses).  Until then the tier counts as degraded.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstrata import failpoints
from kvstrata.errors import StorageError
from kvstrata.native.pool import Hold, Pool
from kvstrata.policy.quotas import TenantLedger
from kvstrata.policy.store import Backlog, EvictAhead, PutPlanner, RetryRule, Skip
from kvstrata.server.l2.news import News
from kvstrata.server.l2.record_roots import root_of
from kvstrata.server.l2.tiers import Tier
from kvstrata.server.l2.trim import Trimmer
from kvstrata.storage.base import Presence, PutItem, PutOutcome, PutStatus, log_broken_contract
from kvstrata.storage.host.pauses import MAX_PAUSE_S, Pauses

log = logging.getLogger(__name__)

KEYS_PER_TURN = 64
"""Holds taken in one turn of the loop (about a microsecond each)."""
SWEEP_KEYS = 64
"""Records whose heads are read at a time, to find those of one tenant."""
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
    tenant: int
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
        quotas: Mapping[int, int],
        skipped: Callable[[bytes, str], None],
        trimmed: Callable[[str, Sequence[bytes]], None],
        news: News,
        progressed: Callable[[], None],
    ) -> None:
        """All tiers share `backlog`. `progressed` is called whenever a batch or a deletion has ended."""
        self.tier = tier
        self.name = tier.name
        self.planner = PutPlanner(tier.configured.policy)
        self.ledger = TenantLedger(quotas)
        self.stopping = False
        """Whether a throttled put is skipped instead of tried again."""
        self._pool = pool
        self._backlog = backlog
        self._limits = limits
        self._batch_bytes = min(limits.batch_bytes, limits.backlog_bytes // 4)
        self._skipped = skipped
        self._news = news
        self._progressed = progressed
        self._trimmer = Trimmer(
            tier, self.ledger, self.planner, news, trimmed=trimmed, resume=self._resume, idle=progressed
        )
        self._queue: collections.deque[Pending] = collections.deque()
        self._queued: set[bytes] = set()
        """Keys in the queue, in flight or waiting for a retry."""
        self._retrying: dict[bytes, tuple[asyncio.TimerHandle, Pending]] = {}
        self._unpinned: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        """Keys skipped because the backlog was full. Once the backlog is empty, those still in L1 are put after all."""
        self._taken: list[list[Pending]] = [[] for _ in range(limits.batches_in_flight)]
        """For each worker, the chunks of its batch that have not ended."""
        self._not_clearing = asyncio.Event()
        """Set except while the tier is being cleared."""
        self._not_clearing.set()
        self._clearing: int | None = None
        """The tenant whose records are being removed meanwhile; None: all records."""
        self._clears: collections.Counter[int | None] = collections.Counter()
        """How often the tier was cleared, of one tenant's records or (None) of all."""
        self._work_there = asyncio.Event()
        self._workers: dict[int, asyncio.Task[None]] = {}
        self._crashed: dict[int, asyncio.TimerHandle] = {}
        """For each worker that has crashed, the timer that starts the next one."""
        self._dismissed = False
        self._pauses = [Pauses(MAX_PAUSE_S, 0.0) for _ in self._taken]
        self._counts: collections.Counter[str] = collections.Counter()
        self._stored_bytes = 0

    @property
    def _in_flight(self) -> int:
        return sum(map(len, self._taken))

    @property
    def busy(self) -> bool:
        """Whether anything waits for the tier or is in flight to it."""
        return bool(self._queue or self._retrying or self._in_flight or self._trimmer)

    @property
    def undone(self) -> int:
        """Chunks that wait for the tier or are in flight to it, and those given up because the server stops."""
        waiting = len(self._queue) + len(self._retrying) + len(self._trimmer)
        return waiting + self._in_flight + self._counts[f"skipped:{Skip.STOPPING}"]

    @property
    def has_unpinned(self) -> bool:
        """Whether chunks wait because the backlog had no room for them."""
        return bool(self._unpinned)

    def stats(self) -> dict[str, Any]:
        """Numbers for status and metrics."""
        trimmed = self._trimmer.n_trimmed
        return {
            "policy": str(self.planner.policy),
            "queued": len(self._queue),
            "retrying": len(self._retrying),
            "in_flight": self._in_flight,
            "stored_bytes": self._stored_bytes,
            "workers": "degraded" if self._crashed else "well",
            "outcomes": {**self._counts, **({"trimmed": trimmed} if trimmed else {})},
        }

    # -- offers --------------------------------------------------------------------------------------------

    def offer(self, key: bytes) -> None:
        """Pin a chunk and queue it, let it wait for room within its tenant's quota, or skip it."""
        if key in self._queued:
            return
        pinned = self._pin(key)
        if isinstance(pinned, Pending):
            self._enqueue(pinned)
        elif pinned is Skip.BACKLOG:
            self._unpinned[key] = None
            if len(self._unpinned) > UNPINNED_KEYS:
                self._unpinned.popitem(last=False)
            self.skip(key, pinned)
        elif pinned is not Skip.QUOTA or not self._make_room(key):
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

    def drop_queued(self, reason: Skip, tenant: int | None = None) -> None:
        """Skip every chunk that waits (of one tenant). Puts in flight go on."""
        retrying = [again for _, again in self._retrying.values()]
        for pending in [one for one in (*self._queue, *retrying) if tenant in (None, one.tenant)]:
            if pending.key in self._retrying:
                self._retrying.pop(pending.key)[0].cancel()
            else:
                self._queue.remove(pending)
            pending.hold.drop()
            self._end(pending)
            self.skip(pending.key, reason)
        for key in self._trimmer.give_up(tenant):
            self.skip(key, reason)
        self._unpinned.clear()  # a second chance: nobody waits for these, and their tenants are not known here

    def _pin(self, key: bytes, attempts: int = 0) -> Pending | Skip:
        """Hold and count a chunk for one put, which ends in `_end`; or return why it cannot be put."""
        hold, backlog = self._pool.hold(key), self._backlog
        if hold is None:
            return Skip.EVICTED
        if not backlog.admit(key, hold.length):
            hold.drop()
            return Skip.BACKLOG
        if not self.ledger.admit(hold.tenant, key, hold.length):
            backlog.release(key)
            hold.drop()
            return Skip.QUOTA
        return Pending(key, hold, hold.length, hold.tenant, attempts)

    def _enqueue(self, pending: Pending) -> None:
        self._unpinned.pop(pending.key, None)
        self._queued.add(pending.key)
        self._queue.append(pending)
        self._work_there.set()

    def _make_room(self, key: bytes) -> bool:
        """Begin to make room for a chunk within its tenant's quota. False if that cannot succeed."""
        if key in self._trimmer:
            return True
        hold = self._pool.hold(key)
        if hold is None:
            return False
        tenant, length_bytes = hold.tenant, hold.length
        hold.drop()
        return self._trimmer.make_room(key, tenant, length_bytes)

    def _resume(self, key: bytes) -> None:
        """Queue or skip a chunk for which the trimmer has made as much room as it could."""
        pinned = self._pin(key)
        if isinstance(pinned, Skip):
            self.skip(key, pinned)
        else:
            self._enqueue(pinned)

    # -- workers -------------------------------------------------------------------------------------------

    def employ(self) -> None:
        """Start the workers."""
        for number in range(len(self._taken)):
            self._start_worker(number)

    def _start_worker(self, number: int) -> None:
        self._crashed.pop(number, None)
        worker = asyncio.create_task(self._work(number), name=f"put-{self.name}-{number}")
        worker.add_done_callback(functools.partial(self._worker_ended, number))
        self._workers[number] = worker
        self._pauses[number].begun(asyncio.get_running_loop().time())

    def _worker_ended(self, number: int, worker: asyncio.Task[None]) -> None:
        """Replace a worker that has crashed, after a pause."""
        if worker.cancelled() or (error := worker.exception()) is None:
            return
        loop = asyncio.get_running_loop()
        pause_s = self._pauses[number].next_s(loop.time())
        log.error(
            "%s crashed; its tier gets puts from another worker in %.1f s",
            worker.get_name(),
            pause_s,
            exc_info=error,
        )
        traceback.clear_frames(error.__traceback__)  # they refer to holds
        self._counts["worker_crashed"] += 1
        if not self._dismissed:
            self._crashed[number] = loop.call_later(pause_s, self._start_worker, number)
        taken, self._taken[number] = self._taken[number], []
        for pending in taken:
            if pending.key in self._queued and pending.key not in self._retrying:
                self._end(pending)
                self.skip(pending.key, Skip.CRASHED)
        self._progressed()

    async def dismiss(self) -> None:
        """End the workers. A put that the adapter has not answered counts as skipped."""
        self._dismissed = True
        trims = self._trimmer.cancel()
        for timer in self._crashed.values():
            timer.cancel()
        for task in self._workers.values():
            task.cancel()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)
        for ended in await asyncio.gather(*trims, return_exceptions=True):
            if isinstance(ended, Exception):
                log.error("a task that makes room for puts crashed", exc_info=ended)
        self._workers.clear()

    async def _work(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._work_there.clear()
                await self._work_there.wait()
            self._take_batch(self._taken[number])
            await self._put_batch(self._taken[number])
            self._pauses[number].answered_well(loop.time())

    def _take_batch(self, batch: list[Pending]) -> None:
        """Move chunks from the queue, which has some, to an empty batch."""
        batch.append(self._queue.popleft())
        batch_bytes = batch[0].length_bytes
        while self._queue and len(batch) < self.tier.adapter.capabilities.max_batch:
            batch_bytes += self._queue[0].length_bytes
            if batch_bytes > self._batch_bytes:
                break
            batch.append(self._queue.popleft())

    async def _put_batch(self, batch: list[Pending]) -> None:
        """Put one batch and count its outcomes. Afterwards the batch is empty, and nothing here refers to its holds."""
        outcomes: list[PutOutcome] = []
        clears = [self._cleared(pending.tenant) for pending in batch]
        failpoints.hit("put.started")
        try:
            outcomes = await self.tier.adapter.put([PutItem(p.key, p.hold) for p in batch])
            failpoints.hit("put.stored")
            if len(outcomes) != len(batch):
                raise ValueError(f"{len(batch)} items were answered with {len(outcomes)} outcomes")
            late = [
                i
                for i, pending in enumerate(batch)
                if self._cleared(pending.tenant) != clears[i] or self._is_clearing(pending.tenant)
            ]
            if late:
                outcomes = await self._cleared_too(batch, late, outcomes)
        except Exception as error:  # the plugin boundary: an adapter that raises broke its contract
            log_broken_contract(self.name, "put", error)
            outcomes = [PutOutcome(PutStatus.FAILED, "adapter_error")] * len(batch)
        finally:  # even when cancelled: the adapter ends the holds, and this ends the counting
            outcomes = outcomes or [PutOutcome(PutStatus.FAILED, Skip.STOPPING)] * len(batch)
            for status, reason in outcomes:
                self._ended(batch[0], status, reason)
                del batch[0]
            self._progressed()

    def _ended(self, pending: Pending, status: PutStatus, reason: str) -> None:
        """Count the outcome of one put, or prepare its retry."""
        there = status in _THERE
        self._end(pending, there=there)
        if there:
            self._counts[status.name.lower()] += 1
            self._stored_bytes += pending.length_bytes if status is PutStatus.STORED else 0
            self.planner.stored(pending.key)
            self._news.tier_got(self.name, pending.key)
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
        self._work_there.set()

    def _end(self, pending: Pending, *, there: bool = False) -> None:
        """Stop counting the pin of a put that has ended; if the record is `there`, its tenant is charged for it."""
        self._backlog.release(pending.key)
        self.ledger.ended(pending.tenant, pending.key, pending.length_bytes, there)
        self._queued.discard(pending.key)

    # -- clear ---------------------------------------------------------------------------------------------

    async def clear(self) -> int:
        """Remove every record. Returns how many. Raises StorageError; then all counts and plans stay as they were.

        A put that is under way meanwhile has its records deleted when it ends (`_cleared_too`).
        """
        with self._in_clear(None):
            removed = await self.tier.adapter.clear()
            self.emptied()
        return removed

    async def clear_tenant(self, tenant: int, is_theirs: Callable[[bytes], bool]) -> int:
        """Remove the records for whose identity roots `is_theirs` is true (b"": the root cannot be read).

        Returns how many.  Raises StorageError if the tier cannot list or delete its records; those that it has deleted
        by then are gone.  Puts of the tenant that are under way are treated as in `clear`.
        """
        adapter = self.tier.adapter
        can = adapter.capabilities
        if not (can.can_delete and can.has_heads):
            lacks = "tell whose its records are" if can.can_delete else "delete single records"
            raise StorageError(f"{self.name}: this kind of storage cannot {lacks}", field=self.name)
        removed = left = 0
        with self._in_clear(tenant):
            async for page in adapter.walk():
                for begin in range(0, len(page), SWEEP_KEYS):
                    keys = list(page[begin : begin + SWEEP_KEYS])
                    roots = map(root_of, keys, await adapter.heads(keys))
                    if theirs := [key for key, root in zip(keys, roots, strict=True) if is_theirs(root)]:
                        gone = await self._trimmer.delete(theirs)
                        failpoints.hit("sweep.deleted")
                        removed, left = removed + len(gone), left + len(theirs) - len(gone)
        if left:
            raise StorageError(
                f"{self.name}: {removed} records were deleted, {left} could not be; try again",
                field=self.name,
            )
        return removed

    @contextlib.contextmanager
    def _in_clear(self, tenant: int | None) -> Iterator[None]:
        """Puts that are under way at any time in the block end after it."""
        self._clearing = tenant
        self._not_clearing.clear()
        try:
            yield
        finally:
            self._clears[tenant] += 1
            self._not_clearing.set()

    def _cleared(self, tenant: int) -> int:
        """How often the tenant's records were cleared."""
        return self._clears[None] + self._clears[tenant]

    def _is_clearing(self, tenant: int) -> bool:
        return not self._not_clearing.is_set() and self._clearing in (None, tenant)

    def emptied(self) -> None:
        """Note that the tier has no records any more."""
        self.planner.forget()
        self.ledger.forget()
        self._news.tier_emptied(self.name)

    async def _cleared_too(
        self, batch: list[Pending], late: list[int], outcomes: list[PutOutcome]
    ) -> list[PutOutcome]:
        """Delete the records of a batch whose places are `late`: they were cleared meanwhile. Returns the corrected
        outcomes.

        Only the adapter knows whether a put or the clear came first. A record that cannot be deleted counts as stored.
        """
        await self._not_clearing.wait()
        adapter = self.tier.adapter
        keys = [batch[i].key for i in late]
        found = await adapter.exists(keys)
        there = {key for key, one in zip(keys, found, strict=True) if one.presence is not Presence.ABSENT}
        if there and adapter.capabilities.can_delete:
            there -= await self._trimmer.delete(sorted(there))
        corrected = list(outcomes)
        for i in late:
            if outcomes[i].status in _THERE and batch[i].key not in there:
                corrected[i] = PutOutcome(PutStatus.FAILED, Skip.CLEARED)
        return corrected
