"""The setting `l1.numa`: on which NUMA nodes this process, and so L1, gets its memory.

The policy is the process's own and holds for memory that it is given from now on, which is nearly all L1: pages of the
extents are allocated by the server, before an engine touches them.
"""

from __future__ import annotations

from pathlib import Path

from kvstrata.errors import ConfigError, MachineUnfit, SegmentError
from kvstrata.memory import linux

_NODES = Path("/sys/devices/system/node")


def nodes_of(setting: str, root: Path = _NODES) -> list[int]:
    """The nodes that `interleave` or a node's number means here. Raises ConfigError, MachineUnfit."""
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


def place(setting: str) -> None:
    """Let the kernel place this process's memory so. Raises SegmentError if it refuses, and as `nodes_of`."""
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
