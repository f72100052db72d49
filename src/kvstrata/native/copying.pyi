"""Copies between an engine's paged blocks and records (`native.record`), and of plain bytes.

Addresses are ints: memory is never touched through Python objects.  The caller keeps an address mapped until the
call has returned or, for a submitted job, until the job has ended.  Calls that touch payloads drop the GIL.  Every
ValueError names the argument.
"""

from collections.abc import Sequence
from typing import Literal, final, overload

from typing_extensions import Buffer

from kvstrata.native.record import RecordSpec

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

def gather_record(
    plan: CopyPlan, block_ids: Sequence[int], extent_address: int, extent_len: int, spec: RecordSpec
) -> None:
    """Copies the blocks into a whole sealed record at `extent_address` (a multiple of 8).

    Raises ValueError for bad arguments, before anything is written.
    """

def scatter_record(
    plan: CopyPlan,
    block_ids: Sequence[int],
    extent_address: int,
    extent_len: int,
    expected_key: bytes,
    expected_identity: bytes,
) -> int:
    """Copies a record into the blocks and verifies it on the way; returns a `CopyOutcome`.

    The part of the record for a negative block id is verified, but written nowhere.  After CORRUPT the blocks hold
    garbage; after any other outcome than OK they are untouched.  Raises ValueError for bad arguments.
    """

@final
class CopyEngine:
    """Native copy threads. Jobs are lists of items of one kind; each item is one record.

    An item of a gather is (block_ids, extent_address, extent_len, RecordSpec), of a scatter (block_ids,
    extent_address, extent_len, (expected key, expected identity root)); block ids as in `gather_record` and
    `scatter_record`.  The engine copies all descriptions; blocks and extents stay the caller's and must stay mapped
    until the job has ended.  Thread-safe.  In a forked child the object does nothing.
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
