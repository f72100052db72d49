"""The leases that a reader has at its peers. No I/O; the caller passes the time.

Invariants
1. A key belongs to at most one HELD lease: if it is leased twice, the later lease counts.
2. Every leased byte counts as under way at its owner until its key has been read, replaced or lost.
3. `add`, `read`, `unused` and `end_all` report each lease that is over exactly once; the caller must tell its owner.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Iterable, Sequence

from kvstrata.types import Extent


class LeaseState(enum.Enum):
    """Whether a lease at a peer takes room there."""

    HELD = "held"
    """The owner keeps the records, and they can be read."""
    OVER = "over"
    """This reader no longer needs the lease, and the owner has not been told yet."""
    GONE = "gone"
    """The lease takes no room at its owner any more, as far as this reader can tell."""


class Lease:
    """A lease on records at an owner, with the records that are not read yet."""

    def __init__(
        self,
        owner: str,
        number: int,
        epoch: int,
        extents: dict[bytes, Extent],
        until_s: float,
        now_s: float,
    ) -> None:
        self.owner = owner
        self.number = number
        self.epoch = epoch
        """Epoch of the owner's process that granted the lease."""
        self.state: LeaseState = LeaseState.HELD
        self.unread = extents
        self.until_s = until_s
        """The lease stands at least until this time, by our clock."""
        self.used_s = now_s
        self.readers = 0
        """Number of batches that are being read."""


class LeaseBook:
    """See the module."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Lease] = {}
        """The HELD lease of each unread key."""
        self._leases: set[Lease] = set()
        """The leases that are HELD or OVER."""
        self._bytes: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        """The number of leases that take room at their owners."""
        return len(self._leases)

    def add(self, lease: Lease) -> list[Lease]:
        """Add a lease; returns the older leases that are over because the new one has their last unread keys."""
        self._leases.add(lease)
        replaced = set()
        for key in lease.unread:
            older = self._by_key.get(key)
            if older is not None:
                self._bytes[older.owner] -= older.unread.pop(key).length_bytes
                replaced.add(older)
            self._by_key[key] = lease
            self._bytes[lease.owner] += lease.unread[key].length_bytes
        return [older for older in replaced if self._finished(older)]

    def under_way_bytes(self, owner: str) -> int:
        """Bytes that are leased from an owner and are not yet read, replaced or lost."""
        return self._bytes[owner]

    def standing(self, key: bytes, until_s: float) -> Extent | None:
        """The extent of a key whose lease stands until `until_s`."""
        lease = self._by_key.get(key)
        return lease.unread[key] if lease is not None and lease.until_s >= until_s else None

    def leading(self, keys: Iterable[bytes], until_s: float) -> list[Extent]:
        """The extents of the leading keys whose leases stand until `until_s`."""

        found = (self.standing(key, until_s) for key in keys)
        return [extent for extent in itertools.takewhile(lambda one: one is not None, found) if extent]

    def take(self, keys: Sequence[bytes], now_s: float) -> dict[Lease, list[tuple[int, Extent]]]:
        """Take those of the keys that are leased; returns their indices and extents, for each lease.

        The caller reads the extents of each lease as one batch, and then calls `read`.
        """
        taken: dict[Lease, list[tuple[int, Extent]]] = {}
        for place, key in enumerate(keys):
            lease = self._by_key.get(key)
            if lease is not None and lease.until_s > now_s:
                del self._by_key[key]
                taken.setdefault(lease, []).append((place, lease.unread.pop(key)))
        for lease in taken:
            lease.readers += 1
            lease.used_s = now_s
        return taken

    def read(self, lease: Lease, n_bytes: int, now_s: float) -> bool:
        """A batch of `n_bytes` is no longer being read. True: the lease is over now, and its owner must be told."""
        self._bytes[lease.owner] -= n_bytes
        lease.readers -= 1
        lease.used_s = now_s
        return self._finished(lease)

    def released(self, lease: Lease) -> None:
        """The owner has been told that the lease is over, or could not be told."""
        self._gone(lease)

    def renewed(self, lease: Lease, until_s: float) -> None:
        """The owner keeps the lease longer."""
        lease.until_s = max(lease.until_s, until_s)

    def lost(self, lease: Lease) -> None:
        """The owner does not keep the lease any more."""
        self._forget_keys(lease)
        self._gone(lease)

    def lost_all(self, owner: str) -> None:
        """The owner is gone, or has restarted: the leases that it kept are lost."""
        for lease in [lease for lease in self._held() if lease.owner == owner]:
            self.lost(lease)

    def unused(self, now_s: float, idle_s: float) -> list[Lease]:
        """End the leases that nobody has read for `idle_s`, and those that have run out; returns them."""
        return self._take_out(
            lease
            for lease in self._held()
            if not lease.readers and (lease.used_s + idle_s <= now_s or lease.until_s <= now_s)
        )

    def end_all(self) -> list[Lease]:
        """End all leases; returns them. REQUIRES that no batch is being read."""
        return self._take_out(self._held())

    def _held(self) -> list[Lease]:
        return [lease for lease in self._leases if lease.state is LeaseState.HELD]

    def _take_out(self, leases: Iterable[Lease]) -> list[Lease]:
        leases = list(leases)
        for lease in leases:
            self._forget_keys(lease)
        return [lease for lease in leases if self._finished(lease)]

    def _forget_keys(self, lease: Lease) -> None:
        for key, extent in lease.unread.items():
            del self._by_key[key]
            self._bytes[lease.owner] -= extent.length_bytes
        lease.unread.clear()

    def _finished(self, lease: Lease) -> bool:
        """End a lease that has no batch being read and no unread record; returns whether its owner must be told."""
        if lease.readers or lease.unread:
            return False
        if lease.state is LeaseState.HELD:
            lease.state = LeaseState.OVER
        return lease.state is LeaseState.OVER

    def _gone(self, lease: Lease) -> None:
        lease.state = LeaseState.GONE
        self._leases.discard(lease)
