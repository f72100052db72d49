"""Chooses the NUMA nodes for L1, and tells on which nodes its pages lie.

The kernel tells which nodes have memory (/sys/devices/system/node), which ones this process may use
(/proc/self/status), and which ones are next to NVIDIA GPUs (/sys/bus/pci), so that the server needs no driver.
Pages are never moved: a placement holds for pages that do not exist yet.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from kvstrata.errors import ConfigError, MachineLacks, SegmentError
from kvstrata.memory import linux
from kvstrata.memory.memory_limit import HUGE_PAGES, meminfo_bytes

_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""PCI vendor NVIDIA, and the first byte of the class of display and 3D controllers."""
_NODES = "sys/devices/system/node"
_SAMPLED_PAGES = 64


class Placement(NamedTuple):
    """The setting `l1.numa`, and its meaning on this machine. No nodes: the kernel's own policy."""

    setting: str = "default"
    policy: int = linux.MPOL_DEFAULT
    nodes: tuple[int, ...] = ()
    memory_bytes: int | None = None
    """Memory of the nodes, if no other nodes may be used."""


def placement(setting: str, root: Path = Path("/")) -> Placement:
    """The placement that `l1.numa` asks for. Raises ConfigError, MachineLacks if this machine cannot provide it."""
    if setting == "default":
        return Placement()
    there, allowed = nodes_with_memory(root), allowed_nodes(root)
    if not there:
        raise _lacks(setting, f"this kernel reports no NUMA nodes (/{_NODES}); leave --l1-numa out")
    if setting == "interleave":
        return Placement(setting, linux.MPOL_INTERLEAVE, tuple(node for node in there if node in allowed))
    try:
        nodes = _gpu_nodes(setting, there, root) if setting == "gpu" else _read_list(setting)
    except ValueError as error:
        raise ConfigError(f"l1.numa: {setting!r}: {error}", field="l1.numa") from None
    for node in nodes:
        if node not in there:
            raise _lacks(setting, f"there is no node {node} with memory, this machine has {_shown(there)}")
        if node not in allowed:
            raise _lacks(
                setting,
                f"this process may not use memory of node {node}, only of {_shown(allowed)}; allow it in the cpuset "
                "(docker run --cpuset-mems) or choose another",
            )
    memory_bytes = sum(meminfo_bytes(root / _NODES / f"node{node}/meminfo", "MemTotal") for node in nodes)
    return Placement(setting, linux.MPOL_BIND, nodes, memory_bytes)


def place(wanted: Placement, address: int, length: int) -> None:
    """Tell the kernel where to place this mapping's pages. Raises SegmentError if it refuses."""
    if wanted.policy == linux.MPOL_DEFAULT:
        # The file may have an earlier server's policy. For a mapping that never had one, MPOL_DEFAULT changes nothing
        # (Linux 6.18), so it gets another policy first. If the kernel refuses that, no earlier server has set one.
        with contextlib.suppress(OSError):
            linux.place_memory(address, length, linux.MPOL_LOCAL, ())
            linux.place_memory(address, length, linux.MPOL_DEFAULT, ())
        return
    try:
        linux.place_memory(address, length, wanted.policy, wanted.nodes)
    except OSError as error:
        raise SegmentError(
            f"l1.numa: {wanted.setting!r}: the kernel refuses to place L1 on nodes {_shown(wanted.nodes)} (mbind: "
            f"{error.strerror}); in a container allow it (docker run --cap-add SYS_NICE), or leave --l1-numa out",
            field="l1.numa",
        ) from error


def sampled_nodes(address: int, length: int) -> dict[str, int]:
    """Node → number of sampled pages that lie on it; pages that this process has not touched are not counted.

    Empty if the kernel does not tell.
    """
    step = max(4096, length // _SAMPLED_PAGES & ~4095)
    try:
        nodes = linux.nodes_of_pages(list(range(address, address + length, step)))
    except OSError:
        return {}
    return {str(node): nodes.count(node) for node in sorted(set(nodes)) if node >= 0}


def nodes_with_memory(root: Path = Path("/")) -> tuple[int, ...]:
    """This machine's nodes with memory; empty if the kernel was built without NUMA."""
    try:
        return _read_list((root / _NODES / "has_memory").read_text().strip())
    except OSError:
        return ()


def allowed_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """Nodes whose memory this process's cpuset lets it use."""
    for line in (root / "proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return _read_list(value.strip())
    return ()


def nodes_of_gpus(root: Path = Path("/")) -> list[int]:
    """The node of each NVIDIA GPU on the bus; -1 if the kernel does not know it."""
    nodes = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = ((device / file).read_text() for file in ("vendor", "class"))
        except OSError:
            continue
        if vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY):
            node = device / "numa_node"
            nodes.append(int(node.read_text()) if node.exists() else -1)
    return nodes


def free_huge_pages(nodes: tuple[int, ...], root: Path = Path("/")) -> int:
    """Free pages of 2 MiB on these nodes."""
    return sum(
        int((root / _NODES / f"node{node}/hugepages/{HUGE_PAGES}/free_hugepages").read_text())
        for node in nodes
    )


def _gpu_nodes(setting: str, there: tuple[int, ...], root: Path) -> tuple[int, ...]:
    found = set(nodes_of_gpus(root))
    if not found:
        raise _lacks(setting, "there is no NVIDIA GPU on this machine's PCI bus; name the nodes")
    if -1 in found and len(there) > 1:
        raise _lacks(setting, "the kernel does not know the node of a GPU; name the nodes")
    return there if -1 in found else tuple(sorted(found))


def _read_list(text: str) -> tuple[int, ...]:
    """Numbers as the kernel lists them: `0-2,5`."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{part} runs backwards; write {last}-{first}")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def _shown(nodes: tuple[int, ...]) -> str:
    return ", ".join(map(str, nodes)) or "none"


def _lacks(setting: str, why: str) -> MachineLacks:
    return MachineLacks(f"l1.numa: {setting!r}: {why}", field="l1.numa")
