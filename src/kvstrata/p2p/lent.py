"""Records of L1 that the server itself leases, for readers or for claims, and how many bytes they keep.

One thread at a time uses a LentPool; no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.errors import BadRequest
from kvstrata.types import EXTENT, KEY_BYTES, SERVER_ROW

if TYPE_CHECKING:
    from kvstrata.native.core import Pool

ABSENT, LIMIT = "absent", "limit"


class Taken(NamedTuple):
    """Leading records of a run that the pool keeps from now on, until `LentPool.give_back`."""

    ticket: int
    """The pool's number of this lease."""
    entries: list[int]
    extents: bytes
    n_bytes: int


class LentPool:
    """See the module."""

    def __init__(self, pool: Pool, share: float) -> None:
        """`share`: the part that may be lent."""
        self.leased_bytes = 0
        """Bytes of the distinct records that are leased."""
        self._pool = pool
        self.limit_bytes = int(pool.extents_bytes * share)
        """Maximum number of bytes that may be lent."""
        self._shares: dict[int, list[int]] = {}
        """Pool entry → [number of leases on it, its bytes]."""

    @property
    def address(self) -> int:
        """Where the pool's extents begin in this process."""
        return self._pool.extents_address

    def take(
        self,
        keys: bytes,
        n_slices: int,
        identity: bytes = b"",
        spans: Sequence[int] = (),
        *,
        unread: bool = False,
    ) -> tuple[Taken | None, str]:
        """Lease leading chunks: None if there are none, and the reason why not all of them ("" if all).

        The other arguments are those of `Pool.lease`.
        """

        def lease(keys: bytes) -> tuple[int, int, bytes, int, int]:
            return self._pool.lease(keys, n_slices, [SERVER_ROW], identity, spans, again=True, unread=unread)

        ticket, n_chunks, extents, _, short_bytes = lease(keys)
        if not ticket:
            return None, LIMIT if short_bytes else ABSENT
        room, fits, more = self.limit_bytes - self.leased_bytes, 0, 0
        for index, (_, length, entry, _, _) in enumerate(EXTENT.iter_unpack(extents)):
            if length and entry not in self._shares:
                more += length
                if more > room:
                    break
            if (index + 1) % n_slices == 0:
                fits = index + 1
        if fits < n_chunks * n_slices:
            self._pool.release(ticket)
            if not fits:
                return None, LIMIT
            # The same records are leased again, unless another thread has removed some since the release.
            ticket, n_chunks, extents, _, _ = lease(keys[: fits * KEY_BYTES])
            if not ticket:
                return None, ABSENT
            reason = LIMIT
        else:
            reason = "" if len(keys) == fits * KEY_BYTES else LIMIT if short_bytes else ABSENT
        records = [(entry, length) for _, length, entry, _, _ in EXTENT.iter_unpack(extents) if length]
        for entry, length in records:
            share = self._shares.setdefault(entry, [0, length])
            if not share[0]:
                self.leased_bytes += length
            share[0] += 1
        entries = [entry for entry, _ in records]
        return Taken(ticket, entries, extents, sum(length for _, length in records)), reason

    def take_each(self, keys: Sequence[bytes]) -> tuple[Taken | None, str, bytes]:
        """As `take`, of each key that is there; the last item has an extent for each key, zero for those not leased."""
        there = [number for number, key in enumerate(keys) if self._pool.peek(key)]
        taken, reason = self.take(b"".join(keys[number] for number in there), 1) if there else (None, ABSENT)
        if taken is None:
            return None, reason, b""
        extents = [bytes(EXTENT.size)] * len(keys)
        for number, extent in zip(there, split_extents(taken.extents), strict=False):
            extents[number] = extent
        return taken, reason or (ABSENT if len(there) < len(keys) else ""), b"".join(extents)

    def give_back(self, taken: Taken) -> None:
        """Let the pool do with these records what it likes. Called once for each `take`."""
        self._pool.release(taken.ticket)
        for entry in taken.entries:
            share = self._shares[entry]
            share[0] -= 1
            if not share[0]:
                self.leased_bytes -= share[1]
                del self._shares[entry]


class LentRecords:
    """The records that a lease keeps."""

    __slots__ = ("_keepers", "_packed", "expires_s", "lent", "taken")

    def __init__(self, lent: LentPool, taken: Taken, expires_s: float) -> None:
        self.lent = lent
        self.taken = taken
        self.expires_s = expires_s
        self._keepers = 1
        """The lease itself until it ends, and each `keep` without its `let_go`."""
        self._packed: frozenset[bytes] = frozenset()

    def named(self, packed: list[bytes]) -> list[tuple[bytes, int]]:
        """The packed extents of some of the records, each with the record's address.

        Raises BadRequest if a record is not in this lease or is named twice.
        """
        if not self._packed:
            self._packed = frozenset(split_extents(self.taken.extents))
        if not packed or len(set(packed)) < len(packed) or not self._packed.issuperset(packed):
            raise BadRequest(
                f"extents: {len(packed)} extents; name one or more of this lease's, each once",
                field="extents",
            )
        return [(one, self.lent.address + EXTENT.unpack(one)[0]) for one in packed]

    def keep(self) -> None:
        """Keep all records in place until one more `let_go`, even if the lease ends."""
        self._keepers += 1

    def let_go(self) -> None:
        """The lease has ended, or a `keep` is over; after the last of these the pool may remove the records."""
        self._keepers -= 1
        if not self._keepers:
            self.lent.give_back(self.taken)


def split_extents(packed: bytes) -> list[bytes]:
    """Packed extents, one by one."""
    return [packed[at : at + EXTENT.size] for at in range(0, len(packed), EXTENT.size)]
