"""Loads: from keys that L1 misses to records loaded out of the tiers.

    fetch ─▶ plan: ask L1, then each tier ─▶ gate ─▶ reserve what fits now ─▶ load ─▶ finish ─▶ the prefix grows
                        ▲                                                       │
                        └────────── the tiers that come after ◀── lost ─────────┘

A fetch asks the tiers how far the prefix extends, reserves extents for the chunks that fit now, loads the holes in
batches and makes each loaded chunk visible at once.  It answers when the prefix is decided or at its deadline; loads
that are under way then continue, and their chunks become visible without a lease.

Keys are chunk-major: key number `i` belongs to chunk `i // n_slices` and slice `i % n_slices`.  The prefix ends before
the first chunk that has a slice which is neither in L1 nor in any tier.  Slices with a span (keys/spans.py) are needed
at the prefix's end only, and may move the end forward.  A *hole* is a key of the prefix that is in a tier but not in
L1.

Invariants
1. No fetch waits while it holds a reservation that is not being loaded: it reserves extents in L1 only after it has
   passed the tier's gate, and a refusal ends the prefix.
2. A key is loaded once at a time; other fetches that need it wait for that load.
3. Every reserved item ends in a commit or an abort (LoadBatch).  Its hold is passed to the tier; an aborted item stays
   quarantined until the tier has dropped the hold.
4. At most `max_in_flight` fetches whose callers wait load from one tier at a time, with at most `in_flight_bytes` under
   way.  These bytes and those stuck in tiers bound the server's own reservations: the pool sets no limit for row 0.  A
   fetch past its deadline goes on only while no other fetch waits at the gate.  A fetch for which no user waits
   (prewarm) loads one small batch at a time, only while no other fetch loads from the tier or waits there, and begins
   none after its deadline.
5. A tier that does not answer `exists` within its share of the time (`PrefetchLimits`) is passed over.
6. A fetch asks the tiers that are active when it begins, in their order.
7. A lookup may leave chunks that tiers have to its engine to compute (tiers/choice.py); other fetches load all chunks
   that they find.
8. No turn of the loop looks at more than about PART_KEYS keys: a fetch keeps a byte for each key, and everything that
   concerns all of them is a single call on these bytes.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvstrata import failpoints
from kvstrata.clock import Clock
from kvstrata.native.core import LoadBatch, LoadRequest, Pool
from kvstrata.observability.explain import Choice
from kvstrata.observability.numbers import RATIO_BUCKETS, Numbers, counter, gauge, histogram, parts_by
from kvstrata.observability.tracing import Span
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.tiers.base import Item, Outcome, failed
from kvstrata.tiers.choice import PROBE_BYTES, PROBE_EVERY, PROBE_S, best_end
from kvstrata.tiers.fetch import (
    MAX_TIERS,
    PART_KEYS,
    PRESENT,
    TIER,
    Fetch,
    FetchOutcome,
    Plan,
    Planner,
    PrefetchLimits,
    Spent,
)
from kvstrata.tiers.reasons import DEADLINE, LENGTH, miss_reason
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import Tier, TierState
from kvstrata.types import MissReason

log = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Maximum number of fetches that wait at one gate; more are refused."""
QUIET_S, PREWARM_SHARE = 0.05, 0.25
"""A prewarm waits until QUIET_S after the last fetch of a user.  Since a user's fetch may then come and wait for its
batch, it first loads a single record, and PREWARM_SHARE of the bytes of other batches after a second without users."""


