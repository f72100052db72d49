"""Reports each exists, put, load and delete of an adapter: the number of items, the duration and the outcomes."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstrata.clock import Clock
from kvstrata.storage.base import (
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
)


class OpReport(NamedTuple):
    """One finished batch."""

    adapter: str
    operation: str
    """exists, put, load or delete."""
    items: int
    moved_bytes: int
    """Bytes of the records that were stored or loaded; 0 for exists and delete."""
    seconds: float
    outcomes: Mapping[str, int]
    """Items by outcome in lower case (`stored`, `absent`, …), by `status:reason` where there is a reason,
    `cancelled` when the caller went away, `raised` when the adapter broke its contract."""


class MeteredAdapter(StorageAdapter):
    """Passes every call on to the inner adapter; `report` gets each batch that has ended, on the event loop."""

    def __init__(self, inner: StorageAdapter, report: Callable[[OpReport], None], clock: Clock) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self._report = report
        self._clock = clock

    async def open(self, context: AdapterContext) -> None:
        """As the inner adapter."""
        await self.inner.open(context)
        self.capabilities = self.inner.capabilities

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """As the inner adapter."""
        with _Span(self, "exists", len(keys)) as span:
            found = await self.inner.exists(keys)
            span.outcomes.update(_presences(found))
        return found

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the inner adapter."""
        return await self.inner.list_keys(cursor, most)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As the inner adapter."""
        lengths = [item.hold.length for item in items]
        with _Span(self, "put", len(items)) as span:
            outcomes = await self.inner.put(items)
            for (status, reason), length in zip(outcomes, lengths, strict=True):
                span.outcomes[_word(status.name, reason)] += 1
                span.moved_bytes += length if status is PutStatus.STORED else 0
        return outcomes

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """As the inner adapter."""
        lengths = [item.hold.length for item in items]
        with _Span(self, "load", len(items)) as span:
            outcomes = await self.inner.load(items)
            for (status, reason), length in zip(outcomes, lengths, strict=True):
                span.outcomes[_word(status.name, reason)] += 1
                span.moved_bytes += length if status is LoadStatus.LOADED else 0
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> int:
        """As the inner adapter."""
        with _Span(self, "delete", len(keys)) as span:
            count = await self.inner.delete(keys)
            span.outcomes.update({"deleted": count, "absent": len(keys) - count})
        return count

    async def clear(self) -> int:
        """As the inner adapter."""
        return await self.inner.clear()

    async def usage(self) -> Usage:
        """As the inner adapter."""
        return await self.inner.usage()

    async def close(self) -> None:
        """As the inner adapter."""
        await self.inner.close()


class _Span:
    """Times one batch, and reports it however it ends."""

    def __init__(self, owner: MeteredAdapter, operation: str, items: int) -> None:
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
            word = "cancelled" if issubclass(kind, asyncio.CancelledError) else "raised"
            self.outcomes = collections.Counter({word: self._items})
        self._owner._report(
            OpReport(
                self._owner.name,
                self._operation,
                self._items,
                self.moved_bytes,
                self._owner._clock.monotonic_s() - self._begun_s,
                dict(self.outcomes),
            )
        )


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
