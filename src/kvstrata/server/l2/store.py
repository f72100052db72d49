"""Store controller: from chunks that became visible in L1 to puts on the adapters.

Invariants
1. A chunk that waits for a put is pinned by a hold; the bytes so pinned never exceed `backlog_bytes`, and
   what would exceed it is skipped and evictable.
2. Every key ends, per adapter, as stored, there already, or skipped with a reason that is counted and told to
   `skipped`.
3. A put is given to the adapter once with its hold; from then on the hold is the medium's.  A retry takes a
   new one, and a chunk that was evicted between is skipped.
4. `committed` and `touched` never block and never wait.  No turn of the loop looks at more than `KEYS_PER_TURN`
   keys; the rest waits for later turns.

5. What waits for room within its tenant's quota (`making_room`) holds nothing, and is then put or skipped.
6. An adapter gets what its policy chooses while it is active; what waited when it began to drain is still put.
   After `leave` nothing here refers to it.

Whether a chunk is put at all is decided in policy/store.py; which adapters there are, in server/l2/tiers.py.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from kvstrata import failpoints
from kvstrata.policy.quotas import TenantLedger
from kvstrata.policy.store import Backlog, EvictAhead, PutPlanner, RetryRule, Skip, StorePolicy
from kvstrata.storage.base import Presence, PutItem, PutOutcome, PutStatus, log_broken_contract

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold, Pool
    from kvstrata.server.l2.tiers import AdapterSet, Member

log = logging.getLogger(__name__)

KEYS_PER_TURN = 64
"""Holds taken in one turn of the loop (about a microsecond each)."""
TRIM_KEYS = 64
"""Records of a tenant deleted at a time."""
MAKING_ROOM_KEYS = 1024
"""Chunks per adapter that wait until their tenant has room there."""


_THERE = (PutStatus.STORED, PutStatus.EXISTS)


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one instance's puts."""

    backlog_bytes: int
    """L1 bytes that may be pinned for puts."""
    batch_bytes: int = 64 << 20
    """At most; never more than a quarter of `backlog_bytes`."""
    batches_in_flight: int = 2
    """Batches one adapter gets at a time."""
    max_waiting_keys: int = 65_536
    """Keys committed but not looked at yet."""
    retry: RetryRule = RetryRule()
    evict_ahead: EvictAhead = EvictAhead()


class _Pending(NamedTuple):
    key: bytes
    hold: Hold
    length_bytes: int
    tenant: int
    attempts: int


UNPINNED_KEYS = 65_536
"""Keys per adapter that are remembered for a put after the backlog has emptied."""


