"""Prefetch controller: from keys that L1 misses to records loaded out of the adapters.

A fetch asks the adapters how far the prefix goes, reserves extents for what fits now, loads the holes in
batches and makes each loaded chunk visible at once.  It answers when the prefix is decided or at its
deadline; what is being loaded then goes on and becomes visible without a lease.

Invariants
1. Nothing waits while it holds a reservation that is not being loaded: room in L1 is asked for only after the
   adapter's gate was passed, and a refusal ends the prefix.
2. A key is loaded once at a time; other fetches that need it wait for that load.
3. Every reserved item ends in a commit or an abort.  Its hold goes to the adapter; after an abort the extent
   stays quarantined until the adapter has dropped it.
4. Per adapter at most `max_in_flight` fetches with a waiting caller load at a time, with at most
   `in_flight_bytes` under way.  That, and what an adapter may have stuck (storage/wrap/deadline.py), bounds the
   server's own reservations: row 0 of the pool has no share.  A fetch past its deadline goes on only while no
   other one waits at the gate.
5. An adapter that does not answer `exists` within its patience is passed over.
6. A fetch asks the adapters that answered lookups when it began, in their order then.  One that leaves meanwhile
   is as one that does not have the chunk: the fetch looks in those after it, or ends as a miss.

What is loaded from where is decided in policy/prefetch.py; which adapters there are, in server/l2/tiers.py.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata import failpoints
from kvstrata.policy.prefetch import Hole, Plan, Run, Source, make_plan, miss_reason, next_batch, reserve_runs
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.server.l2.tiers import REMOVED
from kvstrata.storage.base import (
    Found,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    log_broken_contract,
)
from kvstrata.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstrata.clock import Clock
    from kvstrata.native.pool import Pool
    from kvstrata.server.l2.tiers import AdapterSet, Member

log = logging.getLogger(__name__)

SERVER_ROW = 0
"""Row of the pool that owns the server's own reservations."""
EXISTS_BATCH = 1024
"""Keys asked for in one `exists`."""
MAX_WAITING = 1024
"""Fetches that may wait at one gate; more are refused."""


class PrefetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one instance's loader."""

    in_flight_bytes: int
    """Bytes one adapter may have to load at a time; one batch always may."""
    max_in_flight: int = 8
    """Fetches that load from one adapter at a time."""
    batch_bytes: int = 64 << 20
    """At most; never more than half of `in_flight_bytes`."""
    patience_share: float = 0.25
    """Share of the time left that one adapter gets for `exists` when others come after it, at most …"""
    patience_s: float = 0.5
    """… so many seconds."""


class FetchOutcome(NamedTuple):
    """What a fetch knows when it answers."""

    n_chunks: int
    """Leading chunks of those asked for that are in L1 now."""
    l2_chunks: int
    """How many of them were not there, or not in all slices, when the fetch began."""
    reason: str
    """types.MissReason of the first chunk that is not there, empty if all are."""
    detail: str = ""


