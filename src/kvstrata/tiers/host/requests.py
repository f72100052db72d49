"""The table of requests that an adapter host has not finished, and how long the child may be silent. Sans I/O.

Invariants
1. A hold is in the table from the moment its item was accepted until the child says that the adapter has finished with
   the bytes, or until the child was reaped (`settle`).
2. An answer must name a request in the table, have a kind that answers it, and have one outcome per item; a drop must
   name a hold in the table.  Anything else raises ChannelError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from kvstrata.errors import StorageError
from kvstrata.tiers.base import KeyPage, LoadOutcome, LoadStatus, Presence, PutOutcome, PutStatus, Usage
from kvstrata.tiers.host.frames import (
    Answer,
    ChannelError,
    Clear,
    Counted,
    Delete,
    Dropped,
    Ended,
    Exists,
    Found,
    GetUsage,
    Listed,
    ListKeys,
    Load,
    Put,
    Raised,
    Used,
)

if TYPE_CHECKING:
    from kvstrata.native.core import Hold

T = TypeVar("T")

MAX_REQUESTS = 4_096

_ANSWER_TO: dict[type[Any], type[Any]] = {
    Exists: Found,
    Put: Ended,
    Load: Ended,
    Delete: Counted,
    Clear: Counted,
    GetUsage: Used,
    ListKeys: Listed,
}
_WELL: dict[type[Any], bytes] = {
    Exists: bytes([Presence.ABSENT, Presence.PRESENT]),
    Put: bytes([PutStatus.STORED, PutStatus.EXISTS]),
    Load: bytes([LoadStatus.LOADED, LoadStatus.ABSENT]),
}
"""Outcomes that show that the adapter did what the request asked for."""


class _Request:
    """A row of the table: it is removed when it is answered and all its holds are dropped."""

    __slots__ = ("begun_s", "bytes", "count", "future", "held", "holds", "kind")

    def __init__(
        self,
        kind: type[Any],
        count: int,
        holds: list[Hold | None],
        future: asyncio.Future[Any],
        begun_s: float,
    ) -> None:
        self.kind = kind
        self.count = count
        self.holds = holds
        self.held = len(holds)
        self.bytes = sum(hold.length for hold in holds if hold is not None)
        self.future: asyncio.Future[Any] | None = future
        """None once the request was answered. Its result is None if the child died first."""
        self.begun_s = begun_s


class HostedError(Exception):
    """The adapter in the child raised, which its contract forbids; the child's log has the traceback."""


