"""Chunks that KV events named as stored, watched until they leave L1, so that events can name them as removed.

The server tells its clients nothing of evictions; the index in shared memory shows them.  A few chunks are looked at in
each step, the one looked at longest ago first, so a removal is told a while after it happened: within some hundred
steps of a busy engine, and not at all while vLLM makes no steps.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvstrata.types import KEY_BYTES

MAX_ANNOUNCED = 65_536
"""Chunks watched; of more, the one looked at longest ago is told as removed."""
LOOKED_AT_PER_STEP = 32
ROUND_S = 0.1
"""A chunk is not looked at again sooner than this."""
ARRIVES_WITHIN_S = 10.0
"""A chunk that somebody else was storing is in L1 by then, or never."""


class Announced:
    """The chunks of one engine. Belongs to the scheduler's thread."""

    def __init__(
        self, present: Callable[[bytes], list[bool] | None], now: Callable[[], float] = time.monotonic
    ) -> None:
        """`present(chain)` tells for each of these keys whether it can be hit in L1; None when that cannot be told."""
        self._present = present
        self._now = now
        self._chunks: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """Key → (when it was looked at last, until when it may still be on its way), in the order of the first."""

    def add(self, keys: Iterable[bytes]) -> list[bytes]:
        """Watch these, which events name as stored now. Those that are not watched any more instead."""
        now = self._now()
        for key in keys:
            self._chunks[key] = (now, now + ARRIVES_WITHIN_S)
            self._chunks.move_to_end(key)
        dropped = []
        while len(self._chunks) > MAX_ANNOUNCED:
            dropped.append(self._chunks.popitem(last=False)[0])
        return dropped

    def left(self) -> list[bytes]:
        """Look at a few chunks; those that have left L1 and are not watched any more."""
        now = self._now()
        due: list[bytes] = []
        for key, (looked_s, _) in self._chunks.items():
            if len(due) == LOOKED_AT_PER_STEP or now - looked_s < ROUND_S:
                break
            due.append(key)
        present = self._present(b"".join(due)) if due else None
        if present is None:
            return []
        gone = []
        for key, there in zip(due, present, strict=True):
            arrives_s = self._chunks[key][1]
            if there or now < arrives_s:
                self._chunks[key] = (now, 0.0 if there else arrives_s)
                self._chunks.move_to_end(key)
            else:
                del self._chunks[key]
                gone.append(key)
        return gone


def chunk_keys(chain: bytes) -> list[bytes]:
    """The chain keys one by one."""
    return [chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES)]
