"""What the loop asks of the engines' caches: which of them have how much of a prompt, and how sure that is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from kvstrata.gateway.residency.caches import TIERS, Caches
from kvstrata.gateway.residency.feed import Feed, Phase
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.residency.sources import Source
from kvstrata.gateway.residency.zmq_watcher import Watched, Watcher
from kvstrata.native.registry import Registry
from kvstrata.policy.routing.model import Copy, Tier

MAX_BYTES = 8 << 30
"""Bound on the index of all engines' blocks, which takes memory as it needs it."""
MASK_BYTES = 8_192
MAX_ENGINES = 65_536 // len(TIERS)
BLOCK_LIFE_S, EVENT_LAG_S = 300.0, 1.0
"""Until they have been measured."""
MAX_LAG_S = 10.0
"""An engine that tells later than this does not make the others be believed for longer."""


class Heard(NamedTuple):
    """Since when an engine's events tell all."""

    emptied_s: float
    """When it was last known to be empty."""
    missed_s: float
    """When events were last found to be lost for good."""


class Known(NamedTuple):
    """What is known of a prompt."""

    cached: dict[str, int]
    """Tokens that an engine has in its own cache for certain, by its name."""
    copies: list[Copy]
    """Those in other tiers, and those that may have been lost unheard."""
    heard: dict[str, Heard]
    """The engines whose events are heard."""