class _Gate:
    """Bounds what is loaded from one adapter at a time. First come, first served."""

    def __init__(self, slots: int, limit_bytes: int) -> None:
        self._slots = slots
        self._limit_bytes = limit_bytes
        self._inside: set[_Fetch] = set()
        self._waiters: collections.deque[tuple[_Fetch, int, asyncio.Future[bool]]] = collections.deque()
        self.loading_bytes = 0

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def enter(self, fetch: _Fetch, need_bytes: int) -> bool:
        """Wait for a place. False: the fetch's time was over first, too many wait, or the gate was shut."""
        if not fetch.expired:
            self._give_up(lambda waiter: waiter.expired)
        if not self._waiters and self._try(fetch, need_bytes):
            return True
        if len(self._waiters) >= MAX_WAITING or (fetch.expired and self._waiters):
            return False
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append((fetch, need_bytes, place))
        return await place

    def expire(self, fetch: _Fetch) -> None:
        """Nobody waits for the fetch any more: it leaves its slot, and the queue if others wait there."""
        if fetch.abandoned or any(not waiter.expired for waiter, _, _ in self._waiters):
            self._give_up(lambda waiter: waiter is fetch)
        self.leave(fetch)

    def leave(self, fetch: _Fetch) -> None:
        """The fetch loads no more from this adapter, or gives up its slot."""
        self._inside.discard(fetch)
        self._admit()

    def shut(self) -> None:
        """Turn away whoever waits."""
        self._give_up(lambda waiter: True)

    def ended(self, freed_bytes: int) -> None:
        """A batch was loaded or failed."""
        self.loading_bytes -= freed_bytes
        self._admit()

    def _try(self, fetch: _Fetch, need_bytes: int) -> bool:
        if fetch not in self._inside and len(self._inside) >= self._slots:
            return False
        if self.loading_bytes and self.loading_bytes + need_bytes > self._limit_bytes:
            return False
        if not fetch.expired:
            self._inside.add(fetch)
        self.loading_bytes += need_bytes
        return True

    def _give_up(self, which: Callable[[_Fetch], bool]) -> None:
        for waiter, _, place in self._waiters:
            if which(waiter) and not place.done():
                place.set_result(False)
        self._waiters = collections.deque(entry for entry in self._waiters if not entry[2].done())

    def _admit(self) -> None:
        while self._waiters:
            fetch, need_bytes, place = self._waiters[0]
            if not place.done():
                if not self._try(fetch, need_bytes):
                    return
                place.set_result(True)
            self._waiters.popleft()


class _Loader:
    """What is asked of and loaded from one adapter."""

    def __init__(self, member: Member, gate: _Gate) -> None:
        self.member = member
        self.name = member.name
        self.adapter = member.adapter
        self.gate = gate
        self.asking = 0
        """`exists` calls under way."""
        self.loading: set[asyncio.Task[None]] = set()
        self.quiet = asyncio.Event()
        """Set whenever it has ceased to be busy."""

    def busy(self) -> bool:
        return bool(self.asking or self.loading)

    def note_progress(self) -> None:
        if not self.busy():
            self.quiet.set()


