"""A client's mappings of a pool: the index, read-only, and the extents.

PoolError and PoolFormatError are those of `native.pool`.
"""

import sys
from collections.abc import Sequence

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

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
