"""A fetch of a prompt's records: its keys, which of them L1 and the tiers have, and how far the prefix is ready.

`Fetch` is the state of one fetch; `Planner` asks L1 and the tiers how far the fetch's prefix extends; see loads.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from kvstrata.clock import Clock
from kvstrata.keys.batch import split
from kvstrata.keys.spans import longest
from kvstrata.native.core import LoadRequest, Pool
from kvstrata.observability.explain import Choice
from kvstrata.observability.tracing import Span
from kvstrata.tiers.base import PHASES, Ask, Presence
from kvstrata.tiers.reasons import DEADLINE, miss_reason
from kvstrata.tiers.tier import Tier
from kvstrata.types import KEY_BYTES, MissReason

PART_KEYS = 1024
"""Maximum number of keys in one call of `exists`."""
MAX_ITEMS = 64
"""Maximum number of records in one batch; a tier may accept fewer."""
WINDOW_CHUNKS = 128
"""Number of chunks whose windows are looked up at a time, from the end of the prefix towards its start."""
TIER_PATIENCE_S = 0.5

# Where a key was found (`Fetch.known`), and the progress of its load (`Fetch.state`).  A number from TIER on stands for
# a tier: in `known` the nearest tier that has the key; in `state` the tier from which it waits to be loaded.
_NOT_ASKED, _IN_L1, _ABSENT, _UNKNOWN = range(4)
_DONE, _BUSY, FAILED = range(3)
"""_DONE: in L1 or not needed; _BUSY: it is being loaded, or looked up in the next tier."""
TIER = 8
MAX_TIERS = 256 - TIER
PRESENT, _NOBODY_KNOWS = int(Presence.PRESENT), int(Presence.UNKNOWN)
_MISSING = re.compile(rb"[\x00\x02\x03]")
_WAITING = re.compile(rb"[\x08-\xff]")
_HOLES = bytes(number if number >= TIER else _DONE for number in range(256))
"""Translation table from `known` to `state`."""
_MARKS = bytes(number >= TIER for number in range(256))
_GIVEN_UP = bytes(min(number, _BUSY) if number >= TIER else number for number in range(256))


class PrefetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one instance's loads."""

    in_flight_bytes: int
    """Maximum bytes that one tier loads at a time; a single batch may exceed it."""
    max_in_flight: int = 8
    """Maximum number of fetches that load from one tier at a time."""
    batch_bytes: int = 64 << 20
    """Maximum number of bytes of a batch; never more than half of `in_flight_bytes`."""
    patience_share: float = 0.25
    """Share of the remaining time that a tier has to answer `exists` if other tiers come after it."""
    patience_s: float = TIER_PATIENCE_S
    """Maximum of the time by `patience_share`."""


