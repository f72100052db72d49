"""Ends waits at a deadline, and stops asking an adapter that does not answer.

A deadline ends the *wait*: every item of the batch is answered FAILED('deadline') (exists: UNKNOWN), while the inner
operation goes on and its items keep their holds until the medium has finished with them.  The bytes of such operations
count as stuck until the operations end; while `max_stuck_bytes` or more bytes are stuck, nothing more is put or loaded.

Each operation has a breaker (policy/breaker.py).  If an operation succeeds after its deadline, the breaker admits a try
at once.

An operation failed if it hit the deadline, raised, or all its items are FAILED or UNKNOWN for reasons that blame the
medium (policy/reasons.py; a full queue does not).  A miss, a corrupt record or a full disk is an answer, not a failure.
While the breaker of loads is open, `exists` answers UNKNOWN too, since a record that cannot be loaded is not a hit.

The log has a line when a breaker opens (`tier_down`) and when it closes again (`tier_up`), none for probes that fail.

Each exists, put, load and delete is reported when it has ended, with its duration and outcomes.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvstrata.clock import Clock
from kvstrata.config.secrets import scrubbed
from kvstrata.errors import StorageError
from kvstrata.observability.logging import EventLog
from kvstrata.policy.breaker import Breaker, BreakerState
from kvstrata.policy.reasons import BREAKER_OPEN, DEADLINE, PAUSED, RAISED, blames_medium
from kvstrata.storage.base import (
    MORE_KEYS,
    AdapterContext,
    Found,
    KeyPage,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
    log_broken_contract,
)
from kvstrata.types import KEY_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")
Moved = TypeVar("Moved", PutOutcome, LoadOutcome)

MEANINGS = {
    "exists": "lookups count its chunks as absent",
    "put": "it gets no new chunks",
    "load": "lookups count its chunks as absent",
    "delete": "records that should be deleted stay on it",
}
"""What an open breaker of an operation means, for the log."""


class DeadlineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times and bounds of one adapter."""

    deadline_ms: int = 5_000
    """Time for one operation, and as long again for every `bytes_per_deadline` of its payload."""
    bytes_per_deadline: int = 64 << 20
    max_stuck_bytes: int
    failures: int = 3
    open_s: float = 1.0
    max_open_s: float = 30.0
    close_s: float = 10.0
    """How long `close` waits for the inner adapter's close and for operations past their deadline."""


class OpReport(NamedTuple):
    """One finished batch."""

    adapter: str
    operation: str
    """exists, put, load or delete."""
    moved_bytes: int
    """Bytes of the records that were stored or loaded; 0 for exists and delete."""
    seconds: float
    outcomes: Mapping[str, int]
    """Items by outcome in lower case (`stored`, `absent`, …), by `status:reason` where there is a reason,
    `cancelled` when the caller went away."""


