"""Copies between an engine's paged blocks and records, and the records themselves (`docs/formats.md`).

Addresses are ints: memory is never touched through Python objects, and whoever passes an address keeps
it mapped until the call, or for a submitted job its completion, is over.  Calls that touch payloads drop
the GIL.  Every ValueError names the argument.
"""

import enum
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, final, overload

from typing_extensions import Buffer

from kvstrata.errors import KvstrataError

class CopyOutcome(enum.IntEnum):
    """What became of one record.  Functions return these as plain ints."""

    OK = 0
    STALE = 1
    """Sound headers, but another chunk's key; no block was touched."""
    CORRUPT = 2
    """Headers or a section are not what their CRC says; blocks already written must not be used."""
    MISMATCH = 3
    """A sound record that cannot be taken: other shape than the plan's, other format version, encoded."""
    UNVERIFIED = 4
    """Its CRCs are pending, so it cannot be checked."""
    CANCELLED = 5
    """The copy never began."""
    FAILED = 6
    """Out of memory."""

class RecordError(KvstrataError):
    """The headers of a record are unsound; `field` names what is wrong."""

    code: ClassVar[str]

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
    crc_pending: bool
    sections: tuple[tuple[int, int, int], ...]

@final
class CopyPlan:
    """Describes an engine's blocks once; immutable, for any number of copies and threads.

    A plan has sections (typically one a layer): `section_bases[i]` is the address of block 0,
    `block_stride[i]` the bytes from one block to the next.  A shape of a block is up to three outer
    dimensions `(count, stride in bytes)`, outermost first, around `run_bytes` contiguous bytes; either
    all sections have the one given, or `section_shapes[i]` is the index of one of the `shapes`, each
    `(dims, run_bytes)`.  A section stores, for each block in the order given, its runs in the order of
    the dimensions, packed.
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
        """Bytes of one section of a chunk of so many blocks; ValueError from 4 GiB on of the largest."""

    def payload_bytes(self, n_blocks: int) -> int:
        """Bytes of all sections."""

    def record_bytes(self, n_blocks: int) -> int:
        """Bytes of the whole record, header included: what an extent needs."""

@final
class RecordSpec:
    """What the writer of a record says about its chunk. Keys and digests are 32 bytes."""

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

def gather_record(
    plan: CopyPlan, block_ids: Sequence[int], extent_address: int, extent_len: int, spec: RecordSpec
) -> None:
    """Copies the blocks into a whole sealed record at `extent_address` (a multiple of 8).

    Raises ValueError for bad arguments, and then nothing was written.
    """

def scatter_record(
    plan: CopyPlan, block_ids: Sequence[int], extent_address: int, extent_len: int, expected_key: bytes
) -> int:
    """Copies a record into the blocks and verifies it on the way; returns a `CopyOutcome`.

    A negative block id means: verified, but written nowhere.  After CORRUPT the blocks hold garbage; after
    any other outcome than OK they are untouched.  Raises ValueError for bad arguments.
    """

def verify_record(address: int, length: int, expected_key: bytes | None) -> int:
    """Checks headers, key (unless None) and every section; returns a `CopyOutcome`.

    Never reads outside `length` bytes, whatever they are.
    """

def verify_stored_record(address: int, length: int, expected_key: bytes | None) -> int:
    """As `verify_record`, for what a medium holds: of an encoded record the stored bytes are checked."""

class Verifier:
    """Threads that help to check many records at once: one core does not read as fast as memory gives."""

    def __init__(self, helpers: int) -> None:
        """At most so many threads; they start with the first work. They end with the object."""

    def verify_stored(self, records: Sequence[tuple[int, int, bytes]]) -> list[int]:
        """`verify_stored_record` of each (address, length, expected key), without the GIL; thread-safe."""

def explain_record(address: int, length: int, expected_key: bytes | None) -> str | None:
    """Why `verify_stored_record` does not say OK, naming field or section, for a log; None when it does."""

def write_encoded_header(
    address: int,
    length: int,
    source_address: int,
    source_length: int,
    codecs: Buffer,
    stored_bytes: int,
    stored_crc: int = 0,
    section_crcs: Sequence[int] | None = None,
) -> int:
    """Writes the header of a record whose payload is stored encoded, and returns its length.

    All else is as in the header of `source`; `section_crcs` replace its own where a lossy codec has rounded the
    payload.  Raises RecordError for an unsound source, ValueError for bad arguments.
    """

def write_decoded_header(address: int, length: int, source_address: int, source_length: int) -> None:
    """The inverse: the header without a codec of what the record at `source` decodes to. Errors likewise."""

def record_header(address: int, length: int) -> RecordHeader:
    """The headers of a record, checked except for the payload. Raises RecordError."""

def seal_record(address: int, length: int, spec: RecordSpec, section_lengths: Sequence[int]) -> None:
    """Computes the CRCs of a payload that is in place behind the header's room, and writes the header.

    For writers that did not gather with a plan.  Raises ValueError, and then nothing was written.
    """

@final
class CopyEngine:
    """Native copy threads. Jobs are lists of items of one kind; each item is one record.

    An item of a gather is (block_ids, extent_address, extent_len, RecordSpec), of a scatter (block_ids,
    extent_address, extent_len, expected key); block ids as in `gather_record` and `scatter_record`.  The
    engine copies all descriptions; blocks and extents stay the caller's and must stay mapped until the
    job has ended.  Thread-safe.  In a forked child the object does nothing.
    """

    def __new__(cls, threads: int = 2, queue: int = 256) -> CopyEngine:
        """Starts the threads (0 to 64; with 0 only `run` works). At most `queue` jobs are submitted and unread."""

    @property
    def event_fd(self) -> int:
        """Readable while completions are unread; the object's own, never close it."""

    @property
    def threads(self) -> int: ...
    def submit(
        self,
        job_id: int,
        kind: Literal["gather", "scatter"],
        plan: CopyPlan,
        items: Sequence[tuple[Sequence[int], int, int, RecordSpec]]
        | Sequence[tuple[Sequence[int], int, int, bytes]],
    ) -> bool:
        """Queues a job and never waits. False: the queue is full, read completions and try again.

        Raises ValueError for bad arguments, a job id that is not read yet, and a closed engine; nothing
        happens then.
        """

    def completions(self) -> list[tuple[int, list[int]]]:
        """Takes all ended jobs: (job id, one `CopyOutcome` per item), in the order in which they ended."""

    def run(
        self,
        kind: Literal["gather", "scatter"],
        plan: CopyPlan,
        items: Sequence[tuple[Sequence[int], int, int, RecordSpec]]
        | Sequence[tuple[Sequence[int], int, int, bytes]],
    ) -> list[int]:
        """Does a job now, before everything queued, on this thread and idle copy threads. Errors as `submit`."""

    def wait(self, job_id: int, timeout_s: float) -> bool:
        """Waits for the end of a job. True also when its completion was already read; False: time is over."""

    def cancel(self, job_id: int) -> bool:
        """Items that have not begun end as CANCELLED, the others are copied to their end.

        The completion comes as ever.  Returns whether any item was cancelled.
        """

    def drain(self) -> None:
        """Waits until all submitted jobs have ended."""

    def close(self) -> None:
        """Cancels what has not begun, waits for the rest, ends the threads. Completions can still be read."""