class _Puts:
    """What one adapter still has to get."""

    def __init__(self, member: Member, quotas: Mapping[int, int]) -> None:
        self.member = member
        self.ledger = TenantLedger(quotas)
        self.making_room: collections.OrderedDict[bytes, tuple[int, int]] = collections.OrderedDict()
        """Chunks (tenant, length) for which older ones of their tenant are being deleted."""
        self.trimming: asyncio.Task[None] | None = None
        self.name = member.name
        self.adapter = member.adapter
        self.planner = PutPlanner(member.policy)
        self.queue: collections.deque[_Pending] = collections.deque()
        self.queued: set[bytes] = set()
        """Keys in `queue`, in flight or waiting for a retry."""
        self.retrying: dict[bytes, tuple[asyncio.TimerHandle, _Pending]] = {}
        self.unpinned: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        """Skipped because the backlog was full: put after all once it is empty, if they are in L1 still."""
        self.in_flight = 0
        self.not_clearing = asyncio.Event()
        """Set except while the adapter is being cleared."""
        self.not_clearing.set()
        self.clears = 0
        """How often it was."""
        self.work_there = asyncio.Event()
        self.quiet = asyncio.Event()
        """Set whenever it has ceased to be busy."""
        self.workers: list[asyncio.Task[None]] = []
        self.cut_short = Skip.STOPPING
        """Why a put ended of which nobody waits for the outcome any more."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.stored_bytes = 0

    def busy(self) -> bool:
        return bool(self.queue or self.retrying or self.in_flight or self.making_room)


class PlacementWatcher(Protocol):
    """Who wants to know what adapters have; all on the event loop, at once."""

    def put_there(self, adapter: str, key: bytes) -> None:
        """The adapter has this chunk."""

    def gone_there(self, adapter: str, keys: Sequence[bytes]) -> None:
        """It has these no more."""

    def cleared_there(self, adapter: str) -> None:
        """It has none."""


class StoreController:
    """See the module. All methods belong to the event loop.

    `skipped(key, reason)` hears of every chunk that an adapter will not get, with the reason's short word.
    `quotas` are bytes by a tenant's number, for each adapter by itself; `trimmed(adapter, keys)` hears of records that
    were deleted because their tenant was at its quota.
    """

    def __init__(
        self,
        pool: Pool,
        adapters: AdapterSet,
        limits: StoreLimits,
        skipped: Callable[[bytes, str], None],
        *,
        quotas: Mapping[int, int] | None = None,
        trimmed: Callable[[str, Sequence[bytes]], None] = lambda name, keys: None,
    ) -> None:
        self.limits = limits
        self._pool = pool
        self._adapters = adapters
        self._quotas = quotas or {}
        self._puts: dict[str, _Puts] = {}
        """Of the members that take puts; a medium that is only read has none."""
        self._skipped = skipped
        self._trimmed = trimmed
        self.watcher: PlacementWatcher | None = None
        """Hears which adapter has which chunk, as far as this controller knows."""
        self._backlog = Backlog(limits.backlog_bytes)
        self._batch_bytes = min(limits.batch_bytes, limits.backlog_bytes // 4)
        self._waiting: collections.deque[tuple[bytes, bool]] = collections.deque()
        self._turn_scheduled = False
        self._takes_up = False
        """A turn is scheduled that goes on to take up what the backlog had no room for."""
        self._started = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._stopping = False
        self._clear_lock = asyncio.Lock()
        for member in adapters:
            self.join(member)

    # -- from the engine -----------------------------------------------------------------------------------

    def committed(self, keys: Sequence[bytes]) -> None:
        """Chunks that a worker stored and that are visible now."""
        self._take(keys, touched=False)

    def touched(self, keys: Sequence[bytes]) -> None:
        """Chunks in L1 that a lookup used again."""
        if self.wants_touches:
            self._take(keys, touched=True)

    @property
    def wants_touches(self) -> bool:
        """Whether some adapter gets chunks because they are used."""
        return any(puts.planner.policy is StorePolicy.SECOND_TOUCH for puts in self._puts.values())

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Chunks that left L1: those that `on_evict` meant to put first are counted as skipped."""
        for puts in self._puts.values():
            reason = Skip.EVICTED if puts.member.takes_puts else Skip.DRAINING
            for key in keys:
                if puts.planner.left(key) and key not in puts.queued:
                    self._skip(puts, key, reason)

    def dropped(self, name: str, keys: Sequence[bytes]) -> None:
        """Chunks that the adapter `name` does not have any more (its cap, a delete, a corrupt copy)."""
        puts = self._puts.get(name)
        if puts is not None:
            puts.planner.gone(keys)
            puts.ledger.gone(keys)
            if self.watcher is not None:
                self.watcher.gone_there(name, keys)

    def found(self, name: str, tenant: int, records: Sequence[tuple[bytes, int]]) -> None:
        """Records (key, bytes) of a tenant that were loaded from the adapter `name`."""
        puts = self._puts.get(name)
        if puts is not None:
            for key, length_bytes in records:
                puts.ledger.found(tenant, key, length_bytes)
                if self.watcher is not None:
                    self.watcher.put_there(name, key)

    # -- adapters come and go ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to put. Called once, on the running loop."""
        self._started = True
        for puts in self._puts.values():
            self._employ(puts)

    def join(self, member: Member) -> None:
        """A member of the set, open: it gets chunks from now on, unless it is only read."""
        if not member.adapter.capabilities.takes_puts:
            return
        puts = self._puts[member.name] = _Puts(member, self._quotas)
        if self._started:
            self._employ(puts)

    def draining(self, name: str) -> None:
        """The member is not active any more: what the backlog had no room for will not be put there."""
        if (puts := self._puts.get(name)) is not None:
            puts.unpinned.clear()

    async def idle_of(self, name: str) -> None:
        """Returns when nothing waits for this member or is in flight to it."""
        puts = self._puts.get(name)
        while puts is not None and (self._waiting or puts.busy()):
            puts.quiet.clear()
            await puts.quiet.wait()

    async def leave(self, name: str) -> int:
        """Forget a member that is not active; returns how many chunks it did not get though they waited for it.

        A put that the adapter has not answered ends as skipped here, and its hold when the medium lets go.
        """
        puts = self._puts.pop(name, None)
        if puts is None:
            return 0
        puts.cut_short = Skip.REMOVED
        n_left = len(puts.queued) + len(puts.making_room)
        self._drop_queued(puts, Skip.REMOVED)
        await self._dismiss(puts)
        self._note_progress()
        return n_left

    def offer(self, name: str, keys: Sequence[bytes]) -> None:
        """Give a member chunks that are in L1, whatever its policy; few at a time (KEYS_PER_TURN)."""
        if (puts := self._puts.get(name)) is not None:
            for key in keys:
                self._offer(puts, key)
        self._note_progress()

    def _employ(self, puts: _Puts) -> None:
        for number in range(self.limits.batches_in_flight):
            puts.workers.append(asyncio.create_task(self._work(puts), name=f"put-{puts.name}-{number}"))

    async def _dismiss(self, puts: _Puts) -> None:
        tasks = [*puts.workers, *([puts.trimming] if puts.trimming is not None else [])]
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                log.error("a put worker crashed", exc_info=ended)
        puts.workers.clear()
        puts.trimming = None

    # -- the end, and clear --------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Returns when nothing waits, is in flight or is to be tried again."""
        while not self._is_quiet():
            self._quiet.clear()
            await self._quiet.wait()

    async def stop(self, drain_s: float) -> None:
        """Take nothing more; give what is under way `drain_s` seconds, then skip the rest. Idempotent."""
        self._stopping = True
        if self._started:
            try:
                await asyncio.wait_for(self.idle(), drain_s)
            except TimeoutError:
                pass  # what is left is skipped and counted below
        while self._waiting:
            key, _ = self._waiting.popleft()
            for puts in self._puts.values():
                self._skip(puts, key, Skip.STOPPING)
        for puts in self._puts.values():
            self._drop_queued(puts, Skip.STOPPING)
        await asyncio.gather(*(self._dismiss(puts) for puts in self._puts.values()))

    async def clear(self) -> int:
        """Drop what waits and remove the records of every adapter; returns how many records went.

        Raises StorageError when an adapter cannot be cleared; those before it are cleared then.
        """
        async with self._clear_lock:
            for puts in self._puts.values():
                self._drop_queued(puts, Skip.CLEARED)
            self._note_progress()
            removed = 0
            for puts in list(self._puts.values()):
                if puts.name in self._puts:  # it may have left while another was cleared
                    removed += await self._clear(puts)
        return removed

    async def _clear(self, puts: _Puts) -> int:
        """What a put that is under way meanwhile writes is deleted once it has ended (`_cleared_too`)."""
        puts.not_clearing.clear()
        try:
            removed = await puts.adapter.clear()
            puts.planner.forget()
            puts.ledger.forget()
            if self.watcher is not None:
                self.watcher.cleared_there(puts.name)
        finally:
            puts.clears += 1
            puts.not_clearing.set()
        return removed

    def stats(self) -> dict[str, Any]:
        """Numbers for status and metrics; bytes where the name says so."""
        return {
            "backlog_bytes": self._backlog.pinned_bytes,
            "backlog_limit_bytes": self._backlog.limit_bytes,
            "adapters": {
                member.name: self.stats_of(member.name)
                for member in self._adapters
                if member.name in self._puts
            },
        }

    def tenants(self) -> list[dict[str, Any]]:
        """Bytes of each tenant that has a quota, by adapter, as far as they are known."""
        return [
            {
                "adapter": puts.name,
                "tenant": tenant,
                "bytes": puts.ledger.used_bytes(tenant),
                "quota_bytes": quota_bytes,
            }
            for puts in self._puts.values()
            for tenant, quota_bytes in puts.ledger.quotas.items()
        ]

    def stats_of(self, name: str) -> dict[str, Any]:
        """Numbers of one member; none after it has left."""
        puts = self._puts.get(name)
        if puts is None:
            return {}
        return {
            "policy": str(puts.planner.policy),
            "queued": len(puts.queue),
            "retrying": len(puts.retrying),
            "in_flight": puts.in_flight,
            "stored_bytes": puts.stored_bytes,
            "outcomes": dict(puts.counts),
        }

    # -- deciding ------------------------------------------------------------------------------------------

    def _take(self, keys: Sequence[bytes], touched: bool) -> None:
        room = self.limits.max_waiting_keys - len(self._waiting)
        for key in keys[room:]:
            for puts in self._puts.values():
                self._skip(puts, key, Skip.QUEUE_FULL)
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
                    self._skip(puts, key, Skip.STOPPING)
                elif puts.planner.touched(key) if touched else puts.planner.committed(key):
                    self._offer(puts, key)
        if not self._stopping:
            self._clean_ahead()
        if self._waiting:
            self._turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._note_progress()

    def _clean_ahead(self) -> None:
        """Offer the next victims of the pool to the adapters that get chunks only then."""
        pool = self._pool
        eager = [
            puts
            for puts in self._puts.values()
            if puts.planner.policy is StorePolicy.ON_EVICT and puts.member.takes_puts
        ]
        if not eager:
            return
        need_bytes = self.limits.evict_ahead.need_bytes(pool.stats()["used_bytes"], pool.extents_bytes)
        if need_bytes:
            for key in pool.victims_preview(need_bytes):
                for puts in eager:
                    if puts.planner.leaving(key):
                        self._offer(puts, key)

    def _offer(self, puts: _Puts, key: bytes, attempts: int = 0) -> None:
        """Pin a chunk and queue it, or skip it."""
        if key in puts.queued:
            return
        if not puts.member.takes_puts:
            self._skip(puts, key, Skip.DRAINING)
            return
        pinned = self._pin(puts, key, attempts)
        if isinstance(pinned, _Pending):
            self._enqueue(puts, pinned)
        elif pinned is Skip.BACKLOG:
            puts.unpinned[key] = None
            if len(puts.unpinned) > UNPINNED_KEYS:
                puts.unpinned.popitem(last=False)
            self._skip(puts, key, pinned)
        elif pinned is not Skip.QUOTA or not self._make_room(puts, key):
            self._skip(puts, key, pinned)

    def _pin(self, puts: _Puts, key: bytes, attempts: int = 0) -> _Pending | Skip:
        """A chunk held for one put and counted, or why that cannot be. Each one ends in `_end`."""
        hold = self._pool.hold(key)
        if hold is None:
            return Skip.EVICTED
        if not self._backlog.admit(key, hold.length):
            hold.drop()
            return Skip.BACKLOG
        if not puts.ledger.admit(hold.tenant, key, hold.length):
            self._backlog.release(key)
            hold.drop()
            return Skip.QUOTA
        return _Pending(key, hold, hold.length, hold.tenant, attempts)

    def _enqueue(self, puts: _Puts, pending: _Pending) -> None:
        puts.unpinned.pop(pending.key, None)
        puts.queued.add(pending.key)
        puts.queue.append(pending)
        puts.work_there.set()

    def _skip(self, puts: _Puts, key: bytes, reason: str) -> None:
        puts.counts[f"skipped:{reason}"] += 1
        self._skipped(key, str(reason))

    def _drop_queued(self, puts: _Puts, reason: Skip) -> None:
        for timer, _ in puts.retrying.values():
            timer.cancel()
        for pending in (*puts.queue, *(again for _, again in puts.retrying.values())):
            pending.hold.drop()
            self._end(puts, pending)
            self._skip(puts, pending.key, reason)
        for key in puts.making_room:
            self._skip(puts, key, reason)
        puts.queue.clear()
        puts.unpinned.clear()
        puts.retrying.clear()
        puts.making_room.clear()

    # -- tenants' quotas -----------------------------------------------------------------------------------

    def _make_room(self, puts: _Puts, key: bytes) -> bool:
        """Begin to delete what its tenant used longest ago; False where that would not help."""
        if key in puts.making_room:
            return True
        hold = self._pool.hold(key)
        if hold is None or not puts.adapter.capabilities.can_delete:
            return False
        tenant, length_bytes = hold.tenant, hold.length
        hold.drop()
        if len(puts.making_room) >= MAKING_ROOM_KEYS or not puts.ledger.to_leave(tenant, length_bytes, 1):
            return False
        puts.making_room[key] = (tenant, length_bytes)
        if puts.trimming is None:
            puts.trimming = asyncio.create_task(self._trim(puts), name=f"trim-{puts.name}")
        return True

    async def _trim(self, puts: _Puts) -> None:
        """Make room for each chunk that waits for it, and put it; one that gets none is skipped."""
        try:
            while puts.making_room:
                key, (tenant, length_bytes) = next(iter(puts.making_room.items()))
                while leaving := puts.ledger.to_leave(tenant, length_bytes, TRIM_KEYS):
                    gone = await self._delete(puts, leaving)
                    if not gone:
                        break
                    puts.counts["trimmed"] += len(gone)
                    self._trimmed(puts.name, [key for key in leaving if key in gone])
                if puts.making_room.pop(key, None) is not None:  # else it was cleared meanwhile
                    pinned = self._pin(puts, key)
                    if isinstance(pinned, Skip):
                        self._skip(puts, key, pinned)
                    else:
                        self._enqueue(puts, pinned)
        finally:
            puts.trimming = None
            self._note_progress()

    async def _delete(self, puts: _Puts, keys: list[bytes]) -> set[bytes]:
        """Delete records; those that are gone now."""
        try:
            await puts.adapter.delete(keys)
            found = await puts.adapter.exists(keys)
        except Exception as error:  # the plugin boundary: an adapter that raises broke its contract
            log_broken_contract(puts.name, "delete", error)
            return set()
        gone = [key for key, one in zip(keys, found, strict=True) if one.presence is Presence.ABSENT]
        puts.planner.gone(gone)
        puts.ledger.gone(gone)
        if self.watcher is not None:
            self.watcher.gone_there(puts.name, gone)
        return set(gone)

    # -- putting -------------------------------------------------------------------------------------------

    async def _work(self, puts: _Puts) -> None:
        while True:
            while not puts.queue:
                puts.work_there.clear()
                await puts.work_there.wait()
            await self._put_batch(puts, self._next_batch(puts))

    async def _put_batch(self, puts: _Puts, batch: list[_Pending]) -> None:
        """Put one batch and account for it. Nothing here refers to its holds afterwards."""
        puts.in_flight += len(batch)
        outcomes: list[PutOutcome] = []
        clears = puts.clears
        failpoints.hit("put.started")
        try:
            outcomes = await puts.adapter.put([PutItem(p.key, p.hold) for p in batch])
            failpoints.hit("put.stored")
            if puts.clears != clears or not puts.not_clearing.is_set():
                outcomes = await self._cleared_too(puts, batch, outcomes)
        except Exception as error:  # the plugin boundary: an adapter that raises broke its contract
            log_broken_contract(puts.name, "put", error)
            outcomes = [PutOutcome(PutStatus.FAILED, "adapter_error")] * len(batch)
        finally:  # also when cancelled: the holds are the medium's, the counts are ours
            puts.in_flight -= len(batch)
            outcomes = outcomes or [PutOutcome(PutStatus.FAILED, puts.cut_short)] * len(batch)
            for pending, (status, reason) in zip(batch, outcomes, strict=True):
                self._ended(puts, pending, status, reason)
            self._note_progress()

    async def _cleared_too(
        self, puts: _Puts, batch: list[_Pending], outcomes: list[PutOutcome]
    ) -> list[PutOutcome]:
        """Outcomes of puts during which their adapter was cleared: what they wrote is deleted, too.

        Only the adapter knows whether a put or the clear came first. A record that cannot be deleted counts as stored.
        """
        await puts.not_clearing.wait()
        keys = [pending.key for pending in batch]
        found = await puts.adapter.exists(keys)
        there = {key for key, one in zip(keys, found, strict=True) if one.presence is not Presence.ABSENT}
        if there and puts.adapter.capabilities.can_delete:
            there -= await self._delete(puts, sorted(there))
        return [
            PutOutcome(PutStatus.FAILED, Skip.CLEARED)
            if outcome.status in _THERE and key not in there
            else outcome
            for key, outcome in zip(keys, outcomes, strict=True)
        ]

    def _next_batch(self, puts: _Puts) -> list[_Pending]:
        batch = [puts.queue.popleft()]
        batch_bytes = batch[0].length_bytes
        while puts.queue and len(batch) < puts.adapter.capabilities.max_batch:
            batch_bytes += puts.queue[0].length_bytes
            if batch_bytes > self._batch_bytes:
                break
            batch.append(puts.queue.popleft())
        return batch

    def _ended(self, puts: _Puts, pending: _Pending, status: PutStatus, reason: str) -> None:
        """Count how one put ended, or prepare its retry."""
        there = status in _THERE
        self._end(puts, pending, there=there)
        if there:
            puts.counts[status.name.lower()] += 1
            puts.stored_bytes += pending.length_bytes if status is PutStatus.STORED else 0
            puts.planner.stored(pending.key)
            if self.watcher is not None:
                self.watcher.put_there(puts.name, pending.key)
            return
        attempts = pending.attempts + 1
        delay_s = self.limits.retry.delay_s(attempts) if status is PutStatus.THROTTLED else None
        if delay_s is None or self._stopping:
            self._skip(puts, pending.key, reason or status.name.lower())
            return
        puts.counts["throttled"] += 1
        again = self._pin(puts, pending.key, attempts)
        if isinstance(again, Skip):
            self._skip(puts, pending.key, again)
        else:
            puts.queued.add(pending.key)
            timer = asyncio.get_running_loop().call_later(delay_s, self._retry, puts, pending.key)
            puts.retrying[pending.key] = (timer, again)

    def _retry(self, puts: _Puts, key: bytes) -> None:
        _, pending = puts.retrying.pop(key)
        puts.queue.append(pending)
        puts.work_there.set()

    def _end(self, puts: _Puts, pending: _Pending, *, there: bool = False) -> None:
        """A pending put is over: its pin is no longer counted, its bytes if they are `there`."""
        self._backlog.release(pending.key)
        puts.ledger.ended(pending.tenant, pending.key, pending.length_bytes, there)
        puts.queued.discard(pending.key)

    def _is_quiet(self) -> bool:
        return (
            not self._waiting and not self._takes_up and not any(puts.busy() for puts in self._puts.values())
        )

    def _take_up_unpinned(self) -> None:
        """The backlog is empty: pin what fits of what it had no room for."""
        for puts in self._puts.values():
            for _ in range(min(KEYS_PER_TURN, len(puts.unpinned))):
                key, _ = puts.unpinned.popitem(last=False)
                pinned = self._pin(puts, key)
                if pinned is Skip.BACKLOG:
                    puts.unpinned[key] = None
                    puts.unpinned.move_to_end(key, last=False)
                    break
                if isinstance(pinned, _Pending):
                    puts.counts["taken_up"] += 1
                    self._enqueue(puts, pinned)

    def _note_progress(self) -> None:
        if self._is_quiet() and not self._stopping:
            self._take_up_unpinned()
            if self._is_quiet() and any(
                puts.unpinned for puts in self._puts.values()
            ):  # all of them have left L1
                self._takes_up = True
                asyncio.get_running_loop().call_soon(self._go_on)
        if self._is_quiet():
            self._quiet.set()
        for puts in self._puts.values():
            if not self._waiting and not puts.busy():
                puts.quiet.set()

    def _go_on(self) -> None:
        self._takes_up = False
        self._note_progress()
