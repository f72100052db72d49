"""Lookup: count the leading chunks that are cached and lease them for the caller's whole group, in one reply.

    lease ── all chunks are in L1 ──▶ reply
      │ the next chunks are adopted and not verified yet     verify them on a lane, lease again
      │ L1 has the next chunks in another geometry           recut them (server/recuts), lease again
      │ the next chunks are not in L1, and L2 is configured  load until the deadline, lease again
      │ another instance has them in L2, or computes them    read them (elsewhere.py), lease again
      │ another engine computes the next chunks              wait for them (promises.py), lease again
      ▼
    reply with the chunks leased by then

Rules:

1. Each lookup gets one reply, at the latest `REPLY_MARGIN_S` before the deadline, or, if it may wait for promised
   chunks, `wait_ms` after that; its lease covers exactly the chunks that it names.
2. Chunks that arrive later stay in L1 without a lease.
3. While a lookup waits for more chunks it keeps its first lease, so that the chunks it has found are not evicted.
4. A ticket always has an owner that will end it: this coroutine, `Grants`, or a callback on a lane's future.
5. When leases cover as much of L1 as they may, the oldest leases that no process has begun to use are revoked.  This
   lookup is answered without waiting for that; a later one may use the space.

A lookup may name tails.  A lease covers the leading chunks and one tail, as if the tail were one more chunk.  Only the
tails of the chunk after the last one present are considered, in the order of the caller's preference.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvstrata.errors import BadRequest, NotFound, Refused
from kvstrata.keys.batch import nth, part, split
from kvstrata.keys.spans import PromptKeys
from kvstrata.native.core import Pool, storage_keys
from kvstrata.observability.explain import Choice, Explained, with_advice
from kvstrata.observability.load_line import prompt_work
from kvstrata.observability.tracing import Span
from kvstrata.rpc.wire import Hint, Lookup, LookupReply, Miss, Reply, TailSet, check_keys
from kvstrata.server.processes import DeclaredIdentity, Process
from kvstrata.server.recuts.recuts import MissingChunks
from kvstrata.server.requests.elsewhere import Elsewhere
from kvstrata.server.requests.promises import Early, Promised, Waited
from kvstrata.types import EXTENT, KEY_BYTES, MissReason

if TYPE_CHECKING:
    from kvstrata.server.parts import Parts


class NamedTail(NamedTuple):
    """One of the tails that a lookup names."""

    tokens: int
    keys: bytes
    """Its storage keys, one for each slice."""


class NamedTails:
    """The tails that one lookup names."""

    def __init__(self, sets: Sequence[TailSet], root: bytes, slices: bytes) -> None:
        """`root` of the identity, `slices`: the engine's slice digests, concatenated.

        Raises BadRequest unless each tail has a key and a number of tokens.
        """
        for number, each in enumerate(sets):
            n_keys = check_keys(each.keys, f"tails[{number}].keys")
            if n_keys != len(each.tokens):
                raise BadRequest(
                    f"tails[{number}]: {n_keys} keys for {len(each.tokens)} numbers of tokens", field="tails"
                )
        self._sets = sets
        self._root = root
        self._slices = slices

    def after(self, n_chunks: int) -> Iterator[NamedTail]:
        """The tails that may follow the first `n_chunks` chunks, in the caller's order of preference."""
        for each in self._sets:
            if each.chunk == n_chunks:
                for number, tokens in enumerate(each.tokens):
                    yield NamedTail(tokens, storage_keys(self._root, nth(each.keys, number), self._slices))

    def in_l2(self, n_chunks: int) -> list[NamedTail]:
        """The tails after `n_chunks` chunks that may be loaded from L2."""
        return list(self.after(n_chunks)) if any(s.in_l2 for s in self._sets if s.chunk == n_chunks) else []


REPLY_MARGIN_S = 0.003
"""Time before the deadline that is kept for the last lease, the reply and its way back."""
MAX_NOTING = 64
"""Maximum number of missed prompts that wait to be passed to the pool (32 KiB each); further ones are dropped."""
KEYS_ON_LOOP = 1_024
"""A lookup that needs up to this many storage keys runs on the loop (about 0.2 ms); a larger one goes to a lane."""