class Spent(msgspec.Struct, kw_only=True):
    """The cost of one fetch's loads so far."""

    keys: int = 0
    """Number of loaded records; `bytes`: their length."""
    bytes: int = 0
    phases: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds by phase, see PHASES; phases of concurrent batches overlap."""


class FetchOutcome(NamedTuple):
    """The answer of a fetch."""

    n_chunks: int
    """Number of leading chunks of the fetch that are in L1 now."""
    l2_chunks: int
    """Number of these that were not in L1, or not in all slices, when the fetch began."""
    reason: MissReason | Literal[""]
    """Why the first chunk that is not in L1 is missing; empty if all are in L1."""
    detail: str = ""
    choices: Sequence[Choice] = ()
    """For each tier whether its chunks were loaded, if that was decided by cost."""


class Plan(NamedTuple):
    """The length of the prefix, and the reason for its end."""

    n_chunks: int
    reason: MissReason | Literal[""] = ""
    detail: str = ""


class Fetch:
    """One fetch: its keys, where each was found, and how far the prefix is ready. Belongs to the event loop."""

    def __init__(
        self,
        pool: Pool,
        keys: bytes,
        request: LoadRequest,
        limits: Sequence[int],
        deadline_s: float,
        tiers: list[Tier],
        *,
        spans: Sequence[int] = (),
        tails: bool = False,
        owner: bytes = b"",
        prewarm: Spent | None = None,
    ) -> None:
        self.pool = pool
        self.keys = keys
        self.request = request
        self.limits = limits
        """For each slice the length of a record's extent."""
        self.n_slices = len(limits)
        self.record_bytes = sum(limits) // len(limits)
        """Length of a record's extent, averaged over the slices."""
        self.n_keys = len(keys) // KEY_BYTES
        self.deadline_s = deadline_s
        self.tiers = tiers
        """The tiers that it asks, in order."""
        self.spans = spans if any(spans) else ()
        """For each slice how many of a hit's last chunks it needs, 0: all; () if every slice needs all."""
        self.tails = tails
        """Whether the keys are those of tails."""
        self.owner = owner
        """See Ask."""
        self.compute_s: Callable[[int, int], float] | None = None
        """Function for the seconds to compute a range of its chunks; None: all chunks found are loaded."""
        self.identity, self.tenant = b"", 0
        """Identity and tenant of the request, if chunks may be left to the engine."""
        self.choices: dict[Tier, Choice] = {}
        self.begun_s = 0.0
        self.ahead: dict[Tier, int] = {}
        """For each tier the bytes that other fetches had to load when this one's loads began."""
        self.loaded: dict[Tier, tuple[int, float]] = {}
        """For each tier the bytes that were loaded or timed out, and the time of the last of them."""
        self.trace: Span | None = None
        """Its span, if it is traced; parent of the spans of its loads."""
        self.is_prewarm = prewarm is not None
        """Whether no user waits for it."""
        self.spent = prewarm or Spent()
        phases = self.spent.phases
        self._leading = Ask(each=tails, owner=owner, phases=phases)
        self._each = Ask(each=True, owner=owner, phases=phases)
        self.known = bytearray(self.n_keys)
        self.unknown: dict[int, str] = {}
        """Why a tier did not say whether it has a key, by the key's number."""
        self.plan: Plan | None = None
        self.state = bytearray()
        self.running: set[asyncio.Task[None]] = set()
        self.expired = False
        """Whether the caller no longer waits for the answer."""
        self.abandoned = False
        """Whether the caller no longer needs the chunks either."""
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_failed = self.n_keys
        """The lowest number of a hole that will not be filled; `n_keys` if there is none."""
        self._why = ""
        self._holes = b""
        """For each key of the plan 1 if it was a hole, else 0."""
        self._ready = 0
        """Number of leading keys that are done."""
        self._at = 0
        """Number of the first key that may wait to be loaded."""

    def key(self, number: int) -> bytes:
        """The key of this number."""
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]

    def asks_of(self, numbers: Sequence[int]) -> list[Ask]:
        """The Ask of each of these keys."""
        spans, n_slices = self.spans, self.n_slices
        if not spans:
            return [self._leading] * len(numbers)
        return [self._each if spans[number % n_slices] else self._leading for number in numbers]

    def keys_of(self, numbers: Sequence[int]) -> bytes:
        """The keys of these numbers."""
        if isinstance(numbers, range):
            return self.keys[numbers.start * KEY_BYTES : numbers.stop * KEY_BYTES]
        keys = self.keys
        return b"".join([keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in numbers])

    def is_present(self, chunk: int, number: int) -> bool:
        """Whether L1 or a tier is known to have this chunk of the slice."""
        known = self.known[chunk * self.n_slices + number]
        return known == _IN_L1 or known >= TIER

    def look_in_l1(self, numbers: Sequence[int]) -> None:
        """Record which of these keys are in L1."""
        found = self.pool.has(self.keys_of(numbers))
        if isinstance(numbers, range):
            self.known[numbers.start : numbers.stop] = found
        elif 1 in found:
            for i, in_l1 in zip(numbers, found, strict=True):
                if in_l1:
                    self.known[i] = _IN_L1

    def planned(self, plan: Plan) -> None:
        """Set the holes, once L1 and the tiers have answered."""
        self.plan = plan
        self.state = state = self.holes(plan.n_chunks)
        self._holes = bytes(state.translate(_MARKS))
        self._advance()

    def holes(self, n_chunks: int) -> bytearray:
        """The initial `state` for a hit of `n_chunks` chunks."""
        n_slices = self.n_slices
        state = self.known[: n_chunks * n_slices].translate(_HOLES)
        for number, span in enumerate(self.spans):
            if span and (skipped := n_chunks - span) > 0:
                state[number : skipped * n_slices : n_slices] = bytes(skipped)
        return state

    def bytes_from(self, tier: Tier, state: bytearray) -> int:
        """About how many bytes wait to be loaded from a tier."""
        return state.count(TIER + self.tiers.index(tier)) * self.record_bytes

    def next_batch(self, max_bytes: int) -> list[int]:
        """Numbers of the next holes that wait for one tier, within the limits but at least one; empty if none waits."""
        state, limits = self.state, self.limits
        waiting = _WAITING.search(state, self._at)
        self._at = at = waiting.start() if waiting else len(state)
        numbers: list[int] = []
        batch_bytes = 0
        max_items = min(MAX_ITEMS, self.tier_of(at).capabilities.max_batch) if waiting else 0
        while waiting and state[waiting.start()] == state[at]:
            number = waiting.start()
            batch_bytes += limits[number % self.n_slices]
            if numbers and batch_bytes > max_bytes:
                break
            numbers.append(number)
            if len(numbers) >= max_items:
                break
            waiting = _WAITING.search(state, number + 1)
        return numbers

    def tier_of(self, number: int) -> Tier:
        """The nearest tier that has this hole."""
        return self.tiers[self.known[number] - TIER]

    def bytes_of(self, numbers: Sequence[int]) -> int:
        """Total length of these holes' extents."""
        return sum([self.limits[number % self.n_slices] for number in numbers])

    def busy(self, numbers: Sequence[int]) -> None:
        """Mark these holes as being loaded."""
        for number in numbers:
            self.state[number] = _BUSY

    def filled(self, numbers: Sequence[int]) -> None:
        """Mark these holes as filled, by a load or because the chunks came to L1 meanwhile."""
        for number in numbers:
            self.state[number] = _DONE
        self._advance()

    def failed(self, numbers: Sequence[int], reason: str) -> None:
        """Mark these holes as failed: the prefix ends there."""
        for number in numbers:
            self.state[number] = FAILED
            if number < self.first_failed:
                self.first_failed, self._why = number, reason
        self._advance()

    def again(self, numbers: Sequence[int], tier: int) -> None:
        """Make these holes wait again, now for another tier."""
        for number in numbers:
            self.known[number] = self.state[number] = TIER + tier
            self._at = min(self._at, number)

    def give_up(self) -> None:
        """Make all waiting holes fail."""
        self.state[:] = self.state.translate(_GIVEN_UP)

    def outcome(self) -> FetchOutcome:
        """The current answer: the length of the prefix that is ready with its windows, and why it ends there."""
        assert self.plan is not None
        n_slices, ready = self.n_slices, self._ready
        n_chunks, reason, detail = self.plan
        if ready < len(self.state):
            n_chunks = longest(
                ready // n_slices,
                self.spans,
                lambda chunk, number: self.pool.peek(self.key(chunk * n_slices + number), 1) == 1,
            )
            detail = self._why if self.state[ready] == FAILED else DEADLINE
            reason = miss_reason(detail)
        filled = 0
        for number in range(n_slices):  # a chunk counts if a hole of any slice was filled
            end = min(ready, n_chunks * n_slices)
            row = self._holes[:end].ljust(n_chunks * n_slices, b"\0")[number::n_slices]
            filled |= int.from_bytes(row, "little")
        return FetchOutcome(n_chunks, filled.bit_count(), reason, detail, tuple(self.choices.values()))

    def _advance(self) -> None:
        rest = self.state[self._ready :]
        self._ready += len(rest) - len(rest.lstrip(b"\0"))
        is_last = self._ready == len(self.state)
        if not self.decided.done() and (is_last or self.state[self._ready] == FAILED):
            self.decided.set_result(None)


