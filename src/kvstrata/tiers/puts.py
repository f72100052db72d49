"""Puts: from chunks that became visible in L1 to records on the tiers.

    committed, touched ─▶ waiting ─▶ a turn of the loop ─▶ each tier's policy ─▶ hold_batch ─▶ queue ─▶ batch ─▶ put
                                                                                   ▲                              │
                                                stored, already there, or skipped ◀┴── retry timer ◀── throttled ─┘

Invariants
1. A chunk that waits for a put or is being put is pinned by a hold: ours until the put is passed to the tier, then the
   tier's.  The bytes pinned this way never exceed the backlog, which the pool counts as it takes the holds
   (Pool.hold_batch); a chunk that would exceed it is skipped and can be evicted.
2. For each tier, every key ends as stored, already there, or skipped; a skip has a reason, which is counted and passed
   to `skipped`.
3. `committed` and `touched` never block and never wait.  No turn of the loop looks at more than `KEYS_PER_TURN` keys;
   the others wait for later turns.
4. A put is passed to the tier once, with its hold.  A retry takes a new hold; a chunk that was evicted meanwhile is
   skipped.
5. If a put crashes through a mistake of ours, only its batch ends: its chunks are skipped.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from kvstrata import failpoints
from kvstrata.errors import StorageError
from kvstrata.native.core import Pool
from kvstrata.observability.numbers import Numbers, counter, gauge, parts_by
from kvstrata.tiers.base import Ask, Item, Outcome, Presence, failed
from kvstrata.tiers.config import StorePolicy
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import Tier

log = logging.getLogger(__name__)

KEYS_PER_TURN = 128
"""Number of keys that one turn of the loop handles, in some 100 µs."""
UNPINNED_KEYS = 65_536
"""Maximum number of keys per tier that are kept for a put when the backlog is empty."""
REMEMBERED = 1 << 17
_WORDS = {outcome: outcome.name.lower() for outcome in Outcome}
_NO_ROOM = 2
"""Result of Pool.hold_batch: no hold was taken, since it would exceed the backlog."""


class Skip(enum.StrEnum):
    """The server's own reasons for not putting a chunk; an adapter's reasons are passed on as they are."""

    BACKLOG = "backlog"
    """Too many bytes were waiting to be put."""
    EVICTED = "evicted"
    """The chunk left L1 before its put could begin."""
    QUEUE_FULL = "queue_full"
    """More chunks were committed at once than may wait for a decision."""
    STOPPING = "stopping"
    """The server is stopping."""
    CLEARED = "cleared"
    """L2 was cleared while the chunk waited."""
    CRASHED = "crashed"
    """The put ended by a mistake of our own; the log has the traceback."""


class RetryRule(msgspec.Struct, frozen=True, kw_only=True):
    """The number of retries of a throttled put, and the pauses before them."""

    retries: int = 3
    first_s: float = 0.25
    longest_s: float = 4.0

    def delay_s(self, attempts: int) -> float | None:
        """Seconds until the next attempt after `attempts` throttled ones; None: the put is not retried."""
        if attempts > self.retries:
            return None
        return min(self.first_s * 2.0 ** (attempts - 1), self.longest_s)


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one instance's puts."""

    backlog_bytes: int
    """Maximum bytes of L1 that are pinned for puts."""
    batch_bytes: int = 64 << 20
    """Maximum number of bytes of a batch; never more than a quarter of `backlog_bytes`."""
    batches_in_flight: int = 2
    """Number of batches that one tier puts at a time."""
    max_waiting_keys: int = 65_536
    """Maximum number of committed keys that wait for a turn of the loop."""
    retry: RetryRule = RetryRule()


