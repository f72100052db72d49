"""The settings of a segment, and whether the machine has the memory that they ask for."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from kvstrata.errors import ConfigError, MachineUnfit, SegmentError
from kvstrata.memory.linux import HUGE_PAGE_BYTES
from kvstrata.memory.memory_limit import available_bytes, huge_pages, memory_limit
from kvstrata.types import GB

_log = logging.getLogger(__name__)

MIN_EXTENTS_BYTES = 1 << 20
_ENTRY_PER_BYTES = 64 << 10
_MIN_ENTRIES, _MAX_ENTRIES = 16 << 10, 4 << 20
_INDEX_BYTES, _INDEX_BYTES_PER_ENTRY = 96 << 10, 144  # upper bounds
_GIVEN_BACK_S = 2.0


class SegmentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a segment."""

    socket_dir: Path
    directory: Path
    """Segment directory, see `paths.segment_dir`."""
    extents_bytes: int
    """Size of the extents' file, a multiple of 4096."""
    entry_capacity: int | None = None
    """Entries of the index; None: one per 64 KiB of L1, at least 16 Ki, at most 4 Mi."""
    policy: str = "LRU"
    watermark: tuple[float, float] | None = None
    max_session_share: int = 8
    huge_pages: bool = False
    """Make the extents of pages of 2 MiB; `extents_bytes` must then be a multiple of that."""
    numa: str = "default"
    """`l1.numa`, see `numa.place`."""

    def entries(self) -> int:
        """Entry capacity of a new segment."""
        derived = min(max(self.extents_bytes // _ENTRY_PER_BYTES, _MIN_ENTRIES), _MAX_ENTRIES)
        return self.entry_capacity or derived

    def needed_bytes(self) -> int:
        """Memory that L1 and index take once all their pages are touched."""
        return self.extents_bytes + _INDEX_BYTES + self.entries() * _INDEX_BYTES_PER_ENTRY


def check_size(settings: SegmentSettings, processes_bytes: int = 0) -> None:
    """Raises ConfigError for a size of L1 that is invalid for a pool, MachineUnfit if memory or cgroup is smaller.

    `processes_bytes`: memory that the server and its adapter hosts take beside the segment.
    """
    size = settings.extents_bytes
    if size < MIN_EXTENTS_BYTES or size % 4096:
        raise ConfigError(
            f"l1_size_gb: L1 of {size} bytes; it must be a multiple of 4096 and at least "
            f"{MIN_EXTENTS_BYTES} bytes",
            field="l1_size_gb",
        )
    if settings.huge_pages and size % HUGE_PAGE_BYTES:
        raise ConfigError(
            f"l1_size_gb: L1 of {size} bytes is not a multiple of a huge page of {HUGE_PAGE_BYTES} bytes",
            field="l1_size_gb",
        )
    limit = memory_limit()
    needed = settings.needed_bytes() + processes_bytes
    if needed > limit.limit_bytes:
        fits = max(0, size * (limit.limit_bytes - processes_bytes) // settings.needed_bytes())
        raise MachineUnfit(
            f"l1_size_gb: L1 of {size / GB:.2f} GB needs {needed} bytes with its index and the server's processes, but "
            f"{limit.source} is {limit.limit_bytes} bytes; set --l1-size-gb to {fits * 100 // GB / 100:.2f} or less",
            field="l1_size_gb",
        )
    if not settings.huge_pages and needed > (free := available_bytes()):
        _log.warning("segment: L1 needs %d bytes, but only %d are available now", needed, free)


def check_huge_pages(settings: SegmentSettings, *, wait: bool) -> None:
    """Raises SegmentError if the machine's reserve of huge pages is smaller than L1.

    `wait`: for a moment, since the keeper is about to give back an earlier segment.
    """
    ends_s = time.monotonic() + (_GIVEN_BACK_S if wait else 0.0)
    reserve, needed = huge_pages(), settings.extents_bytes // HUGE_PAGE_BYTES
    while needed > reserve.free and time.monotonic() < ends_s:
        time.sleep(0.01)
        reserve = huge_pages()
    if needed > reserve.free:
        raise SegmentError(
            f"l1.use_hugepages: L1 needs {needed} huge pages of 2 MiB, but {reserve.free} of {reserve.total} are free; "
            f"reserve them with `sysctl -w vm.nr_hugepages={reserve.total - reserve.free + needed}`, lower "
            "--l1-size-gb or leave --l1-use-hugepages out",
            field="l1.use_hugepages",
        )