class Planner:
    """Asks L1, then the tiers in their order, how far the prefix of a fetch extends."""

    def __init__(
        self, clock: Clock, limits: PrefetchLimits, lost: Callable[[str, Sequence[bytes]], None]
    ) -> None:
        """`lost(tier, keys)`: see PrefetchController."""
        self._clock = clock
        self._limits = limits
        self._lost = lost

    async def plan(self, fetch: Fetch, budget_bytes: int | None) -> Plan:
        """Ask L1, then the tiers in their order, each for the keys that were not found before it."""
        n_slices, known = fetch.n_slices, fetch.known
        whole = [number for number in range(n_slices) if not (fetch.spans and fetch.spans[number])]
        plan = Plan(fetch.n_keys // n_slices)
        planned_bytes = 0
        part_keys = max(1, PART_KEYS // n_slices) * n_slices
        for first in range(0, fetch.n_keys if whole else 0, part_keys):
            part = range(first, min(first + part_keys, fetch.n_keys))
            fetch.look_in_l1(part)
            numbers: Sequence[int] = part
            if len(whole) < n_slices or known.count(_IN_L1, part.start, part.stop):
                numbers = [i for i in part if not known[i] and i % n_slices in whole]
            await self.ask_all(fetch, numbers)
            missing = self._first_missing(fetch, numbers)
            end = part.stop if missing is None else missing // n_slices * n_slices
            if budget_bytes is not None:
                for chunk in range(first // n_slices, end // n_slices):
                    holes = [i for i in whole if known[chunk * n_slices + i] >= TIER]
                    planned_bytes += fetch.bytes_of(holes)
                    if planned_bytes > budget_bytes:
                        return await self._with_windows(fetch, _over(chunk), budget_bytes)
            if missing is not None:
                why = fetch.unknown.get(missing, "")
                reason = miss_reason(why) if why else MissReason.NEVER_STORED
                plan = Plan(end // n_slices, reason, why)
                break
        return await self._with_windows(fetch, plan, budget_bytes)

    def _first_missing(self, fetch: Fetch, numbers: Sequence[int]) -> int | None:
        """The first of these keys, all looked up, that neither L1 nor a tier has; None: each was found."""
        if isinstance(numbers, range):
            if _MISSING.search(fetch.known, numbers.start, numbers.stop) is None:
                return None
            numbers = list(numbers)
        missing = [i for i in numbers if fetch.known[i] in (_ABSENT, _UNKNOWN)]
        if missing:
            fetch.look_in_l1(missing)  # it may have come meanwhile
        return next((i for i in missing if fetch.known[i] != _IN_L1), None)

    async def ask_all(self, fetch: Fetch, numbers: Sequence[int]) -> None:
        """Ask the tiers in their order for these keys, and record which they have, or why that is unknown."""
        for at in range(0, len(numbers), PART_KEYS):
            await self._ask_part(fetch, numbers[at : at + PART_KEYS])
        await asyncio.sleep(0)

    async def _ask_part(self, fetch: Fetch, numbers: Sequence[int]) -> None:
        known = fetch.known
        for tier in range(len(fetch.tiers)):
            if not numbers:
                return
            found, why = await self.ask(fetch, tier, numbers)
            if isinstance(numbers, range) and found.count(PRESENT) == len(found):
                known[numbers.start : numbers.stop] = bytes([TIER + tier]) * len(found)
                return
            for i, presence in zip(numbers, found, strict=True):
                if presence == PRESENT:
                    known[i] = TIER + tier
                elif presence == _NOBODY_KNOWS:
                    known[i] = _UNKNOWN
                    fetch.unknown.setdefault(i, why or "unknown")
                elif known[i] == _NOT_ASKED:
                    known[i] = _ABSENT
            numbers = [i for i in numbers if known[i] < TIER]
        for i in numbers:
            if known[i] == _NOT_ASKED:
                known[i] = _ABSENT

    async def ask(self, fetch: Fetch, tier_number: int, numbers: Sequence[int]) -> tuple[bytes, str]:
        """Ask one tier which of the keys it has; all are unknown if it does not answer in time.

        Returns a Presence for each, and why some are unknown.
        """
        tier, keys, spans = fetch.tiers[tier_number], fetch.keys_of(numbers), fetch.spans
        left_s = max(0.0, fetch.deadline_s - self._clock.monotonic_s())
        last = tier_number == len(fetch.tiers) - 1
        patience_s = left_s if last else min(left_s * self._limits.patience_share, self._limits.patience_s)
        # Keys of windows, states and tails are useful without the keys before them.
        each = fetch.tails or (bool(spans) and any(spans[i % fetch.n_slices] for i in numbers))
        ask = Ask(each=each, owner=fetch.owner)
        try:
            found = await asyncio.wait_for(tier.exists(keys, ask), patience_s)
        except TimeoutError:
            return Ask().unknown(keys, DEADLINE), DEADLINE
        if tier.capabilities.shared:  # others may have removed records that this server has stored
            absent = [key for key, one in zip(split(keys), found, strict=True) if one == Presence.ABSENT]
            if absent:
                self._lost(tier.name, absent)
        return found, ask.reason

    async def _with_windows(self, fetch: Fetch, plan: Plan, budget_bytes: int | None) -> Plan:
        """Shorten a plan until each slice with a span has what the hit needs.

        With a budget it is shortened until all loads together stay within it.
        """
        if not fetch.spans:
            return plan
        n_slices, spans, longest_span = fetch.n_slices, fetch.spans, max(fetch.spans)
        over = False

        async def ask(chunks: range, hit: int | None = None) -> None:
            """Look up these chunks, the last ones first; with `hit`, only those that a hit of `hit` chunks needs."""
            numbers = [
                i
                for chunk in reversed(chunks)
                for number, span in enumerate(spans)
                if span and (hit is None or chunk + span >= hit)
                and not fetch.known[i := chunk * n_slices + number]
            ]  # fmt: skip
            if numbers:
                fetch.look_in_l1(numbers)
                await self.ask_all(fetch, [i for i in numbers if not fetch.known[i]])

        def cost_bytes(n_chunks: int) -> int:
            end = n_chunks * n_slices
            return sum(
                limit * fetch.known[max(0, n_chunks - (span or n_chunks)) * n_slices + number : end : n_slices]
                .translate(_MARKS).count(1)
                for number, (span, limit) in enumerate(zip(spans, fetch.limits, strict=True))
            )  # fmt: skip

        if budget_bytes is None:
            # Most prefixes end where the prompt that stored them did.
            await ask(range(max(0, plan.n_chunks - longest_span), plan.n_chunks), hit=plan.n_chunks)
            if longest(plan.n_chunks, spans, fetch.is_present) == plan.n_chunks:
                return plan
        n_chunks = end = plan.n_chunks
        while end > 0:
            begin = max(0, end - WINDOW_CHUNKS)
            await ask(range(max(0, begin - longest_span), end))
            n_chunks = longest(end, spans, fetch.is_present)
            while n_chunks > begin and budget_bytes is not None and cost_bytes(n_chunks) > budget_bytes:
                over = True
                n_chunks = longest(n_chunks - 1, spans, fetch.is_present)
            if n_chunks > begin:
                break
            end = n_chunks = begin
        if n_chunks == plan.n_chunks:
            return plan
        if over:
            return _over(n_chunks)
        first, end = n_chunks * n_slices, plan.n_chunks * n_slices
        beyond = [i for i in fetch.unknown if first <= i < end and spans[i % n_slices]]
        why = fetch.unknown[min(beyond)] if beyond else ""
        return Plan(n_chunks, miss_reason(why) if why else MissReason.NEVER_STORED, why)


def _over(n_chunks: int) -> Plan:
    return Plan(n_chunks, MissReason.REFUSED, "budget")
