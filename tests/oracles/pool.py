"""The pool's promises in plain Python: no policy, no slabs, only who may touch which bytes.

The model is told every call and its answer, and raises AssertionError where the answer breaks a promise.  It learns
from the pool only the free choices of the pool (where an extent lies, which chunk is evicted), and checks that the
choice was allowed:

- bytes that a process or an operation may touch are not handed out;
- only unused chunks are evicted, never one that has descendants, never one of the chain that is being stored;
- no chunk is evicted for another one of its size while an unused tail in such an extent could be;
- no tenant stores beyond its quota at the cost of what another has within its own;
- nothing is evicted for a chunk whose parent is missing, unless L2 may have the parent;
- a key is READY exactly from its commit (or its verification) until it is evicted, dropped or removed;
- a refusal names a true reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.types import Extent
from tests.oracles.pool_chunk import PAGE, Chunk, round_up

SERVER_ROW = 0


@dataclass
class Row:
    session: bytes
    old: bool = False


@dataclass
class Lease:
    rows: set[int]
    keys: list[bytes]
    chunks: list[Chunk]


@dataclass
class Reservation:
    row: int
    items: dict[int, Chunk]


class PoolModel:
    def __init__(self, extents_bytes: int, entry_capacity: int, max_session_share: int) -> None:
        self.extents_bytes = extents_bytes
        self.entry_capacity = entry_capacity
        self.row_limit = extents_bytes // max_session_share
        self.index: dict[bytes, Chunk] = {}
        self.quarantine: list[Chunk] = []
        self.rows: dict[int, Row] = {}
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        self.quotas: dict[int, int] = {}
        self.has_l2 = False
        self.refused: set[bytes] = set()
        """Keys that this server refused and that have not been reserved since."""

    # what can be asked

    def chunks(self) -> Iterable[Chunk]:
        return itertools.chain(self.index.values(), self.quarantine)

    def state_of(self, key: bytes) -> str:
        return self.index[key].state if key in self.index else "free"

    def ready_prefix(self, keys: Sequence[bytes]) -> int:
        return len(list(itertools.takewhile(lambda key: self.state_of(key) == "ready", keys)))

    def leased_bytes(self) -> int:
        return sum(chunk.bytes for chunk in self.chunks() if chunk.leases)

    def row_bytes(self, row: int) -> int:
        return sum(
            chunk.bytes
            for chunk in self.chunks()
            if chunk.owner == row and chunk.state in ("reserved", "quarantined")
        )

    def tenant_bytes(self, tenant: int) -> int:
        return sum(chunk.bytes for chunk in self.index.values() if chunk.tenant == tenant)

    def state_bytes(self, state: str) -> int:
        return sum(chunk.bytes for chunk in self.chunks() if chunk.state == state)

    def tails(self) -> dict[str, int]:
        """What the pool counts of tails."""
        tails = [chunk for chunk in self.chunks() if chunk.tail_bytes]
        return {
            "tails.entries": len(tails),
            "tails.record_bytes": sum(chunk.extent.length_bytes for chunk in tails),
            "tails.extent_bytes": sum(chunk.bytes for chunk in tails),
        }

    def ancestors(self, key: bytes | None) -> list[bytes]:
        result = []
        while key is not None and key in self.index:
            result.append(key)
            key = self.index[key].parent
        return result

    def evictable(self, own: set[bytes]) -> list[bytes]:
        """Return the unused leaves that are not in the chain `own`."""
        parents = {chunk.parent for chunk in self.index.values()}
        return [c.key for c in self.index.values() if not c.in_use and c.key not in own | parents]

    def writable(self, row: int) -> list[Chunk]:
        """Return the extents that a process may still be writing to."""
        mine = [chunk for r in self.reservations.values() if r.row == row for chunk in r.items.values()]
        return mine + [chunk for chunk in self.chunks() if row in chunk.old_writers]

    # rows

    def claimed(self, session: bytes, row: int) -> None:
        known = [r for r, info in self.rows.items() if info.session == session]
        assert known == [row] if known else row not in self.rows
        self.rows.setdefault(row, Row(session))

    def gone(self, row: int) -> None:
        for ticket in [t for t, lease in self.leases.items() if row in lease.rows]:
            self._end_share(ticket, row)
        for ticket in [t for t, reservation in self.reservations.items() if reservation.row == row]:
            reservation = self.reservations.pop(ticket)
            for chunk in reservation.items.values():
                self._drop(chunk)
        self._forget_old(row)
        for chunk in self.quarantine:
            if chunk.owner == row:
                chunk.owner = None
        del self.rows[row]

    def quiesced(self, row: int) -> None:
        self._forget_old(row)
        self.rows[row].old = False

    def _forget_old(self, row: int) -> None:
        for chunk in list(self.chunks()):
            chunk.old_readers.discard(row)
            chunk.old_writers.discard(row)
            self._settle(chunk)

    # leases

    def leased(
        self,
        keys: Sequence[bytes],
        rows: set[int],
        ticket: int,
        extents: Sequence[Extent],
        unverified: int,
        short_bytes: int,
    ) -> None:
        limit = self.extents_bytes // 2
        budget = limit - self.leased_bytes()
        count = waiting = 0
        for key in keys:
            state = self.state_of(key)
            if state not in ("ready", "unverified"):
                break
            waiting += state == "unverified"
            if waiting:
                continue
            chunk = self.index[key]
            more = 0 if chunk.leases or key in keys[:count] else chunk.bytes
            if more > budget:
                break
            budget -= more
            count += 1
        assert len(extents) == count, f"leased {len(extents)} chunks, {count} could be"
        assert unverified == waiting
        assert (ticket != 0) == (count > 0)
        prefix = self.ready_prefix(keys)
        if count == prefix:
            assert short_bytes == 0
        else:
            wanted = [self.index[key].bytes for key in keys[:prefix]]
            new = [self.index[key].bytes for key in keys[:prefix] if not self.index[key].leases]
            assert short_bytes == self.leased_bytes() + sum(new) - max(limit, sum(wanted))
        if not count:
            return
        assert ticket not in self.leases
        chunks = [self.index[key] for key in keys[:count]]
        for chunk, extent in zip(chunks, extents, strict=True):
            assert chunk.extent == extent
            if not chunk.leases:
                chunk.recorded_rows = chunk.old_readers | chunk.old_writers
            chunk.recorded_rows |= rows
            chunk.leases[ticket] = chunk.leases.get(ticket, 0) + 1
        self.leases[ticket] = Lease(set(rows), list(keys[:count]), chunks)

    def released(self, ticket: int, row: int, answer: bool) -> None:
        lease = self.leases.get(ticket)
        held = lease is not None and (row < 0 or row in lease.rows)
        assert answer == held
        if lease is None or not held:
            return
        for one in list(lease.rows) if row < 0 else [row]:
            self._end_share(ticket, one)

    def _end_share(self, ticket: int, row: int) -> None:
        lease = self.leases[ticket]
        lease.rows.discard(row)
        if lease.rows:
            return
        del self.leases[ticket]
        for chunk in lease.chunks:
            chunk.leases.pop(ticket, None)
        for chunk in lease.chunks:
            self._settle(chunk)

    # reservations

    def evicted(self, keys: Iterable[bytes], protected: set[bytes], extent_bytes: int = 0) -> None:
        """Take the keys that the pool evicted during a call, in their order.

        `extent_bytes`: size of the extents that the call needed; 0 if it needed none.  For extents of another size than
        a chunk's, neighbours may leave together, wherever tails lie.
        """
        for key in keys:
            chunk = self.index.get(key)
            assert chunk is not None, "an event names a key that the index did not have"
            assert not chunk.in_use, f"evicted while in use: {chunk}"
            assert key not in protected, "evicted its own chain"
            children = [other.key for other in self.index.values() if other.parent == key]
            assert not children, "evicted before its descendants"
            if not chunk.tail_bytes and extent_bytes in (0, chunk.bytes):
                for other in self.index.values():
                    # Of another tenant, a quota may protect tails.
                    spared = other.tail_bytes == chunk.bytes and other.tenant == chunk.tenant
                    assert not spared or other.in_use, f"evicted before {other}"
            del self.index[key]

    def own_chain(self, keys: Sequence[bytes], parent: bytes | None) -> set[bytes]:
        own = {key for key in keys if key in self.index}
        return own.union(*(self.ancestors(key) for key in [*own, parent]))

    def reserved(
        self,
        keys: Sequence[bytes],
        parent: bytes | None,
        record_bytes: int,
        row: int,
        tenant: int,
        evicted: Sequence[bytes],
        answer: tuple[int, bytes, Sequence[Extent]],
        tail_bytes: int = 0,
    ) -> None:
        """`tail_bytes`: what the caller asked for as the size of a tail's extent; 0 if the keys are those of chunks."""
        ticket, outcomes, extents = answer
        present_before = set(self.index)
        own = self.own_chain(keys, parent)
        orphan = parent is not None and parent not in self.index
        refused_before = orphan and row != SERVER_ROW and parent in self.refused
        assert not (orphan and evicted and (refused_before or not self.has_l2)), "evicted for an orphan"
        extent_bytes = max(round_up(record_bytes), round_up(tail_bytes))
        lost = [self.index[key] for key in evicted if key in self.index]
        self.evicted(evicted, own, extent_bytes)
        self._check_quotas(tenant, extent_bytes, lost)
        items: dict[int, Chunk] = {}
        previous = parent if parent in self.index else None
        refusal = None
        for i, key in enumerate(keys):
            outcome = ReserveOutcome(outcomes[i])
            if key in self.index:
                expected = (
                    ReserveOutcome.IN_FLIGHT
                    if self.index[key].state == "reserved"
                    else ReserveOutcome.PRESENT
                )
                assert outcome == expected, f"{outcome!r} is {expected!r}"
                chunk = self.index[key]
                if previous and previous != key and not chunk.parent and key not in self.ancestors(previous):
                    chunk.parent = previous
                previous = key
                continue
            assert key not in present_before, "a key of the chain itself was evicted"
            if outcome == ReserveOutcome.RESERVED:
                assert refusal is None, "reserved after a refusal"
                assert not refused_before, "reserved behind a refused chunk"
                self.refused.discard(key)
                chunk = Chunk(key, extents[i], "reserved", previous, tenant, owner=row)
                chunk.tail_bytes = extent_bytes if tail_bytes else 0
                self._check_extent(chunk, extent_bytes, record_bytes)
                self._check_admission(row, extent_bytes)
                self.index[key] = chunk
                items[i] = chunk
                previous = key
                continue
            assert extents[i] == Extent(0, 0, 0, 0)
            if row != SERVER_ROW:
                self.refused.add(key)
            if outcome == ReserveOutcome.PARENT_ABSENT:
                assert orphan
            elif refusal is None:
                assert not refused_before or outcome == ReserveOutcome.TOO_LARGE
                self._check_refusal(outcome, row, tenant, extent_bytes, own, bool(items))
            assert refusal in (None, outcome)
            refusal = outcome
            previous = None
        assert (ticket != 0) == bool(items)
        if items:
            assert ticket not in self.reservations
            self.reservations[ticket] = Reservation(row, items)

    def _check_extent(self, chunk: Chunk, extent_bytes: int, record_bytes: int) -> None:
        begin, end = chunk.span
        assert chunk.extent.length_bytes == record_bytes
        assert begin % PAGE == 0 and begin >= 0 and end <= self.extents_bytes
        for other in self.chunks():
            assert end <= other.span[0] or other.span[1] <= begin, f"handed out the bytes of {other}"
            assert chunk.extent.entry != other.extent.entry

    def _check_quotas(self, tenant: int, extent_bytes: int, lost: Sequence[Chunk]) -> None:
        """What a tenant stores beyond its quota takes others to no less than theirs, but for part of a chunk."""
        if self.tenant_bytes(tenant) + extent_bytes <= self.quotas.get(tenant, -1):
            return
        for chunk in lost:
            least = self.quotas.get(chunk.tenant, -1) - max(one.bytes for one in lost)
            assert chunk.tenant == tenant or self.tenant_bytes(chunk.tenant) > least, f"took {chunk}"

    def _check_admission(self, row: int, extent_bytes: int) -> None:
        held = self.row_bytes(row)
        assert row == 0 or held == 0 or held + extent_bytes <= self.row_limit

    def _check_refusal(
        self,
        outcome: ReserveOutcome,
        row: int,
        tenant: int,
        extent_bytes: int,
        own: set[bytes],
        some_reserved: bool,
    ) -> None:
        held = self.row_bytes(row)
        over_limit = row > 0 and held > 0 and held + extent_bytes > self.row_limit
        quota = self.quotas.get(tenant, -1)
        others_in_use = any(c.in_use for c in self.chunks() if c.key not in own)
        match outcome:
            case ReserveOutcome.TOO_LARGE:
                assert extent_bytes > self.extents_bytes
            case ReserveOutcome.SESSION_LIMIT:
                assert over_limit
            case ReserveOutcome.QUOTA:
                assert self.tenant_bytes(tenant) + extent_bytes > quota
                assert any(quota > 0 for other, quota in self.quotas.items() if other != tenant)
            case ReserveOutcome.POOL_PINNED:
                assert others_in_use
            case ReserveOutcome.CHAIN_EXCEEDS_POOL:
                assert own or some_reserved
            case ReserveOutcome.ENTRIES_FULL:
                assert len(self.index) + len(self.quarantine) == self.entry_capacity
                assert not self.evictable(own)
            case _:
                raise AssertionError(f"{outcome!r} for a key that the index does not have")
        if outcome != ReserveOutcome.TOO_LARGE:
            assert extent_bytes <= self.extents_bytes
        if outcome not in (ReserveOutcome.TOO_LARGE, ReserveOutcome.SESSION_LIMIT):
            assert not over_limit

    def committed(
        self, ticket: int, indices: Sequence[int], contents: Sequence[bytes | None], outcomes: bytes
    ) -> None:
        """`contents` has the record that was written for each index, None for one that is not sound."""
        reservation = self.reservations.get(ticket)
        for index, content, outcome in zip(indices, contents, outcomes, strict=True):
            chunk = reservation.items.pop(index, None) if reservation else None
            if chunk is None:
                assert outcome == CommitOutcome.NOT_RESERVED
            elif content is None:
                assert outcome == CommitOutcome.BAD_RECORD
                self._drop(chunk)
            else:
                assert outcome == CommitOutcome.COMMITTED
                chunk.state, chunk.content, chunk.owner = "ready", content, None
        if reservation and not reservation.items:
            del self.reservations[ticket]

    def aborted(self, ticket: int, indices: Sequence[int] | None, count: int) -> None:
        reservation = self.reservations.get(ticket)
        if reservation is None:
            assert count == 0
            return
        given = set(reservation.items) if indices is None else set(indices) & set(reservation.items)
        assert count == len(given)
        for index in given:
            self._drop(reservation.items.pop(index))
        if not reservation.items:
            del self.reservations[ticket]

    # removals from the index

    def removed(self, keys: Iterable[bytes]) -> None:
        """An administrator removed keys: only unused chunks may be among them."""
        for key in keys:
            chunk = self.index[key]
            assert not chunk.in_use
            assert chunk.state in ("ready", "unverified")
            self._drop(chunk)

    def cleared(self, keys: Iterable[bytes]) -> None:
        """An administrator cleared keys, whether or not they are used."""
        for key in keys:
            assert self.index[key].state in ("ready", "unverified")
            self._drop(self.index[key])

    def found_bad(self, key: bytes) -> None:
        chunk = self.index[key]
        assert not chunk.sound, "dropped a sound chunk"
        self._drop(chunk)

    def _drop(self, chunk: Chunk) -> None:
        del self.index[chunk.key]
        for other in self.index.values():
            if other.parent == chunk.key:
                other.parent = None
        if chunk.state != "reserved":
            chunk.owner = None
        chunk.state = "quarantined"
        chunk.parent = None
        self.quarantine.append(chunk)
        self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        """End a quarantine once no process or operation can touch the bytes."""
        used = chunk.leases or chunk.holds or chunk.old_readers or chunk.old_writers
        if chunk.state == "quarantined" and not used and any(chunk is one for one in self.quarantine):
            self.quarantine = [one for one in self.quarantine if one is not chunk]

    # holds

    def hold_dropped(self, chunk: Chunk, hold: int) -> None:
        chunk.holds.discard(hold)
        self._settle(chunk)

    # a restart

    def crashed_and_adopted(self) -> None:
        """The server died and another one adopted the pool; the dead server's holds and tickets have ended."""
        self.refused.clear()
        for chunk in self.chunks():
            if chunk.leases:
                chunk.old_readers |= chunk.recorded_rows & set(self.rows)
        for reservation in self.reservations.values():
            for chunk in reservation.items.values():
                if reservation.row != SERVER_ROW:
                    chunk.old_writers.add(reservation.row)
        self.leases.clear()
        self.reservations.clear()
        for chunk in self.chunks():
            chunk.leases.clear()
            chunk.holds.clear()
        for chunk in list(self.quarantine):
            if not chunk.old_writers and not chunk.old_readers:
                self._settle(chunk)
            elif chunk.owner not in chunk.old_writers:
                chunk.owner = None
        for chunk in list(self.index.values()):
            if chunk.state == "reserved":
                self._drop(chunk)
            else:
                chunk.state = "unverified"
        for row in self.rows.values():
            row.old = True
        # The caller sets the quotas again.
        self.quotas.clear()

    def verified(self, keys: Iterable[bytes], good: int, bad: int) -> None:
        waiting = [self.index[key] for key in dict.fromkeys(keys) if self.state_of(key) == "unverified"]
        assert good == sum(chunk.sound for chunk in waiting)
        assert bad == sum(not chunk.sound for chunk in waiting)
        for chunk in waiting:
            if chunk.sound:
                chunk.state = "ready"
            else:
                self.found_bad(chunk.key)
