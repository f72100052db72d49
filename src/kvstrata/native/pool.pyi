"""The L1 pool in shared memory, for its server. Clients map it by `native.index`, adapter hosts by `native.lent`.

1. An extent is given out again only when nobody can touch its bytes any more: no hold, lease or reservation is left,
   and every process of an earlier epoch that may touch them is gone or has quiesced.  No clock is involved.
2. Only `commit` makes bytes visible, and only an unpinned leaf of the prefix tree (or a whole old slab with its
   descendants) is evicted to make room.
3. Keys are concatenated in one bytes-like object, 32 bytes each; any other length raises ValueError.
4. Every method may be called from any thread.

After `close()` every method raises PoolError with reason `closed`, or answers like an empty pool; holds stay
valid until they are dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
"""The states of an entry, in lower case, in the order of their numbers."""

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
    def drop(self) -> None:
        """Idempotent."""
    def view(self) -> memoryview:
        """The record's bytes; writable only for an item of a reservation. Raises PoolError after `drop()`."""
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

        `extents_bytes`: a multiple of 4096.  `entry_capacity`: most extents (144 bytes of index each).
        `policy`: LRU, ARC, S3FIFO or noop (never evicts).  `watermark`: (share of the pool at which
        `evict_to_watermark` acts, share of the used bytes that it evicts then).  The reserved and quarantined extents
        of one row may take at most 1/`max_session_share` of the pool, but one extent is always allowed.
        Raises ValueError naming a bad option, OSError when a file cannot be sized or mapped.
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

        Committed entries become UNVERIFIED; extents that processes of earlier epochs may touch are kept from eviction
        and reuse until `row_gone` or `row_quiesced`.  Quotas have to be set again.  Sizes other than 0 must be those
        of the files.
        Raises PoolFormatError when the files are no pool of this format; damaged entries are dropped.
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
        """The row of a session, the old one if the session has one. Raises PoolError `sessions_full`.

        `session` and `group` are ids of 16 bytes.  Once true, a row's `registers_memory` stays true.
        """
    def rows(self) -> list[Row]: ...
    def row_gone(self, row: int) -> None:
        """The process is dead: ends its reservations, its shares of leases, its quarantine, and frees the row."""
    def row_stranded(self, row: int) -> int:
        """As `row_gone`, for a process on whose behalf a device may still write; returns the bytes left in quarantine.

        Extents quarantined because of the row stay in quarantine.  While any are left, the row stays claimed, over
        restarts too, until `row_gone`.
        """
    def row_quiesced(self, row: int) -> None:
        """The live process touches nothing of earlier epochs any more."""
    def peek(self, keys: Buffer, n_slices: int = 1) -> int:
        """Leading chunks READY in all slices. Takes no lock."""
    def peek_windows(self, keys: Buffer, spans: Sequence[int]) -> int:
        """As `IndexReader.peek_windows`."""
    def lease(
        self, keys: Buffer, n_slices: int, rows: list[int], identity: bytes = b"", spans: Sequence[int] = ()
    ) -> tuple[int, int, bytes, int, int]:
        """(ticket, n_chunks, extents, unverified, short_bytes): pins the leading READY chunks for these rows.

        `extents`: n_chunks × n_slices packed `types.EXTENT`.  Ticket 0 when n_chunks is 0.  Trimmed where leased
        bytes would pass half of the pool; `short_bytes` is then what other leases would have to give back for the
        rest of the prefix.  `unverified` counts entries that `verify` must see before a longer answer is possible.
        Counts as a use of the chunks.

        `spans`: for each slice 0 if every leading chunk must be READY in it, or how many of the last leading chunks
        must be; other chunks of such a slice are not leased, and their extents are zero.  () means 0 for all.

        `identity`, here and below: root of the identity for which the caller asks, b"" for any; entries of another
        identity count as absent.
        """
    def lease_chain(
        self, root: bytes, chain: Buffer, slices: Buffer, rows: list[int], spans: Sequence[int], max_keys: int
    ) -> tuple[int, int, bytes, int, int, bytes] | None:
        """As `lease` of `storage_keys(root, chain, slices)` and identity `root`; the keys are derived here.

        Those of slices with a span are derived only as far as the answer needs them.  None, and nothing is leased, if
        that takes more than `max_keys` keys.  The last item holds the keys of the slices without a span, chunk-major;
        it is b"" if all chunks are leased.
        """
    def release(self, ticket: int, row: int = -1) -> bool:
        """Ends one row's share of a lease, or with row -1 all shares. False when no such share exists (any more)."""
    def leases_to_end(self, tickets: Sequence[int], need_bytes: int) -> int:
        """How many of these tickets, in this order, would have to end before `need_bytes` more can be leased.

        If all of them are not enough, the count ends with the last one that frees anything.  After 8,192 entries the
        search ends with those looked at.  Each ticket must be named once.  Changes nothing.
        """
    def verify(self, keys: Buffer) -> tuple[int, int]:
        """(ok, bad): checks the UNVERIFIED entries among the keys and drops bad ones. Slow; runs without the GIL."""
    def verify_next(self, max_bytes: int) -> int:
        """Checks unverified entries, last used first, at most about `max_bytes`; returns how many remain."""
    def mark_bad(self, key: Buffer, identity: bytes = b"") -> bool:
        """Checks a record that a reader found wrong; True when it was bad and was dropped."""
    def is_tail(self, key: Buffer) -> bool:
        """Whether the key is in the index and its record is a tail."""
    def is_reserved(self, key: Buffer) -> bool:
        """Whether the chunk is being written, by a process or by a load."""
    def reserve(
        self,
        keys: Buffer,
        parent: bytes,
        record_bytes: int,
        row: int,
        identity: bytes,
        tenant: int = 0,
        tail: bool = False,
        extent_bytes: int = 0,
    ) -> tuple[int, bytes, bytes]:
        """(ticket, outcomes, extents): extents to write these chunks of one chain into, in order.

        `parent`: storage key of the chunk before the first, or b"".  `identity`: root that the records must name.  The
        answer has one wire.ReserveOutcome and one packed `types.EXTENT` for each key (zeros where not RESERVED).
        Entries are evicted at once to make room, never those of this chain.  After the first refusal, all later keys
        that are not present get the same outcome.  Ticket 0 when nothing was reserved.  A tail is evicted before all
        other records; it gets an extent of `extent_bytes`, if its record is shorter.
        """
    def commit(self, ticket: int, indices: list[int], check: bool = True) -> bytes:
        """One wire.CommitOutcome per index; the items' reservation ends, whatever the outcome.

        With `check` the record's header must be sound and name the key, the identity and exactly the reserved
        length, with its checksums computed; otherwise BAD_RECORD, and the extent is given back.
        """
    def abort(self, ticket: int, indices: list[int] | None = None) -> int:
        """Gives items back (None: all that are left); returns how many. Extents in use stay in quarantine."""
    def hold(
        self, key: Buffer | None = None, reserved_ticket: int = 0, index: int = -1, identity: bytes = b""
    ) -> Hold | None:
        """A hold on a READY entry by key, or on an item of a reservation; None when there is none."""
    def remove(self, keys: Buffer) -> int:
        """Drops READY and UNVERIFIED entries that nobody uses; returns how many."""
    def clear(self, tenant: int = -1) -> tuple[int, int]:
        """Drops all entries (of one tenant); returns how many it dropped, and how many it kept.

        The extent of a dropped entry in use becomes free when its last use has ended.  Kept are the entries that the
        server itself leases: for a pin, or for another instance that reads them.
        """
    def cleared_in_use(self, tenant: int = -1) -> tuple[int, int]:
        """(held, leased): numbers of entries that clears dropped and that a hold or a lease still keeps."""
    def ready_tags(self, first: int, max_entries: int) -> tuple[bytes, int]:
        """(the first 8 bytes of each READY key among the next entries from number `first` on, next `first`).

        The next `first` is 0 after the last entry.  Takes about 10 ns an entry, under the lock.  Entries that change
        meanwhile are in the events.
        """
    def set_quota(self, tenant: int, quota_bytes: int) -> None:
        """Limits the bytes of a tenant; -1: no limit.

        At its quota, the tenant's own oldest chunks are evicted to make room.
        """
    def evict_to_watermark(self) -> int:
        """Bytes evicted; 0 below the watermark."""
    def victims_preview(self, need_bytes: int) -> list[bytes]:
        """READY keys that would be evicted next, in about that order, at most 4096 of each size. Changes nothing."""
    def events(self) -> list[tuple[int, bytes, int]]:
        """(kind, key, bytes) since the last call; `kind` is a kvstrata.types.PoolEvent."""
    @property
    def events_lost(self) -> int:
        """Events that were overwritten because nobody took them (65,536 are kept)."""
    def stats(self) -> dict[str, Any]:
        """Bytes and entries by state, classes, evictions, refusals, tenants, fragmentation, …"""
    def heartbeat(self) -> None:
        """Tells clients that the server is alive; a second after the last heartbeat, every peek of theirs answers 0."""
    def set_has_l2(self, has_l2: bool) -> None:
        """Tells the readers of the index whether the server has an L2 tier."""
    def retry_missing(self) -> int:
        """Asks again for memory of L1 that the file system refused; returns the bytes that are still missing."""
    def prefault_start(self, threads: int) -> None:
        """Starts `threads` threads that fault the extents in. Raises PoolError when it was called before."""
    @property
    def prefaulted_bytes(self) -> int: ...
    def close(self) -> None:
        """Ends prefaulting and all use; nothing writes to the index any more. Does not wait for holds. Idempotent."""
    def validate(self) -> None:
        """Raises PoolError `internal` naming the broken invariant. Checks the whole pool: for tests."""
