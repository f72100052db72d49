"""Remembers for a short time what a shared medium said of presence, so that asking again costs no round trip.

Others put into a shared medium and delete from it, so what it said was true when it said it and may be stale by the
time it is told again: a PRESENT for at most `presence_ttl_ms`, an ABSENT for at most `negative_ttl_ms`.  A load that
then finds nothing is an ordinary miss, a chunk that was there after all one that is computed again.

Invariants
1. What is told from memory was the medium's answer to a question begun no longer ago than its time to live.
2. It is no older than what this server itself did to the key: a put that ended (whatever became of it), a delete, a
   clear, a record that its cap evicted and a load that did not end well each make the next question one to the
   medium, and the answer to a question that was under way meanwhile is passed on but not remembered.
3. UNKNOWN is never remembered.
4. At most `max_keys` are remembered of either answer; the oldest go first.

What a load brought is not remembered: L1 has it now.  A medium that keeps what is looked up (Mooncake's leases) hears
nothing of an answer from memory, so the time to live of PRESENT must be shorter than its lease.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import msgspec

from kvstrata.clock import Clock
from kvstrata.errors import StorageError
from kvstrata.storage.base import (
    AdapterContext,
    Found,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    StorageAdapter,
    Usage,
)

MAX_KEYS = 1 << 16
MAX_EVICTED = 1 << 12
"""Evicted keys that wait to be forgotten; of more, the oldest are told as there until their time is over."""


class PresenceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """For how long answers are told again; 0: never."""

    presence_ttl_ms: int = 5_000
    negative_ttl_ms: int = 500
    max_keys: int = MAX_KEYS


class _Answers:
    """Answers of one kind by key, oldest first."""

    def __init__(self, ttl_s: float, max_keys: int) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._told: dict[bytes, tuple[float, Found]] = {}

    def __len__(self) -> int:
        return len(self._told)

    def get(self, key: bytes, now_s: float) -> Found | None:
        told = self._told.get(key)
        if told is None:
            return None
        if now_s - told[0] < self._ttl_s:
            return told[1]
        del self._told[key]
        return None

    def add(self, key: bytes, found: Found, asked_s: float) -> None:
        self._told.pop(key, None)
        if self._ttl_s > 0:
            if len(self._told) >= self._max_keys:
                del self._told[next(iter(self._told))]
            self._told[key] = (asked_s, found)

    def forget(self, key: bytes) -> None:
        self._told.pop(key, None)

    def clear(self) -> None:
        self._told.clear()


class _Question:
    """An `exists` under way: its keys, and those of them of which its answer will not be remembered."""

    __slots__ = ("changed", "keys")

    def __init__(self, keys: Iterable[bytes]) -> None:
        self.keys = frozenset(keys)
        self.changed: set[bytes] = set()


class PresenceAdapter(StorageAdapter):
    """See the module. Passes everything on where the medium turns out not to be shared.

    With `limits` None the defaults hold; limits for a medium that is not shared are an error of `open`.
    """

    def __init__(self, inner: StorageAdapter, limits: PresenceLimits | None, clock: Clock) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self._configured = limits is not None
        self._clock = clock
        limits = limits or PresenceLimits()
        self._present = _Answers(limits.presence_ttl_ms / 1000, limits.max_keys)
        self._absent = _Answers(limits.negative_ttl_ms / 1000, limits.max_keys)
        self._questions: set[_Question] = set()
        self._evicted: collections.deque[bytes] = collections.deque(maxlen=MAX_EVICTED)
        self._counts = dict.fromkeys(("asked", "recalled_present", "recalled_absent"), 0)

    def stats(self) -> dict[str, int]:
        """For status pages: keys asked of the medium, and told from memory since the start; keys remembered."""
        return {**self._counts, "remembered": len(self._present) + len(self._absent)}

    async def open(self, context: AdapterContext) -> None:
        """As the inner adapter. Raises StorageError too where limits were given and nothing is shared."""

        def evicted(key: bytes) -> None:
            self._evicted.append(key)
            context.record_evicted(key)

        await self.inner.open(context._replace(record_evicted=evicted))
        self.capabilities = self.inner.capabilities
        if self._configured and not self.capabilities.shared:
            await self.inner.close()
            raise StorageError(
                f"{self.name}: presence_ttl_ms, negative_ttl_ms: this storage is not shared with other instances,"
                " so what is there is always known; remove them",
                field="presence_ttl_ms",
            )

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """From memory where it was told lately, the rest as the inner adapter."""
        if not self.capabilities.shared:
            return await self.inner.exists(keys)
        self._forget_evicted()
        asked_s = self._clock.monotonic_s()
        answers = {key: found for key in keys if (found := self._recall(key, asked_s)) is not None}
        asked = [key for key in keys if key not in answers]
        self._counts["asked"] += len(asked)
        if not asked:
            return [answers[key] for key in keys]
        question = _Question(asked)
        self._questions.add(question)
        try:
            found_now = await self.inner.exists(asked)
        finally:
            self._questions.discard(question)
        for key, found in zip(asked, found_now, strict=True):
            answers[key] = found
        self._forget_evicted(question)
        for key in question.keys - question.changed:
            self._remember(key, answers[key], asked_s)
        return [answers[key] for key in keys]

    async def heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """As the inner adapter."""
        return await self.inner.heads(keys)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As the inner adapter; what the keys' presence was is forgotten, whatever became of them."""
        keys = [item.key for item in items]
        try:
            return await self.inner.put(items)
        finally:
            self._changed(keys)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """As the inner adapter; what was not loaded is not told to be there any more."""
        keys = {item.key for item in items}
        try:
            outcomes = await self.inner.load(items)
            for item, outcome in zip(items, outcomes, strict=True):
                if outcome.status is LoadStatus.LOADED:
                    keys.discard(item.key)
            return outcomes
        finally:
            self._changed(keys)

    async def delete(self, keys: Sequence[bytes]) -> int:
        """As the inner adapter; the keys are forgotten."""
        try:
            return await self.inner.delete(keys)
        finally:
            self._changed(keys)

    async def clear(self) -> int:
        """As the inner adapter; everything is forgotten."""
        try:
            return await self.inner.clear()
        finally:
            self._present.clear()
            self._absent.clear()
            for question in self._questions:
                question.changed.update(question.keys)

    def numbers(self) -> dict[str, int]:
        """As the inner adapter."""
        return self.inner.numbers()

    async def usage(self) -> Usage:
        """As the inner adapter."""
        return await self.inner.usage()

    async def close(self) -> None:
        """As the inner adapter."""
        await self.inner.close()

    def _recall(self, key: bytes, now_s: float) -> Found | None:
        found = self._present.get(key, now_s)
        if found is not None:
            self._counts["recalled_present"] += 1
            return found
        found = self._absent.get(key, now_s)
        if found is not None:
            self._counts["recalled_absent"] += 1
        return found

    def _remember(self, key: bytes, found: Found, asked_s: float) -> None:
        self._forget(key)  # an answer to another question
        if found.presence is Presence.PRESENT:
            self._present.add(key, found, asked_s)
        elif found.presence is Presence.ABSENT:
            self._absent.add(key, found, asked_s)

    def _forget(self, key: bytes) -> None:
        self._present.forget(key)
        self._absent.forget(key)

    def _changed(self, keys: Iterable[bytes]) -> None:
        keys = set(keys)
        for key in keys:
            self._forget(key)
        for question in self._questions:
            question.changed.update(question.keys & keys)

    def _forget_evicted(self, *more: _Question) -> None:
        """Adapters tell of evictions from their threads; here they take effect."""
        keys = set()
        while self._evicted:
            keys.add(self._evicted.popleft())
        if keys:
            self._changed(keys)
            for question in more:
                question.changed.update(question.keys & keys)
