"""The L1 pool in shared memory: `Pool` for the server, `IndexReader` and `ExtentsMap` for its clients, `LentHold` for
adapter hosts.

States of an entry: FREE → RESERVED (one session writes, nobody sees it) → READY (visible); UNVERIFIED (adopted
from an earlier server, not yet checked); QUARANTINED (out of the index, but somebody may still touch the bytes).

1. An extent is given out again only when nobody can touch its bytes any more: no hold, no lease, no
   reservation, and no process of an earlier epoch that is neither gone nor quiesced.  No clock is involved.
2. Only `commit` makes bytes visible, and only an unpinned leaf of the prefix tree (or a whole old slab with its
   descendants) is evicted to make room.
3. Keys are rows of 32 bytes in one bytes-like object; a batch of another length is a ValueError.
4. Every method may be called from any thread.

After `close()` every method raises PoolError with reason `closed`, or answers like an empty pool; holds stay
valid until they are dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypedDict

from kvstrata.errors import SegmentError

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

MAX_SESSIONS: Final[int]
"""Processes that can be attached to a pool at a time."""
STATES: Final[tuple[str, ...]]
OUTCOMES: Final[tuple[str, ...]]

class PoolError(SegmentError):
    """The pool refused a call. `reason` is a stable word: sessions_full, closed, not_found, internal, …"""

    reason: str
    def __init__(self, message: str, *, reason: str = "") -> None: ...

class PoolFormatError(SegmentError):
    """The files hold no pool that this version can adopt; `field` names what differs. Nothing was changed."""

    found: int
    expected: int
    def __init__(self, field: str, found: int, expected: int) -> None: ...

class Row(TypedDict):
    """An attached process. `old`: claimed in an earlier epoch and not quiesced yet.

    `registers_memory`: a device may access the extents on its behalf.
    """

    row: int
    session: bytes
    group: bytes
    pid: int
    old: bool
    registers_memory: bool

class Hold:
    """A reference on an extent: while it lives, the bytes belong to `key`. Comes from `Pool.hold`.

    Dropped by `drop()`, by leaving a `with` block, or with the object; any thread may do it.  The address stays
    mapped as long as the object (or a view of it) lives, but after `drop()` the bytes may become another chunk's.
    """

    @property
    def key(self) -> bytes: ...
    @property
    def offset(self) -> int:
        """Bytes from the start of the extents file."""
    @property
    def length(self) -> int:
        """Bytes of the record."""
    @property
    def generation(self) -> int:
        """Changes each time the entry gets another extent."""
    @property
    def tenant(self) -> int:
        """Number of the tenant for whom the bytes are counted."""
    @property
    def address(self) -> int:
        """Where the record lies in this process."""
    @property
    def is_held(self) -> bool: ...
    def drop(self) -> None:
        """Idempotent."""
    def view(self) -> memoryview:
        """The record's bytes; writable only for an item of a reservation. PoolError after drop()."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class Pool:
    """The one writer of a segment. Descriptors passed in stay the caller's and may be closed afterwards."""

    @staticmethod
    def create(
        index_fd: int,
        extents_fd: int,
        *,
        extents_bytes: int,
        entry_capacity: int,
        policy: str = "LRU",
        watermark: tuple[float, float] | None = None,
        max_session_share: int = 8,
    ) -> Pool:
        """Makes a pool in two empty files and sizes them.

        `extents_bytes`: a multiple of 4096.  `entry_capacity`: extents at most (144 bytes of index each).
        `policy`: LRU, ARC, S3FIFO or noop (never evicts).  `watermark`: (share of the pool at which
        `evict_to_watermark` acts, share of the used bytes that it evicts then).  One row may hold reserved or
        quarantined at most 1/`max_session_share` of the pool, but always one extent.
        ValueError names a bad option; OSError when a file cannot be sized or mapped.
        """
    @staticmethod
    def adopt(
        index_fd: int,
        extents_fd: int,
        *,
        policy: str = "LRU",
        watermark: tuple[float, float] | None = None,
        max_session_share: int = 8,
        extents_bytes: int = 0,
        entry_capacity: int = 0,
    ) -> Pool:
        """Takes over the pool that another server left, in a new epoch.

        Committed entries become UNVERIFIED; what processes of earlier epochs may touch is kept from eviction and
        reuse until `row_gone` or `row_quiesced`.  Quotas have to be set again.  Sizes other than 0 must be those
        of the files.
        PoolFormatError when the files are no pool of this format; damage inside costs the entries it concerns.
        """
    @property
    def epoch(self) -> int: ...
    @property
    def pool_id(self) -> bytes: ...
    @property
    def extents_bytes(self) -> int: ...
    @property
    def extents_address(self) -> int:
        """The server's own mapping of the extents, valid until the pool and its last hold are gone."""
    @property
    def closed(self) -> bool: ...
    def claim_row(self, session: bytes, group: bytes, pid: int, registers_memory: bool = False) -> int:
        """Row of a session (16-byte ids): its old one where it has one. PoolError `sessions_full`.

        `registers_memory` stays true for a row that said so once.
        """
    def rows(self) -> list[Row]: ...
    def row_gone(self, row: int) -> None:
        """The process is dead: ends its reservations, its shares of leases, its quarantine, and frees the row."""
    def row_stranded(self, row: int) -> int:
        """As `row_gone`, where a device may still write on the process's behalf.

        What is quarantined because of the row stays so; its bytes are returned.  When there are any, the row stays
        claimed, over restarts too, until `row_gone`.
        """
    def row_quiesced(self, row: int) -> None:
        """The live process touches nothing of earlier epochs any more."""
    def peek(self, keys: Buffer, n_slices: int = 1) -> int:
        """Leading chunks READY in all slices. Takes no lock."""
    def lease(self, keys: Buffer, n_slices: int, rows: list[int]) -> tuple[int, int, bytes, int, int]:
        """(ticket, n_chunks, extents, unverified, short_bytes): pins the leading READY chunks for these rows.

        `extents`: n_chunks × n_slices packed `types.EXTENT`.  Ticket 0 when n_chunks is 0.  Trimmed where leased
        bytes would pass half of the pool; `short_bytes` is then what other leases would have to give back for the
        rest of the prefix.  `unverified` counts entries that `verify` must see before a longer answer is possible.
        Counts as a use of the chunks.
        """
    def release(self, ticket: int, row: int = -1) -> bool:
        """Ends one row's share of a lease, or all of it. False when there is no such share (any more)."""
    def leases_to_end(self, tickets: Sequence[int], need_bytes: int) -> int:
        """How many of these tickets, in this order, would have to end until `need_bytes` more can be leased.

        Up to the last that frees anything if that is never enough.  After 8,192 entries the search ends with those
        looked at.  Each ticket must be named once.  Changes nothing.
        """
    def verify(self, keys: Buffer) -> tuple[int, int]:
        """(ok, bad): checks the UNVERIFIED entries among the keys; bad ones are dropped. Long, without the GIL."""
    def verify_next(self, max_bytes: int) -> int:
        """Checks unverified entries, last used first, at most about `max_bytes`; returns how many remain."""
    def mark_bad(self, key: Buffer) -> bool:
        """Somebody saw a wrong checksum: checks the record; True when it was bad and was dropped."""
    def reserve(
        self, keys: Buffer, parent: bytes, record_bytes: int, row: int, identity: bytes, tenant: int = 0
    ) -> tuple[int, bytes, bytes]:
        """(ticket, outcomes, extents): extents to write these chunks of one chain into, in order.

        `parent`: storage key before the first, or b"".  `identity`: root that the records must name.  One
        wire.ReserveOutcome per key and one packed `types.EXTENT` (zeros where not RESERVED).  Evicts at once
        what must go, never the chain itself.  After the first refusal only keys that are present are answered
        otherwise.  Ticket 0 when nothing was reserved.
        """
    def commit(self, ticket: int, indices: list[int], check: bool = True) -> bytes:
        """One wire.CommitOutcome per index; the items' reservation ends, whatever the outcome.

        With `check` the record's header must be sound and name the key, the identity and exactly the reserved
        length, with its checksums computed; otherwise BAD_RECORD, and the extent is given back.
        """
    def abort(self, ticket: int, indices: list[int] | None = None) -> int:
        """Gives items back (None: all that are left); what is still held stays quarantined until then."""
    def hold(self, key: Buffer | None = None, reserved_ticket: int = 0, index: int = -1) -> Hold | None:
        """A hold on a READY entry by key, or on an item of a reservation; None when there is none."""
    def remove(self, keys: Buffer, returned: bool = False) -> int:
        """Drops READY and UNVERIFIED entries that nobody uses; returns how many.

        `returned`: they were read from another instance and were not to stay (their event says so).
        """
    def clear(self, tenant: int = -1, identity: bytes = b"") -> tuple[int, int]:
        """Drops everything (of one tenant, of one identity root); returns how many entries, and how many it kept.

        The extent of a dropped entry that is in use is free when its uses have ended.  Kept is what the server itself
        leases: for a pin, or for another instance that reads it.
        """
    def cleared_in_use(self) -> tuple[int, int]:
        """(held, leased): entries that clears dropped and that somebody still uses."""
    def ready_tags(self, first: int, max_entries: int) -> tuple[bytes, int]:
        """(the first 8 bytes of each READY key among the next entries from number `first` on, where to go on).

        0 when there are no more.  About 10 ns an entry, under the lock.  What changes meanwhile is in the events.
        """
    def set_quota(self, tenant: int, quota_bytes: int) -> None:
        """Bytes that a tenant may hold, -1 for no limit. Over it, its own oldest chunks make room."""
    def evict_to_watermark(self) -> int:
        """Bytes evicted; 0 below the watermark."""
    def victims_preview(self, need_bytes: int) -> list[bytes]:
        """READY keys that would go next, in about that order, at most 4096 of each size. Changes nothing."""
    def events(self) -> list[tuple[int, bytes, int]]:
        """(kind, key, bytes) since the last call; `kind` is a kvstrata.types.PoolEvent."""
    @property
    def events_lost(self) -> int:
        """Events that were overwritten because nobody took them (65,536 are kept)."""
    def stats(self) -> dict[str, Any]:
        """Bytes and entries by state, classes, evictions, refusals, tenants, fragmentation, …"""
    def heartbeat(self) -> None:
        """Tells clients that the server lives; they answer every peek with 0 a second after the last one."""
    def set_has_l2(self, has_l2: bool) -> None: ...
    def retry_missing(self) -> int:
        """Asks again for memory of L1 that the file system refused; returns the bytes that are missing still."""
    def prefault_start(self, threads: int) -> None:
        """Faults the extents in by threads of its own; PoolError when it was started before."""
    @property
    def prefaulted_bytes(self) -> int: ...
    def close(self) -> None:
        """Ends prefaulting and all use; nothing writes to the index any more. Does not wait for holds. Idempotent."""
    def validate(self) -> None:
        """PoolError `internal` naming the broken invariant. Looks at everything: for tests."""

