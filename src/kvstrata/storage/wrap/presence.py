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
4. At most `max_keys` are remembered; the oldest go first.

What a load brought is not remembered: L1 has it now.  A medium that keeps what is looked up (Mooncake's leases) hears
nothing of an answer from memory, so the time to live of PRESENT must be shorter than its lease.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from kvstrata.clock import Clock
from kvstrata.errors import StorageError
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
    StorageAdapter,
    Usage,
)

MAX_KEYS = 1 << 17
MAX_EVICTED = 1 << 12
"""Evicted keys that wait to be forgotten; of more, the oldest are told as there until their time is over."""


class PresenceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """For how long answers are told again; 0: never."""

    presence_ttl_ms: int = 5_000
    negative_ttl_ms: int = 500
    max_keys: int = MAX_KEYS


class _Question:
    """An `exists` under way: its keys, and those of them of which its answer will not be remembered."""

    def __init__(self, asked: Sequence[bytes], asked_s: float) -> None:
        self.asked = asked
        self.asked_s = asked_s
        self.changed: set[bytes] = set()

    @functools.cached_property
    def keys(self) -> frozenset[bytes]:
        """Those asked. Rarely needed: little changes in the middle of a question."""
        return frozenset(self.asked)


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
        self._ttl_s = (limits.negative_ttl_ms / 1000, limits.presence_ttl_ms / 1000, 0.0)
        """By Presence."""
        self._max_keys = limits.max_keys
        self._told: dict[bytes, tuple[float, Found]] = {}
        """What the medium said and until when it may be told again; what was learnt first is first."""
        self._questions: set[_Question] = set()
        self._evicted: collections.deque[bytes] = collections.deque(maxlen=MAX_EVICTED)
        self._counts = dict.fromkeys(("asked", "recalled_present", "recalled_absent"), 0)

    def stats(self) -> dict[str, int]:
        """For status pages: keys asked of the medium, and told from memory since the start; keys remembered."""
        return {**self._counts, "remembered": len(self._told)}

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
        answers = self._recall(keys, asked_s)
        places = [place for place, answer in enumerate(answers) if answer is None]
        if places:
            question = _Question([keys[place] for place in places], asked_s)
            for place, found in zip(places, await self._ask(question), strict=True):
                answers[place] = found
        return cast("list[Found]", answers)

    async def heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """As the inner adapter."""
        return await self.inner.heads(keys)

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """As the inner adapter."""
        return await self.inner.list_keys(cursor, most)

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
            self._told.clear()
            for question in self._questions:
                question.changed.update(question.keys)

    def numbers(self) -> dict[str, int]:
        """As the inner adapter."""
        return self.inner.numbers()

    def remarks(self) -> dict[str, str]:
        """As the inner adapter."""
        return self.inner.remarks()

    async def usage(self) -> Usage:
        """As the inner adapter."""
        return await self.inner.usage()

    async def close(self) -> None:
        """As the inner adapter."""
        await self.inner.close()

    # Of a thousand keys in some 0.1 ms: lookups ask for as many, on the event loop.

    def _recall(self, keys: Sequence[bytes], now_s: float) -> list[Found | None]:
        """What is told from memory of each key."""
        answers: list[Found | None] = [None] * len(keys)
        tolds = [*map(self._told.get, keys)]
        if not any(tolds):
            return answers
        recalled = [0, 0]
        for place, told in enumerate(tolds):
            if told is None:
                continue
            until_s, found = told
            if now_s < until_s:
                answers[place] = found
                recalled[found[0]] += 1
            else:
                self._told.pop(keys[place], None)
        self._counts["recalled_absent"] += recalled[Presence.ABSENT]
        self._counts["recalled_present"] += recalled[Presence.PRESENT]
        return answers

    async def _ask(self, question: _Question) -> list[Found]:
        """What the medium says; it is remembered."""
        self._counts["asked"] += len(question.asked)
        self._questions.add(question)
        try:
            answers = await self.inner.exists(question.asked)
        finally:
            self._questions.discard(question)
        self._forget_evicted(question)
        last, told = None, None
        for key, found in zip(question.asked, answers, strict=True):
            if found is not last:  # equal answers are often one object
                last, told = found, self._to_tell(found, question.asked_s)
            if told is not None:
                self._told[key] = told
            else:
                self._told.pop(key, None)  # the answer to another question
        for key in question.changed:
            self._told.pop(key, None)
        if len(self._told) > self._max_keys:
            # Some more than must, at once: each look for the oldest passes over the places of those that went.
            too_many = len(self._told) - self._max_keys + self._max_keys // 16
            for key in list(itertools.islice(self._told, too_many)):
                del self._told[key]
        return answers

    def _to_tell(self, found: Found, asked_s: float) -> tuple[float, Found] | None:
        ttl_s = self._ttl_s[found.presence]
        return (asked_s + ttl_s, found) if ttl_s > 0 else None

    def _changed(self, keys: Iterable[bytes]) -> None:
        keys = set(keys)
        for key in keys:
            self._told.pop(key, None)
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
