"""What happened to this instance's chunks, on its way to the controller: in order, compact and bounded.  No I/O."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from kvstrata.rpc.cluster_wire import MAX_RUNS, TAG_BYTES, Change, Run

L1_TIER = "l1"
BATCH_TAGS = 8_192
"""Tags of one message, about; a run is never cut in the middle of a tag."""
MAX_QUEUED_TAGS = 262_144
MAX_QUEUED_RUNS = 65_536
MAX_L2_TAGS = 262_144
"""Tags remembered of one L2 tier that does not list its keys, for full syncs; the oldest are forgotten first."""


class EventQueue:
    """Changes that the controller was not told yet. `overflowed`: some were dropped, and only a full sync mends it."""

    def __init__(self) -> None:
        self._runs: collections.deque[tuple[Change, str, bytearray]] = collections.deque()
        self.n_tags = 0
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, change: Change, tier: str, tags: bytes = b"") -> None:
        """Tags one after the other; none for CLEAR."""
        if self.overflowed:
            return
        if self.n_tags + len(tags) // TAG_BYTES > MAX_QUEUED_TAGS or len(self._runs) >= MAX_QUEUED_RUNS:
            self.clear()
            self.overflowed = True
            return
        self.n_tags += len(tags) // TAG_BYTES
        if self._runs:
            last_change, last_tier, last = self._runs[-1]
            if (
                change is last_change
                and tier == last_tier
                and tags
                and len(last) + len(tags) <= BATCH_TAGS * TAG_BYTES
            ):
                last += tags
                return
        self._runs.append((change, tier, bytearray(tags)))

    def take(self) -> list[Run]:
        """The oldest, as many as one message holds; empty when there are none."""
        runs: list[Run] = []
        n_tags = 0
        while self._runs and len(runs) < MAX_RUNS and n_tags < BATCH_TAGS:
            change, tier, tags = self._runs.popleft()
            n_tags += len(tags) // TAG_BYTES
            runs.append(Run(change, tier, bytes(tags)))
        self.n_tags -= n_tags
        return runs

    def clear(self) -> None:
        """Forget all, and that something was dropped."""
        self._runs.clear()
        self.n_tags = 0
        self.overflowed = False


class TierTags:
    """The tags that own L2 tiers which do not list their keys are known to have since this process started."""

    def __init__(self) -> None:
        self._tags: dict[str, collections.OrderedDict[bytes, None]] = {}

    def admit(self, tier: str, keys: Iterable[bytes]) -> None:
        """The tier has these now."""
        known = self._tags.setdefault(tier, collections.OrderedDict())
        for key in keys:
            known[key[:TAG_BYTES]] = None
        while len(known) > MAX_L2_TAGS:
            known.popitem(last=False)

    def evict(self, tier: str, keys: Iterable[bytes]) -> None:
        """It has them no more."""
        known = self._tags.setdefault(tier, collections.OrderedDict())
        for key in keys:
            known.pop(key[:TAG_BYTES], None)

    def clear(self, tier: str) -> None:
        """It is empty."""
        self._tags.pop(tier, None)

    def count(self, tier: str) -> int:
        """How many."""
        return len(self._tags.get(tier, ()))

    def of(self, tier: str) -> bytes:
        """All of them."""
        return b"".join(self._tags.get(tier, ()))
