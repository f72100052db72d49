"""What requests leave behind in the pool, by name: leases and reservations.

The pool knows tickets; processes know (session, seq).  A `Lease` belongs to a whole group: each member's
share ends by its own release or its death, and with the last share the name ends too, also when the process
that looked up is long gone.

Invariants:

1. A lease is in `Leases` exactly as long as some row still holds a share of its ticket.
2. `rows` of a lease are the rows that hold a share; a row in it belongs to a present member of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from kvstrata.rpc.session import Effect
from kvstrata.types import KEY_BYTES

MAX_ORPHANS_TOLD = 1_024
"""Revoked leases named in one reply; the others follow when these have ended."""

LeaseId = tuple[bytes, int]
"""(session that looked up, its lookup's seq)"""


class Lease(Effect):
    """One pool ticket granted to a group."""

    __slots__ = ("group", "name", "rows", "ticket")

    def __init__(self, name: LeaseId, group: bytes, ticket: int, rows: Iterable[int]) -> None:
        super().__init__(wanted_by_ping=True)
        self.name = name
        self.group = group
        self.ticket = ticket
        self.rows = set(rows)


class Reservation(Effect):
    """Extents being written. `open_keys`: index → storage key, for those neither committed nor given back."""

    __slots__ = ("open_keys", "ticket")

    def __init__(self, ticket: int, open_keys: dict[int, bytes]) -> None:
        super().__init__(wanted_by_ping=False)
        self.ticket = ticket
        self.open_keys = open_keys


class Leases:
    """All leases of one instance by name."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, Lease] = {}
        self._orphans: dict[int, set[LeaseId]] = {}
        """Row → leases it still holds whose looker is gone."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def add(self, lease: Lease) -> None:
        """A lookup was answered with this lease."""
        assert lease.name not in self._leases
        self._leases[lease.name] = lease

    def get(self, name: LeaseId) -> Lease | None:
        """The lease of that name while any share is held."""
        return self._leases.get(name)

    def drop(self, lease: Lease) -> None:
        """All shares ended."""
        lease.rows.clear()
        if self._leases.pop(lease.name, None) is not None and self._orphans:
            for names in self._orphans.values():
                names.discard(lease.name)

    def drop_share(self, lease: Lease, row: int) -> bool:
        """One row's share ended; True if it was the last."""
        lease.rows.discard(row)
        orphans = self._orphans.get(row)
        if orphans is not None:
            orphans.discard(lease.name)
        if lease.rows:
            return False
        self._leases.pop(lease.name, None)
        return True

    def orphan(self, lease: Lease) -> None:
        """The process that looked up is gone: whoever holds a share is told to end it."""
        for row in lease.rows:
            self._orphans.setdefault(row, set()).add(lease.name)

    def orphans(self, row: int) -> list[LeaseId]:
        """Some leases of this row that nobody will speak of any more."""
        names = self._orphans.get(row) if self._orphans else None
        return sorted(itertools.islice(names, MAX_ORPHANS_TOLD)) if names else []

    def row_gone(self, row: int) -> list[Lease]:
        """The process of this row is dead; returns the leases that ended with it."""
        self._orphans.pop(row, None)
        return [lease for lease in self if row in lease.rows and self.drop_share(lease, row)]


class InFlight:
    """Storage keys that somebody is writing now."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def add(self, keys: Iterable[bytes]) -> None:
        """These were reserved."""
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1

    def remove(self, keys: Iterable[bytes]) -> None:
        """These were committed or given back."""
        for key in keys:
            left = self._counts[key] - 1
            if left:
                self._counts[key] = left
            else:
                del self._counts[key]

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._counts)


def nth_key(keys: bytes, index: int) -> bytes:
    """One of concatenated keys."""
    return keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
