"""The events of this instance's chunks on their way to one controller: in order, compact and bounded.  No I/O.

the pool, the store controller ─▶ TierNews ─▶ EventQueue ─▶ frames, numbered ─▶ server/cluster/link.py
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable, Sequence

from kvstrata.observability.logging import EventLog
from kvstrata.rpc.cluster_wire import MAX_RUNS, TAG_BYTES, Change, Events, Run, encode
from kvstrata.server.cluster.told_tiers import ToldTiers, tier_name
from kvstrata.types import PoolEvent

L1_TIER = "l1"
BATCH_TAGS = 8_192
"""A message takes whole runs until it has at least this many tags."""
MAX_QUEUED_TAGS = 262_144
MAX_QUEUED_RUNS = 65_536
MAX_L2_TAGS = 262_144
"""Most tags that are remembered, for full syncs, of an L2 tier whose keys are not listed; the oldest go first."""


class EventQueue:
    """Changes that were not sent yet. `overflowed`: they were dropped, and the controller needs a full sync."""

    def __init__(self) -> None:
        self._runs: collections.deque[tuple[Change, str, bytearray]] = collections.deque()
        self.n_tags = 0
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, change: Change, tier: str, tags: bytes = b"") -> None:
        """Append a change. `tags`: concatenated; empty for CLEAR."""
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
        """Remove and return the oldest runs, as many as one message holds; empty if none is queued."""
        runs: list[Run] = []
        n_tags = 0
        while self._runs and len(runs) < MAX_RUNS and n_tags < BATCH_TAGS:
            change, tier, tags = self._runs.popleft()
            n_tags += len(tags) // TAG_BYTES
            runs.append(Run(change, tier, bytes(tags)))
        self.n_tags -= n_tags
        return runs

    def clear(self) -> None:
        """Empty the queue and reset `overflowed`."""
        self._runs.clear()
        self.n_tags = 0
        self.overflowed = False


class TierTags:
    """For L2 tiers whose keys are not listed: the tags put or found there since this process started."""

    def __init__(self) -> None:
        self._tags: dict[str, collections.OrderedDict[bytes, None]] = {}

    def admit(self, tier: str, keys: Iterable[bytes]) -> None:
        """Note that the tier has these chunks now."""
        known = self._tags.setdefault(tier, collections.OrderedDict())
        for key in keys:
            known[key[:TAG_BYTES]] = None
        while len(known) > MAX_L2_TAGS:
            known.popitem(last=False)

    def evict(self, tier: str, keys: Iterable[bytes]) -> None:
        """Note that the tier does not have these chunks any more."""
        known = self._tags.setdefault(tier, collections.OrderedDict())
        for key in keys:
            known.pop(key[:TAG_BYTES], None)

    def clear(self, tier: str) -> None:
        """Note that the tier is empty."""
        self._tags.pop(tier, None)

    def known(self, tier: str, keys: Iterable[bytes]) -> list[bytes]:
        """Those of these keys whose tags are known."""
        tags = self._tags.get(tier) or ()
        return [key for key in keys if key[:TAG_BYTES] in tags]

    def count(self, tier: str) -> int:
        """Number of known tags of this tier."""
        return len(self._tags.get(tier, ()))

    def of(self, tier: str) -> bytes:
        """All known tags of this tier, concatenated."""
        return b"".join(self._tags.get(tier, ()))


class TierNews:
    """The news for one controller, and whether it needs a full sync.

    Invariants:

    1. While `telling` is false nothing is queued: the next full sync will cover it.
    2. Batches are numbered 1, 2, … without a gap.  A frame that the socket did not take is sent next.
    """

    def __init__(self, told: ToldTiers) -> None:
        self.wake = asyncio.Event()
        """Set when the link has something to do."""
        self.tags = TierTags()
        """Known tags of the tiers whose keys are not listed."""
        self.tiers: list[str] = []
        """The tiers as they were registered with the controller; the first is L1."""
        self.telling = False
        """Whether events are queued for the controller: since a full sync has begun, unless it failed."""
        self.seq = 0
        """Number of the last batch that was sent."""
        self.n_events = 0
        """Tags in all batches so far."""
        self.sync_wanted = False
        """Whether a full sync must begin, now or after the one under way."""
        self._told = told
        self._queue = EventQueue()
        self._frame: bytes | None = None
        """The batch that the socket did not take yet."""
        self._log = EventLog("cluster")

    # --- what happens in this instance ---------------------------------------------------------------------

    def pool_events(self, events: Sequence[tuple[int, bytes, int]]) -> None:
        """Queue what happened in L1 (Pool.events), in order."""
        if self.telling:
            for kind, key, _ in events:
                change = _CHANGE_OF.get(kind)
                if change is not None:
                    self._queue.add(change, L1_TIER, key[:TAG_BYTES])

    def pool_events_lost(self) -> None:
        """Want a full sync: the pool dropped events before they were read."""
        if self.telling:
            self.want_sync("events_lost")

    def tier_got(self, adapter: str, keys: Sequence[bytes]) -> None:
        """Queue that a tier has these chunks."""
        tier = tier_name(adapter)
        if tier in self.tiers:
            if not self._told.lists(tier):
                self.tags.admit(tier, keys)
            if self.telling:
                self._queue.add(Change.ADMIT, tier, b"".join(key[:TAG_BYTES] for key in keys))

    def tier_lost(self, adapter: str, keys: Sequence[bytes]) -> None:
        """Queue that a tier does not have these chunks any more."""
        tier = tier_name(adapter)
        if tier in self.tiers:
            if not self._told.lists(tier):
                keys = self.tags.known(tier, keys)  # nobody was told of the others
            self.tags.evict(tier, keys)
            if self.telling and keys:
                self._queue.add(Change.EVICT, tier, b"".join(key[:TAG_BYTES] for key in keys))

    def tier_emptied(self, adapter: str) -> None:
        """Queue that a tier is empty."""
        tier = tier_name(adapter)
        if tier in self.tiers:
            self.tags.clear(tier)
            if self.telling:
                self._queue.add(Change.CLEAR, tier)

    # --- full sync -----------------------------------------------------------------------------------------

    def want_sync(self, why: str) -> None:
        """Note that the controller needs a full sync."""
        if not self.sync_wanted:
            self._log.info("sync_wanted", reason=why)
        self.sync_wanted = True
        self.wake.set()

    def set_tiers(self, tiers: list[str]) -> None:
        """Note the tiers that the instance is about to register; if they have changed, a full sync is needed."""
        if tiers != self.tiers:
            self.tiers = tiers
            self.telling = False

    def begin_telling(self) -> None:
        """Drop what is queued and queue events from now on: a full sync begins."""
        self._queue.clear()
        self._frame = None
        self.telling, self.sync_wanted = True, False

    # --- to the controller ---------------------------------------------------------------------------------

    @property
    def queued_tags(self) -> int:
        return self._queue.n_tags

    @property
    def overflowed(self) -> bool:
        """Whether events were dropped, so that the controller needs a full sync."""
        return self._queue.overflowed

    def next_frame(self, instance: str, incarnation: int) -> bytes | None:
        """The oldest batch that was not sent, encoded; None if all were sent."""
        if self._frame is None and (runs := self._queue.take()):
            self._frame = encode(Events(instance, incarnation, self.seq + 1, runs))
            self.n_events += sum(len(run.tags) // TAG_BYTES for run in runs)
        return self._frame

    def sent(self) -> None:
        """Note that the socket took the batch of `next_frame`."""
        self._frame = None
        self.seq += 1


_CHANGE_OF: dict[int, Change] = {
    kind: Change.ADMIT if kind in (PoolEvent.INSERTED, PoolEvent.VERIFIED) else Change.EVICT
    for kind in PoolEvent
}