class DeadlineAdapter(StorageAdapter):
    """Wraps one adapter. Its exists, put, load and delete never raise; an exception of the adapter becomes outcomes.

    `report` gets each batch that has ended, on the event loop.
    """

    def __init__(
        self,
        inner: StorageAdapter,
        limits: DeadlineLimits,
        clock: Clock,
        report: Callable[[OpReport], None],
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.limits = limits
        self.stuck_bytes = 0
        """Bytes of operations that have not ended and that nobody waits for any more."""
        self._clock = clock
        self._report = report
        self._states = EventLog("adapters", clock.monotonic_s)
        self._misanswered: set[str] = set()
        """Operations whose invalid answers were logged."""
        self._shut = ""
        """Why the medium gets no puts and deletes; empty: it gets them."""
        self._shut_to_loads = False
        self.paused = False
        """Whether an admin wants the medium to be asked nothing; the answer is PAUSED."""
        self._running: set[asyncio.Task[Any]] = set()
        self._breakers = {
            operation: Breaker(limits.failures, limits.open_s, limits.max_open_s)
            for operation in ("exists", "put", "load", "delete")
        }

    def breaker_states(self) -> dict[str, str]:
        """State of each operation's breaker, for status pages."""
        return {operation: breaker.state.value for operation, breaker in self._breakers.items()}

    def shut(self, reason: str, *, loads: bool) -> None:
        """Ask the medium nothing from now on, except lookups and loads if `loads`; the answer is `reason`."""
        self._shut, self._shut_to_loads = reason, not loads

    def open_again(self) -> None:
        """Use the medium again after `shut`."""
        self._shut, self._shut_to_loads = "", False

    def _refusal(self, *, loads: bool = False) -> str:
        """Why the medium is not asked to put or delete, or (`loads`) to look up or load; empty: it is asked."""
        if self.paused:
            return PAUSED
        return "" if loads and not self._shut_to_loads else self._shut

    async def open(self, context: AdapterContext) -> None:
        """As the inner adapter, without a deadline: the server bounds the opening of all layers."""
        await self.inner.open(context)
        self.capabilities = self.inner.capabilities

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """As the inner adapter; UNKNOWN at the deadline, while a breaker is open and while the medium is shut."""
        with _Span(self, "exists", len(keys)) as span:
            found = await self._exists(keys)
            span.outcomes.update(_presences(found))
        return found

    async def _exists(self, keys: Sequence[bytes]) -> list[Found]:
        if refusal := self._refusal(loads=True):
            return [Found(Presence.UNKNOWN, 0, refusal)] * len(keys)
        if not self._breakers["load"].would_admit(self._clock.monotonic_s()) or not self._admit("exists"):
            return [Found(Presence.UNKNOWN, 0, BREAKER_OPEN)] * len(keys)
        try:
            return await self._bounded("exists", self.inner.exists(keys), keys, 0, Found, _found_says_why_not)
        except _Failed as failed:
            return [Found(Presence.UNKNOWN, 0, failed.reason)] * len(keys)

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the inner adapter; None if it does not answer in time, its answer is not a page, or the medium is shut."""
        if self._refusal(loads=True):
            return None
        try:
            page = await self._in_time("", self.inner.list_keys(cursor, most), 0, _no_reason)
        except _Failed:
            return None
        if page is None or _is_page(page, most):
            return page
        log.error("%s: list_keys answered %.200r, which is not a page of %d keys", self.name, page, most)
        return None

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As the inner adapter; FAILED at the deadline, while the breaker is open and while the medium is shut."""
        return await self._move("put", self.inner.put, items, PutOutcome, PutStatus.FAILED, PutStatus.STORED)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """As the inner adapter; FAILED at the deadline, while the breaker is open and while the medium is shut."""
        return await self._move(
            "load", self.inner.load, items, LoadOutcome, LoadStatus.FAILED, LoadStatus.LOADED
        )

    async def _move(
        self,
        operation: str,
        call: Callable[[Any], Coroutine[Any, Any, list[Moved]]],
        items: Sequence[PutItem] | Sequence[LoadItem],
        kind: type[Moved],
        failed: Any,
        moved: object,
    ) -> list[Moved]:
        lengths = [item.hold.length for item in items]
        with _Span(self, operation, len(items)) as span:
            refusal = self._refusal(loads=operation == "load")
            if refusal or self._is_stuck() or not self._admit(operation):
                for item in items:
                    item.hold.drop()
                outcomes = [kind(failed, refusal or BREAKER_OPEN)] * len(items)
            else:
                try:
                    outcomes = await self._bounded(
                        operation, call(items), items, sum(lengths), kind,
                        lambda outcome: outcome.reason if outcome.status is failed else None,
                    )  # fmt: skip
                except _Failed as error:
                    outcomes = [kind(failed, error.reason)] * len(items)
            for (status, reason), length in zip(outcomes, lengths, strict=True):
                span.outcomes[_word(status.name, reason)] += 1
                span.moved_bytes += length if status is moved else 0
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> int:
        """As the inner adapter; 0 at the deadline, while the breaker is open and while the medium is shut."""
        with _Span(self, "delete", len(keys)) as span:
            count = await self._delete(keys)
            span.outcomes.update({"deleted": count, "absent": len(keys) - count})
        return count

    async def _delete(self, keys: Sequence[bytes]) -> int:
        if self._refusal() or not self._admit("delete"):
            return 0
        try:
            count = await self._in_time("delete", self.inner.delete(keys), 0, _no_reason)
        except _Failed:
            return 0
        return count if self._is_answer("delete", count, _is_count(count)) else 0

    async def clear(self) -> int:
        """As the inner adapter, without a deadline, since an admin waits for the answer. Raises StorageError."""
        if self.paused:
            raise self._not_cleared("it is paused; resume it first")
        try:
            count = await self.inner.clear()
        except StorageError:
            raise
        except Exception as error:  # the plugin boundary
            log_broken_contract(self.name, "clear", error)
            raise self._not_cleared(f"{type(error).__name__}: {scrubbed(error)}") from None
        if not self._is_answer("clear", count, _is_count(count)):
            raise self._not_cleared(f"it answered {count!r:.80}, which is not a number of records")
        return count

    async def usage(self) -> Usage:
        """As the inner adapter; all zero if it is paused or does not answer in time, or its answer is not a usage."""
        if self.paused:
            return Usage(0, 0, 0)
        try:
            usage = await self._in_time("", self.inner.usage(), 0, _no_reason)
        except _Failed:
            return Usage(0, 0, 0)
        counts = isinstance(usage, tuple) and len(usage) == len(Usage._fields) and all(map(_is_count, usage))
        return Usage(*usage) if self._is_answer("usage", usage, counts) else Usage(0, 0, 0)

    def _not_cleared(self, why: str) -> StorageError:
        return StorageError(f"{self.name}: not cleared: {why}", field=self.name)

    def _is_answer(self, operation: str, answer: object, is_one: bool) -> bool:
        """Return `is_one`; if it is false, log the answer, once for each operation."""
        if not is_one and operation not in self._misanswered:
            self._misanswered.add(operation)
            log.error(
                "%s: %s answered %.200r, which the storage contract forbids", self.name, operation, answer
            )
        return is_one

    async def close(self) -> None:
        """Close the inner adapter; wait at most `close_s` for that and for its running operations.

        What has not ended by then goes on, and is logged.
        """
        closing = asyncio.create_task(self.inner.close(), name=f"{self.name}-close")
        self._running.add(closing)
        closing.add_done_callback(self._closed)
        _, pending = await asyncio.wait(set(self._running), timeout=self.limits.close_s)
        if pending:
            log.error(
                "%s: still busy %.0f s after close with %d stuck bytes; they stay pinned",
                self.name, self.limits.close_s, self.stuck_bytes,
            )  # fmt: skip

    @property
    def running(self) -> int:
        """How many operations have not ended, whether or not somebody waits for them; `close` counts as one."""
        return len(self._running)

    async def ended(self) -> None:
        """Return when no operation runs any more."""
        while self._running:
            await asyncio.wait(set(self._running))

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._running.discard(closing)
        if not closing.cancelled() and closing.exception() is not None:
            log.error("%s: close: %r", self.name, closing.exception())

    def _admit(self, operation: str) -> bool:
        return self._breakers[operation].admit(self._clock.monotonic_s())

    def _is_stuck(self) -> bool:
        return self.stuck_bytes >= self.limits.max_stuck_bytes

    async def _bounded(
        self,
        operation: str,
        work: Coroutine[Any, Any, list[T]],
        asked: Sequence[object],
        payload_bytes: int,
        kind: type[T],
        why_not: Callable[[T], str | None],
    ) -> list[T]:
        """`_in_time` for a batch, whose result must be one outcome of this kind for each item of `asked`.

        `why_not` returns None if an outcome is an answer of the medium, else the outcome's reason.
        """

        def fits(outcomes: object) -> bool:
            return (
                isinstance(outcomes, (list, tuple))
                and len(outcomes) == len(asked)
                and all(issubclass(found, kind) for found in set(map(type, outcomes)))
            )

        def failure(outcomes: list[T]) -> str:
            if not fits(outcomes):
                return RAISED
            first = ""
            for outcome in outcomes:
                reason = why_not(outcome)
                if reason is None or not blames_medium(reason):
                    return ""
                first = first or reason or "failed"
            return first

        outcomes = await self._in_time(operation, work, payload_bytes, failure)
        if not fits(outcomes):
            log.error(
                "%s: %s answered %d items with %.200r, which is not a list of one %s each",
                self.name, operation, len(asked), outcomes, kind.__name__,
            )  # fmt: skip
            raise _Failed(RAISED)
        return outcomes

    async def _in_time(
        self,
        operation: str,
        work: Coroutine[Any, Any, T],
        payload_bytes: int,
        failure: Callable[[T], str],
    ) -> T:
        """The result of `work` if it comes in time. Raises _Failed otherwise.

        `failure` returns the reason if a result means that the medium failed, else "".

        After the deadline, and when the caller is cancelled, the work goes on and its bytes count as stuck until it
        ends.  In any case the breaker hears how the work ended, or that its deadline passed.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(work)
        late = loop.create_future()
        timeout_s = self.limits.deadline_ms / 1000 * (1 + payload_bytes / self.limits.bytes_per_deadline)
        breaker = self._breakers.get(operation)

        def judge(reason: str) -> None:
            if not late.done():
                late.set_result(None)
                if breaker is not None:
                    self._judge(operation, breaker, reason)

        def ended(task: asyncio.Task[T]) -> None:
            self._running.discard(task)
            timer.cancel()
            reason = RAISED if task.cancelled() or task.exception() is not None else failure(task.result())
            if not reason and late.done() and breaker is not None:
                breaker.late_but_well(self._clock.monotonic_s())
            judge(reason)

        timer = loop.call_later(timeout_s, judge, DEADLINE)
        self._running.add(task)
        task.add_done_callback(ended)
        try:
            await asyncio.wait({task, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                self._count_stuck(task, payload_bytes)
        if not task.done():
            raise _Failed(DEADLINE)
        error = task.exception()
        if error is not None:
            log_broken_contract(self.name, operation, error)
            raise _Failed(RAISED)
        return task.result()

    def _judge(self, operation: str, breaker: Breaker, reason: str) -> None:
        """Tell the breaker how an operation ended, for which reason it failed ("": it did not), and log its change."""
        before = breaker.state
        breaker.ended(not reason, self._clock.monotonic_s())
        is_well, was_well = breaker.state is BreakerState.CLOSED, before is BreakerState.CLOSED
        if was_well and not is_well:
            self._states.repeated(
                logging.WARNING, f"down {self.name} {operation}", "tier_down", adapter=self.name, operation=operation,
                reason=reason, meaning=f"{MEANINGS[operation]}; it is asked again by itself",
            )  # fmt: skip
        elif is_well and not was_well:
            self._states.repeated(
                logging.INFO, f"up {self.name} {operation}", "tier_up", adapter=self.name, operation=operation
            )

    def _count_stuck(self, task: asyncio.Task[Any], payload_bytes: int) -> None:
        self.stuck_bytes += payload_bytes

        def unstick(ended: asyncio.Task[Any]) -> None:
            self.stuck_bytes -= payload_bytes
            error = None if ended.cancelled() else ended.exception()
            if error is not None:
                log_broken_contract(self.name, "an operation past its deadline", error)

        task.add_done_callback(unstick)


class _Span:
    """Times one batch, and reports it however it ends."""

    def __init__(self, owner: DeadlineAdapter, operation: str, items: int) -> None:
        self._owner = owner
        self._operation = operation
        self._items = items
        self.moved_bytes = 0
        self.outcomes: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> _Span:
        self._begun_s = self._owner._clock.monotonic_s()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self.outcomes = collections.Counter({"cancelled": self._items})
        owner = self._owner
        seconds = owner._clock.monotonic_s() - self._begun_s
        owner._report(OpReport(owner.name, self._operation, self.moved_bytes, seconds, dict(self.outcomes)))


def _presences(found: Sequence[Found]) -> collections.Counter[str]:
    """The number of keys by outcome; takes some 30 µs for a thousand keys."""
    presences = bytes([answer[0] for answer in found])
    words = collections.Counter(
        {presence.name.lower(): presences.count(presence) for presence in Presence if presence in presences}
    )
    if words.pop("unknown", 0):
        words.update(
            _word("unknown", reason) for presence, _, reason in found if presence is Presence.UNKNOWN
        )
    return words


def _word(status: str, reason: str) -> str:
    return f"{status.lower()}:{reason}" if reason else status.lower()


class _Failed(Exception):
    """The operation failed, or did not end within its deadline."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _no_reason(result: object) -> str:
    return ""


def _is_count(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 1 << 63


def _is_page(page: object, most: int) -> bool:
    return (
        isinstance(page, KeyPage)
        and isinstance(page.cursor, int)
        and 0 <= page.cursor < 1 << 64
        and len(page.keys) <= most + MORE_KEYS
        and all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in page.keys)
    )


def _found_says_why_not(found: Found) -> str | None:
    return found.reason if found.presence is Presence.UNKNOWN else None
