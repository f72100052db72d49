"""The native half of the server and its clients: keys, records, copies, codecs, the pool, the registry.

Each part is headed by what holds for it. Exceptions for errors of the C++ core stand under `reasons`.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, TypedDict, final, overload

from kvstrata.errors import MediumError, SegmentError

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

# The exceptions that native modules raise for errors of the C++ core, and the reasons that the core reports.
#
# All native modules get their exceptions from this one.  An exception's class depends on the error's code and on its
# *site*, the group of calls that it comes from:
#
# | site | calls | `os_error` | `bad_argument` | `no_space` | `closed` | other codes |
# |---|---|---|---|---|---|---|
# | `call` | all others | OSError | ValueError | MemoryError | ValueError | ValueError |
# | `items` | with items of copies | ValueError | ValueError | MemoryError | ValueError | ValueError |
# | `lanes` | of `NativeLanes` | OSError | ValueError | MemoryError | RuntimeError | ValueError |
# | `record` | that read a record's headers | RecordError | RecordError | RecordError | RecordError | RecordError |
# | `pool` | of a pool and of its mappings | OSError | ValueError | PoolError | PoolError | PoolError |
# | `registry` | of a registry | RegistryError | ValueError | RegistryError | RegistryError | RegistryError |
#
# PoolError and RegistryError have a stable `reason`.

# Chunk keys in batches (SHA-256; definitions in `docs/formats.md`).

def chain_keys(
    start: bytes,
    tokens: Sequence[int] | Buffer,
    chunk_tokens: int,
    extras: Mapping[int, bytes] | None = None,
    first: int = 0,
) -> bytes:
    """Chain keys of the full chunks of tokens[first:], 32 bytes each; tokens after the last full chunk are ignored.

    `start` is the chain key of the chunk before, or the identity's root.  `tokens` is a sequence of ints or a
    buffer of 32-bit unsigned numbers (a `bytes` object holds them little-endian).  `extras` maps the number of a chunk
    in this call to the 32 bytes that stand for its content other than tokens (media).

    Raises ValueError naming index and value for a token outside 0..2**32-1, and ValueError for an extra whose chunk is
    not full; TypeError for a token that is not an int.  Drops the GIL while it hashes 64 chunks or more.
    """

def storage_keys(root: Buffer, chain: Buffer, slice_digests: Buffer) -> bytes:
    """SHA-256(chain key ‖ SHA-256(root ‖ slice digest)) for each pair, chunk-major: all slices of chunk 0, then of 1, …

    `root` is the identity's.  Since it enters here once more, no chain key gives a storage key of another identity: a
    process that names foreign chain keys reaches nothing but chunks of its own identities.
    """

def sha256_path() -> str:
    """The implementation in use: scalar, armsha2 or shani."""

# Work on batches of keys and values.
#
# A key has 32 bytes.  Thread-safe; every call keeps the GIL, for some 10 to 50 µs with 1,024 keys.

def names_of(prefix: str, keys: Sequence[bytes]) -> list[str]:
    """For each key, `prefix` followed by the key in hexadecimal digits.

    Raises ValueError for a key that does not have 32 bytes, and for a prefix that is not ASCII.
    """

# Records: their headers, checksums and verification (`docs/formats.md`).
#
# Addresses are ints: memory is never touched through Python objects.  The caller keeps an address mapped until the
# call has returned.  Calls that touch payloads drop the GIL.  Every ValueError names the argument.

class CopyOutcome(enum.IntEnum):
    """What became of one record.  Functions return these as plain ints."""

    OK = 0
    STALE = 1
    """Sound headers, but another chunk's key; no block was touched."""
    CORRUPT = 2
    """Headers or a section do not match their CRC; blocks already written must not be used."""
    MISMATCH = 3
    """A sound record that this call cannot use: it has another shape than the plan or another format version, or is
    encoded."""
    UNVERIFIED = 4
    """Its CRCs are pending, so it cannot be checked."""
    CANCELLED = 5
    """The copy never began."""
    FAILED = 6
    """Out of memory; for a copy by a GPU also the failures that `cuda.CudaCopyEngine` lists."""

class RecordError(MediumError):
    """The headers of a record are unsound; `field` names what is wrong."""

    code: str