class Index:
    """The caches of all engines, and what they have of a prompt. Lookups may go on while another thread adds blocks."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._registry = Registry(max_bytes=MAX_BYTES)
        self.caches: dict[str, Caches] = {}
        """By engine; their owner is whoever hears the engine."""
        self._numbers: dict[int, str] = {}
        self._next = 0

    @property
    def registry(self) -> Registry:
        """The blocks of all engines and tiers."""
        return self._registry

    def add(self, name: str) -> Caches:
        """The caches of a new engine."""
        while self._next in self._numbers:
            self._next = (self._next + 1) % MAX_ENGINES
        number, self._next = self._next, (self._next + 1) % MAX_ENGINES
        self._numbers[number] = name
        caches = self.caches[name] = Caches(self._registry, number * len(TIERS), self._now_s)
        return caches

    def remove(self, name: str) -> None:
        """Find an engine no more; its caches must be told to forget."""
        caches = self.caches.pop(name)
        del self._numbers[caches.own.group // len(TIERS)]

    def known(self, prompt: Prompt, names: Collection[str]) -> Known:
        """What these engines have of a prompt."""
        exact, every = bytearray(MASK_BYTES), bytearray(MASK_BYTES)
        sizes: set[int] = set()
        doubt = False
        for name in names:
            for blocks in self.caches[name].of.values():
                sizes.update(blocks.sizes)
                for which, slot in list(blocks.slots.items()):
                    every[slot >> 3] |= 1 << (slot & 7)
                    if which == "exact":
                        exact[slot >> 3] |= 1 << (slot & 7)
                    else:
                        doubt = True
        sure = self._longest(prompt, exact, sizes)
        perhaps = self._longest(prompt, every, sizes) if doubt else {}
        copies: list[Copy] = []
        for (name, tier), tokens in sure.items():
            if tier != "l0":
                copies.append(Copy(engine=name, tier=tier, tokens=tokens, source=tier))
        for (name, tier), tokens in perhaps.items():
            if tokens > sure.get((name, tier), 0):
                age_s = max(0.0, self._now_s() - self.caches[name].of[tier].doubtful_since_s)
                copies.append(
                    Copy(
                        engine=name, tier=tier, tokens=tokens, certainty="degraded", age_s=age_s, source=tier
                    )
                )
        cached = {name: tokens for (name, tier), tokens in sure.items() if tier == "l0"}
        return Known(
            cached,
            copies,
            {name: Heard(self.caches[name].emptied_s, self.caches[name].missed_s) for name in names},
        )

    def _longest(self, prompt: Prompt, mask: bytearray, sizes: Iterable[int]) -> dict[tuple[str, Tier], int]:
        """The tokens of the longest prefix in these slots, by engine and tier."""
        found: dict[tuple[str, Tier], int] = {}
        best = max(1, len(TIERS) * len(self.caches))
        for size in sizes:
            tags, step = prompt.tags(size)
            if not tags:
                continue
            for one in self._registry.lookup_prefix(tags, allowed=mask, best=best):
                number, tier = divmod(one.group, len(TIERS))
                name = self._numbers.get(number)
                if name is not None:
                    where = name, TIERS[tier]
                    found[where] = max(size * step * one.chunks, found.get(where, 0))
        return found

    @property
    def block_life_s(self) -> float:
        """Measured life of a block, the median of the engines."""
        lives = [life_s for one in self.caches.values() if (life_s := one.own.life_s)]
        return statistics.median(lives) if lives else BLOCK_LIFE_S

    @property
    def event_lag_s(self) -> float:
        """Measured time from a first token to the event of its blocks, of the slowest engine."""
        lags = [one.own.lag_s for one in self.caches.values() if one.own.lag_s]
        return min(MAX_LAG_S, max(lags, default=EVENT_LAG_S))


class Residency:
    """What is heard of the engines. Belongs to the event loop, and owns the thread that hears the events."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` may be called from any thread."""
        self._index = Index(now_s)
        self._watcher = Watcher(self._index.registry)
        self._watched: dict[str, Watched] = {}

    def close(self) -> None:
        """End the thread."""
        self._watcher.close()

    # -- engines ---------------------------------------------------------------------------------------------

    def watch(self, name: str, source: Source) -> None:
        """Hear an engine's events from now on; what was known of an earlier one of this name is forgotten."""
        self.unwatch(name)
        engine = Watched(name, source, Feed(self._index.add(name), replays=bool(source.replay)))
        self._watched[name] = engine
        self._watcher.watch(engine)

    def unwatch(self, name: str) -> None:
        """Forget an engine."""
        if self._watched.pop(name, None) is not None:
            self._index.remove(name)
            self._watcher.unwatch(name)

    def source(self, name: str) -> Source | None:
        """Where an engine's events are heard."""
        engine = self._watched.get(name)
        return engine.source if engine is not None else None

    def returned(self, name: str) -> None:
        """An engine has come back after a failure: it may have been restarted."""
        engine = self._watched.get(name)
        if engine is not None:
            self._watcher.check(engine, same_life=bool(engine.source.replay))

    # -- prompts ---------------------------------------------------------------------------------------------

    def known(self, prompt: Prompt, names: Iterable[str]) -> Known:
        """What these engines have of a prompt."""
        heard = [
            name
            for name in names
            if (found := self._watched.get(name)) is not None
            and found.connected
            and found.feed.phase is not Phase.JOINING
        ]
        if self._watcher.ended or not heard:
            return Known({}, [], {})
        return self._index.known(prompt, heard)

    def computed(self, name: str, prompt: Prompt, at_s: float) -> None:
        """A request with this prompt had its first token: measure how long its event takes."""
        engine = self._watched.get(name)
        if engine is not None:
            self._watcher.post(lambda: engine.caches.computed(prompt, at_s))

    def reported(self, name: str, prompt: Prompt, expected: int, cached: int) -> None:
        """An engine tells how many tokens of a prompt were `cached`, of which `expected` were taken for that."""
        engine = self._watched.get(name)
        if engine is not None:
            self._watcher.post(lambda: engine.caches.reported(prompt, expected, cached))

    @property
    def block_life_s(self) -> float:
        """See Index."""
        return self._index.block_life_s

    @property
    def event_lag_s(self) -> float:
        """See Index."""
        return self._index.event_lag_s

    # -- numbers ---------------------------------------------------------------------------------------------

    def thread(self) -> dict[str, Any]:
        """Whether the thread hears events; without it nothing is known of any engine's cache by its events."""
        return {"hears": not self._watcher.ended, "error": self._watcher.error}

    def page(self) -> dict[str, dict[str, Any]]:
        """What is heard, by engine."""
        return {
            name: {
                "connected": one.connected,
                "phase": one.feed.phase.value,
                "whole": one.feed.whole,
                "doubtful": any("doubtful" in blocks.slots for blocks in one.caches.of.values()),
                "blocks": {tier: len(blocks) for tier, blocks in one.caches.of.items()},
                "block_tokens": {tier: list(blocks.sizes) for tier, blocks in one.caches.of.items()},
                "batches": one.feed.batches,
                "gaps": one.feed.gaps,
                "restarts": one.feed.restarts,
                "malformed": one.feed.malformed,
                "orphans": sum(blocks.orphans for blocks in one.caches.of.values()),
                "block_life_s": round(one.caches.own.life_s, 3),
                "event_lag_s": round(one.caches.own.lag_s, 4),
            }
            for name, one in sorted(self._watched.items())
        }