class RecentKeys:
    """A bounded set of keys, which forgets the key that was added longest ago."""

    def __init__(self, limit_keys: int) -> None:
        self._limit_keys = limit_keys
        self._keys: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Remember a key as the newest."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._limit_keys:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all keys."""
        self._keys.clear()

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget these keys."""
        for key in keys:
            self._keys.pop(key, None)


class PutPlanner:
    """Decides by a tier's policy which keys the tier gets. No I/O, no clock.

    `through` puts every chunk when it is committed; `second_touch` puts a chunk when it was stored or used for the
    second time.

    It remembers REMEMBERED keys that were used once and as many that the adapter has, but not the content of L1.
    """

    def __init__(self, policy: StorePolicy) -> None:
        self.policy = policy
        self._seen = RecentKeys(REMEMBERED)
        self._clean = RecentKeys(REMEMBERED)

    def committed(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """A worker has stored these chunks in L1. Returns those to put now."""
        return keys if self.policy is StorePolicy.THROUGH else self.touched(keys)

    def touched(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """These chunks were used. Returns those to put now."""
        if self.policy is not StorePolicy.SECOND_TOUCH:
            return []
        again = []
        for key in keys:
            if key in self._clean:
                continue
            if key in self._seen:
                self._seen.discard((key,))
                again.append(key)
            else:
                self._seen.add(key)
        return again

    def stored(self, keys: Sequence[bytes]) -> None:
        """The adapter has these chunks."""
        if self.policy is not StorePolicy.THROUGH:
            for key in keys:
                self._clean.add(key)

    def gone(self, keys: Iterable[bytes]) -> None:
        """The adapter no longer has these chunks."""
        self._clean.discard(keys)

    def forget(self) -> None:
        """The adapter no longer has any chunk."""
        self._clean.clear()


class News(Protocol):
    """A listener for changes of the chunks that a tier has."""

    def tier_got(self, adapter: str, keys: Sequence[bytes]) -> None:
        """The tier has these chunks."""

    def tier_lost(self, adapter: str, keys: Sequence[bytes]) -> None:
        """The tier does not have these chunks any more."""

    def tier_emptied(self, adapter: str) -> None:
        """The tier is empty."""


class TierPuts(Numbers):
    """The puts of one tier. Belongs to the event loop."""

    queued = gauge("Puts waiting for this adapter.", lambda self: len(self._queue), name="queued_puts")
    retrying = gauge(
        "Puts that this adapter throttled and that will be retried.",
        lambda self: sum(map(len, self._retrying.values())),
        name="retrying_puts",
    )
    in_flight = gauge(
        "Puts in progress.", lambda self: sum(map(len, self._batches.values())), name="in_flight_puts"
    )
    stored_bytes = counter("Record bytes stored.")
    outcomes = counter(
        "Puts by outcome: stored, exists, throttled, taken_up (started late), or `skipped:` and the reason.",
        "outcome",
    )

    def __init__(
        self,
        tier: Tier,
        pool: Pool,
        limits: StoreLimits,
        skipped: Callable[[bytes, str], None],
        news: News | None,
        progressed: Callable[[], None],
    ) -> None:
        """`progressed` is called whenever a batch has ended."""
        self.tier = tier
        self.name = tier.name
        self.planner = PutPlanner(tier.config.common.policy)
        self.stopping = False
        """Whether a throttled put is skipped instead of tried again."""
        self._pool = pool
        self._limits = limits
        self._batch_bytes = min(limits.batch_bytes, limits.backlog_bytes // 4)
        self._skipped = skipped
        self._news = news
        self._progressed = progressed
        self._queue: collections.deque[Item] = collections.deque()
        self.pending: set[bytes] = set()
        """Keys in the queue, in flight or waiting for a retry."""
        self._attempts: dict[bytes, int] = {}
        """How often the put of a pending key was throttled."""
        self._retrying: dict[asyncio.TimerHandle, list[Item]] = {}
        self.unpinned: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        """Keys skipped because the backlog was full. When the backlog is empty, those still in L1 are put after all."""
        self._batches: dict[asyncio.Task[Sequence[Item]], list[Item]] = {}
        self._begins = False
        """Whether batches will be begun in the next turn of the loop."""
        self._not_clearing = asyncio.Event()
        """Set except while the tier is being cleared."""
        self._not_clearing.set()
        self._n_clears = 0

    @property
    def undone(self) -> int:
        """Number of chunks that wait for the tier, are in flight to it, or were dropped because the server stops."""
        return len(self.pending) + self.outcomes[f"skipped:{Skip.STOPPING}"]

    def document(self) -> dict[str, Any]:
        """The numbers, and the policy."""
        return {"policy": str(self.planner.policy), **super().document()}

    # -- offers --------------------------------------------------------------------------------------------

    def offer(self, keys: Sequence[bytes]) -> None:
        """Pin chunks and queue them, or skip them."""
        keys = [key for key in dict.fromkeys(keys) if key not in self.pending]
        for key, why in self._pin(keys):
            if why == _NO_ROOM:
                self.unpinned[key] = None
                if len(self.unpinned) > UNPINNED_KEYS:
                    self.unpinned.popitem(last=False)
            self.skip(key, Skip.BACKLOG if why == _NO_ROOM else Skip.EVICTED)

    def skip(self, key: bytes, reason: str) -> None:
        """Count and report that the tier does not get this chunk."""
        self.outcomes[f"skipped:{reason}"] += 1
        self._skipped(key, str(reason))

    def retry_unpinned(self) -> None:
        """Queue chunks that did not fit into the backlog, now that the backlog is empty."""
        taken = min(KEYS_PER_TURN, len(self.unpinned))
        left = self._pin([self.unpinned.popitem(last=False)[0] for _ in range(taken)])
        if len(left) < taken:
            self.outcomes["taken_up"] += taken - len(left)
        for key, why in reversed(left):
            if why == _NO_ROOM:
                self.unpinned[key] = None
                self.unpinned.move_to_end(key, last=False)

    def _pin(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Hold each chunk for one put, and queue it. Returns the keys that were not held, with the pool's reason."""
        if not keys:
            return []
        holds, left_out = self._pool.hold_batch(b"".join(keys), self._limits.backlog_bytes)
        left = []
        if len(holds) < len(keys):
            left = [(key, why) for key, why in zip(keys, left_out, strict=True) if why]
            keys = [key for key, why in zip(keys, left_out, strict=True) if not why]
        if holds:
            self._enqueue(map(Item, keys, holds))
            self.pending.update(keys)
            if self.unpinned:
                for key in keys:
                    self.unpinned.pop(key, None)
        return left

    def _enqueue(self, items: Iterable[Item]) -> None:
        self._queue.extend(items)
        if not self._begins:
            self._begins = True
            asyncio.get_running_loop().call_soon(self._begin)

    def drop_queued(self, reason: Skip) -> None:
        """Skip every chunk that waits. Puts in flight continue."""
        waiting = list(self._queue)
        for timer, items in self._retrying.items():
            timer.cancel()
            waiting += items
        self._queue.clear()
        self._retrying.clear()
        self.unpinned.clear()
        for item in waiting:
            item.hold.drop()
            self.pending.discard(item.key)
            self._attempts.pop(item.key, None)
            self.skip(item.key, reason)

    # -- batches -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Put batches of queued chunks, as many at a time as the limit allows."""
        self._begins = False
        while self._queue and len(self._batches) < self._limits.batches_in_flight:
            batch = self._take_batch()
            task = asyncio.create_task(self._put(batch), name=f"put-{self.name}")
            self._batches[task] = batch
            task.add_done_callback(self._batch_ended)

    def _take_batch(self) -> list[Item]:
        """Take chunks from the queue, which must not be empty."""
        batch: list[Item] = []
        batch_bytes = 0
        for _ in range(min(self.tier.capabilities.max_batch, len(self._queue))):
            batch_bytes += self._queue[0].hold.length
            if batch and batch_bytes > self._batch_bytes:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _put(self, items: list[Item]) -> Sequence[Item]:
        n_clears = self._n_clears
        failpoints.hit("put.started")
        settled = await self.tier.put(items)
        failpoints.hit("put.stored")
        if self._n_clears != n_clears or not self._not_clearing.is_set():
            await self._cleared_too(settled)
        return settled

    def _batch_ended(self, task: asyncio.Task[Sequence[Item]]) -> None:
        """Count the outcomes of a batch, and prepare retries. Afterwards nothing here refers to its holds."""
        batch = self._batches.pop(task)
        if task.cancelled():
            items: Sequence[Item] = failed(batch, Skip.STOPPING)
        elif (error := task.exception()) is not None:
            log.error("%s crashed", task.get_name(), exc_info=error)
            traceback.clear_frames(error.__traceback__)  # they refer to holds
            self.outcomes["crashed"] += 1
            items = failed(batch, Skip.CRASHED)
        else:
            items = task.result()
        present: list[bytes] = []
        throttled: collections.defaultdict[int, list[bytes]] = collections.defaultdict(list)
        for item in items:
            item.hold.uncount()  # the tier may hold it for longer
            key, outcome = item.key, item.outcome
            self.pending.discard(key)
            attempts = self._attempts.pop(key, 0) + 1
            if outcome is Outcome.STORED or outcome is Outcome.EXISTS:
                present.append(key)
                self.outcomes[_WORDS[outcome]] += 1
                self.stored_bytes += item.hold.length if outcome is Outcome.STORED else 0
            elif (
                outcome is Outcome.THROTTLED and not self.stopping and attempts <= self._limits.retry.retries
            ):
                throttled[attempts].append(key)
            else:
                self.skip(key, item.reason or _WORDS[outcome])
        if present:
            self.planner.stored(present)
            if self._news is not None:
                self._news.tier_got(self.name, present)
        for attempts, keys in throttled.items():
            self._retry_later(keys, attempts)
        self._begin()
        self._progressed()

    def _retry_later(self, keys: list[bytes], attempts: int) -> None:
        """Pin throttled chunks again, and queue them after a pause."""
        self.outcomes["throttled"] += len(keys)
        holds, left_out = self._pool.hold_batch(b"".join(keys), self._limits.backlog_bytes)
        for key, why in zip(keys, left_out, strict=True):
            if why:
                self.skip(key, Skip.BACKLOG if why == _NO_ROOM else Skip.EVICTED)
        keys = [key for key, why in zip(keys, left_out, strict=True) if not why]
        self.pending.update(keys)
        self._attempts.update(dict.fromkeys(keys, attempts))

        def retry() -> None:
            self._enqueue(self._retrying.pop(timer))

        delay_s = self._limits.retry.delay_s(attempts)
        assert delay_s is not None
        timer = asyncio.get_running_loop().call_later(delay_s, retry)
        self._retrying[timer] = list(map(Item, keys, holds))

    async def dismiss(self) -> None:
        """End the batches in flight. A put that the adapter has not answered counts as skipped."""
        tasks = list(self._batches)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        """The tier has no records any more."""
        self.planner.forget()
        if self._news is not None:
            self._news.tier_emptied(self.name)

    async def _cleared_too(self, items: Sequence[Item]) -> None:
        """Delete the records of a batch, which were cleared meanwhile, and correct the outcomes.

        Only the adapter knows whether a put or the clear came first. A record that cannot be deleted counts as stored.
        """
        await self._not_clearing.wait()
        keys = b"".join([item.key for item in items])
        await self.tier.delete(keys)
        presences = await self.tier.exists(keys, Ask())
        gone = [item for item, presence in zip(items, presences, strict=True) if presence == Presence.ABSENT]
        for item in gone:
            if item.outcome in (Outcome.STORED, Outcome.EXISTS):
                item.outcome, item.reason = Outcome.FAILED, Skip.CLEARED
        self.dropped([item.key for item in gone])

    def dropped(self, keys: Sequence[bytes]) -> None:
        """The tier does not have these records any more."""
        self.planner.gone(keys)
        if self._news is not None:
            self._news.tier_lost(self.name, keys)


