"""When a chunk goes to L2, and what bounds the chunks that wait for it. Decides only: no I/O, no clock.

Policies of an adapter: `through` puts every chunk when it is committed; `second_touch` puts it when it was
stored or used a second time; `on_evict` puts it when it is about to leave L1, which begins at a low watermark
so that room is made ahead of need.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable

import msgspec


class StorePolicy(enum.StrEnum):
    """When an adapter gets a chunk."""

    THROUGH = "through"
    ON_EVICT = "on_evict"
    SECOND_TOUCH = "second_touch"


class Skip(enum.StrEnum):
    """Our own reasons for not putting a chunk; an adapter's reasons come as it says them."""

    BACKLOG = "backlog"
    """Too many bytes were waiting to be put."""
    EVICTED = "evicted"
    """It left L1 before its put could begin."""
    QUEUE_FULL = "queue_full"
    """More chunks were committed at a time than wait for a decision."""
    STOPPING = "stopping"
    """The server stops."""
    CLEARED = "cleared"
    """L2 was cleared while it waited."""
    DRAINING = "draining"
    """The adapter takes no more: an admin drains it."""
    QUOTA = "quota"
    """Its tenant may have no more bytes in the adapter."""
    REMOVED = "removed"
    """The adapter was removed while it waited."""


class RetryRule(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how late a throttled put is tried again."""

    retries: int = 3
    first_s: float = 0.25
    longest_s: float = 4.0

    def delay_s(self, attempts: int) -> float | None:
        """Seconds until the next try after so many throttled ones; None: no more."""
        if attempts > self.retries:
            return None
        return min(self.first_s * 2.0 ** (attempts - 1), self.longest_s)


class Backlog:
    """Bytes of L1 pinned for puts, each key counted once however many adapters get it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.pinned_bytes = 0
        self._pins: dict[bytes, list[int]] = {}

    def admit(self, key: bytes, length_bytes: int) -> bool:
        """Count a pin, unless that would exceed the limit. Each admitted one ends in `release`."""
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
    """A bounded set of keys that forgets the one longest unused."""

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
        """Forget all."""
        self._keys.clear()

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget keys."""
        for key in keys:
            self._keys.pop(key, None)


class PutPlanner:
    """Which keys one adapter gets, by its policy. Remembers keys, bounded, never what is in L1."""

    def __init__(self, policy: StorePolicy, limit_keys: int = 1 << 17) -> None:
        self.policy = policy
        self._seen = RecentKeys(limit_keys)
        self._clean = RecentKeys(limit_keys)

    def committed(self, key: bytes) -> bool:
        """A worker stored this chunk in L1: put it now?"""
        if self.policy is StorePolicy.THROUGH:
            return True
        if self.policy is StorePolicy.SECOND_TOUCH:
            return self.touched(key)
        return False

    def touched(self, key: bytes) -> bool:
        """This chunk was used: put it now?"""
        if self.policy is not StorePolicy.SECOND_TOUCH or key in self._clean:
            return False
        if key in self._seen:
            self._seen.discard((key,))
            return True
        self._seen.add(key)
        return False

    def leaving(self, key: bytes) -> bool:
        """This chunk is among the next to leave L1: put it now?"""
        return self.policy is StorePolicy.ON_EVICT and key not in self._clean

    def stored(self, key: bytes) -> None:
        """The adapter has this chunk."""
        if self.policy is not StorePolicy.THROUGH:
            self._clean.add(key)

    def left(self, key: bytes) -> bool:
        """This chunk left L1. True: the policy meant to put it first and did not come to it."""
        return self.policy is StorePolicy.ON_EVICT and key not in self._clean

    def gone(self, keys: Iterable[bytes]) -> None:
        """The adapter does not have these chunks any more."""
        self._clean.discard(keys)

    def forget(self) -> None:
        """The adapter has nothing any more."""
        self._clean.clear()


class EvictAhead(msgspec.Struct, frozen=True, kw_only=True):
    """When and how far `on_evict` cleans ahead of eviction. Shares of L1's bytes."""

    low_watermark: float = 0.6
    """Occupancy above which puts begin; below the watermark at which the pool evicts."""
    step: float = 1 / 16
    """Bytes looked at in one go."""

    def need_bytes(self, used_bytes: int, l1_bytes: int) -> int:
        """Bytes whose next victims should be put now; 0 below the watermark."""
        over_bytes = used_bytes - int(self.low_watermark * l1_bytes)
        return min(over_bytes, int(self.step * l1_bytes)) if over_bytes > 0 else 0
