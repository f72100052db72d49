"""What the loop asks of the engines' caches: which of them have how much of a prompt, and how sure that is."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstrata.gateway.residency.blocks import KEY, Blocks
from kvstrata.gateway.residency.feed import Feed, Phase
from kvstrata.gateway.residency.prompt import extras_of, keys_of, root_of
from kvstrata.gateway.residency.sources import Source
from kvstrata.gateway.residency.zmq_watcher import Watched, Watcher
from kvstrata.native.registry import Registry
from kvstrata.policy.routing.model import Copy
from kvstrata.rpc.cluster_wire import tags_of

MAX_BYTES = 8 << 30
"""Bound on the index of all engines' blocks, which takes memory as it needs it."""
MASK_BYTES = 8_192
BLOCK_LIFE_S, EVENT_LAG_S = 300.0, 1.0
"""Until they have been measured."""


class Prompt:
    """The token ids of a prompt, and the keys of its blocks by their size."""

    def __init__(self, tokens: Sequence[int] | array[int], *, adapter: str = "", salt: str = "") -> None:
        self.tokens = tokens if isinstance(tokens, array) else array("I", tokens)
        self._adapter, self._salt = adapter, salt
        self._keys: dict[int, bytes] = {}

    def keys(self, block_tokens: int) -> bytes:
        """The keys of its whole blocks, 32 bytes each."""
        found = self._keys.get(block_tokens)
        if found is None:
            extras = extras_of(self._adapter, self._salt, len(self.tokens) // block_tokens)
            found = self._keys[block_tokens] = keys_of(
                root_of(block_tokens), self.tokens, block_tokens, extras
            )
        return found


class Known(NamedTuple):
    """What is known of a prompt."""

    cached: dict[str, int]
    """Tokens that an engine has for certain, by its name."""
    copies: list[Copy]
    """Those that it may have lost unheard."""
    heard: frozenset[str]
    """The engines whose events are heard: what else they were sent a while ago counts no more."""


class Residency:
    """See the module. Belongs to the event loop, and owns the thread that hears the events."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` may be called from any thread."""
        self._now_s = now_s
        self._registry = Registry(max_bytes=MAX_BYTES)
        self._watcher = Watcher(self._registry)
        self._watched: dict[str, Watched] = {}
        self._groups: dict[int, str] = {}
        self._next_group = 0

    def close(self) -> None:
        """End the thread."""
        self._watcher.close()

    # -- engines ---------------------------------------------------------------------------------------------

    def watch(self, name: str, source: Source) -> None:
        """Hear an engine's events from now on; what was known of an earlier one of this name is forgotten."""
        self.unwatch(name)
        while self._next_group in self._groups:
            self._next_group = (self._next_group + 1) & 0xFFFF
        group = self._next_group
        self._next_group = (group + 1) & 0xFFFF
        self._groups[group] = name
        blocks = Blocks(self._registry, group, self._now_s)
        engine = Watched(name, source, Feed(blocks, replays=bool(source.replay)))
        self._watched[name] = engine
        self._watcher.watch(engine)

    def unwatch(self, name: str) -> None:
        """Forget an engine."""
        engine = self._watched.pop(name, None)
        if engine is not None:
            del self._groups[engine.blocks.group]
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
        if self._watcher.ended:
            return Known({}, [], frozenset())
        engines = {
            name: found
            for name in names
            if (found := self._watched.get(name)) is not None and found.feed.phase is not Phase.JOINING
        }
        cached: dict[str, int] = {}
        copies: list[Copy] = []
        sizes = {size for engine in engines.values() for size in engine.blocks.sizes}
        masks: dict[str, bytearray] = {"exact": bytearray(MASK_BYTES), "doubtful": bytearray(MASK_BYTES)}
        doubt = False
        for engine in engines.values():
            for which, slot in list(engine.blocks.slots.items()):
                masks["doubtful"][slot >> 3] |= 1 << (slot & 7)
                if which == "exact":
                    masks["exact"][slot >> 3] |= 1 << (slot & 7)
                else:
                    doubt = True
        for size in sizes:
            tags = tags_of(prompt.keys(size))
            for name, tokens in self._longest(tags, masks["exact"], size, len(engines)).items():
                cached[name] = max(tokens, cached.get(name, 0))
            if not doubt:
                continue
            for name, tokens in self._longest(tags, masks["doubtful"], size, len(engines)).items():
                if tokens > cached.get(name, 0):
                    age_s = self._now_s() - engines[name].blocks.doubtful_since_s
                    copies.append(
                        Copy(
                            engine=name, tier="l0", tokens=tokens, certainty="degraded", age_s=max(0.0, age_s)
                        )
                    )
        return Known(cached, copies, frozenset(engines))

    def _longest(self, tags: bytes, mask: bytearray, size: int, best: int) -> dict[str, int]:
        if not tags or not best:
            return {}
        found = self._registry.lookup_prefix(tags, allowed=mask, best=best)
        return {name: size * one.chunks for one in found if (name := self._groups.get(one.group)) is not None}

    def computed(self, name: str, prompt: Prompt, at_s: float) -> None:
        """A request with this prompt had its first token: measure how long its event takes."""
        engine = self._watched.get(name)
        if engine is not None and engine.blocks.sizes:
            keys = prompt.keys(engine.blocks.sizes[0])
            if keys:
                tag = keys[-KEY : -KEY + 8]
                self._watcher.post(lambda: engine.blocks.expect(tag, at_s))

    def reported(self, name: str, prompt: Prompt, expected: int, cached: int) -> None:
        """An engine tells how many tokens of a prompt were `cached`, of which `expected` were taken for that."""
        engine = self._watched.get(name)
        if engine is None or not engine.blocks.sizes:
            return
        size = engine.blocks.sizes[0]
        keys = prompt.keys(size)
        had, thought = cached // size * KEY, expected // size * KEY
        blocks = engine.blocks
        if had > thought:
            self._watcher.post(lambda: blocks.told(keys[thought:had]))
        # An engine computes the last block again if it has all.
        elif thought - had > KEY:
            self._watcher.post(lambda: blocks.denied(keys[had:thought]))

    # -- numbers ---------------------------------------------------------------------------------------------

    @property
    def block_life_s(self) -> float:
        """Measured life of a block, the median of the engines."""
        lives = [one.blocks.life_s for one in self._watched.values() if one.blocks.life_s]
        return statistics.median(lives) if lives else BLOCK_LIFE_S

    @property
    def event_lag_s(self) -> float:
        """Measured time from a first token to the event of its blocks, of the slowest engine."""
        return max(
            (one.blocks.lag_s for one in self._watched.values() if one.blocks.lag_s), default=EVENT_LAG_S
        )

    def page(self) -> Mapping[str, dict[str, object]]:
        """What is heard, by engine."""
        return {
            name: {
                "phase": one.feed.phase.value,
                "whole": one.feed.whole,
                "doubtful": "doubtful" in one.blocks.slots,
                "blocks": len(one.blocks),
                "block_tokens": list(one.blocks.sizes),
                "batches": one.feed.batches,
                "gaps": one.feed.gaps,
                "restarts": one.feed.restarts,
                "malformed": one.feed.malformed,
                "orphans": one.blocks.orphans,
                "block_life_s": round(one.blocks.life_s, 3),
                "event_lag_s": round(one.blocks.lag_s, 4),
            }
            for name, one in sorted(self._watched.items())
        }