class Gate(Numbers):
    """Bounds how many fetches load from one tier at a time, and how many bytes they load; first come, first served.

    A fetch enters the gate before it reserves extents, so that no fetch waits while it holds a reservation.  A fetch
    past its deadline gives up its place to any other fetch.  Prewarms wait behind all other fetches, take no slot, and
    pass only while no other load runs.
    """

    loading_bytes = gauge("Bytes being loaded from this adapter.")
    waiting = gauge(
        "Fetches queued for this adapter.",
        lambda gate: len(gate._waiters),
        name="waiting_fetches",
    )
    left_bytes = counter(
        "Bytes of records not loaded because the engine was expected to compute them faster."
    )
    load_ratio = histogram("Ratio of expected to measured load time of this adapter.", bounds=RATIO_BUCKETS)

    def __init__(self, slots: int, limit_bytes: int) -> None:
        self._slots = slots
        self._limit_bytes = limit_bytes
        self._inside: set[Fetch] = set()
        self._waiters: collections.deque[tuple[Fetch, int, asyncio.Future[bool]]] = collections.deque()

    async def enter(self, fetch: Fetch, need_bytes: int) -> bool:
        """Wait for a slot. False if the fetch's time is over first or too many fetches wait."""
        if not fetch.expired:
            self._give_up(lambda waiter: waiter.expired)
        n_before = len([1 for other, _, _ in self._waiters if fetch.is_prewarm or not other.is_prewarm])
        if not n_before and self._try(fetch, need_bytes):
            return True
        if len(self._waiters) >= MAX_WAITING or (fetch.expired and self._waiters):
            return False
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.insert(n_before, (fetch, need_bytes, place))
        return await place

    def expire(self, fetch: Fetch) -> None:
        """Free the slot of a fetch whose caller has gone, and its place in the queue if others wait there."""
        if fetch.abandoned or any(not waiter.expired for waiter, _, _ in self._waiters):
            self._give_up(lambda waiter: waiter is fetch)
        self.leave(fetch)

    def leave(self, fetch: Fetch) -> None:
        """Free the fetch's slot."""
        self._inside.discard(fetch)
        self._admit()

    def ended(self, freed_bytes: int) -> None:
        """Free the bytes of a batch that was loaded or failed."""
        self.loading_bytes -= freed_bytes
        self._admit()

    def _try(self, fetch: Fetch, need_bytes: int) -> bool:
        if fetch.is_prewarm and (self._inside or self.loading_bytes):
            return False
        if fetch not in self._inside and len(self._inside) >= self._slots:
            return False
        if self.loading_bytes and self.loading_bytes + need_bytes > self._limit_bytes:
            return False
        if not (fetch.expired or fetch.is_prewarm):
            self._inside.add(fetch)
        self.loading_bytes += need_bytes
        return True

    def _give_up(self, which: Callable[[Fetch], bool]) -> None:
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