COPY_SHARE = 1.5
STEPS_S = 0.02
"""A lookup in parts is answered when the rest is expected within COPY_SHARE times the copying time of this part, plus
STEPS_S for the engine's steps: earlier, blocks would be held idle; later, the engine would wait for the copy."""
_WAITED: dict[Waited, tuple[MissReason | Literal[""], str]] = {
    "ready": ("", ""),
    "soon": ("", ""),
    "late": (
        MissReason.PROMISED,
        "another engine was still computing it when computing it here would have been done",
    ),
    "broken": (MissReason.PROMISE_BROKEN, "another engine was computing it, and ended without storing it"),
}
_SAID = {MissReason.RECOMPUTE, MissReason.PROMISED, MissReason.PROMISE_BROKEN}
"""Reasons that need no added explanation of why a lookup stopped."""


class Granted(NamedTuple):
    """A lease of leading chunks. `ticket` 0: no chunk is leased."""

    ticket: int
    n_chunks: int
    extents: bytes
    unverified: int
    short_bytes: int
    """Bytes of other leases that must be released before the rest of the prefix can be leased."""
    rows: list[int]
    """The pool rows that got a share."""
    tail_tokens: int = 0
    """Number of tokens of the leased tail after these chunks, whose extents come last; 0: no tail is leased."""


NOTHING = Granted(0, 0, b"", 0, 0, [])


class Asked(NamedTuple):
    """One lookup: the request, its process, and its deadline by our clock."""

    process: Process
    identity: DeclaredIdentity
    request: Lookup
    n_chunks: int
    keys: PromptKeys
    """Has no slices while some slices of the engine are unknown."""
    tails: NamedTails | None
    started_s: float
    deadline_s: float
    choices: list[Choice]
    """Filled when the chunks to load have been chosen."""
    trace: Span | None
    """Its span, if it is traced."""
    unused: int
    """Number of leading chunks that the engine does not need, because its own cache has them."""
    latest_promise: int
    """Number of the newest promise that it may wait for; -1: any."""

    @property
    def taken(self) -> int:
        """Number of leading chunks that need not be copied."""
        return max(self.request.own_chunks, self.request.follows)

    @property
    def limits(self) -> list[int]:
        """For each slice the length in bytes of a whole chunk's record; 0, to load nothing, if its engine has died."""
        limits = self.process.group.record_limits
        return limits if len(limits) == self.keys.n_slices else [0] * self.keys.n_slices

    def compute_s(self, before: int) -> Callable[[int, int], float] | None:
        """A function that estimates how many seconds the engine needs for a range of the chunks after `before`, without
        those in its own cache.  None: its rate is not known yet."""
        group, own = self.process.group, self.request.own_chunks
        size, tokens_s = group.layout.chunk_tokens, group.prompt_tokens_s
        if not tokens_s:
            return None

        def compute_s(first: int, end: int) -> float:
            work = prompt_work(max(before + first, own) * size, max(before + end, own) * size)
            return work / tokens_s

        return compute_s


def _lease(pool: Pool, asked: Asked, rows: list[int], again: bool) -> Granted:
    """Derive all keys, and lease the leading chunks and the tail that follows them. Any thread.

    `again`: this is not the first lease of the request.
    """
    keys, tails, n_chunks = asked.keys, asked.tails, asked.n_chunks
    of_chunks, own, tenant = keys.derive(), asked.unused, asked.identity.tenant
    if tails is None:
        leased = pool.lease(of_chunks, keys.n_slices, rows, keys.root, keys.spans, again, False, own, tenant)
        return Granted(*leased, rows)

    def take(all_keys: bytes, again: bool) -> Granted:
        if not all_keys:
            return NOTHING
        leased = pool.lease(all_keys, keys.n_slices, rows, keys.root, (), again, False, own, tenant)
        return Granted(*leased, rows)

    # Most lookups hit all chunks that they ask for, so the tail after the last one is tried at once.
    wanted = next(tails.after(n_chunks), None)
    granted = take(of_chunks + wanted.keys if wanted else of_chunks, again)
    if wanted and granted.n_chunks == n_chunks + 1:
        return granted._replace(n_chunks=n_chunks, tail_tokens=wanted.tokens)
    found = granted.n_chunks
    for tail in tails.after(found):
        if tail == wanted or pool.peek(tail.keys, keys.n_slices) != 1:
            continue
        other = take(of_chunks[: found * len(tail.keys)] + tail.keys, again=True)
        with_tail = other.n_chunks == found + 1
        given_up = granted if with_tail else other
        if given_up.ticket:
            pool.release(given_up.ticket, -1)
        if with_tail:
            return other._replace(n_chunks=found, tail_tokens=tail.tokens)
        break  # chunks have left L1 meanwhile, or leases may cover no more
    return granted


