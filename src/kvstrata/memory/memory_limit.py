"""How much memory this machine and our control group give us."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvstrata.memory.linux import HUGE_PAGE_BYTES

HUGE_PAGES = f"hugepages-{HUGE_PAGE_BYTES >> 10}kB"
"""The kernel's name of their folder."""
_UNLIMITED = 1 << 60
"""A cgroup without a limit reports a number near 2^63."""


class MemoryLimit(NamedTuple):
    """The smallest bound found, and where it comes from (for messages)."""

    limit_bytes: int
    source: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The least of physical memory and the memory limits of our cgroup and those above it (v1, v2)."""
    limits = [MemoryLimit(meminfo_bytes(root / "proc/meminfo", "MemTotal"), "this machine's memory")]
    limits += _cgroup_limits(root)
    return min(limits)


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had now without swapping, as the kernel estimates it (not looking at cgroups)."""
    return meminfo_bytes(root / "proc/meminfo", "MemAvailable")


class HugePages(NamedTuple):
    """Pages of `HUGE_PAGE_BYTES` that this machine keeps apart, and how many of them nobody has or reserved."""

    total: int
    free: int


def huge_pages(root: Path = Path("/")) -> HugePages:
    """The machine's reserve of 2 MiB pages; none where the kernel has no such pages."""
    pool = root / "sys/kernel/mm/hugepages" / HUGE_PAGES
    try:
        total, free, reserved = (
            int((pool / name).read_text()) for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
        )
    except OSError:
        return HugePages(0, 0)
    return HugePages(total, free - reserved)


def meminfo_bytes(path: Path, field: str) -> int:
    """One amount out of /proc/meminfo, or out of a node's, where `Node 0` stands before the name."""
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
    """Limits of the group and its ancestors; only the mount's own where the path is of another namespace."""
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
