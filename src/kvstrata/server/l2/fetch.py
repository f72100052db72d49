"""One fetch: its plan, the state of each hole, and how far the prefix is ready.

A *hole* is a key of the fetch that is in a tier but not in L1.  The prefix is ready up to the first hole that is not
THERE.  It is decided as soon as that hole has FAILED, or all holes are THERE.
"""

from __future__ import annotations

import asyncio
import collections
import enum
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvstrata.keys.spans import longest
from kvstrata.native.core import Pool
from kvstrata.policy.prefetch import Hole, Plan
from kvstrata.policy.reasons import miss_reason
from kvstrata.server.l2.gate import Loader
from kvstrata.types import MissReason


class HoleState(enum.Enum):
    """Whether a hole has been filled."""

    OPEN = enum.auto()
    """It waits for its load, is being loaded, or is looked for in the next tier."""
    THERE = enum.auto()
    """The chunk is in L1."""
    FAILED = enum.auto()
    """It will not be filled: the prefix ends before it."""


class FetchOutcome(NamedTuple):
    """The answer of a fetch."""

    n_chunks: int
    """How many leading chunks of the fetch are in L1 now."""
    l2_chunks: int
    """How many of these were not in L1, or not in all slices, when the fetch began."""
    reason: MissReason | Literal[""]
    """Why the first chunk that is not in L1 is missing; empty if all are."""
    detail: str = ""


class Fetch:
    """One fetch. Belongs to the event loop."""

    def __init__(
        self,
        pool: Pool,
        keys: list[bytes],
        n_slices: int,
        parents: list[bytes],
        identity: bytes,
        tenant: int,
        deadline_s: float,
        limits: Sequence[int] = (),
        spans: Sequence[int] = (),
        tails: bool = False,
    ) -> None:
        self.spans = spans
        """For each slice how many of the last chunks are needed, 0: all; () if all are in each slice."""
        self.limits = limits
        """For each slice the length of a chunk's longest record; 0: not known."""
        self.tails = tails
        """The keys are those of tails."""
        self.pool = pool
        self.keys = keys
        self.n_slices = n_slices
        self.parents = parents
        self.identity = identity
        self.tenant = tenant
        self.deadline_s = deadline_s
        self.sources: list[Loader] = []
        """The tiers that it asks, in order; `Source.adapter` of a hole is an index into this list."""
        self.plan = Plan(0, [], "")
        self.pending: collections.deque[Hole] = collections.deque()
        self.running: set[asyncio.Task[None]] = set()
        self.expired = False
        """The caller does not wait for the answer any more."""
        self.abandoned = False
        """The caller does not want the chunks any more either."""
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._states: dict[int, HoleState] = {}
        """State of each hole, by its key's number."""
        self._why: dict[int, str] = {}
        """Reason of each failed hole, by its key's number."""
        self._ready = 0
        """Number of leading holes that are THERE."""
        self._first_failed = len(keys)
        """Number of the first key whose hole has FAILED; `len(keys)` if none has."""

    def limit_of(self, number: int) -> int:
        """The greatest length of this key's record; 0: not known."""
        return self.limits[number % self.n_slices] if self.limits else 0

    def extent_bytes(self, number: int) -> int:
        """The least length of the extent for this key, 0 for that of its record: a tail gets one of a chunk's size."""
        return self.limit_of(number) if self.tails else 0

    def span_of(self, number: int) -> int:
        """The span of this key's slice."""
        return self.spans[number % self.n_slices] if self.spans else 0

    def in_l1(self, key: bytes) -> bool:
        """Whether the chunk is in the pool now."""
        return self.pool.peek(key, 1) == 1

    def planned(self, plan: Plan) -> None:
        """Set the holes, once L1 and the tiers have answered."""
        self.plan = plan
        self.pending.extend(plan.holes)
        self._states = dict.fromkeys((hole.number for hole in plan.holes), HoleState.OPEN)
        self._advance()

    def there(self, hole: Hole) -> None:
        """Note that the hole is filled, by a load or because the chunk came to L1 meanwhile."""
        self._end(hole, HoleState.THERE)

    def failed(self, hole: Hole, reason: str) -> None:
        """Note that the hole will not be filled: the prefix ends there."""
        self._why[hole.number] = reason
        self._first_failed = min(self._first_failed, hole.number)
        self._end(hole, HoleState.FAILED)

    def is_open(self, hole: Hole) -> bool:
        """Whether the hole is neither filled nor failed."""
        return self._states[hole.number] is HoleState.OPEN

    def again(self, holes: list[Hole]) -> None:
        """Queue these holes again, now with another source."""
        self.pending = collections.deque(sorted((*holes, *self.pending), key=lambda hole: hole.number))

    def take(self, batch: list[Hole]) -> None:
        """Take these holes out of `pending`."""
        taken = {hole.number for hole in batch}
        while self.pending and self.pending[0].number in taken:
            taken.remove(self.pending.popleft().number)
        if taken:  # not at the front: `again` has put earlier holes before them
            self.pending = collections.deque(hole for hole in self.pending if hole.number not in taken)

    def in_vain(self) -> bool:
        """Whether more loads are useless: the prefix ends before the pending holes, or the caller has gone."""
        first = self.pending[0].number if self.pending else len(self.keys)
        return self.abandoned or self._first_failed < min(first + 1, len(self.keys))

    def outcome(self) -> FetchOutcome:
        """The answer now: how far the prefix is ready and has its windows, and why not further."""
        holes = self.plan.holes
        if self._ready == len(holes):
            n_chunks, reason, detail = self.plan.n_chunks, self.plan.reason, self.plan.detail
        else:
            hole = holes[self._ready]
            n_chunks = longest(
                hole.number // self.n_slices,
                self.spans,
                lambda chunk, number: self.in_l1(self.keys[chunk * self.n_slices + number]),
            )
            detail = self._why.get(hole.number) or "deadline"
            reason = miss_reason(detail)
        filled = {hole.number // self.n_slices for hole in holes[: self._ready]}
        return FetchOutcome(n_chunks, sum(chunk < n_chunks for chunk in filled), reason, detail)

    def _end(self, hole: Hole, state: HoleState) -> None:
        assert self._states[hole.number] is HoleState.OPEN, hole
        self._states[hole.number] = state
        self._advance()

    def _advance(self) -> None:
        holes = self.plan.holes
        while self._ready < len(holes) and self._states[holes[self._ready].number] is HoleState.THERE:
            self._ready += 1
        if not self.decided.done() and (
            self._ready == len(holes) or self._states[holes[self._ready].number] is HoleState.FAILED
        ):
            self.decided.set_result(None)