class RecordHeader(NamedTuple):
    """The checked headers of a record. `sections` are (offset from the payload's start, length, crc)."""

    key: bytes
    identity: bytes
    slice_digest: bytes
    parent_key: bytes
    chunk_tokens: int
    created_unix_ms: int
    header_bytes: int
    payload_bytes: int
    stored_bytes: int
    stored_crc: int
    codecs: bytes
    """Numbers of the codecs in the order of encoding; empty: the payload is stored as it is."""
    sections: tuple[tuple[int, int, int], ...]

@final
class RecordSpec:
    """The facts that a record's writer states about its chunk. Keys and digests are 32 bytes."""

    def __new__(
        cls,
        key: bytes,
        identity: bytes,
        slice_digest: bytes,
        parent_key: bytes,
        chunk_tokens: int,
        created_unix_ms: int = 0,
    ) -> RecordSpec:
        """`parent_key` b"" means none; `created_unix_ms` 0 means the time of writing."""

    @property
    def key(self) -> bytes: ...

def record_bytes(section_count: int, payload_bytes: int) -> int:
    """Length of a record: header, section table and payload."""

def verify_record(address: int, length: int, expected_key: bytes | None) -> int:
    """Checks headers, key (unless None) and every section; returns a `CopyOutcome`.

    Never reads outside the `length` bytes, whatever they contain.
    """

def verify_stored_record(address: int, length: int, expected_key: bytes | None) -> int:
    """As `verify_record`, for a record as a medium stores it: of an encoded record, the stored bytes are checked."""

class Verifier:
    """Threads that help to verify many records at once: one core checks bytes slower than memory delivers them."""

    def __init__(self, helpers: int) -> None:
        """At most `helpers` threads besides the caller's. They start with the first work and end with the object."""

    def verify_stored(self, records: Sequence[tuple[int, int, bytes]]) -> list[int]:
        """`verify_stored_record` of each (address, length, expected key), without the GIL; thread-safe."""

def explain_record(address: int, length: int, expected_key: bytes | None) -> str | None:
    """Why `verify_stored_record` does not answer OK, naming field or section, for a log; None if it does answer OK."""

def write_encoded_header(
    address: int,
    length: int,
    source_address: int,
    source_length: int,
    codecs: Buffer,
    stored_bytes: int,
    stored_crc: int = 0,
) -> int:
    """Writes the header of a record whose payload is stored encoded, and returns its length.

    All other fields are as in the header of `source`.  Raises RecordError for an unsound source, ValueError for bad
    arguments.
    """

def write_decoded_header(address: int, length: int, source_address: int, source_length: int) -> None:
    """Writes the header of the record that the encoded record at `source` decodes to.

    Raises as `write_encoded_header`.
    """

def record_header(address: int, length: int) -> RecordHeader:
    """The headers of a record, checked except for the payload. Raises RecordError."""

def seal_record(address: int, length: int, spec: RecordSpec, section_lengths: Sequence[int]) -> None:
    """Computes the CRCs of a payload, and writes the header into the room that was left before the payload.

    For writers that did not gather with a plan.  Raises ValueError, before anything is written.
    """

# Copies between an engine's paged blocks and records, and of plain bytes.
#
# Addresses are ints: memory is never touched through Python objects.  The caller keeps an address mapped until the
# call has returned or, for a submitted job, until the job has ended.  Calls that touch payloads drop the GIL.  Every
# ValueError names the argument.

