"""The leases and reservations that requests have left behind in the pool, by name.

The pool knows tickets; processes know (session, seq).  A `Lease` belongs to a whole group.  Each process's share ends
by its own release or its death.  The name ends with the last share, even if the process that looked up is long gone.

A lease that no process has begun to use may be *revoked*: the process that looked up is asked to give it back, again
and again until it gives it back, hands it on, or dies.  A revoke by itself frees nothing.

Invariants:

1. A lease is in `Leases` exactly as long as some row still holds a share of its ticket.
2. `rows` of a lease are the rows that hold a share; each belongs to an attached process of the group.
3. As long as the process that looked up is attached and no process of the group has released its share, the lease is
   either in `_waiting` or revoked.  Every other lease is neither.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from kvstrata.policy.reserved import Share
from kvstrata.rpc.session import Address, Effect

MAX_TOLD = 1_024
"""Orphaned and revoked leases named in one reply; the others follow when these have ended."""
MAX_REVOKES = 1_024
"""Maximum number of leases that one lookup may revoke."""

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
        """The connection over which the lookup came."""


class Reservation(Effect):
    """Extents being written. `open_keys`: index → storage key of those neither committed nor given back."""

    __slots__ = ("begun_s", "open_keys", "replaces", "share", "tail", "ticket")

    def __init__(
        self,
        ticket: int,
        open_keys: dict[int, bytes],
        share: Share,
        *,
        tail: bool = False,
        replaces: bytes = b"",
    ) -> None:
        super().__init__(wanted_by_ping=False)
        self.begun_s = time.perf_counter()
        self.ticket = ticket
        self.open_keys = open_keys
        self.share = share
        """The bytes of `open_keys`, counted for their process and token."""
        self.tail = tail
        """Whether the key is that of a tail."""
        self.replaces = replaces
        """Storage keys of the tails that leave L1 with the first commit."""

    def over(self) -> None:
        """All its items have ended."""
        self.share.keep(0)
        self.open_keys.clear()


class Leases:
    """All leases of one instance, by name."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, Lease] = {}
        self._orphans: dict[tuple[bytes, int], set[LeaseId]] = {}
        """(Group, row) → the leases of which it holds a share and whose process that looked up is gone."""
        # An OrderedDict, because a plain dict finds its first item only after skipping all earlier deleted ones.
        self._waiting: OrderedDict[LeaseId, Lease] = OrderedDict()
        """Leases that no process is known to use yet, in the order in which they were granted."""
        self._revoked: dict[bytes, dict[int, None]] = {}
        """Session → its lookups whose leases are revoked, oldest first."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def add(self, lease: Lease) -> None:
        """Add a lease, as its lookup is answered."""
        assert lease.name not in self._leases
        self._leases[lease.name] = lease
        self._waiting[lease.name] = lease

    def get(self, name: LeaseId) -> Lease | None:
        """The lease with this name, while any share of it is held."""
        return self._leases.get(name)

    def drop(self, lease: Lease) -> None:
        """Remove a lease whose shares have all ended."""
        lease.rows.clear()
        self.begun(lease)
        if self._leases.pop(lease.name, None) is not None and self._orphans:
            for names in self._orphans.values():
                names.discard(lease.name)

    def drop_share(self, lease: Lease, row: int) -> bool:
        """End one row's share. True if it was the last."""
        lease.rows.discard(row)
        orphans = self._orphans.get((lease.group, row))
        if orphans is not None:
            orphans.discard(lease.name)
        if lease.rows:
            return False
        self.begun(lease)
        self._leases.pop(lease.name, None)
        return True

    def begun(self, lease: Lease) -> None:
        """Note that the lease is in use or has ended, so that it is not revoked."""
        session, seq = lease.name
        if self._waiting.pop(lease.name, None) is None and (revoked := self._revoked.get(session)):
            revoked.pop(seq, None)
            if not revoked:
                del self._revoked[session]

    def orphan(self, lease: Lease) -> None:
        """Note that the process that looked up is gone: each row that holds a share will be told to end it."""
        self.begun(lease)
        for row in lease.rows:
            self._orphans.setdefault((lease.group, row), set()).add(lease.name)

    def orphans(self, group: bytes, row: int) -> list[LeaseId]:
        """Orphaned leases of which this row of a group holds a share, at most `MAX_TOLD`."""
        names = self._orphans.get((group, row)) if self._orphans else None
        return sorted(itertools.islice(names, MAX_TOLD)) if names else []

    def revoke(self, choose: Callable[[list[int]], int]) -> list[Lease]:
        """Revoke the oldest leases that no process has begun to use. Returns them.

        `choose` gets the tickets of the candidates, oldest first, and returns how many of them to revoke.
        """
        oldest = list(itertools.islice(self._waiting.values(), MAX_REVOKES))
        chosen = oldest[: choose([lease.ticket for lease in oldest])] if oldest else []
        for lease in chosen:
            session, seq = lease.name
            del self._waiting[lease.name]
            self._revoked.setdefault(session, {})[seq] = None
        return chosen

    def revoked(self, session: bytes) -> list[int]:
        """Lookups of this session whose leases are revoked, at most `MAX_TOLD`."""
        return list(itertools.islice(self._revoked.get(session, ()), MAX_TOLD))

    @property
    def n_revoked(self) -> int:
        """Revoked leases that were neither given back nor handed on yet."""
        return sum(map(len, self._revoked.values()))

    def validate(self) -> None:
        """Assert the invariants (tests call it after every step)."""
        revoked = {(session, seq) for session, numbers in self._revoked.items() for seq in numbers}
        assert all(self._revoked.values())
        assert not revoked & self._waiting.keys()
        assert revoked | self._waiting.keys() <= self._leases.keys()
        for (_, row), names in self._orphans.items():
            assert not names & (revoked | self._waiting.keys())
            assert all(row in self._leases[name].rows for name in names)

    def process_gone(self, group: bytes, row: int) -> list[Lease]:
        """End all shares of a dead process: of its row, in leases of its group. Returns the leases that ended."""
        self._orphans.pop((group, row), None)
        return [
            lease
            for lease in self
            if lease.group == group and row in lease.rows and self.drop_share(lease, row)
        ]


class InFlight:
    """Storage keys that processes are writing now."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys that were reserved."""
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove keys that were committed or given back."""
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