class StoreController(Numbers):
    """Puts chunks of L1 to the tiers. All methods belong to the event loop.

    `skipped(key, reason)` is called for every chunk that a tier will not get, with the reason code. `news` is notified
    of the chunks that the tiers have.
    """

    backlog_bytes = gauge(
        "Bytes of L1 that stay pinned because they are waiting to be put.",
        lambda self: self._pool.counted_bytes,
    )
    backlog_limit_bytes = gauge(
        "Limit of the bytes waiting to be put; chunks beyond it are skipped.",
        lambda self: self.limits.backlog_bytes,
    )
    adapters = parts_by("adapter", TierPuts, lambda self: self._puts)

    def __init__(
        self,
        pool: Pool,
        tiers: TierSet,
        limits: StoreLimits,
        skipped: Callable[[bytes, str], None],
        *,
        news: News | None = None,
    ) -> None:
        self.limits = limits
        self.wants_touches = False
        """Whether any tier puts chunks when they are used again."""
        self._pool = pool
        self._puts: dict[str, TierPuts] = {}
        """Puts by name of the tier; a tier that is only read has none."""
        self._skipped = skipped
        self._news = news
        self._waiting: collections.deque[tuple[bytes, bool]] = collections.deque()
        """Keys, and whether they were touched instead of committed."""
        self._turn_scheduled = False
        self._retries_unpinned = False
        """Whether the next turn of the loop will queue more of the chunks that did not fit into the backlog."""
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._stopping = False
        self._clear_lock = asyncio.Lock()
        tiers.use(self._join)

    def _join(self, tier: Tier) -> None:
        """Add an open tier: it gets chunks from now on, unless it is only read."""
        if not tier.capabilities.takes_puts:
            return
        puts = TierPuts(tier, self._pool, self.limits, self._skipped, self._news, self._note_progress)
        tier.users["puts"] = self._puts[tier.name] = puts
        self.wants_touches |= puts.planner.policy is StorePolicy.SECOND_TOUCH

    # -- from requests and the pool ------------------------------------------------------------------------

    def committed(self, keys: Sequence[bytes]) -> None:
        """Queue chunks that a worker stored and that are visible now."""
        if self._puts:
            self._take(keys, touched=False)

    def touched(self, keys: Sequence[bytes]) -> None:
        """Queue chunks of L1 that a lookup used again."""
        if self.wants_touches:
            self._take(keys, touched=True)

    def dropped(self, name: str, keys: Sequence[bytes] | None) -> None:
        """The tier does not have these chunks any more (its cap, a delete, a corrupt copy). None: it has no chunks."""
        puts = self._puts.get(name)
        if puts is not None and keys is None:
            puts.emptied()
        elif puts is not None and keys is not None:
            puts.dropped(keys)

    def found(self, name: str, keys: Sequence[bytes]) -> None:
        """These records were loaded from the tier."""
        if name in self._puts and self._news is not None:
            self._news.tier_got(name, keys)

    # -- the end, and clear --------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Returns when no chunk waits, is in flight or waits for a retry."""
        while not self._is_quiet():
            self._quiet.clear()
            await self._quiet.wait()

    async def stop(self, drain_s: float) -> None:
        """Accept no more chunks, wait `drain_s` seconds for puts under way, then skip the rest. Idempotent."""
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
        """Number of puts that wait or are under way, or were dropped because the server stops."""
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

    # -- deciding ------------------------------------------------------------------------------------------

    def _take(self, keys: Sequence[bytes], *, touched: bool) -> None:
        room = self.limits.max_waiting_keys - len(self._waiting)
        for key in keys[room:]:
            for puts in self._puts.values():
                puts.skip(key, Skip.QUEUE_FULL)
        self._waiting.extend([(key, touched) for key in keys[:room]])
        if not self._turn_scheduled:
            self._turn()

    def _turn(self) -> None:
        """Handle some of the waiting keys, and continue in the next turn of the loop if more are left."""
        self._turn_scheduled = False
        waiting = self._waiting
        taken = [waiting.popleft() for _ in range(min(KEYS_PER_TURN, len(waiting)))]
        committed = [key for key, touched in taken if not touched]
        touched = [key for key, touched in taken if touched] if len(committed) < len(taken) else []
        for puts in self._puts.values():
            if self._stopping:
                for key in (*committed, *touched):
                    puts.skip(key, Skip.STOPPING)
            else:
                puts.offer([*puts.planner.committed(committed), *puts.planner.touched(touched)])
        if waiting:
            self._turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._note_progress()

    def _is_quiet(self) -> bool:
        return not (
            self._waiting or self._retries_unpinned or any(puts.pending for puts in self._puts.values())
        )

    def _note_progress(self) -> None:
        if not self._is_quiet():
            return
        unpinned = [puts for puts in self._puts.values() if puts.unpinned and not self._stopping]
        for puts in unpinned:
            puts.retry_unpinned()
        # Still quiet: all retried chunks had left L1, so retry more in the next turn of the loop.
        if unpinned and self._is_quiet() and any(puts.unpinned for puts in unpinned):
            self._retries_unpinned = True
            asyncio.get_running_loop().call_soon(self._go_on)
        if not unpinned or self._is_quiet():
            self._quiet.set()

    def _go_on(self) -> None:
        self._retries_unpinned = False
        self._note_progress()