class _Fetch:
    """One fetch: its plan, what became of each hole, and how far the prefix is ready."""

    def __init__(
        self,
        keys: list[bytes],
        n_slices: int,
        parents: list[bytes],
        identity: bytes,
        tenant: int,
        deadline_s: float,
    ) -> None:
        self.keys = keys
        self.n_slices = n_slices
        self.parents = parents
        self.identity = identity
        self.tenant = tenant
        self.deadline_s = deadline_s
        self.sources: list[_Loader] = []
        """Whom it asks, in order; `Source.adapter` of its holes is a place in it."""
        self.plan = Plan(0, [], "")
        self.pending: collections.deque[Hole] = collections.deque()
        self.running: set[asyncio.Task[None]] = set()
        self.expired = False
        """Nobody waits for the answer any more."""
        self.abandoned = False
        """Nobody wants the chunks any more either."""
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._states: dict[int, str | None] = {}
        """Per hole (by key number): None under way or not begun, "" there, else why not."""
        self._ready = 0
        """Leading holes that are there."""
        self._first_failed = len(keys)
        """Number of the first key that will not be there; the number of keys while there is none."""

    def planned(self, plan: Plan) -> None:
        self.plan = plan
        self.pending.extend(plan.holes)
        self._states = dict.fromkeys((hole.number for hole in plan.holes), None)
        self._advance()

    def there(self, hole: Hole) -> None:
        """The hole is filled, by a load or because somebody else brought the chunk meanwhile."""
        self._states[hole.number] = ""
        self._advance()

    def failed(self, hole: Hole, reason: str) -> None:
        """The hole is not filled: the prefix ends there."""
        self._states[hole.number] = reason
        self._first_failed = min(self._first_failed, hole.number)
        self._advance()

    def is_open(self, hole: Hole) -> bool:
        """Whether nothing became of the hole yet."""
        return self._states[hole.number] is None

    def again(self, holes: list[Hole]) -> None:
        """These holes are to be loaded from another source."""
        self.pending = collections.deque(sorted((*holes, *self.pending), key=lambda hole: hole.number))

    def take(self, batch: list[Hole]) -> None:
        """These holes are no longer pending."""
        taken = {hole.number for hole in batch}
        while self.pending and self.pending[0].number in taken:
            taken.remove(self.pending.popleft().number)
        if taken:  # earlier ones came back to be tried again
            self.pending = collections.deque(hole for hole in self.pending if hole.number not in taken)

    def in_vain(self) -> bool:
        """Whether more loads are useless: the prefix ends before the pending holes, or nobody wants them."""
        first = self.pending[0].number if self.pending else len(self.keys)
        return self.abandoned or self._first_failed < min(first + 1, len(self.keys))

    def outcome(self) -> FetchOutcome:
        """How far the prefix is ready now, and why not further."""
        holes = self.plan.holes
        if self._ready == len(holes):
            n_chunks, reason, detail = self.plan.n_chunks, self.plan.reason, self.plan.detail
        else:
            hole = holes[self._ready]
            n_chunks = hole.number // self.n_slices
            detail = self._states[hole.number] or "deadline"
            reason = miss_reason(detail)
        filled = {hole.number // self.n_slices for hole in holes[: self._ready]}
        return FetchOutcome(n_chunks, sum(chunk < n_chunks for chunk in filled), reason, detail)

    def _advance(self) -> None:
        holes = self.plan.holes
        while self._ready < len(holes) and self._states[holes[self._ready].number] == "":
            self._ready += 1
        if not self.decided.done() and (
            self._ready == len(holes) or self._states[holes[self._ready].number] is not None
        ):
            self.decided.set_result(None)


class _Reserved(NamedTuple):
    """Items of one reservation that are being loaded."""

    ticket: int
    indices: list[int]
    holes: list[Hole]


class _Refusal(NamedTuple):
    """From this chunk on nothing of a batch can be reserved, and the pool's word for why."""

    chunk: int
    word: str


class PrefetchController:
    """See the module. All methods belong to the event loop."""

    def __init__(
        self,
        pool: Pool,
        adapters: AdapterSet,
        limits: PrefetchLimits,
        clock: Clock,
        lost: Callable[[str, Sequence[bytes]], None],
        found: Callable[[str, int, Sequence[tuple[bytes, int]]], None] = lambda name, tenant, records: None,
    ) -> None:
        """`lost(adapter, keys)` hears of records that an adapter turned out not to have, or not whole;
        `found(adapter, tenant, records)` of those that were loaded for a tenant, with their bytes."""
        self.limits = limits
        self._lost = lost
        self._found = found
        self._pool = pool
        self._adapters = adapters
        self._of: dict[str, _Loader] = {}
        for member in adapters:
            self.join(member)
        self._clock = clock
        self._batch_bytes = min(limits.batch_bytes, limits.in_flight_bytes // 2)
        self._loads: dict[bytes, asyncio.Future[str]] = {}
        """Key → how its load under way will end: "" loaded, else why not."""
        self._fetches: dict[_Fetch, asyncio.Task[None]] = {}
        self._chores: set[asyncio.Task[int]] = set()
        self._stopping = False
        self._counts: collections.Counter[str] = collections.Counter()
        self._loaded_bytes = 0

    # -- from the engine -----------------------------------------------------------------------------------

    async def fetch(
        self,
        keys: bytes,
        n_slices: int,
        *,
        identity: bytes,
        tenant: int,
        deadline_s: float,
        parent: bytes = b"",
        budget_bytes: int | None = None,
    ) -> FetchOutcome:
        """Bring the leading chunks of `keys` (32-byte storage keys, chunk-major × slices) into L1.

        `identity` is the 32-byte root that the records must name, `tenant` whom the bytes count for, `parent`
        the keys of the chunk before (one per slice, empty at the start of a prompt), `deadline_s` a time of
        the controller's clock.  With `budget_bytes` no more than that is loaded (prewarm).  Cancelling ends
        the wait and every load that has not begun.
        """
        names = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        parents = [parent[at : at + KEY_BYTES] for at in range(0, len(parent), KEY_BYTES)]
        fetch = _Fetch(names, n_slices, parents, identity, tenant, deadline_s)
        if self._stopping:
            return FetchOutcome(0, 0, miss_reason("stopping"), "stopping")
        self._counts["fetches"] += 1
        task = asyncio.create_task(self._run(fetch, budget_bytes), name="fetch")
        self._fetches[fetch] = task
        task.add_done_callback(functools.partial(self._fetch_ended, fetch))
        try:
            left_s = max(0.0, deadline_s - self._clock.monotonic_s())
            await asyncio.wait({task, fetch.decided}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            fetch.abandoned = True
            raise
        finally:
            fetch.expired = True
            for loader in fetch.sources:
                loader.gate.expire(fetch)
        return fetch.outcome() if fetch.decided.done() or fetch.plan.holes else self._undecided(task)

    async def idle(self) -> None:
        """Returns when no fetch is under way."""
        while self._fetches or self._chores:
            await asyncio.wait({*self._fetches.values(), *self._chores})

    async def stop(self, drain_s: float) -> None:
        """Begin no more loads, give those under way `drain_s` seconds, abort the rest. Idempotent."""
        self._stopping = True
        try:
            await asyncio.wait_for(self.idle(), drain_s)
        except TimeoutError:
            tasks = [*self._fetches.values(), *self._chores]
            for fetch in self._fetches:
                tasks += fetch.running
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def loading(self, key: bytes) -> bool:
        """Whether this key is being loaded now."""
        return key in self._loads

    # -- adapters come and go ------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """A member of the set, open: fetches that begin from now on ask it."""
        self._of[member.name] = _Loader(member, _Gate(self.limits.max_in_flight, self.limits.in_flight_bytes))

    def shut(self, name: str) -> None:
        """The member takes no more loader: what waits for it looks elsewhere."""
        self._of[name].gate.shut()

    async def idle_of(self, name: str) -> None:
        """Returns when this member is neither asked nor loaded from."""
        loader = self._of[name]
        while loader.busy():
            loader.quiet.clear()
            await loader.quiet.wait()

    async def leave(self, name: str) -> None:
        """Forget a member that takes no more loader. What is under way looks elsewhere, or ends as a miss."""
        loader = self._of.pop(name)
        await asyncio.sleep(0)  # a task must have begun before it can end as its reservations need it
        running = list(loader.loading)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def stats(self) -> dict[str, Any]:
        """Numbers for status and metrics."""
        return {
            "fetches_running": len(self._fetches),
            "keys_loading": len(self._loads),
            "loaded_bytes": self._loaded_bytes,
            "counts": dict(self._counts),
            "adapters": {
                member.name: self.stats_of(member.name)
                for member in self._adapters
                if member.name in self._of
            },
        }

    def stats_of(self, name: str) -> dict[str, int]:
        """Numbers of one member; none after it has left."""
        loader = self._of.get(name)
        if loader is None:
            return {}
        return {"loading_bytes": loader.gate.loading_bytes, "waiting": loader.gate.waiting}

    # -- one fetch -----------------------------------------------------------------------------------------

    def _undecided(self, task: asyncio.Task[None]) -> FetchOutcome:
        if task.done() and not task.cancelled() and task.exception() is not None:
            return FetchOutcome(0, 0, miss_reason("internal"), "internal")
        return FetchOutcome(0, 0, miss_reason("deadline"), "deadline")

    def _fetch_ended(self, fetch: _Fetch, task: asyncio.Task[None]) -> None:
        del self._fetches[fetch]
        for loader in fetch.sources:
            loader.gate.leave(fetch)
        if not task.cancelled() and task.exception() is not None:
            log.error("a fetch failed by our own mistake", exc_info=task.exception())

    async def _run(self, fetch: _Fetch, budget_bytes: int | None) -> None:
        fetch.planned(await self._plan(fetch, budget_bytes))
        while fetch.pending or fetch.running:
            if not fetch.pending or fetch.in_vain() or self._stopping:
                fetch.pending.clear()
                if fetch.running:
                    await asyncio.wait(fetch.running, return_when=asyncio.FIRST_COMPLETED)
                continue
            first = fetch.pending[0]
            if self._join(fetch, first):
                fetch.take([first])
                continue
            loader = fetch.sources[first.source.adapter]
            max_items = loader.adapter.capabilities.max_batch
            count = next_batch(fetch.pending, max_items, self._batch_bytes)
            batch = list(itertools.islice(fetch.pending, count))
            batch_bytes = sum(hole.source.record_bytes for hole in batch)
            if not loader.member.takes_loads:
                fetch.take(batch)
                self._not_filled(fetch, [(hole, REMOVED) for hole in batch])
            elif not await loader.gate.enter(fetch, batch_bytes):
                if loader.member.takes_loads:
                    fetch.failed(first, "deadline")
            elif fetch.in_vain() or self._stopping or not loader.member.takes_loads:
                loader.gate.ended(batch_bytes)  # that came out while the fetch waited
            else:
                fetch.take(batch)
                batch = [hole for hole in batch if not self._join(fetch, hole)]
                self._start(fetch, loader, batch, batch_bytes)

    async def _plan(self, fetch: _Fetch, budget_bytes: int | None) -> Plan:
        """Ask L1, then the adapters in their order, each for what no one before it has."""
        keys, n_slices = fetch.keys, fetch.n_slices
        fetch.sources = [self._of[member.name] for member in self._adapters if member.takes_loads]
        l1_chunks = [self._pool.peek(b"".join(keys[s::n_slices]), 1) for s in range(n_slices)]
        missing = [i for i in range(len(keys)) if i // n_slices >= l1_chunks[i % n_slices]]
        sources: dict[int, Source] = {}
        unknown: dict[int, str] = {}
        for at in range(0, len(missing), EXISTS_BATCH):
            part = missing[at : at + EXISTS_BATCH]
            for number in range(len(fetch.sources)):
                asked = [i for i in part if i not in sources]
                if not asked:
                    break
                found = await self._ask(fetch, number, [keys[i] for i in asked])
                for i, (presence, record_bytes, reason) in zip(asked, found, strict=True):
                    if presence is Presence.PRESENT:
                        sources[i] = Source(number, record_bytes)
                    elif presence is Presence.UNKNOWN:
                        unknown.setdefault(i, reason or "unknown")
            if not all(i in sources or self._in_l1(keys[i]) for i in part):
                break  # the prefix ends in this part
        return make_plan(keys, n_slices, l1_chunks, sources, self._in_l1, unknown, budget_bytes)

    def _in_l1(self, key: bytes) -> bool:
        return self._pool.peek(key, 1) == 1

    async def _ask(self, fetch: _Fetch, number: int, keys: list[bytes]) -> list[Found]:
        """`exists` of one adapter, waiting no longer than its patience."""
        loader = fetch.sources[number]
        if not loader.member.takes_loads:
            return [Found(Presence.UNKNOWN, 0, REMOVED)] * len(keys)
        left_s = max(0.0, fetch.deadline_s - self._clock.monotonic_s())
        last = number == len(fetch.sources) - 1
        patience_s = left_s if last else min(left_s * self.limits.patience_share, self.limits.patience_s)
        loader.asking += 1
        try:
            return await asyncio.wait_for(loader.adapter.exists(keys), patience_s)
        except TimeoutError:
            return [Found(Presence.UNKNOWN, 0, "deadline")] * len(keys)
        except Exception as error:  # the plugin boundary: an adapter that raises broke its contract
            log_broken_contract(loader.name, "exists", error)
            return [Found(Presence.UNKNOWN, 0, "adapter_error")] * len(keys)
        finally:
            loader.asking -= 1
            loader.note_progress()

    async def _elsewhere(self, fetch: _Fetch, lost: list[tuple[Hole, str]]) -> None:
        """Look for holes that one adapter could not fill in those that come after it."""
        for number in range(min(hole.source.adapter for hole, _ in lost) + 1, len(fetch.sources)):
            asked = [hole for hole, _ in lost if hole.source.adapter < number]
            if not asked:
                continue
            answers = await self._ask(fetch, number, [hole.key for hole in asked])
            found = {
                hole.number: hole._replace(source=Source(number, record_bytes))
                for hole, (presence, record_bytes, _) in zip(asked, answers, strict=True)
                if presence is Presence.PRESENT
            }
            fetch.again(list(found.values()))
            lost = [(hole, reason) for hole, reason in lost if hole.number not in found]
            if not lost:
                return
        for hole, reason in lost:
            fetch.failed(hole, reason)

    def _not_filled(self, fetch: _Fetch, lost: list[tuple[Hole, str]]) -> None:
        """These loads failed: try the adapters that come after, or end the prefix."""
        last = len(fetch.sources) - 1
        final = fetch.abandoned or fetch.expired or self._stopping
        for hole, reason in lost:
            if final or hole.source.adapter == last:
                fetch.failed(hole, reason)
        again = [] if final else [(hole, reason) for hole, reason in lost if hole.source.adapter < last]
        if again:
            self._spawn(fetch, self._elsewhere(fetch, again), "fetch-elsewhere")

    def _spawn(self, fetch: _Fetch, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        fetch.running.add(task)
        task.add_done_callback(fetch.running.discard)
        return task

    def _join(self, fetch: _Fetch, hole: Hole) -> bool:
        """Wait for a load of the same key that another fetch has begun; False if there is none."""
        load = self._loads.get(hole.key)
        if load is None:
            return False
        self._counts["joined"] += 1
        self._spawn(fetch, self._wait_for(fetch, hole, load), "fetch-join")
        return True

    async def _wait_for(self, fetch: _Fetch, hole: Hole, load: asyncio.Future[str]) -> None:
        await asyncio.wait({load})
        if reason := load.result():
            self._not_filled(fetch, [(hole, reason)])
        else:
            fetch.there(hole)

    # -- one batch -----------------------------------------------------------------------------------------

    def _start(self, fetch: _Fetch, loader: _Loader, batch: list[Hole], batch_bytes: int) -> None:
        """Reserve what fits now and begin to load it."""
        items: list[LoadItem] = []
        parts: list[_Reserved] = []
        beyond = _Refusal(len(fetch.keys), "")
        for run in reserve_runs(batch, fetch.keys, fetch.n_slices, fetch.parents):
            part, beyond = self._reserve(fetch, run, beyond)
            for i, hole in zip(part.indices, part.holes, strict=True):
                hold = self._pool.hold(hole.key, part.ticket, i)
                assert hold is not None, "an item just reserved has a hold"
                items.append(LoadItem(hole.key, hold))
            if part.indices:
                parts.append(part)
        begun = {item.key for item in items}
        for hole in batch:
            if hole.key not in begun and fetch.is_open(hole):
                fetch.failed(hole, beyond.word or "refused")
        if not items:
            loader.gate.ended(batch_bytes)
            return
        loop = asyncio.get_running_loop()
        for item in items:
            self._loads[item.key] = loop.create_future()
        work = self._load(fetch, loader, items, parts, batch_bytes)
        task = self._spawn(fetch, work, f"load-{loader.name}")
        loader.loading.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            loader.loading.discard(task)
            loader.note_progress()

        task.add_done_callback(ended)

    def _reserve(self, fetch: _Fetch, run: Run, beyond: _Refusal) -> tuple[_Reserved, _Refusal]:
        """Reserve one run, but nothing from the chunk on that an earlier run of the batch was refused.

        Returns what is to be loaded, and the first refusal of the batch so far.
        """
        n_slices = fetch.n_slices
        holes = [hole for hole in run.holes if hole.number // n_slices < beyond.chunk]
        if not holes:
            return _Reserved(0, [], []), beyond
        ticket, outcomes, _ = self._pool.reserve(
            b"".join(hole.key for hole in holes),
            run.parent,
            run.record_bytes,
            SERVER_ROW,
            fetch.identity,
            fetch.tenant,
        )
        indices: list[int] = []
        useless: list[int] = []
        for i, (hole, outcome) in enumerate(zip(holes, outcomes, strict=True)):
            chunk = hole.number // n_slices
            if outcome == ReserveOutcome.RESERVED:
                (indices if chunk < beyond.chunk else useless).append(i)
            elif outcome == ReserveOutcome.PRESENT:
                fetch.there(hole)
            elif chunk < beyond.chunk:
                beyond = _Refusal(chunk, ReserveOutcome(outcome).name.lower())
                self._counts[f"reserve:{beyond.word}"] += 1
        if useless:
            self._pool.abort(ticket, useless)
        return _Reserved(ticket, indices, [holes[i] for i in indices]), beyond

    async def _load(
        self, fetch: _Fetch, loader: _Loader, items: list[LoadItem], parts: list[_Reserved], batch_bytes: int
    ) -> None:
        """Load, commit or abort each item, and tell everybody who waits for it."""
        outcomes: list[LoadOutcome] = []
        lengths = {item.key: item.hold.length for item in items}
        failpoints.hit("load.reserved")
        try:
            outcomes = await loader.adapter.load(items)
            failpoints.hit("load.read")
        except Exception as error:  # the plugin boundary: an adapter that raises broke its contract
            log_broken_contract(loader.name, "load", error)
            outcomes = [LoadOutcome(LoadStatus.FAILED, "adapter_error")] * len(items)
        finally:  # also when cancelled: the holds are the medium's, the reservations are ours
            loader.gate.ended(batch_bytes)
            cut_short = "stopping" if self._stopping else REMOVED
            outcomes = outcomes or [LoadOutcome(LoadStatus.FAILED, cut_short)] * len(items)
            at = 0
            for part in parts:
                self._finish(fetch, loader, part, outcomes[at : at + len(part.holes)], lengths)
                at += len(part.holes)

    def _finish(
        self,
        fetch: _Fetch,
        loader: _Loader,
        part: _Reserved,
        outcomes: Sequence[LoadOutcome],
        lengths: dict[bytes, int],
    ) -> None:
        loaded = [i for i, o in zip(part.indices, outcomes, strict=True) if o.status is LoadStatus.LOADED]
        lost = [i for i, o in zip(part.indices, outcomes, strict=True) if o.status is not LoadStatus.LOADED]
        committed = dict(zip(loaded, self._pool.commit(part.ticket, loaded), strict=True)) if loaded else {}
        failpoints.hit("load.committed")
        if lost:
            self._pool.abort(part.ticket, lost)
        foreign: list[bytes] = []
        lost_keys: list[bytes] = []
        found: list[tuple[bytes, int]] = []
        failed: list[tuple[Hole, str]] = []
        for i, hole, (status, why) in zip(part.indices, part.holes, outcomes, strict=True):
            if status is not LoadStatus.LOADED:
                reason = status.name.lower() if status is not LoadStatus.FAILED else why or "failed"
                self._counts[f"load:{reason}"] += 1
                if status is not LoadStatus.FAILED:
                    lost_keys.append(hole.key)
            elif committed[i] == CommitOutcome.COMMITTED:
                reason = ""
                self._counts["loaded"] += 1
                self._loaded_bytes += lengths[hole.key]
                found.append((hole.key, lengths[hole.key]))
            else:  # whole, but not what its key says it is
                reason = "corrupt"
                self._counts["load:foreign"] += 1
                foreign.append(hole.key)
                lost_keys.append(hole.key)
            self._loads.pop(hole.key).set_result(reason)
            if reason:
                failed.append((hole, reason))
            else:
                fetch.there(hole)
        if found:
            self._found(loader.name, fetch.tenant, found)
        if lost_keys:
            self._lost(loader.name, lost_keys)
        self._not_filled(fetch, failed)
        if foreign:
            log.error("%s: %d records do not name the identity asked for", loader.name, len(foreign))
            chore = asyncio.create_task(loader.adapter.delete(foreign), name="delete-foreign")
            self._chores.add(chore)
            chore.add_done_callback(self._chores.discard)
