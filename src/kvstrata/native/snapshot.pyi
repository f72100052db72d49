"""An index file as it is, for tools that look at a pool without taking part in it.

The file is read, never mapped or written: if it is truncated meanwhile, a read raises an error, and reading a hole
allocates no memory for it.  Nothing in the file is trusted.  A running server changes entries meanwhile; `changing`
marks such an entry.
"""

from typing import Any, Final, TypeAlias

ROW_BITS: Final[int]
"""Bits of an entry's `rows`; rows with equal numbers modulo ROW_BITS share a bit."""

_Entry: TypeAlias = tuple[int, int, bool, bytes, int, int, int, int | None, int, bytes, int, int]

class IndexSnapshot:
    """Header and rows of an index file, as they were when it was opened. Entries are read anew by each `read`."""

    def __init__(self, index_fd: int) -> None:
        """`index_fd`: a regular file's descriptor, which stays the caller's and must stay open while this is used.

        Raises PoolFormatError when the file is no index of this format.  This and the other methods raise PoolError
        when the file has become shorter, and OSError.
        """
    def header(self) -> dict[str, Any]:
        """file_bytes, format_version, pool_id, extents_bytes, entry_capacity, entries_touched, epoch, heartbeat_ns
        (CLOCK_MONOTONIC, 0 before the first), has_l2, slab_bytes (0: not chosen yet)."""
    def runs(self) -> list[tuple[int, int, int]]:
        """(first slab, slabs, bytes of each extent) of each sound run in the slab table."""
    def rows(self) -> list[dict[str, Any]]:
        """The claimed rows: row, session, group, pid, epoch (the row may touch nothing of earlier epochs),
        registers_memory. Row 0 is the server's."""
    def read(self, first: int) -> tuple[list[_Entry], int]:
        """The entries in use among the next 4,096 from number `first` on, and the next `first` (0: no more entries).

        Each is (number, state, changing, key, offset, length, generation, parent, rows, identity, owner, tenant).
        `state` is an index of `pool.STATES`, or another number in a damaged file.  `changing`: the entry was being
        changed, so its fields may not belong together.  `rows` has bit `row % ROW_BITS` for each row that may touch the
        bytes.  `identity` is the first half of the identity root.
        """
