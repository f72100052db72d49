"""Chunks that KV events named as stored, watched until they leave L1, so that events can name them as removed.

The server does not tell its clients of evictions, but the index in shared memory shows them.  Each step of vLLM looks
at a few chunks, first at those looked at longest ago.  So a removal is reported some time after it happened: in a busy
engine after at most about MAX_ANNOUNCED / LOOKED_AT_PER_STEP = 2,048 steps, and never while vLLM makes no steps.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvstrata.patience import patience

MAX_ANNOUNCED = 65_536
"""Maximum number of chunks that are watched; beyond that, the chunk looked at longest ago is reported as removed."""
LOOKED_AT_PER_STEP = 32
ROUND_S = 0.1
"""Shortest time between two looks at a chunk."""
ARRIVES_WITHIN_S = 10.0
"""If another process is still storing a chunk when events name it, the chunk reaches L1 within this time, or never."""


class Announced:
    """The chunks of one engine. Belongs to the scheduler's thread."""

    def __init__(
        self,
        present: Callable[[Sequence[tuple[bytes, bytes]]], list[bool] | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`present` tells for each (identity root, chain key) whether L1 has the chunk; None while that is unknown."""
        self._present = present
        self._now = now
        self._chunks: OrderedDict[bytes, tuple[bytes, float, float]] = OrderedDict()
        """Key → (root, time of the last look, time until which it may still be on its way); the oldest look first."""

    def add(self, root: bytes, keys: Iterable[bytes]) -> list[bytes]:
        """Watch these chunks of an identity, which events now name as stored.

        Returns the chunks that are dropped to stay within MAX_ANNOUNCED; the caller reports them as removed.
        """
        now = self._now()
        for key in keys:
            self._chunks[key] = (root, now, now + patience(ARRIVES_WITHIN_S))
            self._chunks.move_to_end(key)
        dropped = []
        while len(self._chunks) > MAX_ANNOUNCED:
            dropped.append(self._chunks.popitem(last=False)[0])
        return dropped

    def left(self) -> list[bytes]:
        """Look at a few chunks. Returns those that have left L1, which are not watched any more."""
        now = self._now()
        due: list[tuple[bytes, bytes]] = []
        for key, (root, looked_s, _) in self._chunks.items():
            if len(due) == LOOKED_AT_PER_STEP or now - looked_s < ROUND_S:
                break
            due.append((root, key))
        present = self._present(due) if due else None
        if present is None:
            return []
        gone = []
        for (root, key), there in zip(due, present, strict=True):
            arrives_s = self._chunks[key][2]
            if there or now < arrives_s:
                self._chunks[key] = (root, now, 0.0 if there else arrives_s)
                self._chunks.move_to_end(key)
            else:
                del self._chunks[key]
                gone.append(key)
        return gone