class RequestTable:
    """The requests of one adapter host; outlives its children."""

    def __init__(self, kill_s: float, bytes_per_kill: int) -> None:
        """The child may be silent for `kill_s`, and as long again for every `bytes_per_kill` of payload under way."""
        self._kill_s = kill_s
        self._bytes_per_kill = bytes_per_kill
        self._requests: dict[int, _Request] = {}
        self._last_number = 0
        self._heard_s = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def heard_s(self) -> float:
        """When the child last showed that it works (`heard`), or got work after it had none."""
        return self._heard_s

    @property
    def is_full(self) -> bool:
        """Whether no more requests may be added now."""
        return len(self._requests) >= MAX_REQUESTS

    def add(
        self, kind: type[Any], count: int, holds: list[Hold | None], future: asyncio.Future[Any], now_s: float
    ) -> int:
        """Add a request that is sent now; returns its number. The table owns the holds from now on."""
        if not self._is_working():
            self._heard_s = now_s
        self._last_number += 1
        self._requests[self._last_number] = _Request(kind, count, holds, future, now_s)
        return self._last_number

    def heard(self, now_s: float) -> None:
        """The child sent a frame that shows its adapter at work."""
        self._heard_s = now_s

    def take(self, answer: Answer) -> bool:
        """Handle an answer or drops; returns whether the adapter did what the request asked. Raises ChannelError."""
        assert isinstance(answer, (Found, Ended, Counted, Listed, Used, Raised, Dropped)), answer
        request = self._requests.get(answer.number)
        if request is None:
            raise ChannelError(f"{_name(answer)} for request {answer.number}, which is not under way")
        well = False
        if isinstance(answer, Dropped):
            self._drop(request, answer.indices)
        else:
            well = self._answer(request, answer)
        if request.future is None and not request.held:
            del self._requests[answer.number]
        return well

    def settle(self) -> int:
        """Drop every hold and give every future None, since the child was reaped; returns the number of requests."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            for hold in request.holds:
                if hold is not None:
                    hold.drop()
            if request.future is not None and not request.future.done():
                request.future.set_result(None)
        return len(requests)

    def due_s(self, *, by_age: bool) -> float | None:
        """When the child is to be killed if it sends nothing more; None while it has no work with a time limit.

        `by_age`: it is also killed for a single operation that does not end, whatever else it sends.
        """
        working = [request for request in self._requests.values() if request.kind is not Clear]
        if not working:
            return None
        due = [self._heard_s + self._patience_s(sum(request.bytes for request in working))]
        if by_age:
            due += [request.begun_s + self._patience_s(request.bytes) for request in working]
        return min(due)

    def _is_working(self) -> bool:
        return any(request.kind is not Clear for request in self._requests.values())

    def _patience_s(self, payload_bytes: int) -> float:
        return self._kill_s * (1 + payload_bytes / self._bytes_per_kill)

    def _answer(self, request: _Request, answer: Found | Ended | Counted | Listed | Used | Raised) -> bool:
        """Resolve the request's future; returns whether an outcome shows that the adapter did what it was asked."""
        future = request.future
        if future is None:
            raise ChannelError(f"{_name(answer)}: request {answer.number} was answered before")
        if isinstance(answer, Raised):
            request.future = None
            if not future.done():
                kind = StorageError if answer.kind == "StorageError" else HostedError
                future.set_exception(kind(answer.message))
            return False
        if not isinstance(answer, _ANSWER_TO[request.kind]):
            raise ChannelError(f"{_name(answer)} as the answer to {request.kind.__name__}")
        result, well = _result_of(request, answer)
        if isinstance(answer, Ended):
            self._drop(request, answer.dropped)
        request.future = None
        if not future.done():
            future.set_result(result)
        return well

    def _drop(self, request: _Request, indices: Iterable[int]) -> None:
        holds = request.holds
        for index in indices:
            if index >= len(holds) or (hold := holds[index]) is None:
                raise ChannelError(f"item {index} of {len(holds)} is dropped but not held")
            holds[index] = None
            request.held -= 1
            hold.drop()


def _name(answer: Answer) -> str:
    return type(answer).__name__


def _result_of(request: _Request, answer: Found | Ended | Counted | Listed | Used) -> tuple[Any, bool]:
    """The result that the caller waits for, and whether it shows an adapter at work. Raises ChannelError."""
    if isinstance(answer, Counted):
        return answer.count, False
    if isinstance(answer, Used):
        return Usage(answer.used_bytes, answer.capacity_bytes, answer.records), False
    if isinstance(answer, Listed):
        return KeyPage(answer.keys, answer.cursor) if answer.can_list else None, False
    statuses = answer.presences if isinstance(answer, Found) else answer.statuses
    reasons = [""] * request.count if isinstance(answer, Found) or not answer.reasons else answer.reasons
    if len(statuses) != request.count or len(reasons) != request.count:
        raise ChannelError(f"{len(statuses)} outcomes and {len(reasons)} reasons for {request.count} items")
    well = any(status in _WELL[request.kind] for status in statuses)
    if isinstance(answer, Found):
        if statuses.translate(None, bytes(Presence)):
            raise ChannelError(f"a presence in {statuses.hex():.40} is none")
        return (statuses, answer.reason), well
    try:
        if request.kind is Put:
            return [*map(PutOutcome, map(PutStatus, statuses), reasons)], well
        return [*map(LoadOutcome, map(LoadStatus, statuses), reasons)], well
    except ValueError as error:
        raise ChannelError(f"{_name(answer)}: {error}") from None


async def outcome_of(future: asyncio.Future[T | None] | None, otherwise: T) -> T:
    """The future's result; `otherwise` if there is no future, or if the child died before it answered."""
    result = None if future is None else await future
    return otherwise if result is None else result
