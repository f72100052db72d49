"""Remembers a shared medium's answers about presence for a short time, so that asking again costs no round trip.

Other servers put and delete on a shared medium too, so a remembered answer may be stale: a PRESENT for at most
`presence_ttl_ms`, an ABSENT for at most `negative_ttl_ms`.  If a key remembered as PRESENT is gone, its load is an
ordinary miss; if a key remembered as ABSENT exists, its chunk is computed again.

Invariants
1. An answer from memory is the medium's answer to a question that began no longer ago than the answer's time to live.
2. It is no older than this server's own changes to the key: after a put has ended (with any outcome), a delete, a
   clear, an eviction by the medium's cap or a load that did not end well, the next question goes to the medium.  The
   answer to a question that was under way during such a change is passed on but not remembered.
3. UNKNOWN is never remembered.
4. At most `max_keys` answers are remembered; the oldest are forgotten first.

A load that ends well changes nothing here, since L1 has the chunk then.  A medium that extends a record's life when the
record is looked up (Mooncake's leases) does not notice answers from memory, so the time to live of PRESENT must be
shorter than that lease.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import cast

import msgspec

from kvstrata.clock import Clock
from kvstrata.errors import ConfigError
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
"""Evicted keys that wait to be forgotten; if more wait, the oldest stay PRESENT in memory for their time to live."""


class PresenceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """For how long answers are remembered; 0: not at all."""

    presence_ttl_ms: int = 5_000
    negative_ttl_ms: int = 500
    max_keys: int = MAX_KEYS


class _Question:
    """An `exists` under way: its keys, and those (`changed`) whose answers will not be remembered."""

    def __init__(self, asked: Sequence[bytes], asked_s: float) -> None:
        self.asked = asked
        self.asked_s = asked_s
        self.changed: set[bytes] = set()

    @functools.cached_property
    def keys(self) -> frozenset[bytes]:
        """The keys asked for. Computed only when a key changes during a question, which is rare."""
        return frozenset(self.asked)


class PresenceAdapter(StorageAdapter):
    """See the module. It passes everything on if the medium turns out not to be shared.

    With `limits` None the defaults hold; `open` fails if limits are given for a medium that is not shared.
    """

    def __init__(self, inner: StorageAdapter, limits: PresenceLimits | None, clock: Clock) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self._configured = limits is not None
        self._clock = clock
        limits = limits or PresenceLimits()
        self._ttl_s = (limits.negative_ttl_ms / 1000, limits.presence_ttl_ms / 1000, 0.0)
        """Times to live, indexed by Presence."""
        self._max_keys = limits.max_keys
        self._told: dict[bytes, tuple[float, Found]] = {}
        """By key: the time until which the medium's answer may be reused, and the answer; the oldest is first."""
        self._questions: set[_Question] = set()
        self._evicted: collections.deque[bytes] = collections.deque(maxlen=MAX_EVICTED)
        self._counts = dict.fromkeys(("asked", "recalled_present", "recalled_absent"), 0)

    def stats(self) -> dict[str, int]:
        """For status pages: keys that the medium was asked for, keys answered from memory, keys remembered now."""
        return {**self._counts, "remembered": len(self._told)}

    async def open(self, context: AdapterContext) -> None:
        """As the inner adapter. Raises ConfigError too if limits are given and the medium is not shared."""

        def evicted(key: bytes) -> None:
            self._evicted.append(key)
            context.record_evicted(key)

        await self.inner.open(context._replace(record_evicted=evicted))
        self.capabilities = self.inner.capabilities
        if self._configured and not self.capabilities.shared:
            await self.inner.close()
            raise ConfigError(
                f"{self.name}: presence_ttl_ms, negative_ttl_ms: this storage is not shared with other instances,"
                " so no answers are remembered; remove these fields",
                field="presence_ttl_ms",
            )

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        """Answer from memory where an answer is remembered; ask the inner adapter for the other keys."""
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

    def walk(self) -> AsyncIterator[Sequence[bytes]]:
        """As the inner adapter."""
        return self.inner.walk()

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As the inner adapter; the keys' remembered answers are forgotten, whatever the outcomes."""
        keys = [item.key for item in items]
        try:
            return await self.inner.put(items)
        finally:
            self._changed(keys)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        """As the inner adapter; the remembered answers of keys that were not loaded are forgotten."""
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
        """As the inner adapter; the keys' remembered answers are forgotten."""
        try:
            return await self.inner.delete(keys)
        finally:
            self._changed(keys)

    async def clear(self) -> int:
        """As the inner adapter; all remembered answers are forgotten."""
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

    # `_recall` takes about 0.1 ms for the thousand keys of a long lookup, on the event loop.

    def _recall(self, keys: Sequence[bytes], now_s: float) -> list[Found | None]:
        """For each key the answer from memory; None if none is remembered."""
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
        """Ask the medium, and remember its answers."""
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
                self._told.pop(key, None)  # forget the answer to an earlier question
        for key in question.changed:
            self._told.pop(key, None)
        if len(self._told) > self._max_keys:
            # Forget a sixteenth at once: to find its oldest key, a dict steps over every entry removed before.
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
        """Forget the keys whose evictions adapters have reported, from any thread, since the last call."""
        keys = set()
        while self._evicted:
            keys.add(self._evicted.popleft())
        if keys:
            self._changed(keys)
            for question in more:
                question.changed.update(question.keys & keys)
