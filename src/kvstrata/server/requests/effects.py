"""What requests leave behind in the pool, by name: leases and reservations.

The pool knows tickets; processes know (session, seq).  A `Lease` belongs to a whole group: each member's
share ends by its own release or its death, and with the last share the name ends too, also when the process
that looked up is long gone.

A lease that nobody has begun to use may be *revoked*: its looker is asked to give it back, and is asked again
until it does, hands it on, or dies.  A revoke frees nothing by itself.

Invariants:

1. A lease is in `Leases` exactly as long as some row still holds a share of its ticket.
2. `rows` of a lease are the rows that hold a share; a row in it belongs to a present member of the group.
3. A lease whose looker is there and of which no member has released its share is in `_waiting` or revoked;
   every other one is neither.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from kvstrata.rpc.session import Address, Effect
from kvstrata.types import KEY_BYTES

MAX_TOLD = 1_024
"""Orphaned and revoked leases named in one reply; the others follow when these have ended."""
MAX_REVOKES = 1_024
"""Leases looked at for one trimmed lookup."""

LeaseId = tuple[bytes, int]
"""(session that looked up, its lookup's seq)"""


class Lease(Effect):
    """One pool ticket granted to a group."""

    __slots__ = ("address", "group", "name", "rows", "ticket")

    def __init__(
        self,
        name: LeaseId,
        group: bytes,
        ticket: int,
        rows: Iterable[int],
        address: Address | None = None,
    ) -> None:
        super().__init__(wanted_by_ping=True)
        self.name = name
        self.group = group
        self.ticket = ticket
        self.rows = set(rows)
        self.address = address
        """Where its looker was heard when it asked."""


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
        # Ordered, because a plain dict looks for its first item behind all that were deleted before it.
        self._waiting: OrderedDict[LeaseId, Lease] = OrderedDict()
        """In the order they were granted: those nobody has begun to use, as far as is known here."""
        self._revoked: dict[bytes, dict[int, None]] = {}
        """Session → its lookups whose leases are asked back, oldest first."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def add(self, lease: Lease) -> None:
        """A lookup was answered with this lease."""
        assert lease.name not in self._leases
        self._leases[lease.name] = lease
        self._waiting[lease.name] = lease

    def get(self, name: LeaseId) -> Lease | None:
        """The lease of that name while any share is held."""
        return self._leases.get(name)

    def drop(self, lease: Lease) -> None:
        """All shares ended."""
        lease.rows.clear()
        self.begun(lease)
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
        self.begun(lease)
        self._leases.pop(lease.name, None)
        return True

    def begun(self, lease: Lease) -> None:
        """It is in use, or over: its looker is not asked for it (any more)."""
        session, seq = lease.name
        if self._waiting.pop(lease.name, None) is None and (revoked := self._revoked.get(session)):
            revoked.pop(seq, None)
            if not revoked:
                del self._revoked[session]

    def orphan(self, lease: Lease) -> None:
        """The process that looked up is gone: whoever holds a share is told to end it."""
        self.begun(lease)
        for row in lease.rows:
            self._orphans.setdefault(row, set()).add(lease.name)

    def orphans(self, row: int) -> list[LeaseId]:
        """Some leases of this row that nobody will speak of any more."""
        names = self._orphans.get(row) if self._orphans else None
        return sorted(itertools.islice(names, MAX_TOLD)) if names else []

    def revoke(self, choose: Callable[[list[int]], int]) -> list[Lease]:
        """Ask the oldest leases back that wait for their use and were not asked back before.

        `choose` is given their tickets, oldest first, and says how many of them.
        """
        oldest = list(itertools.islice(self._waiting.values(), MAX_REVOKES))
        chosen = oldest[: choose([lease.ticket for lease in oldest])] if oldest else []
        for lease in chosen:
            session, seq = lease.name
            del self._waiting[lease.name]
            self._revoked.setdefault(session, {})[seq] = None
        return chosen

    def revoked(self, session: bytes) -> list[int]:
        """Some lookups of this session whose leases are asked back."""
        return list(itertools.islice(self._revoked.get(session, ()), MAX_TOLD))

    @property
    def n_revoked(self) -> int:
        """Leases asked back and neither given back nor handed on yet."""
        return sum(map(len, self._revoked.values()))

    def validate(self) -> None:
        """Assert the invariants (tests call it after every step)."""
        revoked = {(session, seq) for session, numbers in self._revoked.items() for seq in numbers}
        assert all(self._revoked.values())
        assert not revoked & self._waiting.keys()
        assert revoked | self._waiting.keys() <= self._leases.keys()
        for row, names in self._orphans.items():
            assert not names & (revoked | self._waiting.keys())
            assert all(row in self._leases[name].rows for name in names)

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