def _tails_in_l2(asked: Asked, n_chunks: int) -> list[NamedTail]:
    return asked.tails.in_l2(n_chunks) if asked.tails is not None else []


def _named(asked: Asked, number: int) -> str:
    """Describe the slice and chunk of a key, if slices of this engine have spans: a hit may then end anywhere."""
    keys = asked.keys
    if not keys.spans:
        return ""
    chunk, index = divmod(number, keys.n_slices)
    digest = nth(keys.slices, index)
    slices = [one.declared.slice for one in asked.process.group.members.values() if one.digest == digest]
    group = next((one.group for one in slices if one), None)
    whose = "" if group is None else f" (group {group})"
    what = "the window of slice" if keys.spans[index] else "slice"
    return f"{what} {digest.hex()[:8]}…{whose} at chunk {chunk} is absent: "


def _note_missed(pool: Pool, identity: DeclaredIdentity, chain: bytes, slices: bytes) -> int:
    """Let the pool learn from a request that missed all its chunks. Returns 0. Any thread."""
    keys = storage_keys(identity.root, chain, slices[:KEY_BYTES])
    pool.missed(keys, len(slices) // KEY_BYTES, identity.tenant)
    return 0


def _note_hint(pool: Pool, root: bytes, ends: bytes, last_slice: bytes, next_: int) -> int:
    """Tell the pool what follows a request that ended with the first of these chunks present in L1. Any thread."""
    return pool.hint(storage_keys(root, ends, last_slice), next_) if next_ and ends and last_slice else 0


class Lookups:
    """Answers lookups. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._pool, self._lane, self._clock = parts.pool, parts.lane, parts.clock
        self._own_lane, self._noting = parts.own_lane, 0
        self._processes, self._grants = parts.processes, parts.grants
        self._promises = parts.grants.promises
        self._elsewhere = Elsewhere(parts, parts.awaited_peers) if parts.awaited_peers else None
        self._tiers, self._prefetch, self._store = parts.tiers, parts.prefetch, parts.store
        self._tail_puts, self._recuts, self._events = parts.tails, parts.recuts, parts.events
        self._explainer, self._counters, self._tracer = parts.explainer, parts.counters, parts.tracer
        self._epoch, self._instance_id = parts.facts.epoch, parts.facts.instance_id
        self._shared = parts.shared
        self._never, self._auto = (parts.settings.l2.load == word for word in ("never", "auto"))
        self._unnoted: list[Callable[[], None]] = []

    def lookup(self, process: Process, request: Lookup) -> Reply | Coroutine[Any, Any, Reply]:
        """Begin a lookup. Returns its reply, or a coroutine that returns it. Raises BadRequest or UnknownIdentity."""
        self._grants.check_new(process, request.seq)
        identity = self._processes.identity(process, request.identity_id)
        keys = request.keys
        n_chunks = 0 if request.tails and not keys else check_keys(keys, "keys", request.probe)
        group = process.group
        now_s = self._clock.monotonic_s()
        slices, spans = (group.packed_slices, group.spans) if group.complete else (b"", ())
        tails = NamedTails(request.tails, identity.root, slices) if request.tails else None
        asked = Asked(
            process, identity, request, n_chunks,
            PromptKeys(identity.root, keys, slices, spans),
            None if spans else tails, now_s,
            now_s + request.deadline_ms / 1000 - REPLY_MARGIN_S, [],
            self._tracer.begin(request.traceparent) if self._tracer else None,
            max(request.own_chunks if request.stores_late else 0, request.follows),
            -1 if request.expects else self._promises.given,
        )  # fmt: skip
        if not group.complete:
            known = f"{len(group.slices)} of {group.engine_slices} slices of this engine are attached"
            return self._outcome(asked, NOTHING, 0, MissReason.REFUSED, known)
        granted = self._lease_now(asked, group.rows)
        if granted is None:
            return self._on_lane(asked)
        whole = granted.n_chunks == n_chunks and (granted.tail_tokens or not _tails_in_l2(asked, n_chunks))
        if whole or not (
            granted.unverified
            or self._tiers.hit_beyond_l1
            or (request.wait_ms and (request.expects or self._promised(asked, granted.n_chunks)))
        ):
            return self._answer(asked, granted, granted.n_chunks)
        return self._more(asked, granted)

    def _lease_now(self, asked: Asked, rows: list[int], *, again: bool = False) -> Granted | None:
        """Lease on the loop.  Returns None, without a lease, if that needs more than `KEYS_ON_LOOP` keys."""
        keys = asked.keys
        if keys.all or asked.tails:
            too_many = asked.n_chunks * keys.n_slices > KEYS_ON_LOOP
            return None if too_many else _lease(self._pool, asked, rows, again)
        leased = self._pool.lease_chain(
            keys.root,
            keys.chain,
            keys.slices,
            rows,
            keys.spans,
            KEYS_ON_LOOP,
            again,
            asked.unused,
            asked.identity.tenant,
        )
        if leased is None:
            return None
        keys.know(leased[5])
        return Granted(*leased[:5], rows)

    async def _lease_on_lane(self, asked: Asked, rows: list[int], *, again: bool = False) -> Granted:
        """Lease on a lane, since it would block the loop. Raises Refused. When cancelled, nothing stays leased."""
        future = self._lane.run(_lease, self._pool, asked, rows, again)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._give_up(done.result()))
            raise

    def _give_up(self, granted: Granted) -> None:
        """End a lease that was not put into a reply."""
        if granted.ticket:
            self._pool.release(granted.ticket, -1)

    async def _on_lane(self, asked: Asked) -> Reply:
        """Answer a lookup whose lease would block the loop for too long."""
        rows, keys = list(asked.process.group.rows), asked.keys
        try:
            granted = await self._lease_on_lane(asked, rows)
        except Refused:
            few = part(keys.chain, 0, KEYS_ON_LOOP // keys.n_slices)
            leased = self._pool.lease_chain(
                keys.root,
                few,
                keys.slices,
                rows,
                keys.spans,
                KEYS_ON_LOOP,
                own_chunks=asked.unused,
                tenant=asked.identity.tenant,
            )
            granted = NOTHING if leased is None else Granted(*leased[:5], rows)
            detail = "too many long lookups wait; this one got what can be leased at once"
            return self._outcome(asked, granted, granted.n_chunks, MissReason.REFUSED, detail)
        return await self._more(asked, granted)

    async def _more(self, asked: Asked, granted: Granted) -> Reply:
        """Verify or load the chunks that follow, and lease them too, until the deadline."""
        held, keys = granted, asked.keys
        reason: MissReason | Literal[""] = ""
        detail, left = "", False
        on_disks: asyncio.Task[tuple[str, int]] | None = None
        try:
            if not keys.all and (asked.n_chunks - held.n_chunks) * keys.n_slices > KEYS_ON_LOOP:
                await asyncio.shield(self._lane.run(keys.derive))
            if held.unverified and not self._late(asked):
                beyond = keys.part(held.n_chunks, asked.n_chunks)
                with contextlib.suppress(Refused):
                    await self._until_deadline(asked, self._lane.run(self._pool.verify, beyond))
                held = await self._lease_again(asked, held)
            if await self._recut(asked, held):
                held = await self._lease_again(asked, held)
            l1_chunks = held.n_chunks
            lacks = held.n_chunks < asked.n_chunks and not self._late(asked)
            beyond_l1 = lacks and self._tiers.take_loads and not self._never
            asked_from = held.n_chunks
            if beyond_l1 and self._elsewhere is not None:
                on_disks = self._elsewhere.ask_for_disks(asked, asked_from)
            if beyond_l1:
                asked_s, trace = self._clock.monotonic_s(), asked.trace and asked.trace.child()
                fetched = await self._prefetch.fetch(
                    keys.part(held.n_chunks, asked.n_chunks),
                    keys.n_slices,
                    identity=asked.identity.root,
                    tenant=asked.identity.tenant,
                    parent=keys.part(held.n_chunks - 1, held.n_chunks) if held.n_chunks else b"",
                    deadline_s=asked.deadline_s,
                    limits=asked.limits,
                    spans=keys.spans,
                    compute_s=asked.compute_s(held.n_chunks) if self._auto else None,
                    trace=trace,
                )
                if trace:
                    trace.end("prefetch", chunks=fetched.n_chunks, reason=fetched.reason)
                asked.choices.extend(fetched.choices)
                self._counters.prefetch.add(self._clock.monotonic_s() - asked_s)
                reason, detail = fetched.reason, fetched.detail
                left = reason is MissReason.RECOMPUTE
                if fetched.n_chunks or (not left and await self._recut(asked, held, of_l2=True)):
                    held = await self._lease_again(asked, held)
            has_tail = asked.tails is None or held.tail_tokens or left
            if not has_tail and await self._fetch_tail(asked, held.n_chunks):
                held = await self._lease_again(asked, held)
            if on_disks is not None and self._elsewhere is not None and not left:
                ending = self._elsewhere.from_disks(asked, asked_from, held.n_chunks, on_disks)
                async with contextlib.aclosing(ending):
                    async for _ in ending:
                        before, held = held.n_chunks, await self._lease_again(asked, held)
                        if held.n_chunks == before:
                            break
            wait_ends_s = self._clock.monotonic_s() + asked.request.wait_ms / 1000
            expects, source = asked.request.expects, asked.request.source
            may_read = beyond_l1 and not left and not source
            if may_read and self._elsewhere is not None and not self._promised(asked, held.n_chunks):
                source = await self._elsewhere.promiser(asked, held.n_chunks)
            if source and self._elsewhere is not None and source != self._instance_id:
                ending = self._elsewhere.from_instance(source, asked, held.n_chunks, wait_ends_s)
                async with contextlib.aclosing(ending):
                    async for ended in ending:
                        before, held = held.n_chunks, await self._lease_again(asked, held)
                        reason, detail = _WAITED[ended]
                        if ended == "ready" and held.n_chunks == before:
                            break  # the load was not begun, or L1 has no free space
                expects = False
            while asked.request.wait_ms and (
                waited := await self._wait_for_others(asked, held.n_chunks, wait_ends_s, expects=expects)
            ):
                end, whole = waited
                before, expects = held.n_chunks, False
                held = await self._lease_again(asked, held)
                if end == "soon" and asked.taken < held.n_chunks < whole:
                    return self._outcome(asked, held, held.n_chunks, "", "", promised=whole)
                l1_chunks += max(0, held.n_chunks - before)
                reason, detail = _WAITED[end]
                if end == "late" or (end != "broken" and held.n_chunks == before):
                    break  # it took too long, or chunks have left L1 meanwhile
        except BaseException:
            self._give_up(held)
            raise
        finally:
            if on_disks is not None:
                on_disks.cancel()
        outcome = self._answer(asked, held, l1_chunks, reason, detail)
        self.note_answered()
        return outcome

    async def _lease_again(self, asked: Asked, held: Granted) -> Granted:
        """Lease again from the start, then end `held`.

        Returns `held` unchanged if the lane refuses the work, or if the engine has died meanwhile.

        When cancelled, nothing new stays leased.
        """
        rows = list(asked.process.group.rows)
        if not rows:
            return held
        more = self._lease_now(asked, rows, again=True)
        if more is None:
            try:
                more = await self._lease_on_lane(asked, rows, again=True)
            except Refused:
                return held
        self._give_up(held)
        return more

    async def _wait_for_others(
        self, asked: Asked, n_chunks: int, ends_s: float, *, expects: bool
    ) -> tuple[Waited, int] | None:
        """Wait until L1 has the chunks after `n_chunks` that other engines have promised.

        Returns how the wait ended, and the number of leading chunks with the promised ones.  None: no engine has
        promised any of them, nor, if the lookup `expects` a promise, makes one in time.
        """
        while n_chunks < asked.n_chunks and (left_s := ends_s - self._clock.monotonic_s()) > 0:
            if promised := self._promised(asked, n_chunks):
                early = self._early(asked, promised)
                return await self._promises.wait(asked.process, promised, left_s, early), promised.end
            if not (expects and self._promises.may_wait(asked.process)):
                break
            keys = asked.keys
            if not await self._promises.expect(asked.process, keys.root, keys.slices, left_s):
                return "broken", n_chunks
        return None

    def _early(self, asked: Asked, promised: Promised) -> Early | None:
        """The condition for answering a lookup that takes promised chunks in parts; None: when L1 has all of them."""
        group, rate = asked.process.group, asked.process.group.load_rate
        if not asked.request.in_parts or rate is None:
            return None
        (latency_s, bytes_s), chunk_bytes = rate, sum(group.record_limits)
        not_copied = promised.end - promised.n_chunks - asked.taken

        def copy_s(n_ready: int) -> float:
            return STEPS_S + COPY_SHARE * (latency_s + (not_copied + n_ready) * chunk_bytes / bytes_s)

        return Early(max(1, 1 - not_copied), copy_s, holds=asked.request.follows > 0)

    def _promised(self, asked: Asked, n_chunks: int) -> Promised | None:
        """The chunks after `n_chunks` that other engines have promised, if they are expected in time."""
        request, identity = asked.request, asked.identity
        if n_chunks == asked.n_chunks:
            return None
        if (
            asked.keys.spans
        ):  # a hit ends where it has windows, a promise begins at the first chunk that is absent
            n_chunks = asked.keys.peek_whole(self._pool)
        found = self._promises.find(
            asked.process, identity.root, asked.keys.chain, n_chunks, asked.latest_promise
        )
        if found is None or request.expects:
            return found
        return found if 1000 * (found.expected_s(n_chunks) or 0.0) <= request.wait_ms else None

    async def _recut(self, asked: Asked, held: Granted, *, of_l2: bool = False) -> int:
        """Make the chunks after `held` from records of other geometries in L1 or L2. Returns their number."""
        keys, group = asked.keys, asked.process.group
        plans = self._recuts.plans(group.layout, keys.slices)
        if not plans or held.n_chunks >= asked.n_chunks or self._late(asked):
            return 0
        missing = MissingChunks(keys, held.n_chunks, asked.identity.tenant, asked.deadline_s)
        return await self._recuts.make(plans, missing, of_l2=of_l2)

    async def _fetch_tail(self, asked: Asked, n_chunks: int) -> bool:
        """Load the preferred tail after `n_chunks` chunks from L2 into L1. Returns whether L1 has one now."""
        if self._never or not self._tiers.take_loads or self._late(asked):
            return False
        tails, keys = _tails_in_l2(asked, n_chunks), asked.keys
        if not tails:
            return False
        found = await self._prefetch.fetch_one_of(
            [tail.keys for tail in tails],
            keys.n_slices,
            identity=asked.identity.root,
            tenant=asked.identity.tenant,
            parent=keys.part(n_chunks - 1, n_chunks) if n_chunks else b"",
            deadline_s=asked.deadline_s,
            limits=asked.limits,
        )
        if found >= 0:
            self._tail_puts.loaded(split(tails[found].keys))
        return found >= 0

    async def _until_deadline(self, asked: Asked, future: asyncio.Future[Any]) -> None:
        """Wait for work on a lane, at most until the deadline; the work continues after that."""
        left_s = asked.deadline_s - self._clock.monotonic_s()
        done, _ = await asyncio.wait([future], timeout=max(left_s, 0.0))
        for finished in done:
            finished.result()

    def _late(self, asked: Asked) -> bool:
        return self._clock.monotonic_s() >= asked.deadline_s

    def _answer(
        self,
        asked: Asked,
        granted: Granted,
        l1_chunks: int,
        load_reason: MissReason | Literal[""] = "",
        load_detail: str = "",
    ) -> Reply:
        """The reply with the current lease. `load_reason`: why the load from L2 stopped."""
        try:
            found = self._reason(asked, granted, load_reason, load_detail)
        except BaseException:
            self._give_up(granted)
            raise
        return self._outcome(asked, granted, l1_chunks, *found)

    def _reason(
        self, asked: Asked, granted: Granted, load_reason: MissReason | Literal[""], load_detail: str
    ) -> tuple[MissReason | Literal[""], str, bytes]:
        """Why the hit ends here, a detail, and the absent key that causes it; all empty if the hit is complete."""
        if granted.n_chunks == asked.n_chunks:
            if not asked.n_chunks and not granted.tail_tokens:
                return MissReason.NEVER_STORED, "no tail of the prompt is present", b""
            return "", "", b""
        asked_back = self._grants.revoke(granted.short_bytes) if granted.short_bytes else 0
        self._events.drain()  # a chunk may have left L1 after they were last read
        keys = asked.keys
        numbers = self._lacking(asked, granted.n_chunks)
        number = next((i for i in numbers if self._has_event(keys.nth(i))), numbers[0] if numbers else None)
        reason, detail = self._why(asked, granted, asked_back, number)
        if load_reason and load_reason in _SAID:
            reason, detail = load_reason, load_detail
        elif load_reason and load_reason is not MissReason.NEVER_STORED:
            reason, detail = load_reason, f"while loading from L2: {with_advice(load_detail or load_reason)}"
        if number is None:
            return reason, detail, b""
        return reason, _named(asked, number) + detail, keys.nth(number)

    def _has_event(self, key: bytes) -> bool:
        """Whether there is a recorded event of an absent key."""
        return self._pool.is_reserved(key) or self._explainer.note_of(key) is not None

    def _why(
        self, asked: Asked, granted: Granted, asked_back: int, number: int | None
    ) -> tuple[MissReason, str]:
        """The reason for a miss, and a detail. `number`: index of the absent key; None if no key is absent."""
        if number is None:
            detail = f"present, but leases may cover no more of L1 now; {asked_back} older leases have been revoked"
            return MissReason.REFUSED, detail
        if granted.unverified:
            late = self._late(asked)
            why = "since the restart" if late else "since the restart: too much waits to be verified"
            return (MissReason.DEADLINE if late else MissReason.REFUSED), f"present, but not verified {why}"
        first = number < asked.keys.n_slices
        return self._why_absent(asked.keys.nth(number), asked.identity, asked.request.probe, first=first)

    def _why_absent(
        self, key: bytes, identity: DeclaredIdentity, probe: bytes, *, first: bool
    ) -> tuple[MissReason, str]:
        """The reason why a key is absent, and a detail. `first`: it is a key of the prompt's first chunk."""
        return self._explainer.why(
            key,
            first=first,
            probe=probe,
            root=identity.root,
            layout=identity.layout,
            request=identity.request,
            in_flight=self._pool.is_reserved(key),
        )

    def _lacking(self, asked: Asked, n_chunks: int) -> list[int]:
        """Indices of the keys whose absence may end a hit after `n_chunks` chunks; empty if L1 allows a longer hit.

        With slices that have a span, a hit may end although its next chunk is present, because the windows of every
        longer hit are incomplete: then these are the absent window keys of the longest hit that the other slices allow.
        """
        keys, pool = asked.keys, self._pool
        n_slices, spans = keys.n_slices, keys.spans
        if not spans:
            found = pool.peek(keys.part(n_chunks, n_chunks + 1), n_slices)
            return [] if found else list(range(n_chunks * n_slices, (n_chunks + 1) * n_slices))
        n = keys.peek_whole(pool)
        if keys.peek_windows(pool, n) > n_chunks:
            return []
        if n <= n_chunks:
            needed = [n_chunks * n_slices + number for number, span in enumerate(spans) if not span]
        else:
            needed = [
                chunk * n_slices + number
                for number, span in enumerate(spans)
                for chunk in range(max(0, n - span), n if span else 0)
            ]
        return [i for i in needed if not pool.peek(keys.nth(i))]

    def _outcome(
        self,
        asked: Asked,
        granted: Granted,
        l1_chunks: int,
        reason: MissReason | Literal[""],
        detail: str,
        missing_key: bytes = b"",
        promised: int = 0,
    ) -> Reply:
        """Keep the lease, and make the reply. `missing_key`: the absent key that is the reason; b"": no key is.

        A hit that is a part of `promised` chunks is not counted; the last part is counted as the whole hit.
        """
        request, keys = asked.request, asked.keys
        if granted.ticket:
            group, rows = asked.process.group, set(granted.rows)
            if granted.rows is not group.rows:
                # Processes that died while a lane worked on this will never end their shares.
                for row in rows.difference(group.rows):
                    self._pool.release(granted.ticket, row)
                rows.intersection_update(group.rows)
            if rows:
                self._grants.leased(asked.process, request.seq, granted.ticket, rows)
        n, now_s = granted.n_chunks, self._clock.monotonic_s()
        l1_chunks = min(l1_chunks, n)
        if l1_chunks and self._store.wants_touches:
            self._store.touched(split(keys.part(0, l1_chunks)))
        if n < asked.n_chunks and keys.n_slices:
            missing_key = missing_key or keys.nth(n * keys.n_slices)
        if not promised:
            self._unnoted.append(
                functools.partial(self._note, asked, granted, l1_chunks, reason, detail, missing_key, now_s)
            )
        extents, of_tail = granted.extents, b""
        if granted.tail_tokens:
            at = len(extents) - keys.n_slices * EXTENT.size
            extents, of_tail = extents[:at], extents[at:]
        return LookupReply(
            request.seq, self._epoch, n, extents, l1_chunks, n - l1_chunks, str(reason), granted.tail_tokens, of_tail,
            promised,
        )  # fmt: skip

    def note_answered(self) -> None:
        """Count and record the lookups answered since the last call, so that their replies need not wait for that."""
        while self._unnoted:
            self._unnoted.pop()()

    def note_missed(self, process: Process, misses: Sequence[Miss]) -> None:
        """Count and explain misses that an engine found in the shared index, like those of lookups.

        A miss under an identity that this process has not declared is ignored.
        """
        self._events.drain()  # a chunk may have left L1 after they were last read
        group = process.group
        slices = group.packed_slices
        for miss in misses:
            identity = process.identities.get(miss.identity_id)
            if identity is None or not slices:
                continue
            keys = split(storage_keys(identity.root, miss.absent, slices))
            absent = [key for key in keys if not self._pool.peek(key)]
            reason, detail = MissReason.NOT_IN_L1, "it was absent at the lookup, and is present now"
            key = next((key for key in absent if self._has_event(key)), absent[0] if absent else keys[0])
            if absent:
                reason, detail = self._why_absent(key, identity, miss.probe, first=bool(miss.probe))
            self._counters.peeked_misses += 1
            found = Explained(
                miss.request_id, identity.request.tenant, identity.root, self._clock.unix_ms(), 0.0,
                miss.chunks, 0, 0, 0, str(reason), detail, key, miss.last, slices[-KEY_BYTES:],
            )  # fmt: skip
            self._explainer.looked_up(group.use, identity.tenant, found)
            self._learn(_note_missed, identity, miss.chain, slices)
            if self._shared is not None:
                self._shared.note(identity, group, miss.chain, 0)

    def note_hints(self, process: Process, hints: Sequence[Hint]) -> None:
        """Pass a process's hints about the chunks of its requests to the pool."""
        for hint in hints:
            identity, slices = process.identities.get(hint.identity_id), process.group.packed_slices
            if identity is not None and slices:
                self._learn(_note_hint, identity.root, hint.last, slices[-KEY_BYTES:], hint.next)

    def hint(self, request_id: str, next_: int) -> asyncio.Future[int]:
        """Hint what follows a request. The result is the number of its chunks in L1. Raises NotFound, Refused."""
        found = self._explainer.newest(request_id)
        if found is None:
            raise NotFound(f"request_id: {request_id!r:.80} is not a recent request")
        hinted = self._learn(_note_hint, found.root, found.ends, found.slice, next_)
        if hinted is None:
            raise Refused(f"{MAX_NOTING} hints and prompts wait for the pool; try again")
        return hinted

    def _learn(self, note: Callable[..., int], *keys: Any) -> asyncio.Future[int] | None:
        """Let the pool learn on a lane; None if too many notes wait already."""
        if self._noting >= MAX_NOTING:
            return None
        self._noting += 1
        noted = self._own_lane.run(note, self._pool, *keys)
        noted.add_done_callback(self._noted)
        return noted

    def _noted(self, done: asyncio.Future[int]) -> None:
        self._noting -= 1
        if not done.cancelled() and done.exception() is None:
            self._counters.hinted_chunks += done.result()

    def _note(
        self,
        asked: Asked,
        granted: Granted,
        l1_chunks: int,
        reason: MissReason | Literal[""],
        detail: str,
        missing_key: bytes,
        now_s: float,
    ) -> None:
        """Count and record an answered lookup. `missing_key`: the absent key, or one of the first chunk not served."""
        n, tail_tokens = granted.n_chunks, granted.tail_tokens
        request, keys, identity = asked.request, asked.keys, asked.identity
        self._counters.lookup.add(now_s - asked.started_s)
        compute_s = asked.compute_s(0) if n else None
        found = Explained(
            request.request_id, identity.request.tenant, identity.root, self._clock.unix_ms(),
            (now_s - asked.started_s) * 1000, asked.n_chunks, l1_chunks, n - l1_chunks, n, str(reason),
            detail or (f"a tail of {tail_tokens} tokens follows" if tail_tokens else ""), missing_key,
            keys.chain[-KEY_BYTES:] + keys.chain[max(0, n - 1) * KEY_BYTES : n * KEY_BYTES], keys.slices[-KEY_BYTES:],
            asked.choices,
        )  # fmt: skip
        group = asked.process.group
        self._explainer.looked_up(group.use, identity.tenant, found, compute_s(0, n) if compute_s else 0.0)
        if self._shared is not None:
            self._shared.note(identity, group, keys.chain, n)
        if asked.trace:
            asked.trace.end(
                "lookup", request=request.request_id, chunks=asked.n_chunks, l1_chunks=l1_chunks,
                l2_chunks=n - l1_chunks, bytes=n * sum(group.record_limits), reason=str(reason),
            )  # fmt: skip
