"""The settings of a segment, and the check that the machine and our control group have the memory that they ask for.

`l1.numa` selects the NUMA nodes from which this process, and so L1, gets its memory.  The policy belongs to the process
and applies to memory allocated from now on, which includes nearly all of L1: the server allocates the pages of the
extents before an engine touches them.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstrata.errors import ConfigError, MachineUnfit, SegmentError
from kvstrata.memory import linux
from kvstrata.memory.linux import HUGE_PAGE_BYTES
from kvstrata.types import GB

HUGE_PAGES = f"hugepages-{HUGE_PAGE_BYTES >> 10}kB"
"""The kernel's name for the folder of huge pages."""
_UNLIMITED = 1 << 60
"""A cgroup without a limit reports a number near 2^63."""


class MemoryLimit(NamedTuple):
    """The lowest limit found, and its source (for messages)."""

    limit_bytes: int
    source: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The minimum of physical memory and the memory limits of our cgroup and its ancestors (v1, v2)."""
    limits = [MemoryLimit(meminfo_bytes(root / "proc/meminfo", "MemTotal"), "this machine's memory")]
    limits += _cgroup_limits(root)
    return min(limits)


def cgroup_limit_bytes(root: Path = Path("/")) -> int:
    """The lowest limit of our cgroup and its ancestors; 0: no limit."""
    return min((limit.limit_bytes for limit in _cgroup_limits(root)), default=0)


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that is available now without swapping, by the kernel's estimate; cgroups are ignored."""
    return meminfo_bytes(root / "proc/meminfo", "MemAvailable")


class HugePages(NamedTuple):
    """Pages of `HUGE_PAGE_BYTES` that this machine sets aside, and how many are neither used nor reserved."""

    total: int
    free: int


def huge_pages(root: Path = Path("/")) -> HugePages:
    """The machine's reserve of 2 MiB pages; zero if the kernel has no such pages."""
    pool = root / "sys/kernel/mm/hugepages" / HUGE_PAGES
    try:
        total, free, reserved = (
            int((pool / name).read_text()) for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
        )
    except OSError:
        return HugePages(0, 0)
    return HugePages(total, free - reserved)


def meminfo_bytes(path: Path, field: str) -> int:
    """One field of /proc/meminfo, or of a node's meminfo, whose lines begin with `Node 0`.

    Raises OSError, and ValueError if the file has no such field.
    """
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.split()[-1:] == [field]:
            return int(value.split()[0]) * 1024
    raise ValueError(f"{path} has no {field}")


def _cgroup_limits(root: Path) -> list[MemoryLimit]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places = [("sys/fs/cgroup", "memory.max"), ("sys/fs/cgroup/unified", "memory.max")]
        elif "memory" in controllers.split(","):
            places = [("sys/fs/cgroup/memory", "memory.limit_in_bytes")]
        else:
            continue
        for mount, name in places:
            found += _limits_up_from(root / mount, path, name)
    return found


def _limits_up_from(mount: Path, path: str, name: str) -> list[MemoryLimit]:
    """Limits of a group and its ancestors; only the mount's own if the path belongs to another namespace."""
    group = mount if ".." in path.split("/") else mount / path.strip("/")
    found = []
    for directory in [group, *group.parents]:
        if not directory.is_relative_to(mount):
            break
        try:
            text = (directory / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            shown = "/" + str(directory.relative_to(mount)).strip(".")
            found.append(MemoryLimit(int(text), f"the memory limit of cgroup {shown}"))
    return found


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
    policy: str = "VALUE"
    max_session_share: int = 8
    huge_pages: bool = False
    """Make the extents of pages of 2 MiB; `extents_bytes` must then be a multiple of that."""
    numa: str = "default"
    """`l1.numa`, see `place_memory`."""

    def entries(self) -> int:
        """Entry capacity of a new segment."""
        derived = min(max(self.extents_bytes // _ENTRY_PER_BYTES, _MIN_ENTRIES), _MAX_ENTRIES)
        return self.entry_capacity or derived

    def needed_bytes(self) -> int:
        """Bytes of memory that L1 and its index use when all their pages are touched."""
        return self.extents_bytes + _INDEX_BYTES + self.entries() * _INDEX_BYTES_PER_ENTRY


def check_size(settings: SegmentSettings, processes_bytes: int = 0) -> None:
    """Raises ConfigError for a size of L1 that is invalid for a pool, MachineUnfit if memory or cgroup is smaller.

    `processes_bytes`: memory that the server and its adapter hosts use besides the segment.
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

    `wait`: retry for a moment, since the keeper is about to free an earlier segment.
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


_NODES = Path("/sys/devices/system/node")


def nodes_of(setting: str, root: Path = _NODES) -> list[int]:
    """The nodes that `setting` (`interleave` or a node's number) selects. Raises ConfigError, MachineUnfit."""
    nodes = sorted(int(node.name[4:]) for node in root.glob("node[0-9]*"))
    if setting == "interleave" and nodes:
        return nodes
    if setting != "interleave" and not setting.isdecimal():
        raise ConfigError(
            f"l1.numa: {setting!r:.80}; write default, interleave, or the number of a node", field="l1.numa"
        )
    if setting == "interleave" or int(setting) not in nodes:
        there = ", ".join(map(str, nodes)) or "none"
        raise MachineUnfit(
            f"l1.numa: {setting!r}: no such node on this machine, whose nodes are: {there}; leave --l1-numa out",
            field="l1.numa",
        )
    return [int(setting)]


def place_memory(setting: str) -> None:
    """Set the kernel's memory policy of this process. Raises SegmentError if the kernel refuses, and as `nodes_of`."""
    if setting == "default":
        return
    policy = linux.MPOL_INTERLEAVE if setting == "interleave" else linux.MPOL_PREFERRED
    try:
        linux.set_memory_policy(policy, nodes_of(setting))
    except OSError as error:
        raise SegmentError(
            f"l1.numa: {setting!r}: the kernel refuses (set_mempolicy: {error.strerror}); in a container allow it "
            "(docker run --cap-add SYS_NICE), or leave --l1-numa out",
            field="l1.numa",
        ) from error
