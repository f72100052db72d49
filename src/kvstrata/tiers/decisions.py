"""Decides when a chunk is put to L2, and bounds the bytes that wait for puts. Decides only: no I/O, no clock.

Policies of an adapter: `through` puts every chunk when it is committed; `second_touch` puts a chunk when it was stored
or used for the second time; `on_evict` puts a chunk when it is about to leave L1.  `on_evict` begins at a low watermark
of L1's occupancy, so that chunks are stored before their room is needed.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable

import msgspec

from kvstrata.storage.config import StorePolicy


class Skip(enum.StrEnum):
    """The server's own reasons for not putting a chunk; an adapter's reasons are passed on as they are."""

    BACKLOG = "backlog"
    """Too many bytes were waiting to be put."""
    EVICTED = "evicted"
    """The chunk left L1 before its put could begin."""
    QUEUE_FULL = "queue_full"
    """More chunks were committed at once than may wait for a decision."""
    STOPPING = "stopping"
    """The server is stopping."""
    CLEARED = "cleared"
    """L2 was cleared while the chunk waited."""
    CRASHED = "crashed"
    """The put ended by a mistake of the server's own; its log has the traceback."""


class RetryRule(msgspec.Struct, frozen=True, kw_only=True):
    """The number of further tries of a throttled put, and the pauses before them."""

    retries: int = 3
    first_s: float = 0.25
    longest_s: float = 4.0

    def delay_s(self, attempts: int) -> float | None:
        """Seconds until the next try after `attempts` throttled tries; None: the put is not tried again."""
        if attempts > self.retries:
            return None
        return min(self.first_s * 2.0 ** (attempts - 1), self.longest_s)


class Backlog:
    """Counts the bytes of L1 that are pinned for puts; a key counts once, however many adapters it is put to."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.pinned_bytes = 0
        self._pins: dict[bytes, list[int]] = {}

    def admit(self, key: bytes, length_bytes: int) -> bool:
        """Count a pin, or return False if it would exceed the limit. `release` ends an admitted pin."""
        pin = self._pins.get(key)
        if pin is not None:
            pin[0] += 1
            return True
        if self.pinned_bytes + length_bytes > self.limit_bytes:
            return False
        self._pins[key] = [1, length_bytes]
        self.pinned_bytes += length_bytes
        return True

    def release(self, key: bytes) -> None:
        """End one pin of a key."""
        pin = self._pins[key]
        pin[0] -= 1
        if pin[0] == 0:
            self.pinned_bytes -= pin[1]
            del self._pins[key]


class RecentKeys:
    """A bounded set of keys, which forgets the key that was added longest ago."""

    def __init__(self, limit_keys: int) -> None:
        self._limit_keys = limit_keys
        self._keys: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Remember a key as the newest."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._limit_keys:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all keys."""
        self._keys.clear()

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget these keys."""
        for key in keys:
            self._keys.pop(key, None)


class PutPlanner:
    """Decides by an adapter's policy which keys the adapter gets.

    It remembers at most `limit_keys` keys that were seen once and as many that the adapter has, but not the content of
    L1.
    """

    def __init__(self, policy: StorePolicy, limit_keys: int = 1 << 17) -> None:
        self.policy = policy
        self._seen = RecentKeys(limit_keys)
        self._clean = RecentKeys(limit_keys)

    def committed(self, key: bytes) -> bool:
        """Note that a worker has stored this chunk in L1; returns whether to put it now."""
        if self.policy is StorePolicy.THROUGH:
            return True
        if self.policy is StorePolicy.SECOND_TOUCH:
            return self.touched(key)
        return False

    def touched(self, key: bytes) -> bool:
        """Note that this chunk was used; returns whether to put it now."""
        if self.policy is not StorePolicy.SECOND_TOUCH or key in self._clean:
            return False
        if key in self._seen:
            self._seen.discard((key,))
            return True
        self._seen.add(key)
        return False

    def leaving(self, key: bytes) -> bool:
        """Whether this chunk, which is among the next to leave L1, should be put now."""
        return self.policy is StorePolicy.ON_EVICT and key not in self._clean

    def stored(self, key: bytes) -> None:
        """Note that the adapter has this chunk."""
        if self.policy is not StorePolicy.THROUGH:
            self._clean.add(key)

    def left(self, key: bytes) -> bool:
        """Whether this chunk, which has left L1, should have been put before."""
        return self.policy is StorePolicy.ON_EVICT and key not in self._clean

    def gone(self, keys: Iterable[bytes]) -> None:
        """Note that the adapter no longer has these chunks."""
        self._clean.discard(keys)

    def forget(self) -> None:
        """Note that the adapter no longer has any chunk."""
        self._clean.clear()


class EvictAhead(msgspec.Struct, frozen=True, kw_only=True):
    """When `on_evict` begins to put chunks ahead of their eviction, and how many, as shares of L1's bytes."""

    low_watermark: float = 0.6
    """Occupancy above which puts begin; lower than the watermark at which the pool evicts."""
    step: float = 1 / 16
    """Largest answer of `need_bytes`."""

    def need_bytes(self, used_bytes: int, l1_bytes: int) -> int:
        """How many bytes of chunks, next in the order of eviction, should be put now; 0 below the watermark."""
        over_bytes = used_bytes - int(self.low_watermark * l1_bytes)
        return min(over_bytes, int(self.step * l1_bytes)) if over_bytes > 0 else 0
