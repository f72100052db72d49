"""How much memory this machine and our control group let us use."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvstrata.memory.linux import HUGE_PAGE_BYTES

HUGE_PAGES = f"hugepages-{HUGE_PAGE_BYTES >> 10}kB"
"""The kernel's name for the folder of huge pages."""
_UNLIMITED = 1 << 60
"""A cgroup without a limit reports a number near 2^63."""


class MemoryLimit(NamedTuple):
    """The smallest bound found, and where it comes from (for messages)."""

    limit_bytes: int
    source: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The least of physical memory and the memory limits of our cgroup and its ancestors (v1, v2)."""
    limits = [MemoryLimit(meminfo_bytes(root / "proc/meminfo", "MemTotal"), "this machine's memory")]
    limits += _cgroup_limits(root)
    return min(limits)


def cgroup_limit_bytes(root: Path = Path("/")) -> int:
    """The least limit of our cgroup and its ancestors; 0: no limit."""
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
    """One amount out of /proc/meminfo, or out of a node's meminfo, which puts `Node 0` before the name.

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
