"""Prefetch controller: from keys that L1 misses to records loaded out of the tiers.

    fetch ─▶ plan: ask L1, then each tier ─▶ gate ─▶ reserve what fits now ─▶ load ─▶ commit ─▶ the prefix grows
                        ▲                                                      │
                        └────────── the tiers that come after ◀── lost ────────┘

A fetch asks the tiers how far the prefix goes, reserves extents for the chunks that fit now, loads the holes in batches
and makes each loaded chunk visible at once.  It answers when the prefix is decided or at its deadline; loads that are
under way then go on, and their chunks become visible without a lease.

Invariants
1. No fetch waits while it holds a reservation that is not being loaded: it asks for room in L1 only after it has passed
   the tier's gate, and a refusal ends the prefix.
2. A key is loaded once at a time; other fetches that need it wait for that load.
3. Every reserved item ends in a commit or an abort.  Its hold goes to the adapter; after an abort the extent
   stays quarantined until the adapter has dropped the hold.
4. At most `max_in_flight` fetches whose callers wait load from one tier at a time, with at most `in_flight_bytes` under
   way.  These bytes and those stuck in adapters (tiers/tier.py) bound the server's own reservations: the
   pool sets no limit for row 0.  A fetch past its deadline goes on only while no other fetch waits at the gate.
5. A tier that does not answer `exists` within its share of the time (`PrefetchLimits`) is passed over.
6. A fetch asks the tiers that are active when it begins, in their order.

policy/prefetch.py decides which key is loaded from where; fetch.py has the state of one fetch.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from kvstrata import failpoints
from kvstrata.clock import Clock
from kvstrata.keys.batch import split
from kvstrata.keys.spans import longest
from kvstrata.native.core import Pool
from kvstrata.observability.logging import Thinning
from kvstrata.observability.numbers import Numbers, counter, gauge, parts_by
from kvstrata.policy.prefetch import (
    Hole,
    Plan,
    Run,
    Source,
    make_plan,
    next_batch,
    reserve_runs,
    with_windows,
)
from kvstrata.policy.reasons import LENGTH, miss_reason
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.server.l2.fetch import Fetch, FetchOutcome
from kvstrata.server.l2.gate import Gate, Loader, PrefetchLimits
from kvstrata.storage.base import Found, LoadItem, LoadOutcome, LoadStatus, Presence
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import Tier, TierState
from kvstrata.types import SERVER_ROW

log = logging.getLogger(__name__)

_too_long = Thinning(60.0)

EXISTS_BATCH = 1024
"""Keys in one call of `exists`."""
WINDOW_CHUNKS = 128
"""Chunks whose windows are asked for at a time, from the end of the prefix towards its start."""
Asks = Callable[[str, Sequence[bytes]], None]
"""`asks(tier, scattered)` is called before a tier is asked for keys of which each is useful without those before it:
those of windows, states and tails."""


class _Reserved(NamedTuple):
    """Items of one reservation that are being loaded."""

    ticket: int
    indices: list[int]
    holes: list[Hole]


class _Refusal(NamedTuple):
    """The first chunk of a batch that could not be reserved, and the pool's reason; later chunks are left out too."""

    chunk: int
    word: str


