"""The event loop's queries to the engines' caches: how many tokens of a prompt each engine has in its own cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from kvstrata.gateway.residency.cache import MASK_BYTES, Cache
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.residency.sources import Source
from kvstrata.gateway.residency.zmq_watcher import Feed, Watcher
from kvstrata.native.core import Registry

MAX_BYTES = 8 << 30
"""Maximum size of the index of all engines' blocks; memory is allocated as it fills."""
MAX_ENGINES = 65_536
BLOCK_LIFE_S = 300.0
"""Assumed life of blocks until it has been measured."""
LIFE_AGAIN_S = 1.0
"""Interval at which the median life of blocks is updated."""


class Index:
    """The caches of all engines, with lookups by prompt. A lookup may run while another thread adds blocks."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.registry = Registry(max_bytes=MAX_BYTES)
        self.caches: dict[str, Cache] = {}
        """By engine or rank; each belongs to the thread that receives its events."""
        self._numbers: dict[int, str] = {}
        self._next = 0
        self._mask, self._sizes = bytearray(MASK_BYTES), list[int]()
        """Slots and block sizes of all caches."""
        self._life_s, self._looked_s = BLOCK_LIFE_S, float("-inf")

    def add(self, name: str) -> Cache:
        """Add an engine, and return its cache."""
        while self._next in self._numbers:
            self._next = (self._next + 1) % MAX_ENGINES
        number, self._next = self._next, (self._next + 1) % MAX_ENGINES
        self._numbers[number] = name
        cache = self.caches[name] = Cache(self.registry, number, self._now_s, self._mask, self._sizes)
        return cache

    def remove(self, name: str) -> None:
        """Remove an engine; the caller must have its cache `forget`."""
        del self._numbers[self.caches.pop(name).group]

    def known(self, prompt: Prompt) -> dict[str, int]:
        """By engine: number of the prompt's leading tokens in its own cache."""
        cached: dict[str, int] = {}
        for size in self._sizes:
            tags, step = prompt.tags(size)
            if not tags:
                continue
            best = max(1, len(self.caches))
            for group, chunks in self.registry.lookup_prefix(tags, allowed=self._mask, best=best):
                if (found := self._numbers.get(group)) is not None:
                    cached[found] = max(size * step * chunks, cached.get(found, 0))
        return cached

    @property
    def block_life_s(self) -> float:
        """Median over the engines of the measured life of a block."""
        if (now_s := self._now_s()) > self._looked_s + LIFE_AGAIN_S:
            lives = [one.life_s for one in self.caches.values() if one.life_s]
            self._life_s, self._looked_s = statistics.median(lives) if lives else BLOCK_LIFE_S, now_s
        return self._life_s


class Residency:
    """The engines' caches as known from their KV events. Belongs to the event loop, and owns the watcher's thread."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` may be called from any thread."""
        self.index = Index(now_s)
        self._watcher = Watcher(self.index.registry)
        self._feeds: dict[str, Feed] = {}

    def close(self) -> None:
        """End the thread."""
        self._watcher.close()

    def watch(self, name: str, source: Source, owner: object = None) -> None:
        """Subscribe to an engine's events; the blocks of an earlier engine of this name are forgotten."""
        self.unwatch(name)
        feed = self._feeds[name] = Feed(self.index.add(name), source, name, owner)
        self._watcher.watch(feed)

    def unwatch(self, name: str) -> None:
        """End the subscription to an engine, and forget its blocks."""
        if (feed := self._feeds.pop(name, None)) is not None:
            self.index.remove(name)
            self._watcher.unwatch(feed)

    def listen(self, owner: object, sources: Mapping[str, Source]) -> None:
        """Set an engine's subscriptions, by rank's name; for a source that stays, the rank counts as restarted."""
        for name in [name for name, one in self._feeds.items() if one.owner is owner]:
            if name not in sources:
                self.unwatch(name)
        for name, source in sources.items():
            known = self._feeds.get(name)
            if known is not None and known.owner is owner and known.source == source:
                self._watcher.watch(known)
            else:
                self.watch(name, source, owner)

    def known(self, prompt: Prompt) -> dict[str, int]:
        """By engine with a live subscription: number of the prompt's leading tokens in its own cache."""
        return {name: n for name, n in self.index.known(prompt).items() if self.heard(name) is not None}

    def heard(self, name: str) -> Cache | None:
        """The cache of an engine with a live subscription; None: not connected, or still joining."""
        one = self._feeds.get(name)
        return None if one is None or not one.connected or one.joining else one.cache

    @property
    def block_life_s(self) -> float:
        """See Index."""
        return self.index.block_life_s

    def page(self) -> dict[str, dict[str, Any]]:
        """The subscriptions, by engine, for the status page."""
        return {
            name: {
                "connected": one.connected,
                "phase": one.phase,
                "whole": one.whole,
                "blocks": len(one.cache),
                "block_tokens": list(one.cache.sizes),
                "batches": one.batches,
                "gaps": one.gaps,
                "restarts": one.restarts,
                "malformed": one.malformed,
                "orphans": one.cache.orphans,
                "block_life_s": round(one.cache.life_s, 3),
                "failures": one.failures,
                "error": one.error,
            }
            for name, one in sorted(self._feeds.items())
        }