@final
class CopyPlan:
    """Describes an engine's blocks; immutable, for any number of copies and threads.

    A plan has sections, typically one for each layer: `section_bases[i]` is the address of block 0 in section i,
    `block_stride[i]` the bytes from one of its blocks to the next.  The shape of a block is up to three outer
    dimensions `(count, stride in bytes)`, outermost first, around `run_bytes` contiguous bytes.  Either all sections
    have the shape `(dims, run_bytes)`, or section i has the shape `shapes[section_shapes[i]]`.  A section of a record
    holds the runs of each block, packed: blocks in the order given, runs in the order of the dimensions.
    """

    @overload
    def __new__(
        cls,
        section_bases: Sequence[int],
        num_blocks: int,
        block_stride: Sequence[int],
        dims: Sequence[tuple[int, int]],
        run_bytes: int,
    ) -> CopyPlan: ...
    @overload
    def __new__(
        cls,
        section_bases: Sequence[int],
        num_blocks: int,
        block_stride: Sequence[int],
        *,
        shapes: Sequence[tuple[Sequence[tuple[int, int]], int]],
        section_shapes: Sequence[int],
    ) -> CopyPlan: ...
    @property
    def section_count(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def section_bytes(self, section: int, n_blocks: int) -> int:
        """Bytes of one section of a chunk of `n_blocks` blocks; ValueError if a section would have 4 GiB or more."""

    def payload_bytes(self, n_blocks: int) -> int:
        """Bytes of all sections of a chunk of `n_blocks` blocks."""

    def record_bytes(self, n_blocks: int) -> int:
        """Bytes of the whole record, header included: what an extent needs."""

@final
class CopyEngine:
    """Native copy threads. Jobs are lists of items of one kind; each item is one record.

    An item of a gather is (block_ids, extent_address, extent_len, RecordSpec), of a scatter (block_ids,
    extent_address, extent_len, (expected key, expected identity root)).  A gather makes a whole sealed record at
    `extent_address`, a multiple of 8.  A scatter verifies the record on the way: the part for a negative block id is
    verified, but written nowhere; after CORRUPT the blocks hold garbage, after any other outcome than OK they are
    untouched.  The engine copies all descriptions; blocks and extents stay the caller's and must stay mapped until the
    job has ended.  Thread-safe.  In a forked child the object does nothing.
    """

    def __new__(cls, threads: int = 2, queue: int = 256) -> CopyEngine:
        """Starts the threads (0 to 64; with 0 only `run` works). At most `queue` jobs may have unread completions."""

    @property
    def event_fd(self) -> int:
        """Readable while completions are unread. Belongs to the object: never close it."""

    @property
    def threads(self) -> int: ...
    def submit(
        self,
        job_id: int,
        kind: Literal["gather", "scatter"],
        plan: CopyPlan,
        items: Sequence[tuple[Sequence[int], int, int, RecordSpec]]
        | Sequence[tuple[Sequence[int], int, int, tuple[bytes, bytes]]],
    ) -> bool:
        """Queues a job and never waits. False: the queue is full, read completions and try again.

        Raises ValueError for bad arguments, for a job id whose completion was not read yet, and after `close`; nothing
        is queued then.
        """

    def completions(self) -> list[tuple[int, list[int]]]:
        """Takes all ended jobs: (job id, one `CopyOutcome` per item), in the order in which they ended."""

    def run(
        self,
        kind: Literal["gather", "scatter"],
        plan: CopyPlan,
        items: Sequence[tuple[Sequence[int], int, int, RecordSpec]]
        | Sequence[tuple[Sequence[int], int, int, tuple[bytes, bytes]]],
    ) -> list[int]:
        """Does a job now, before all queued ones, on this thread and idle copy threads. Raises as `submit`."""

    def wait(self, job_id: int, timeout_s: float) -> bool:
        """Waits for the end of a job. True also if its completion was already read; False after the timeout."""

    def cancel(self, job_id: int) -> bool:
        """Cancels the items that have not begun (their outcome is CANCELLED); the others are copied to their end.

        The job's completion comes as usual.  Returns whether any item was cancelled.
        """

    def drain(self) -> None:
        """Waits until all submitted jobs have ended."""

    def close(self) -> None:
        """Cancels the items that have not begun, waits for the others, ends the threads. Completions stay readable."""

def crc32c(buffer: Buffer, crc: int = 0) -> int:
    """CRC32C of the bytes, continued from `crc`."""

def crc32c_at(address: int, length: int, crc: int = 0) -> int:
    """CRC32C of memory, continued from `crc`."""

def copy_strided(
    target_address: int,
    target_length: int,
    sources: Sequence[tuple[int, int]],
    copies: Sequence[tuple[int, int, int, Sequence[tuple[int, int, int]], int]],
) -> None:
    """Copies runs of bytes from sources, each (address, length), to a target that overlaps none of them.

    A copy is (index of the source, offset in the source, offset in the target, loops, bytes of a run); it has at most
    8 loops, outermost first, each (count, stride in the source, stride in the target).  Raises ValueError, before
    anything is written, when a copy leaves its source or the target.
    """

def libc_copy_at(destination: int, source: int, length: int) -> None:
    """Copies memory with libc's memcpy, which leaves the copy in the cache."""

def buffer_address(buffer: Buffer, *, writable: bool = False) -> int:
    """Address of an object's contiguous memory; valid while the object is alive and not resized."""

def crc32c_path() -> str:
    """The implementation in use: table, armcrc, sse42, vpclmul256 or vpclmul512."""

# Transformations of payloads for codecs (`docs/formats.md`). They run without the GIL.
#
# All buffers stay the caller's; each function returns when its output buffers are filled.

def split_planes(out: Buffer, source: Buffer) -> None:
    """Writes bytes 0, 2, 4, … of `source` to `out`, then bytes 1, 3, 5, …

    Raises ValueError if the two buffers overlap or differ in length.
    """

def join_planes(out: Buffer, source: Buffer) -> None:
    """The inverse of `split_planes`; raises as it does."""

# The L1 pool in shared memory, for its server.
#
# 1. An extent is given out again only when nobody can touch its bytes any more: no hold, lease or reservation is left,
#    and every process of an earlier epoch that may touch them is gone or has quiesced.  No clock is involved.
# 2. Only `commit` makes bytes visible, and only an unpinned leaf of the prefix tree (or a whole old slab with its
#    descendants) is evicted to make room.
# 3. Keys are concatenated in one bytes-like object, 32 bytes each; any other length raises ValueError.
# 4. Every method may be called from any thread.
#
# After `close()` every method raises PoolError with reason `closed`, or answers like an empty pool; holds stay
# valid until they are dropped.

MAX_SESSIONS: Final[int]
"""Processes that can be attached to a pool at a time."""
POOL_NUMBERS: Final[tuple[tuple[str, str, str, str, str], ...]]
"""The numbers of a pool: key of `Pool.stats`, name of the metric if it differs, kind, label, meaning."""

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
    def tenant(self) -> int:
        """Number of the tenant for whom the bytes are counted."""
    @property
    def address(self) -> int:
        """Where the record lies in this process."""
    def drop(self) -> None:
        """Idempotent."""
    def uncount(self) -> None:
        """Stop counting the bytes against the limit of `hold_batch`, though they are still held. `drop` does it too."""
    def view(self) -> memoryview:
        """The record's bytes; writable only for an item of a reservation. Raises PoolError after `drop()`."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class LoadRequest:
    """A prompt whose records are loaded.

    `keys` are those of all chunks, chunk-major: key number i is that of chunk i // n_slices, slice i % n_slices.
    `parents`: the keys before chunk 0, one a slice, or b"".  `room_bytes`: for each slice the room for a record.  Each
    record may be shorter than its room, as a `tail` is.
    """

    def __init__(
        self,
        keys: Buffer,
        parents: bytes,
        room_bytes: Sequence[int],
        identity: bytes,
        tenant: int = 0,
        tail: bool = False,
    ) -> None: ...

class LoadBatch:
    """Reservations of the server for records that are loaded; what is not finished is given back with the object."""

    numbers: list[int]
    """The reserved keys."""
    holds: list[Hold]
    """A hold for each of them."""
    present: list[int]
    """Keys that are in the pool already."""
    refusal: tuple[int, int] | None
    """The first chunk that could not be reserved, and its wire.ReserveOutcome; None if there is none."""

    def finish(self, loaded: Buffer) -> bytes:
        """Commit the items whose byte in `loaded` is not 0, as `Pool.commit` with `check`, and give back the others.

        For each item its wire.CommitOutcome, or 255 if it was given back.  Extents in use stay in quarantine.
        """

class Shadow:
    """A cache without bytes under the pool's eviction policy, through which logged requests pass. Not thread-safe."""

    def __init__(
        self,
        *,
        capacity: int,
        policy: str = "VALUE",
        depth_cost: float = 0.0085,
        refuses: bool = True,
        engine_chunks: int = 0,
        late: bool = False,
    ) -> None:
        """`capacity`: chunks. `policy`: VALUE or LRU. `refuses`: as without an L2. Raises ValueError.

        With `engine_chunks`, an engine with a cache of so many chunks asks, whose hits count too; `late`: chunks are
        stored when that cache loses them.
        """
    def replay(self, log: bytes) -> bool:
        """Requests as `Pool.take_requests` returns them; False if the last one is incomplete. Releases the GIL."""
    @property
    def sums(self) -> tuple[float, float, float, float]:
        """Chunks, hits among them, and both in costs (units of a prompt's first chunk)."""

class Pool:
    """The one writer of a segment. Descriptors passed in stay the caller's and may be closed afterwards."""

    @staticmethod
    def create(
        index_fd: int,
        extents_fd: int,
        *,
        extents_bytes: int,
        entry_capacity: int,
        policy: str = "VALUE",
        max_session_share: int = 8,
        depth_cost: float = 0.0085,
        lessons: bytes = b"",
    ) -> Pool:
        """Makes a pool in two empty files and sizes them.

        `extents_bytes`: a multiple of 4096.  `entry_capacity`: most extents (144 bytes of index each).
        `policy`: VALUE, LRU, or noop (never evicts).  `depth_cost`: by which share of the first chunk's cost each
        further chunk of a prompt costs more to compute than the one before it.  `lessons`: those of an earlier pool.
        The reserved and quarantined extents of one row may take at
        most 1/`max_session_share` of the pool, but one extent is always allowed.
        Raises ValueError naming a bad option, OSError when a file cannot be sized or mapped.
        """
    @staticmethod
    def adopt(
        index_fd: int,
        extents_fd: int,
        *,
        policy: str = "VALUE",
        max_session_share: int = 8,
        extents_bytes: int = 0,
        entry_capacity: int = 0,
        depth_cost: float = 0.0085,
        lessons: bytes = b"",
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
    def learn(self) -> bool:
        """Learns what is worth keeping from the requests since the last time, in milliseconds; False: too few."""
    def missed(self, keys: bytes, n_slices: int = 1, tenant: int = 0) -> None:
        """A request that found none of these chunks in the index, and sent no lookup; keys of its first slice."""
    def hint(self, keys: bytes, next: int) -> int:
        """Says what comes next (`types.Next`) after a request that used the first of these chunks that is present, and
        those before it in its prompt. How many those are.
        """
    def log_requests(self, salt: int) -> None:
        """From now on logs requests for `take_requests`, the keys mixed with the random number `salt`."""
    def take_requests(self) -> bytes:
        """The requests since the last call, at most 64 MiB: docs/formats.md has the form."""
    def forecasts(
        self,
    ) -> tuple[
        list[tuple[float, float, float]],
        list[tuple[int | None, int, float, list[tuple[float, float, float]]]],
    ]:
        """What requests of late would have hit in a pool of another size, and with other shares of tenants.

        Sizes are (size ÷ the present one, share of chunks, share of prefill seconds).  Those of the pool are told by a
        sample of the chunks and the pool's own policy, and are empty as long as nothing is known.  Then come the
        tenants with most requests of late, at most 16, and all others together (None): (tenant, bytes in the pool, its
        part of the prefill seconds that all requests would take without a cache, sizes of its share).  A share is what
        a quota is: the tenant's oldest chunks leave it.  No sizes of a share in which the sample has fewer than 128
        chunks.
        """
    def lessons(self) -> bytes:
        """All that was learnt, at most 1 MiB, for a later pool. It names no prompt."""
    @staticmethod
    def are_lessons(lessons: bytes) -> bool: ...
    def set_model(self, identity: bytes, model: int) -> None:
        """From now on the chunks of an identity have the costs of this model, 0 to 3; 0 is that of all others."""
    def set_cost(self, model: int, cost: float) -> None:
        """A chunk of this model costs so many times as much, per byte, as an average one of its depth."""
    def set_time(self, monotonic_ns: int) -> None:
        """For a replay: the policy's time is this from now on, not the clock's."""
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
    def has(self, keys: Buffer) -> bytes:
        """For each key 1 if it is READY, else 0. Takes no lock."""
    def peek_windows(self, keys: Buffer, spans: Sequence[int]) -> int:
        """As `IndexReader.peek_windows`."""
    def lease(
        self,
        keys: Buffer,
        n_slices: int,
        rows: list[int],
        identity: bytes = b"",
        spans: Sequence[int] = (),
        again: bool = False,
        unread: bool = False,
        own_chunks: int = 0,
        tenant: int = 0,
    ) -> tuple[int, int, bytes, int, int]:
        """(ticket, n_chunks, extents, unverified, short_bytes): pins the leading READY chunks for these rows.

        `extents`: n_chunks × n_slices packed `types.EXTENT`.  Ticket 0 when n_chunks is 0.  Trimmed where leased
        bytes would pass half of the pool; `short_bytes` is then what other leases would have to give back for the
        rest of the prefix.  `unverified` counts entries that `verify` must see before a longer answer is possible.
        Counts as a use of the chunks, but with `again` not as a return: the request leases them once more, or a peer.
        With `unread` UNVERIFIED chunks are leased like READY ones: no holder reads bytes by this lease.
        The first `own_chunks` chunks are in a cache of the caller's, which serves them: no use of them is counted.

        `spans`: for each slice 0 if every leading chunk must be READY in it, or how many of the last leading chunks
        must be; other chunks of such a slice are not leased, and their extents are zero.  () means 0 for all.

        `identity`, here and below: root of the identity for which the caller asks, b"" for any; entries of another
        identity count as absent.  `tenant`: whose request it is.
        """
    def lease_chain(
        self,
        root: bytes,
        chain: Buffer,
        slices: Buffer,
        rows: list[int],
        spans: Sequence[int],
        max_keys: int,
        again: bool = False,
        own_chunks: int = 0,
        tenant: int = 0,
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
    def reserve_batch(self, request: LoadRequest, numbers: Sequence[int]) -> LoadBatch:
        """Extents for these keys of a prompt, whose numbers ascend, with a hold on each.

        As `reserve` for the server itself.  From the first refused chunk on, nothing is reserved in any slice.
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
    def hold_batch(self, keys: Buffer, limit_bytes: int) -> tuple[list[Hold], bytes]:
        """Holds for puts on the READY entries among these keys, which count against a limit until `Hold.uncount`.

        An entry counts once, with the bytes of its extent, however many holds on it count.  The holds are in the keys'
        order.  For each key, the second result has 0 if there is a hold, 1 if the entry is absent, 2 if it would exceed
        the limit.
        """
    @property
    def counted_bytes(self) -> int:
        """Bytes of the extents that count against the limit of `hold_batch`."""
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
        meanwhile are in the changes.
        """
    def set_quota(self, tenant: int, quota_bytes: int) -> None:
        """Limits the bytes of a tenant; -1: no limit.

        At its quota, the tenant's own oldest chunks are evicted to make room.
        """
    def events(self) -> list[tuple[int, bytes, int]]:
        """(kind, key, bytes) since the last call; `kind` is a kvstrata.types.PoolEvent."""
    @property
    def events_lost(self) -> int:
        """Events that were overwritten because nobody took them (65,536 are kept)."""
    def begin_changes(self) -> int:
        """Keeps the changes of L1 and of other tiers from now on; returns the descriptor that signals `has_changes`.

        The pool owns the descriptor.  Raises PoolError without memory or descriptors.
        """
    def note_changes(self, tier: int, change: int, keys: bytes) -> None:
        """Notes a change (kvstrata.types.Change) of a tier other than L1, which is 0. `keys` are whole, concatenated.

        A clear has no keys.  Does nothing before `begin_changes`.
        """
    @property
    def next_change(self) -> int:
        """Number of the next change: the cursor of a reader that wants only changes from now on."""
    def changes(self, cursor: int, limit: int) -> tuple[int, list[tuple[int, bool, bytes, bytes]]] | None:
        """At most `limit` changes from `cursor` on: (next cursor, [(tier, cleared, tags gone, tags that came)]).

        To be applied in this order: the clear, what has gone, what came.  No tag is named twice.  None: more than
        262,144 changes have happened since `cursor`, or it is not a cursor of this pool.  Takes about 20 ns a change.
        """
    def has_changes(self, cursor: int) -> bool:
        """Whether `changes` has something to tell. If not, the descriptor becomes readable at the next change."""
    def drain_changes(self) -> None:
        """Makes the descriptor unreadable until it is signalled again."""
    def stats(self) -> dict[str, Any]:
        """Bytes and entries by state, classes, evictions, refusals, tenants, fragmentation, …"""
    def heartbeat(self) -> None:
        """Tells clients that the server is alive; a second after the last heartbeat, every peek of theirs answers 0."""
    def set_has_l2(self, has_l2: bool) -> None:
        """Tells the readers of the index whether the server has an L2 tier."""
    def set_has_promises(self, has_promises: bool) -> None:
        """Tells them whether any engine promises chunks now."""
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

# A client's mappings of a pool: the index, read-only, and the extents.

class IndexReader:
    """A client's read-only mapping of the index; not inherited by forks. The descriptor may be closed afterwards."""

    def __init__(self, index_fd: int) -> None:
        """Raises PoolFormatError when the file is no index of this format."""
    def peek(self, keys: Buffer, n_slices: int = 1) -> int:
        """Leading chunks READY in all slices; 0 when the server's heartbeat is older than 1 s.

        Takes microseconds and asks no other process.  The answer promises nothing: the chunks may be evicted at any
        time, so a caller sends a lookup before it reads them.
        """
    def peek_windows(self, keys: Buffer, spans: Sequence[int]) -> int:
        """The most leading chunks whose last `span` chunks are READY in each slice, by the slices' `spans` (above 0).

        `keys` are chunk-major, len(spans) for each chunk.  0 when the server's heartbeat is older than 1 s.
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
    def has_promises(self) -> bool: ...
    @property
    def extents_bytes(self) -> int: ...
    def close(self) -> None:
        """Close it only while no peek runs. Idempotent; every later use raises PoolError."""

class ExtentsMap:
    """A client's mapping of the extents; not inherited by forks. Without `writable`, a write into it is a SIGSEGV."""

    length: int
    writable: bool
    def __init__(self, extents_fd: int, length: int, writable: bool = True) -> None:
        """PoolFormatError when the file is shorter than `length`."""
    @property
    def address(self) -> int: ...
    def view(self, offset: int, length: int) -> memoryview:
        """The bytes of one extent. Raises ValueError when the extent leaves the map."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def close(self) -> None:
        """Raises BufferError while views exist. Copies by address must have ended. Idempotent."""

# Holds in an adapter host, on extents that the pool's owner holds for the host.

class LentHold:
    """A hold in an adapter host: the pool's owner keeps its own hold until it is told that this one was dropped.

    Has the members of `Hold`, except `tenant`.  The hold is dropped by `drop()`, by leaving a `with`
    block, or with the object; `dropped` is called once, in the thread that drops it, and must not raise.
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
        """Raises ValueError when the extent leaves the map."""
    def drop(self) -> None:
        """Idempotent."""
    def view(self) -> memoryview:
        """The record's bytes; writable only for a load. Raises PoolError after `drop()`."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

# Page tables of shared mappings.

def map_present_pages(address: int, length: int) -> int:
    """Enter the existing pages of [address, address + length) into this process's page tables; returns their bytes.

    Pages that nobody has touched yet stay untouched. Contents do not change. Drops the GIL; takes 0.1 to 0.3 µs a page.
    REQUIRES: one shared, writable mapping covers the range until this function returns.
    Raises ValueError if `address` does not begin a page, OSError if the kernel refuses.
    """

# The registry of the controller's directory: which instance holds which chunk, and in which tier.
#
# A *placement* is (tag, slot).  A *tag* is the first 8 bytes of a 32-byte storage key, little-endian; batches of tags
# are bytes-like objects of 8 bytes each.  Only the upper 57 bits count: tags that differ only in the lowest 7 are
# one tag.  With n tags present, a tag that nobody holds is found with odds of n / 2**57 (6.9e-10 for 10**8).  The
# instance that is asked for the chunk compares the full key, so such a find costs a refused lease and never gives wrong
# KV.
#
# A *slot* is a number from 1 to `MAX_SLOTS` that stands for one (incarnation of an instance, tier), or for a full sync
# of that tier in progress.  Its states:
#
#     free → hidden (`open_slot`: being filled, not found) → visible (`publish`) → retired (`retire`) → free (`sweep`)
#
# 1. A lookup finds a placement only if it was admitted and not evicted since, and its slot is visible.
# 2. `retire` costs the same for any number of placements, and no lookup that begins after it finds one of them.
# 3. A retired slot becomes free when a pass of `sweep` over all placements that began after its retirement has ended.
#    `open_slot` answers None while no slot is free.
# 4. Admitting a placement that is present changes nothing, nor does evicting one that is absent.
# 5. Every method may be called from any thread.  Lookups never wait for a batch that another thread admits; batches are
#    cut into pieces of some microseconds between which other writers get their turn.  The GIL is released while a batch
#    is worked on.
#
# A *group* is any number below 65,536 that the slots of one instance share (each of its incarnations may have its own).
# Slot numbers are used again: translate a lookup's slots to instances before the next `open_slot`.

MAX_SLOTS: Final[int]
"""65,534."""

class RegistryError(MediumError):
    """A call was refused. `reason`: `no_space` (the bound on bytes), or `bad_slot` (its state forbids the call)."""

    reason: str
    def __init__(self, message: str, *, reason: str) -> None: ...

class Candidate(NamedTuple):
    """One group's answer to `lookup_prefix`."""

    group: int
    chunks: int
    """Length of the longest prefix all of whose keys its allowed slots hold."""
    slots: array[int]
    """Type "H": for each of the prefix's chunks * n_slices keys, the slot of lowest rank that holds it."""

class Slot(NamedTuple):
    """A slot that is not free."""

    slot: int
    group: int
    rank: int
    state: str
    """`hidden`, `visible` or `retired`."""
    keys: int
    """Placements in the slot; for a retired slot, those not yet swept."""

class RegistryUsage(NamedTuple):
    """Numbers of the whole registry."""

    bytes: int
    """Memory taken from the system and not given back: placements, lists of holders, slots, and room to grow."""
    placements: int
    """Placements in all slots, including those of retired slots until they are swept."""
    shared_tags: int
    """Tags with so many holders that a separate list names them."""
    slots: int
    """Slots that are not free."""
    retired: int
    """Slots that are retired and not yet swept."""
    rebuilds: int
    """Times a partition grew or shrank."""
    refused: int
    """Placements refused because too many others have nearly the same tag, which never happens by chance."""

class Registry:
    def __init__(self, *, max_bytes: int = 4 << 30, max_slots: int = MAX_SLOTS) -> None:
        """An empty registry that takes at most about `max_bytes` (64 MiB to 1 TiB) of memory, as it needs it.

        Raises ValueError naming the argument, and MemoryError if the address space cannot be reserved.
        """

    def open_slot(self, group: int, *, rank: int = 0) -> int | None:
        """Take a free slot, which becomes hidden and empty; None if no slot is free (`sweep` frees retired ones).

        `group` is below 65,536. `rank` (0 to 255): of several slots of one group that hold a key, `lookup_prefix` names
        the one of the lowest rank (0 for L1, 1 for the nearest L2 tier, …).
        """

    def publish(self, slot: int, *, retire: int | None = None) -> None:
        """Make a hidden slot visible, then retire another one, so that every lookup finds at least one of the two.

        Raises RegistryError(bad_slot), and changes nothing, if `slot` is not hidden or `retire` is neither hidden nor
        visible.
        """

    def retire(self, slot: int) -> None:
        """Forget all placements of a hidden or visible slot. O(1). Raises RegistryError(bad_slot) for any other."""

    def admit(self, slot: int, tags: Buffer) -> int:
        """Add placements; returns how many of them are new.

        Raises RegistryError: `bad_slot` if the slot is neither hidden nor visible (even if it is retired meanwhile),
        `no_space` at the bound on bytes.  Tags of the batch that were added before the error stay; repeating the batch
        is harmless.  After every 512 tags, other threads that wait for this processor run first.
        """

    def evict(self, slot: int, tags: Buffer) -> int:
        """Remove placements; returns how many were present. Raises as `admit`, except for `no_space`."""

    def sweep(self, max_cells: int = 65_536) -> int:
        """Run one step of the background pass that frees retired slots; returns how many cells (8 bytes each) it read.

        A step reads at most one partition (1/1024 of all placements) beyond `max_cells`; after each partition, other
        threads that wait for this processor run first.  0: no slot is retired; call again when one is.
        """

    def lookup(self, tag: int) -> tuple[int, ...]:
        """The visible slots that hold one tag, in no order."""

    def holders(self, tags: Buffer) -> list[tuple[int, ...]]:
        """The visible slots that hold each tag of a batch, in no order."""

    def lookup_prefix(
        self,
        tags: Buffer,
        *,
        n_slices: int = 1,
        allowed: Buffer | None = None,
        except_group: int | None = None,
        best: int = 1,
    ) -> list[Candidate]:
        """The groups that each hold the longest leading part of a chain, the longest part first.

        `tags` are those of the chunks in order, the `n_slices` of each chunk one after another; a group holds a chunk
        if it holds all its slices.  A slot counts if it is visible, is not of `except_group` (usually the asking
        instance) and, with `allowed`, has its bit set there (bit slot & 7 of byte slot >> 3; missing bytes are zero).
        Returns at most `best` groups, all of which hold the first chunk; of groups with equally long prefixes, any.
        """

    def slot(self, slot: int) -> Slot | None:
        """The slot's facts; None if it is free."""

    def slots(self) -> list[Slot]:
        """All slots that are not free."""

    def dump(self, cursor: int = 0, max_cells: int = 65_536) -> tuple[array[int], array[int], int]:
        """One step through the placements of visible slots: tags (type "Q"), the slot of each ("H"), next cursor.

        Begin with cursor 0 and end when the next one is 0.  Placements that are present from the first step to the last
        come exactly once; those admitted or evicted meanwhile may be missing.  The lowest 7 bits of each tag are zero.
        """

    def restore(self, tags: Buffer, slots: Buffer, slot_of: Buffer) -> int:
        """Admit the placements of a `dump`, each to the slot that `slot_of[slot]` names (0: leave it out).

        Returns how many are new.  `slots` and `slot_of` are native u16.  Raises ValueError if their lengths do not
        agree, and RegistryError as `admit`.
        """

    def usage(self) -> RegistryUsage:
        """The numbers now. Never waits for other threads."""