class PrefetchController(Numbers):
    """See the module. All methods belong to the event loop."""

    fetches_running = gauge("Lookups and prewarms that are loading now.", lambda self: len(self._fetches))
    keys_loading = gauge("Records being loaded.", lambda self: len(self._loads))
    loaded_bytes = counter("Record bytes loaded.")
    counts = counter(
        "Fetches, joined (waited for the load of another fetch), loaded, and failures as `reserve:` or `load:` and the "
        "reason.",
        "outcome",
        name="outcomes",
    )
    adapters = parts_by("adapter", Gate, lambda self: {name: one.gate for name, one in self._loaders.items()})

    def __init__(
        self,
        pool: Pool,
        tiers: TierSet,
        limits: PrefetchLimits,
        clock: Clock,
        lost: Callable[[str, Sequence[bytes]], None],
        found: Callable[[str, Sequence[bytes]], None] = lambda name, keys: None,
        asks: Asks = lambda name, scattered: None,
    ) -> None:
        """`lost(tier, keys)` is called with records that a tier turned out to lack or to have damaged; `found(tier,
        keys)` with records that were loaded; for `asks` see `Asks`."""
        self.limits = limits
        self._tiers = tiers
        self._asks = asks
        self._lost = lost
        self._found = found
        self._pool = pool
        self._loaders: dict[str, Loader] = {}
        self._clock = clock
        self._batch_bytes = min(limits.batch_bytes, limits.in_flight_bytes // 2)
        self._loads: dict[bytes, asyncio.Future[str]] = {}
        """Key → outcome of its load under way: "" if it was loaded, else the reason why not."""
        self._fetches: dict[Fetch, asyncio.Task[None]] = {}
        self._stopping = False
        tiers.use(self._join_tier)

    # -- from lookups, prewarms and controllers ------------------------------------------------------------

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
        limits: Sequence[int] = (),
        spans: Sequence[int] = (),
    ) -> FetchOutcome:
        """Bring the leading chunks of `keys` (32-byte storage keys, chunk-major × slices) into L1.

        `identity` is the 32-byte root that the records must name, `tenant` the tenant that the bytes count for,
        `parent` the keys of the chunk before (one per slice, empty at the start of a prompt), `deadline_s` a time of
        the prefetch controller's clock.  `budget_bytes` limits the bytes that are loaded (prewarm).  `limits` has for
        each slice the greatest length of its records, 0 for any: a longer value takes no room in L1.  Of slices with a
        span (`spans`, see keys/spans.py) only what a hit needs is loaded.
        Cancelling ends the wait and every load that has not begun.
        """
        fetch = Fetch(
            self._pool, split(keys), n_slices, split(parent), identity, tenant, deadline_s, limits, spans,
        )  # fmt: skip
        if self._stopping:
            return FetchOutcome(0, 0, miss_reason("stopping"), "stopping")
        return await self._fetch(fetch, budget_bytes)

    async def _fetch(self, fetch: Fetch, budget_bytes: int | None) -> FetchOutcome:
        self.counts["fetches"] += 1
        task = asyncio.create_task(self._run(fetch, budget_bytes), name="fetch")
        self._fetches[fetch] = task
        task.add_done_callback(functools.partial(self._fetch_ended, fetch))
        try:
            left_s = max(0.0, fetch.deadline_s - self._clock.monotonic_s())
            await asyncio.wait({task, fetch.decided}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            fetch.abandoned = True
            raise
        finally:
            fetch.expired = True
            for loader in fetch.sources:
                loader.gate.expire(fetch)
        return fetch.outcome() if fetch.decided.done() or fetch.plan.holes else self._undecided(task)

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
        """Bring the first tail that the tiers have into L1. `alternatives` are the storage keys of each tail.

        Returns its number, or -1 if they have none, or do not load it in time.  See `fetch` for the arguments.
        """
        asked = Fetch(
            self._pool, split(b"".join(alternatives)), n_slices, split(parent), identity, tenant, deadline_s, limits,
            tails=True,
        )  # fmt: skip
        number = await self._first_of(asked)
        if number < 0 or self._stopping:
            return -1
        wanted = Fetch(
            self._pool, split(alternatives[number]), n_slices, split(parent), identity, tenant, deadline_s, limits,
            tails=True,
        )  # fmt: skip
        return number if (await self._fetch(wanted, None)).n_chunks else -1

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

    def _join_tier(self, tier: Tier) -> None:
        """Take in an open tier of the set: fetches that begin from now on ask it."""
        tier.users["loads"] = gate = Gate(self.limits.max_in_flight, self.limits.in_flight_bytes)
        self._loaders[tier.name] = Loader(tier, gate)

    # -- one fetch -----------------------------------------------------------------------------------------

    def _undecided(self, task: asyncio.Task[None]) -> FetchOutcome:
        if task.done() and not task.cancelled() and task.exception() is not None:
            return FetchOutcome(0, 0, miss_reason("internal"), "internal")
        return FetchOutcome(0, 0, miss_reason("deadline"), "deadline")

    def _fetch_ended(self, fetch: Fetch, task: asyncio.Task[None]) -> None:
        del self._fetches[fetch]
        for loader in fetch.sources:
            loader.gate.leave(fetch)
        if not task.cancelled() and task.exception() is not None:
            log.error("a fetch failed because of a bug in kvstrata", exc_info=task.exception())

    async def _run(self, fetch: Fetch, budget_bytes: int | None) -> None:
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
            max_items = loader.tier.capabilities.max_batch
            count = next_batch(fetch.pending, max_items, self._batch_bytes)
            batch = list(itertools.islice(fetch.pending, count))
            batch_bytes = sum(hole.source.record_bytes for hole in batch)
            if not await loader.gate.enter(fetch, batch_bytes):
                fetch.failed(first, "deadline")
            elif fetch.in_vain() or self._stopping:
                loader.gate.ended(batch_bytes)  # one of these became true while the fetch waited
            else:
                fetch.take(batch)
                batch = [hole for hole in batch if not self._join(fetch, hole)]
                self._start(fetch, loader, batch, batch_bytes)

    async def _elsewhere(self, fetch: Fetch, lost: list[tuple[Hole, str]]) -> None:
        """Look for these holes, which their tiers could not fill, in the tiers that come after."""
        for number in range(min(hole.source.adapter for hole, _ in lost) + 1, len(fetch.sources)):
            asked = [hole for hole, _ in lost if hole.source.adapter < number]
            if not asked:
                continue
            answers = await self._ask(fetch, number, {hole.number: hole.key for hole in asked})
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

    def _not_filled(self, fetch: Fetch, lost: list[tuple[Hole, str]]) -> None:
        """Try the next tiers for these failed loads, or end the prefix."""
        last = len(fetch.sources) - 1
        final = fetch.abandoned or fetch.expired or self._stopping
        for hole, reason in lost:
            if final or hole.source.adapter == last:
                fetch.failed(hole, reason)
        again = [] if final else [(hole, reason) for hole, reason in lost if hole.source.adapter < last]
        if again:
            self._spawn(fetch, self._elsewhere(fetch, again), "fetch-elsewhere")

    def _spawn(self, fetch: Fetch, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        fetch.running.add(task)
        task.add_done_callback(fetch.running.discard)
        return task

    def _join(self, fetch: Fetch, hole: Hole) -> bool:
        """Let a fetch wait for a load of the same key that is under way; False if none is."""
        load = self._loads.get(hole.key)
        if load is None:
            return False
        self.counts["joined"] += 1
        self._spawn(fetch, self._wait_for(fetch, hole, load), "fetch-join")
        return True

    async def _wait_for(self, fetch: Fetch, hole: Hole, load: asyncio.Future[str]) -> None:
        await asyncio.wait({load})
        if reason := load.result():
            self._not_filled(fetch, [(hole, reason)])
        else:
            fetch.there(hole)

    # -- what L1 and the tiers have ------------------------------------------------------------------------

    async def _plan(self, fetch: Fetch, budget_bytes: int | None) -> Plan:
        """Ask L1, then the tiers in their order, each for the keys that were not found before it."""
        keys, n_slices, spans = fetch.keys, fetch.n_slices, fetch.spans
        fetch.sources = self._active()
        whole = [number for number in range(n_slices) if not (spans and spans[number])]
        l1_chunks = [0] * n_slices
        for number in whole:
            l1_chunks[number] = fetch.pool.peek(b"".join(keys[number::n_slices]), 1)
        missing = [
            chunk * n_slices + number
            for chunk in range(len(keys) // n_slices)
            for number in whole
            if chunk >= l1_chunks[number]
        ]
        sources: dict[int, Source] = {}
        unknown: dict[int, str] = {}
        for at in range(0, len(missing), EXISTS_BATCH):
            part = missing[at : at + EXISTS_BATCH]
            await self._ask_all(fetch, part, sources, unknown)
            if not all(i in sources or fetch.in_l1(keys[i]) for i in part):
                break  # the prefix ends in this part
        plan = make_plan(keys, n_slices, l1_chunks, sources, fetch.in_l1, unknown, budget_bytes, spans)
        if not any(spans):
            return plan
        # A budget may allow a shorter hit only.
        await self._ask_windows(fetch, plan.n_chunks, sources, unknown, shorter_too=budget_bytes is not None)
        return with_windows(plan, keys, n_slices, sources, fetch.in_l1, unknown, spans, budget_bytes)

    def _active(self) -> list[Loader]:
        """The tiers that answer lookups now, nearest first."""
        return [self._loaders[tier.name] for tier in self._tiers if tier.state is TierState.ACTIVE]

    async def _first_of(self, fetch: Fetch) -> int:
        """The first chunk of the fetch's keys that L1 and the tiers have in all slices; -1 if they have none."""
        fetch.sources = self._active()
        keys, n_slices = fetch.keys, fetch.n_slices
        sources: dict[int, Source] = {}
        absent = [i for i, key in enumerate(keys) if not fetch.in_l1(key)]
        for at in range(0, len(absent), EXISTS_BATCH):
            await self._ask_all(fetch, absent[at : at + EXISTS_BATCH], sources, {})
        lacking = {i // n_slices for i in absent if i not in sources}
        return next((chunk for chunk in range(len(keys) // n_slices) if chunk not in lacking), -1)

    async def _ask(self, fetch: Fetch, number: int, names: dict[int, bytes]) -> list[Found]:
        """Ask one tier which of the keys, by their numbers, it has; all are unknown if it does not answer in time."""
        loader, keys = fetch.sources[number], list(names.values())
        left_s = max(0.0, fetch.deadline_s - self._clock.monotonic_s())
        last = number == len(fetch.sources) - 1
        patience_s = left_s if last else min(left_s * self.limits.patience_share, self.limits.patience_s)
        scattered = [key for i, key in names.items() if fetch.tails or fetch.span_of(i)]
        if scattered:
            self._asks(loader.name, scattered)
        try:
            found = await asyncio.wait_for(loader.tier.exists(keys), patience_s)
        except TimeoutError:
            return [Found(Presence.UNKNOWN, 0, "deadline")] * len(keys)
        if loader.tier.capabilities.shared:  # others may have removed what this server has put there
            absent = [key for key, one in zip(keys, found, strict=True) if one.presence is Presence.ABSENT]
            if absent:
                self._lost(loader.name, absent)
        return [
            self._checked(loader.name, key, one, fetch.limit_of(i))
            for (i, key), one in zip(names.items(), found, strict=True)
        ]

    def _checked(self, tier: str, key: bytes, found: Found, limit_bytes: int) -> Found:
        """A tier's answer, UNKNOWN for a value that is longer than a record of a chunk, which would evict others."""
        if not limit_bytes or found.record_bytes <= limit_bytes:
            return found
        self.counts[f"load:{LENGTH}"] += 1
        _too_long.log(
            log, logging.WARNING, tier, "%s: not loading record %s: it has %d bytes, more than a record of its layout",
            tier, key.hex()[:16], found.record_bytes,
        )  # fmt: skip
        return Found(Presence.UNKNOWN, 0, LENGTH)

    async def _ask_all(
        self, fetch: Fetch, numbers: Sequence[int], sources: dict[int, Source], unknown: dict[int, str]
    ) -> None:
        """Ask the tiers in their order for these keys, and note what they have, or why that is unknown."""
        for tier in range(len(fetch.sources)):
            asked = [i for i in numbers if i not in sources]
            if not asked:
                return
            found = await self._ask(fetch, tier, {i: fetch.keys[i] for i in asked})
            for i, (presence, record_bytes, reason) in zip(asked, found, strict=True):
                if presence is Presence.PRESENT:
                    sources[i] = Source(tier, record_bytes)
                elif presence is Presence.UNKNOWN:
                    unknown.setdefault(i, reason or "unknown")

    async def _ask_windows(
        self,
        fetch: Fetch,
        n_chunks: int,
        sources: dict[int, Source],
        unknown: dict[int, str],
        *,
        shorter_too: bool,
    ) -> None:
        """Ask for the keys of slices with a span, until the longest hit of at most `n_chunks` chunks is known.

        With `shorter_too` all shorter hits are known in the end as well.
        """
        n_slices, spans, keys = fetch.n_slices, fetch.spans, fetch.keys

        def there(chunk: int, number: int) -> bool:
            i = chunk * n_slices + number
            return i in sources or fetch.in_l1(keys[i])

        async def ask(chunks: range, hit: int | None = None) -> None:
            """Ask for these chunks, the last ones first; with `hit`, only for what a hit of so many chunks needs."""
            absent = [
                chunk * n_slices + number
                for chunk in reversed(chunks)
                for number, span in enumerate(spans)
                if span and (hit is None or chunk + span >= hit) and not there(chunk, number)
            ]
            for at in range(0, len(absent), EXISTS_BATCH):
                await self._ask_all(fetch, absent[at : at + EXISTS_BATCH], sources, unknown)

        longest_span = max(spans)
        # Most prefixes end where the prompt that stored them did.
        await ask(range(max(0, n_chunks - longest_span), n_chunks), hit=n_chunks)
        if longest(n_chunks, spans, there) == n_chunks and not shorter_too:
            return
        end = n_chunks
        while end > 0:
            begin = max(0, end - WINDOW_CHUNKS)
            await ask(range(max(0, begin - longest_span), end))
            if longest(n_chunks, spans, there) > begin and not shorter_too:
                return
            end = begin

    # -- one batch -----------------------------------------------------------------------------------------

    def _start(self, fetch: Fetch, loader: Loader, batch: list[Hole], batch_bytes: int) -> None:
        """Reserve the chunks of a batch that fit now, and begin to load them."""
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
        self._spawn(fetch, work, f"load-{loader.name}")

    def _reserve(self, fetch: Fetch, run: Run, beyond: _Refusal) -> tuple[_Reserved, _Refusal]:
        """Reserve one run, but only its chunks before `beyond`, the batch's first refusal so far.

        Returns the reserved items, and the batch's first refusal now.
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
            fetch.tails,
            fetch.extent_bytes(holes[0].number),
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
                self.counts[f"reserve:{beyond.word}"] += 1
        if useless:
            self._pool.abort(ticket, useless)
        return _Reserved(ticket, indices, [holes[i] for i in indices]), beyond

    async def _load(
        self, fetch: Fetch, loader: Loader, items: list[LoadItem], parts: list[_Reserved], batch_bytes: int
    ) -> None:
        """Load the items, commit or abort each, and wake the fetches that wait for it."""
        outcomes: list[LoadOutcome] = []
        lengths = {item.key: item.hold.length for item in items}
        failpoints.hit("load.reserved")
        try:
            outcomes = await loader.tier.load(items)
            failpoints.hit("load.read")
        finally:  # even when cancelled: the adapter ends the holds, and this ends the reservations
            loader.gate.ended(batch_bytes)
            outcomes = outcomes or [LoadOutcome(LoadStatus.FAILED, "stopping")] * len(items)
            at = 0
            for part in parts:
                self._finish(fetch, loader, part, outcomes[at : at + len(part.holes)], lengths)
                at += len(part.holes)

    def _finish(
        self,
        fetch: Fetch,
        loader: Loader,
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
        found: list[bytes] = []
        failed: list[tuple[Hole, str]] = []
        for i, hole, (status, why) in zip(part.indices, part.holes, outcomes, strict=True):
            if status is not LoadStatus.LOADED:
                reason = status.name.lower() if status is not LoadStatus.FAILED else why or "failed"
                self.counts[f"load:{reason}"] += 1
                if status is not LoadStatus.FAILED:
                    lost_keys.append(hole.key)
            elif committed[i] == CommitOutcome.COMMITTED:
                reason = ""
                self.counts["loaded"] += 1
                self.loaded_bytes += lengths[hole.key]
                found.append(hole.key)
            else:  # a whole record whose header does not match the reservation
                reason = "corrupt"
                self.counts["load:foreign"] += 1
                foreign.append(hole.key)
                lost_keys.append(hole.key)
            self._loads.pop(hole.key).set_result(reason)
            if reason:
                failed.append((hole, reason))
            else:
                fetch.there(hole)
        if found:
            self._found(loader.name, found)
        if lost_keys:
            self._lost(loader.name, lost_keys)
        self._not_filled(fetch, failed)
        if foreign:
            log.error("%s: deleting %d records that name another identity", loader.name, len(foreign))
            self._spawn(fetch, self._delete(loader, foreign), "delete-foreign")

    async def _delete(self, loader: Loader, keys: list[bytes]) -> None:
        """Delete values that are not a record of their key: some media store no record where a value exists."""
        await loader.tier.delete(keys)
