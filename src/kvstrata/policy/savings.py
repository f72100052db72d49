"""The time that engines take to compute what is not cached, and from it the time that cached chunks save them.

    lookup that misses chunks ──reply──▶ the engine computes them ──▶ commit of the prompt's last chunk

The time from the reply to the commit is measured.  Times of one engine that overlap, because it computes several
prompts at once, are counted once.  Their sum by the number of chunks that were computed is the time of one chunk, for
each layout, since it depends on the model.  A chunk that a lookup finds saves this time.

1. A prompt counts only once its last chunk is committed.  A prompt that was given up, or not stored, counts nothing.
2. Until the first prompt of a layout has been computed, hits of its engines save nothing.
3. The figure is an estimate: waiting in the engine counts as computing, and chunks that an engine had in its own cache
   count as saved if the lookup named them too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvstrata.types import LayoutIdentity

MAX_COMPUTING = 1_024
MAX_LAYOUTS = 64


class EngineUse:
    """What one engine has asked for and stored; totals since it attached."""

    __slots__ = ("avoided_s", "counted_until_s", "hit_chunks", "lookup_chunks", "lookups", "stored_records")

    def __init__(self) -> None:
        self.lookups = 0
        self.lookup_chunks = 0
        self.hit_chunks = 0
        self.stored_records = 0
        self.avoided_s = 0.0
        self.counted_until_s = 0.0
        """Its time up to this moment has been counted as computing, or was idle."""


class Pace:
    """How long engines with one layout compute."""

    __slots__ = ("chunks", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.chunks = 0

    @property
    def chunk_s(self) -> float:
        """Seconds for one chunk; 0 as long as nothing was measured."""
        return self.seconds / self.chunks if self.chunks else 0.0


class Computing(NamedTuple):
    """A prompt of which an engine computes the chunks that a lookup did not find."""

    engine: EngineUse
    pace: Pace
    chunks: int
    since_s: float


class Savings:
    """Measures computing and counts what was avoided. Belongs to the event loop; its memory is bounded."""

    def __init__(self) -> None:
        self.avoided_s = 0.0
        """Seconds of computing that hits have saved."""
        self.computed = Pace()
        """Of all engines."""
        self._computing: OrderedDict[bytes, Computing] = OrderedDict()
        """By the storage key of the prompt's last chunk."""
        self._paces: OrderedDict[LayoutIdentity, Pace] = OrderedDict()

    def looked_up(
        self,
        engine: EngineUse,
        layout: LayoutIdentity,
        n_chunks: int,
        n_hits: int,
        last_key: bytes,
        now_s: float,
    ) -> None:
        """Note the reply to a lookup of `n_chunks` chunks. `last_key`: storage key of the last one, in any slice."""
        pace = self._pace(layout)
        avoided_s = n_hits * pace.chunk_s
        self.avoided_s += avoided_s
        engine.lookups += 1
        engine.lookup_chunks += n_chunks
        engine.hit_chunks += n_hits
        engine.avoided_s += avoided_s
        if n_hits < n_chunks and last_key:
            self._computing[last_key] = Computing(engine, pace, n_chunks - n_hits, now_s)
            self._computing.move_to_end(last_key)
            if len(self._computing) > MAX_COMPUTING:
                self._computing.popitem(last=False)

    def committed(self, engine: EngineUse, keys: list[bytes], now_s: float) -> None:
        """Note that an engine's records became visible."""
        engine.stored_records += len(keys)
        if not self._computing:
            return
        for key in keys:
            prompt = self._computing.pop(key, None)
            if prompt is None:
                continue
            seconds = max(0.0, now_s - max(prompt.since_s, prompt.engine.counted_until_s))
            prompt.engine.counted_until_s = now_s
            for pace in (prompt.pace, self.computed):
                pace.seconds += seconds
                pace.chunks += prompt.chunks

    def _pace(self, layout: LayoutIdentity) -> Pace:
        pace = self._paces.get(layout)
        if pace is None:
            pace = self._paces[layout] = Pace()
            if len(self._paces) > MAX_LAYOUTS:
                self._paces.popitem(last=False)
        return pace