class _Load:
    """A batch under way, and a reason for each key that it did not load."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reasons: dict[bytes, str] = {}


class PrefetchController(Numbers):
    """Runs all fetches, as the module describes. All methods belong to the event loop."""

    fetches_running = gauge("Lookups and prewarms that are loading now.", lambda self: len(self._fetches))
    keys_loading = gauge("Records being loaded.", lambda self: len(self._loads))
    loaded_bytes = counter("Record bytes loaded.")
    counts = counter(
        "Fetches by outcome: joined (waited for another fetch's load), loaded, probes (loads that measure a skipped "
        "adapter), and failures as `reserve:` or `load:` and the reason.",
        "outcome",
        name="outcomes",
    )
    phases = histogram(
        "Time that the loads of one lookup took in each phase. Adapters in Python or in a host report `wait` in "
        "their lanes and `verify` as `medium`.",
        "phase",
        name="phase_seconds",
    )
    adapters = parts_by("adapter", Gate, lambda self: self._gates)

    def __init__(
        self,
        pool: Pool,
        tiers: TierSet,
        limits: PrefetchLimits,
        clock: Clock,
        lost: Callable[[str, Sequence[bytes]], None],
        found: Callable[[str, Sequence[bytes]], None] = lambda name, keys: None,
    ) -> None:
        """`lost(tier, keys)` is called with records that turned out to be absent or damaged in a tier; `found(tier,
        keys)` with records that were loaded."""
        self.limits = limits
        self._pool = pool
        self._tiers = tiers
        self._clock = clock
        self._lost = lost
        self._found = found
        self._gates: dict[str, Gate] = {}
        """Gates by name of the tier; each open tier has one."""
        self._planner = Planner(clock, limits, lost)
        self._batch_bytes = min(limits.batch_bytes, limits.in_flight_bytes // 2)
        self._loads: dict[bytes, _Load] = {}
        """Loads under way, by key."""
        self._fetches: dict[Fetch, asyncio.Task[None]] = {}
        self._choices = 0
        """Number of choices between load and recompute."""
        self._stopping = False
        self._user_ended_s = 0.0
        tiers.use(self._use)

    def _use(self, tier: Tier) -> None:
        """Use an open tier for fetches that begin from now on."""
        gate = Gate(self.limits.max_in_flight, self.limits.in_flight_bytes)
        tier.users["loads"] = self._gates[tier.name] = gate

    # -- from lookups, prewarms and controllers ------------------------------------------------------------

    async def fetch(
        self,
        keys: bytes,
        n_slices: int,
        *,
        identity: bytes,
        tenant: int,
        deadline_s: float,
        limits: Sequence[int],
        parent: bytes = b"",
        budget_bytes: int | None = None,
        spans: Sequence[int] = (),
        owner: bytes = b"",
        prewarm: Spent | None = None,
        compute_s: Callable[[int, int], float] | None = None,
        trace: Span | None = None,
        own: bool = False,
    ) -> FetchOutcome:
        """Bring the leading chunks of `keys` (32-byte storage keys, chunk-major × slices) into L1.

        `identity` is the 32-byte root that the records must name, `tenant` the tenant that the bytes count for,
        `parent` the keys of the chunk before (one per slice, empty at the start of a prompt), `deadline_s` a time of
        the prefetch controller's clock.  `budget_bytes` limits the bytes that are loaded.  `limits` has for each slice
        the length of a whole chunk's record, which is the length of the extents; 0 if it is unknown, and then nothing
        can be loaded.  Of slices with a span (`spans`, see keys/spans.py) only the chunks that a hit needs are loaded.
        `owner`: see Ask.  `prewarm`: no user waits, so users' loads go first; the cost of the loads is added to it.
        `compute_s(first, end)`: the engine's time to compute a range of these chunks; with it, chunks that are computed
        faster than loaded are left to the engine.  `trace`: see Fetch.  `own`: ask only tiers that no other instance
        shares.  Cancelling ends the wait and every load that has not begun.
        """
        assert len(limits) == n_slices
        if self._stopping:
            return FetchOutcome(0, 0, miss_reason("stopping"), "stopping")
        if not all(limits):
            return FetchOutcome(0, 0, miss_reason(LENGTH), LENGTH)
        request = LoadRequest(keys, parent, limits, identity, tenant)
        tiers = self._active()
        if own:
            tiers = [tier for tier in tiers if tier.capabilities.takes_puts and not tier.capabilities.shared]
        fetch = Fetch(
            self._pool, keys, request, limits, deadline_s, tiers, spans=spans, owner=owner, prewarm=prewarm
        )  # fmt: skip
        fetch.compute_s, fetch.identity, fetch.tenant = compute_s, identity, tenant
        fetch.trace = trace
        return await self._fetch(fetch, budget_bytes)

    async def _fetch(self, fetch: Fetch, budget_bytes: int | None) -> FetchOutcome:
        self.counts["fetches"] += 1
        task = self._fetches[fetch] = asyncio.create_task(self._run(fetch, budget_bytes), name="fetch")
        task.add_done_callback(functools.partial(self._fetch_ended, fetch))
        try:
            left_s = max(0.0, fetch.deadline_s - self._clock.monotonic_s())
            await asyncio.wait({task, fetch.decided}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            fetch.abandoned = True
            raise
        finally:
            fetch.expired = True
            if fetch.is_prewarm:
                fetch.abandoned = True
            else:
                self._user_ended_s = time.perf_counter()
            for tier in fetch.tiers:
                self._gates[tier.name].expire(fetch)
        if fetch.plan is not None:
            return fetch.outcome()
        failed = task.done() and not task.cancelled() and task.exception() is not None
        detail = "internal" if failed else DEADLINE
        return FetchOutcome(0, 0, miss_reason(detail), detail)

    async def fetch_one_of(
        self,
        alternatives: Sequence[bytes],
        n_slices: int,
        *,
        identity: bytes,
        tenant: int,
        parent: bytes,
        deadline_s: float,
        limits: Sequence[int],
    ) -> int:
        """Load the first of these tails that a tier has into L1. `alternatives` are the storage keys of each tail.

        Returns its number, or -1 if no tier has one or it is not loaded in time.  See `fetch` for the arguments.
        """
        assert len(limits) == n_slices
        if not all(limits):
            return -1

        def tail_fetch(keys: bytes) -> Fetch:
            request = LoadRequest(keys, parent, limits, identity, tenant, tail=True)
            return Fetch(self._pool, keys, request, limits, deadline_s, self._active(), tails=True)

        asked = tail_fetch(b"".join(alternatives))
        asked.look_in_l1(range(asked.n_keys))
        await self._planner.ask_all(asked, [i for i in range(asked.n_keys) if not asked.known[i]])
        number = next(
            (
                chunk
                for chunk in range(len(alternatives))
                if all(asked.is_present(chunk, slice_number) for slice_number in range(n_slices))
            ),
            -1,
        )
        if number < 0 or self._stopping:
            return -1
        return number if (await self._fetch(tail_fetch(alternatives[number]), None)).n_chunks else -1

    async def idle(self) -> None:
        """Returns when no fetch is under way."""
        while self._fetches:
            await asyncio.wait(set(self._fetches.values()))

    async def stop(self, drain_s: float) -> None:
        """Begin no more loads, give those under way `drain_s` seconds, abort the rest. Idempotent."""
        self._stopping = True
        try:
            await asyncio.wait_for(self.idle(), drain_s)
        except TimeoutError:
            tasks = list(self._fetches.values())
            for fetch in self._fetches:
                tasks += fetch.running
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- one fetch -----------------------------------------------------------------------------------------

    def _active(self) -> list[Tier]:
        """The tiers that answer lookups now, nearest first."""
        return [tier for tier in self._tiers if tier.state is TierState.ACTIVE][:MAX_TIERS]

    def _fetch_ended(self, fetch: Fetch, task: asyncio.Task[None]) -> None:
        del self._fetches[fetch]
        for tier in fetch.tiers:
            self._gates[tier.name].leave(fetch)
        if fetch.spent.keys and not fetch.is_prewarm:
            self.phases.add_each(fetch.spent.phases)
        if not task.cancelled() and task.exception() is not None:
            log.error("a fetch failed because of a bug in kvstrata", exc_info=task.exception())

    async def _run(self, fetch: Fetch, budget_bytes: int | None) -> None:
        phases, begun_s = fetch.spent.phases, time.perf_counter()
        plan = await self._planner.plan(fetch, budget_bytes)
        phases["lookup"] += time.perf_counter() - begun_s
        fetch.begun_s = self._clock.monotonic_s()
        if len(self._fetches) > 1:
            fetch.ahead = {tier: self._to_load_bytes(tier) for tier in fetch.tiers}
        fetch.planned(plan if fetch.compute_s is None else self._choose(fetch, plan, fetch.compute_s))
        while True:
            is_prewarm = fetch.is_prewarm and not fetch.decided.done()
            max_bytes = await self._prewarm_bytes(fetch) if is_prewarm else self._batch_bytes
            numbers = fetch.next_batch(max_bytes)
            if not numbers or self._is_in_vain(fetch, numbers):
                fetch.give_up()
                if not fetch.running:
                    if not fetch.is_prewarm:
                        self._measure(fetch)
                    return
                await asyncio.wait(fetch.running, return_when=asyncio.FIRST_COMPLETED)
                continue
            if numbers := self._join(fetch, numbers):
                tier, size = fetch.tier_of(numbers[0]), fetch.bytes_of(numbers)
                gate, waits_s = self._gates[tier.name], time.perf_counter()
                may_load = await gate.enter(fetch, size)
                phases["wait"] += time.perf_counter() - waits_s
                if not may_load:
                    fetch.failed(numbers[:1], DEADLINE)
                elif self._is_in_vain(fetch, numbers):  # this can change while the fetch waits
                    gate.ended(size)
                else:
                    self._start(fetch, tier, self._join(fetch, numbers), size)
            await asyncio.sleep(0)

    async def _prewarm_bytes(self, fetch: Fetch) -> int:
        """Wait for the end of a prewarm's last batch, and for a pause of users. Returns the bytes of its next batch."""
        if fetch.running:
            await asyncio.wait(fetch.running)
        quiet_s = time.perf_counter() - self._user_ended_s
        if (waits_s := QUIET_S - quiet_s) > 0:
            await asyncio.sleep(waits_s)
            fetch.spent.phases["wait"] += waits_s
        return int(self._batch_bytes * min(quiet_s, 1.0) * PREWARM_SHARE)

    def _is_in_vain(self, fetch: Fetch, numbers: Sequence[int]) -> bool:
        """Whether loading these holes is useless: the prefix ends before them, or the caller has gone."""
        return self._stopping or fetch.abandoned or fetch.first_failed <= numbers[0]

    def _join(self, fetch: Fetch, numbers: list[int]) -> list[int]:
        """Make a fetch wait for loads of the same keys that are under way. Returns the holes without such a load."""
        if not self._loads:
            return numbers
        joined: dict[_Load, list[int]] = {}
        for number in numbers:
            load = self._loads.get(fetch.key(number))
            if load is not None:
                joined.setdefault(load, []).append(number)
        for load, mine in joined.items():
            self.counts["joined"] += len(mine)
            fetch.busy(mine)
            self._spawn(fetch, self._wait_for(fetch, load, mine), "fetch-join")
        return [number for number in numbers if fetch.state[number] >= TIER] if joined else numbers

    async def _wait_for(self, fetch: Fetch, load: _Load, numbers: list[int]) -> None:
        waits_s = time.perf_counter()
        await asyncio.wait({load.done})
        fetch.spent.phases["wait"] += time.perf_counter() - waits_s
        reasons = [(number, load.reasons.get(fetch.key(number), "")) for number in numbers]
        fetch.filled([number for number, reason in reasons if not reason])
        self._not_filled(fetch, [(number, reason) for number, reason in reasons if reason])

    def _not_filled(self, fetch: Fetch, lost: list[tuple[int, str]]) -> None:
        """Try the next tiers for these failed loads, or end the prefix."""
        last = TIER + len(fetch.tiers) - 1
        final = fetch.abandoned or fetch.expired or self._stopping
        again = []
        for number, reason in lost:
            if final or fetch.known[number] == last:
                fetch.failed([number], reason)
            else:
                again.append((number, reason))
        if again:
            self._spawn(fetch, self._elsewhere(fetch, again), "fetch-elsewhere")

    async def _elsewhere(self, fetch: Fetch, lost: list[tuple[int, str]]) -> None:
        """Look up these holes, which their tiers could not fill, in the next tiers."""
        for tier in range(min(fetch.known[number] for number, _ in lost) - TIER + 1, len(fetch.tiers)):
            asked = [number for number, _ in lost if fetch.known[number] < TIER + tier]
            if not asked:
                continue
            presences, _ = await self._planner.ask(fetch, tier, asked)
            found = {number for number, one in zip(asked, presences, strict=True) if one == PRESENT}
            fetch.again(list(found), tier)
            lost = [(number, reason) for number, reason in lost if number not in found]
            if not lost:
                return
        for number, reason in lost:
            fetch.failed([number], reason)

    def _spawn(self, fetch: Fetch, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        fetch.running.add(task)
        task.add_done_callback(fetch.running.discard)

    # -- load or leave -------------------------------------------------------------------------------------

    def _to_load_bytes(self, tier: Tier) -> int:
        """Bytes that fetches still have to load from a tier."""
        waits = (one for one in self._fetches if tier in one.tiers and not (one.expired or one.is_prewarm))
        return self._gates[tier.name].loading_bytes + sum(one.bytes_from(tier, one.state) for one in waits)

    def _choose(self, fetch: Fetch, plan: Plan, compute_s: Callable[[int, int], float]) -> Plan:
        """The plan, shortened if computing the chunks after it is expected to be faster."""
        n_chunks, found = plan.n_chunks, fetch.holes(plan.n_chunks)
        firsts = {
            tier: found.index(number) // fetch.n_slices
            for number, tier in enumerate(fetch.tiers, TIER)
            if number in found
        }
        if not firsts:
            return plan

        def expected_s(tier: Tier, holes: bytearray) -> float | None:
            n_bytes = fetch.bytes_from(tier, holes)
            return tier.load_times.expected_s(fetch.ahead.get(tier, 0) + n_bytes) if n_bytes else 0.0

        def load_s(end: int) -> float:
            return sum(expected_s(*each) or 0.0 for each in zip(firsts, itertools.repeat(fetch.holes(end))))

        # A shorter hit needs other windows, so with spans either all chunks are loaded or none.
        ends = {n_chunks, *([0] if fetch.spans else firsts.values())}
        self._choices += 1
        probes = self._choices % PROBE_EVERY == 0
        end = best_end(ends, load_s, lambda end: compute_s(end, n_chunks), probes=probes)
        kept, left = fetch.holes(end), None
        for tier, first in firsts.items():
            loads = first < end
            holes = kept if loads else found
            choice = fetch.choices[tier] = Choice(
                tier.name, n_chunks - first, fetch.bytes_from(tier, holes), expected_s(tier, holes),
                compute_s(first, n_chunks), loads,
            )  # fmt: skip
            self._gates[tier.name].left_bytes += fetch.bytes_from(tier, found) - fetch.bytes_from(tier, kept)
            left = left if loads else left or choice
            if not loads and fetch.begun_s - tier.load_times.measured_s >= PROBE_S:
                self._probe(fetch, tier, found)
        if left is None:
            return plan
        why = f"{left.load_s or 0.0:.3g} s to load, {left.compute_s:.3g} s to compute are expected"
        return Plan(end, MissReason.RECOMPUTE, f"{left.adapter}: {why}")

    def _probe(self, fetch: Fetch, tier: Tier, holes: bytearray) -> None:
        """Begin to measure a tier with its last holes of one slice, behind all loads that a caller waits for."""
        self.counts["probes"] += 1
        tier.load_times.measured_s = now_s = self._clock.monotonic_s()
        n_slices, number = fetch.n_slices, bytes([TIER + fetch.tiers.index(tier)])
        last = holes.rindex(number)
        limits, row = [fetch.limits[last % n_slices]], holes[last % n_slices : last + 1 : n_slices]
        count = max(1, min(PART_KEYS, PROBE_BYTES // limits[0], len(row) - len(row.rstrip(number))))
        first = last - (count - 1) * n_slices
        keys = fetch.keys_of(list(range(first, last + 1, n_slices)))
        parent = fetch.key(first - n_slices) if first >= n_slices else b""
        request = LoadRequest(keys, parent, limits, fetch.identity, fetch.tenant)
        probe = Fetch(self._pool, keys, request, limits, now_s + PROBE_S, [tier], owner=fetch.owner)
        probe.expired = True
        task = self._fetches[probe] = asyncio.create_task(self._run(probe, None), name="probe")
        task.add_done_callback(functools.partial(self._fetch_ended, probe))

    def _measure(self, fetch: Fetch) -> None:
        """Record how long the loads of an ended fetch took."""
        for tier, (n_bytes, ended_s) in fetch.loaded.items():
            seconds, choice = ended_s - fetch.begun_s, fetch.choices.get(tier)
            tier.load_times.measured(fetch.ahead.get(tier, 0) + n_bytes, seconds, ended_s)
            if choice is not None:
                choice.took_s = seconds
                if choice.load_s and seconds and n_bytes >= choice.load_bytes:
                    self._gates[tier.name].load_ratio.add(choice.load_s / seconds)

    # -- one batch -----------------------------------------------------------------------------------------

    def _start(self, fetch: Fetch, tier: Tier, numbers: list[int], size: int) -> None:
        """Reserve the chunks of a batch that fit now, and begin to load them. The gate has counted `size` bytes."""
        begun_s = time.perf_counter()
        batch = self._pool.reserve_batch(fetch.request, numbers)
        fetch.spent.phases["promote"] += time.perf_counter() - begun_s
        fetch.busy(numbers)
        fetch.filled(batch.present)
        if left := set(numbers).difference(batch.numbers, batch.present):
            why = ReserveOutcome(batch.refusal[1]).name.lower() if batch.refusal else "refused"
            self.counts[f"reserve:{why}"] += 1
            fetch.failed(sorted(left), why)
        if not batch.numbers:
            self._gates[tier.name].ended(size)
            return
        keys, load = [fetch.key(number) for number in batch.numbers], _Load()
        self._loads.update(dict.fromkeys(keys, load))
        self._spawn(fetch, self._load(fetch, tier, batch, keys, load, size), f"load-{tier.name}")

    async def _load(
        self, fetch: Fetch, tier: Tier, batch: LoadBatch, keys: list[bytes], load: _Load, size: int
    ) -> None:
        """Load the items, commit or abort each, and wake the fetches that wait for it."""
        items: Sequence[Item] = list(map(Item, keys, batch.holds, fetch.asks_of(batch.numbers)))
        del batch.holds[:]  # the tier owns them now
        settled: Sequence[Item] = ()
        begun_s = time.perf_counter()
        trace = fetch.trace and fetch.trace.child()
        try:
            failpoints.hit("load.reserved")
            settled = await tier.load(items)
            failpoints.hit("load.read")
        finally:  # even when cancelled: the tier ends the holds, and this ends the reservations
            fetch.spent.phases["medium"] += time.perf_counter() - begun_s
            self._gates[tier.name].ended(size)
            settled = settled or failed(items, "stopping")
            if trace:
                loaded = sum(item.outcome is Outcome.LOADED for item in settled)
                trace.end("load", tier=tier.name, records=len(keys), loaded=loaded, bytes=size)
            self._finish(fetch, tier, batch, load, settled)

    def _finish(self, fetch: Fetch, tier: Tier, batch: LoadBatch, load: _Load, items: Sequence[Item]) -> None:
        begun_s = time.perf_counter()
        ended = batch.finish(bytes([item.outcome is Outcome.LOADED for item in items]))
        fetch.spent.phases["promote"] += time.perf_counter() - begun_s
        failpoints.hit("load.committed")
        loaded: list[int] = []
        found: list[bytes] = []
        lost: list[bytes] = []
        foreign: list[bytes] = []
        failures: list[tuple[int, str]] = []
        late = 0
        for number, item, end in zip(batch.numbers, items, ended, strict=True):
            key, outcome = item.key, item.outcome
            del self._loads[key]
            if end == CommitOutcome.COMMITTED:
                loaded.append(number)
                found.append(key)
                continue
            if outcome is Outcome.LOADED:  # a complete record whose header does not match the reservation
                reason = "corrupt"
                self.counts["load:foreign"] += 1
                foreign.append(key)
            else:
                reason = outcome.name.lower() if outcome is not Outcome.FAILED else item.reason or "failed"
                self.counts[f"load:{reason}"] += 1
            if outcome is not Outcome.FAILED:
                lost.append(key)
            load.reasons[key] = reason
            late += reason == DEADLINE
            failures.append((number, reason))
        load.done.set_result(None)
        if loaded or late:
            loaded_bytes = fetch.bytes_of(loaded)
            self.loaded_bytes += loaded_bytes
            before, _ = fetch.loaded.get(tier, (0, 0.0))
            timed = before + loaded_bytes + late * fetch.record_bytes
            fetch.loaded[tier] = timed, self._clock.monotonic_s()
        fetch.filled(loaded)
        if found:
            self.counts["loaded"] += len(found)
            fetch.spent.keys += len(found)
            fetch.spent.bytes += loaded_bytes
            self._found(tier.name, found)
        if lost:
            self._lost(tier.name, lost)
        self._not_filled(fetch, failures)
        if foreign:
            # Some media do not replace an existing value.
            log.error("%s: deleting %d records that name another identity", tier.name, len(foreign))
            self._spawn(fetch, self._delete(tier, b"".join(foreign)), "delete-foreign")

    async def _delete(self, tier: Tier, keys: bytes) -> None:
        await tier.delete(keys)