class IndexReader:
    """A client's read-only mapping of the index; not inherited by forks. The descriptor may be closed after."""

    def __init__(self, index_fd: int) -> None:
        """PoolFormatError when the file is no index of this format."""
    def peek(self, keys: Buffer, n_slices: int = 1) -> int:
        """Leading chunks READY in all slices; 0 when the server's heartbeat is older than 1 s.

        Microseconds, asks nobody, and promises nothing: an answer is worth a lookup, not a read.
        """
    @property
    def epoch(self) -> int: ...
    @property
    def pool_id(self) -> bytes: ...
    @property
    def heartbeat_age_s(self) -> float: ...
    @property
    def has_l2(self) -> bool: ...
    @property
    def extents_bytes(self) -> int: ...
    def close(self) -> None:
        """Only while no peek runs. Idempotent; every use afterwards is a PoolError."""

class ExtentsMap:
    """A client's mapping of the extents, readable and writable; not inherited by forks."""

    length: int
    def __init__(self, extents_fd: int, length: int) -> None:
        """PoolFormatError when the file is shorter than `length`."""
    @property
    def address(self) -> int: ...
    def view(self, offset: int, length: int) -> memoryview:
        """ValueError when the extent leaves the map."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def close(self) -> None:
        """BufferError while views exist. Copies by address must have ended. Idempotent."""

class LentHold:
    """A hold as an adapter host has it: the pool's owner keeps the real one until it hears of the drop.

    Has what `Hold` has. `dropped` is called once, by `drop()`, by leaving a `with` block, or with the object, in
    whatever thread that happens; it must not raise.
    """

    key: bytes
    offset: int
    length: int
    address: int
    def __init__(
        self,
        extents: ExtentsMap,
        key: bytes,
        offset: int,
        length: int,
        *,
        writable: bool,
        dropped: Callable[[], None],
    ) -> None:
        """ValueError when the extent leaves the map."""
    @property
    def generation(self) -> int:
        """Not known here: 0."""
    @property
    def is_held(self) -> bool: ...
    def drop(self) -> None:
        """Idempotent."""
    def view(self) -> memoryview:
        """The record's bytes; writable only for a load. PoolError after drop()."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