def crc32c(buffer: Buffer, crc: int = 0) -> int:
    """CRC32C of the bytes, continued from `crc`."""

def crc32c_at(address: int, length: int, crc: int = 0) -> int:
    """CRC32C of memory, continued from `crc`."""

def copy_at(destination: int, source: int, length: int, crc: int = 0, *, cached: bool = False) -> int:
    """Copies memory (not overlapping) and returns its CRC32C; streaming stores unless `cached`."""

def copy_strided(
    target_address: int,
    target_length: int,
    sources: Sequence[tuple[int, int]],
    copies: Sequence[tuple[int, int, int, Sequence[tuple[int, int, int]], int]],
) -> None:
    """Copies runs of bytes from sources, each (address, length), to a target that overlaps none of them.

    A copy is (source, offset in it, offset in the target, loops, bytes of a run); a loop is (count, stride in the
    source, stride in the target), at most 8, outermost first.  ValueError when one leaves its source or the target;
    nothing was written then.
    """

def libc_copy_at(destination: int, source: int, length: int) -> None:
    """libc's memcpy, the yardstick of benchmarks."""

def buffer_address(buffer: Buffer, *, writable: bool = False) -> int:
    """Address of an object's contiguous memory; good for as long as the object is alive and not resized."""

def crc32c_path() -> str:
    """The implementation in use: table, armcrc, sse42, pclmul, vpclmul256 or vpclmul512."""

def crc32c_paths() -> list[str]:
    """What this CPU can run, slowest first."""

def set_crc32c_path(name: str | None) -> None:
    """Forces an implementation, for tests and benchmarks; None: the best one. ValueError if unsupported."""
