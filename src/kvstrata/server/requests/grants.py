"""The grants of past requests: leases of lookups, reservations of reserves, and promises, by session and number.

    lookup, reserve ─▶ granted ─┬─▶ released, committed, aborted
                                ├─▶ ended: cancelled by its process, or not named in a `resume`
                                └─▶ process_gone

The pool names grants by ticket, processes by (session, seq).  `Process.grants` has the grants that the process itself
still holds.  A `Lease` belongs to a whole engine.  Each process's share ends by its own release or its death.  The name
of a lease is valid until the last share ends, even if the process that looked up is long gone.

A lease that no process has begun to use may be *revoked*: the process that looked up is asked repeatedly to release it,
until it releases it, hands it to the workers, or dies.  A revoke by itself frees nothing.

Invariants:

1. A lease is in `Grants` exactly as long as some row still holds a share of its ticket.
2. `rows` of a lease are the rows that hold a share; each belongs to an attached process of the engine.
3. As long as the process that looked up is attached and no process of the engine has released its share, the lease is
   either in `_waiting` or revoked.  Every other lease is neither.
4. A reservation is in its process's grants exactly as long as it has an open chunk; a promise, until it ends.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from kvstrata.errors import BadRequest
from kvstrata.native.core import Pool
from kvstrata.observability.explain import ServerNumbers
from kvstrata.observability.tracing import Span
from kvstrata.rpc.wire import Pong, encode
from kvstrata.server.processes import Process, Use
from kvstrata.server.requests.promises import Promise, Promises

MAX_NAMED_LEASES = 1_024
"""Maximum number of orphaned or revoked leases in one reply; the others follow when these have ended."""
MAX_REVOKES = 1_024
"""Maximum number of leases that one lookup may revoke."""


LeaseId = tuple[bytes, int]
"""(session that looked up, its lookup's seq)"""


class Lease(msgspec.Struct, eq=False):
    """One pool ticket granted to an engine."""

    owner: Process
    """The process that looked up, which may be gone."""
    name: LeaseId
    ticket: int
    rows: set[int]
    """The rows that hold a share."""
    revoked: bool = False
    """Its owner is asked to release it."""


class Reservation(msgspec.Struct, eq=False):
    """The chunks of one reserve; they count for their process and token from the start of the reserve to their end."""

    uses: tuple[Use, ...]
    bytes_each: int
    keys: bytes
    """Storage keys of all chunks of the reserve."""
    tail: bool
    """Whether the key is that of a tail."""
    replaces: bytes
    """Storage keys of the tails that leave L1 with the first commit."""
    begun_s: float
    trace: Span | None = None
    """Its span, if it is traced."""
    ticket: int = 0
    open: set[int] = set()
    """Indices of the chunks that are neither committed nor aborted."""
    n_counted: int = 0

    def count(self, n_chunks: int) -> None:
        """Change the number of chunks whose bytes are counted."""
        change = (n_chunks - self.n_counted) * self.bytes_each
        self.n_counted = n_chunks
        for use in self.uses:
            use.reserved_bytes += change


class Grants:
    """Creates, finds and ends leases and reservations. Belongs to the event loop."""

    def __init__(self, pool: Pool, counters: ServerNumbers, epoch: int) -> None:
        self._pool = pool
        self._counters = counters
        self._epoch = epoch
        self.promises = Promises(pool)
        self._leases: dict[LeaseId, Lease] = {}
        self._orphans: dict[LeaseId, Lease] = {}
        """Leases whose owner (the process that looked up) is gone."""
        # An OrderedDict, because a plain dict finds its first item only after skipping all earlier deleted ones.
        self._waiting: OrderedDict[LeaseId, Lease] = OrderedDict()
        """Leases that no process has begun to use, as far as known, in the order in which they were granted."""
        self.n_revoked = 0
        """Number of revoked leases that were neither released nor handed to workers yet."""

    @property
    def n_leases(self) -> int:
        """Number of leases of which a process holds a share."""
        return len(self._leases)

    def leases(self) -> Iterator[Lease]:
        """All leases."""
        return iter(list(self._leases.values()))

    # --- granted -----------------------------------------------------------------------------------------

    def check_new(self, process: Process, seq: int) -> None:
        """Raises BadRequest if an earlier process of the session has a lease with this lookup's name that its group
        still holds."""
        if (process.session, seq) in self._leases:
            raise BadRequest(
                f"seq: {seq} names a lease that this group still holds; go on with higher numbers after attaching "
                "again, or attach with a new session",
                field="seq",
            )

    def leased(self, process: Process, seq: int, ticket: int, rows: set[int]) -> None:
        """Keep the lease of a lookup that is being answered. `rows` hold a share."""
        lease = process.grants[seq] = Lease(process, (process.session, seq), ticket, rows)
        self._leases[lease.name] = self._waiting[lease.name] = lease

    def reservation(self, process: Process, seq: int) -> Reservation | None:
        """The reservation of a reserve of this process, while it has an open chunk."""
        found = process.grants.get(seq)
        return found if isinstance(found, Reservation) else None

    # --- ended -------------------------------------------------------------------------------------------

    def end(self, process: Process, seq: int) -> bool:
        """End the grant of a lookup or reserve of this process. Returns False if it has none."""
        found = process.grants.get(seq)
        if isinstance(found, Lease):
            self._release_all(found)
        elif isinstance(found, Reservation):
            self._pool.abort(found.ticket, None)
            found.open.clear()
            self.settle(process, seq, found)
        elif found is not None:
            del process.grants[seq]
            self.promises.end(found)
        return found is not None

    def settle(self, process: Process, seq: int, reservation: Reservation) -> None:
        """Handle the end of some chunks of a reservation, which ends with its last chunk."""
        reservation.count(len(reservation.open))
        if not reservation.open:
            del process.grants[seq]

    def find(self, name: LeaseId) -> Lease | None:
        """The lease with this name, while any share of it is held."""
        return self._leases.get(name)

    def release(self, lease: Lease, process: Process, *, group: bool) -> bool:
        """End this process's share, or with `group` every share. Returns False if it had none."""
        if not lease.rows or not (group or process.row in lease.rows):
            return False
        if group:
            self._release_all(lease)
            return True
        self._pool.release(lease.ticket, process.row)
        self._begun(lease)
        self._end_share(lease, process.row)
        return True

    def promise(self, process: Process, seq: int, root: bytes, chain: bytes) -> None:
        """Keep a promise of a process. Raises Refused."""
        process.grants[seq] = self.promises.add(process, root, chain)

    def process_gone(self, process: Process) -> tuple[int, int]:
        """End the lease shares, reservations and promises of a process that has ended.

        Returns the numbers of leases and reservations.

        Its reservations end in the pool, with its row.  Leases of which other processes of its group hold a share
        continue as orphans.
        """
        reservations = [one for one in process.grants.values() if isinstance(one, Reservation)]
        for reservation in reservations:
            reservation.count(0)
        n_leases = sum(isinstance(one, Lease) for one in process.grants.values())
        promises = [one for one in process.grants.values() if isinstance(one, Promise)]
        process.grants.clear()
        for promise in promises:
            self.promises.end(promise)
        for lease in self.leases():
            if lease.owner.group is process.group and process.row in lease.rows:
                self._end_share(lease, process.row)
            if lease.owner is process and lease.rows:
                self._begun(lease)
                self._orphans[lease.name] = lease
        return n_leases, len(reservations)

    def orphans(self, process: Process) -> list[LeaseId]:
        """Orphaned leases of which this process holds a share, at most `MAX_NAMED_LEASES`."""
        if not self._orphans:  # the usual case; every ping calls this
            return []
        held = (
            name
            for name, lease in self._orphans.items()
            if lease.owner.group is process.group and process.row in lease.rows
        )
        return sorted(itertools.islice(held, MAX_NAMED_LEASES))

    def _release_all(self, lease: Lease) -> None:
        self._pool.release(lease.ticket, -1)
        for row in list(lease.rows):
            self._end_share(lease, row)

    def _end_share(self, lease: Lease, row: int) -> None:
        owner = lease.owner
        lease.rows.discard(row)
        if row == owner.row or not lease.rows:
            owner.grants.pop(lease.name[1], None)
        if not lease.rows:
            self._begun(lease)
            self._leases.pop(lease.name, None)
            self._orphans.pop(lease.name, None)

    def _begun(self, lease: Lease) -> None:
        """Record that the lease is in use or has ended, so that it is not revoked."""
        self._waiting.pop(lease.name, None)
        self.n_revoked -= lease.revoked
        lease.revoked = False

    # --- revoked -----------------------------------------------------------------------------------------

    def revoke(self, need_bytes: int) -> int:
        """Revoke the oldest unused leases, as many as it takes to lease `need_bytes` more. Returns their number.

        Their owners are notified at once, and again in each reply to their pings.  Nothing waits for the owners, and
        bytes become free only when they release the leases.
        """
        oldest = list(itertools.islice(self._waiting.values(), MAX_REVOKES))
        n_chosen = self._pool.leases_to_end([lease.ticket for lease in oldest], need_bytes) if oldest else 0
        owners: dict[bytes, Process] = {}
        for lease in oldest[:n_chosen]:
            del self._waiting[lease.name]
            lease.revoked = True
            owners[lease.owner.session] = lease.owner
        self.n_revoked += n_chosen
        for owner in owners.values():
            if owner.line is not None:
                owner.line.send(encode(Pong(0, self._epoch, [], self.revoked(owner))))
        self._counters.revoked_leases += n_chosen
        return n_chosen

    def revoked(self, process: Process) -> list[int]:
        """Lookups of this process whose leases are revoked, oldest first, at most `MAX_NAMED_LEASES`."""
        if not self.n_revoked:
            return []
        asked_back = (
            seq for seq, grant in process.grants.items() if isinstance(grant, Lease) and grant.revoked
        )
        return list(itertools.islice(asked_back, MAX_NAMED_LEASES))

    def validate(self) -> None:
        """Assert the invariants (tests call it after every step)."""
        revoked = {name for name, lease in self._leases.items() if lease.revoked}
        assert len(revoked) == self.n_revoked
        assert not revoked & self._waiting.keys()
        assert self._waiting.keys() <= self._leases.keys()
        assert all(lease.rows for lease in self._leases.values())
        assert self._orphans.keys() <= self._leases.keys() - revoked - self._waiting.keys()
