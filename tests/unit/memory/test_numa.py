"""On which NUMA nodes L1's pages lie: what `l1.numa` means on a machine, and what the kernel is told."""

from __future__ import annotations

import array
import platform
from pathlib import Path

import pytest

from kvstrata.config.load import load
from kvstrata.config.model import ServerSettings
from kvstrata.errors import ConfigError, SegmentError
from kvstrata.memory import linux, numa
from kvstrata.memory.numa import Placement, placement
from kvstrata.memory.segment import Segment, SegmentSettings
from kvstrata.native.index import ExtentsMap
from kvstrata.server.plan import plan

MIB = 1 << 20
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
MPOL_F_ADDR = 2

needs_numa = pytest.mark.skipif(not numa.nodes_with_memory(), reason="needs a kernel with NUMA nodes")


def machine(root: Path, *, nodes: str = "0-1", allowed: str = "0-1", gpus: tuple[str, ...] = ()) -> Path:
    """A folder laid out like /sys and /proc; each node has 8 MiB, `gpus` are the contents of `numa_node` files."""

    def write(path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    write("proc/self/status", f"Name:\tserver\nMems_allowed_list:\t{allowed}\nThreads:\t1\n")
    if nodes:
        write("sys/devices/system/node/has_memory", f"{nodes}\n")
        for node in range(4):
            write(
                f"sys/devices/system/node/node{node}/meminfo",
                f"Node {node} MemTotal:    8192 kB\nNode {node} MemFree: 1 kB\n",
            )
            write(
                f"sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/free_hugepages", f"{node}\n"
            )
    for number, node in enumerate(gpus):
        write(f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", "0x10de\n")
        write(f"sys/bus/pci/devices/0000:0{number}:00.0/class", "0x030200\n")
        write(f"sys/bus/pci/devices/0000:0{number}:00.0/numa_node", f"{node}\n")
    for number, vendor, kind in ((8, "0x8086", "0x030000"), (9, "0x10de", "0x068000")):
        write(f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", f"{vendor}\n")
        write(f"sys/bus/pci/devices/0000:0{number}:00.0/class", f"{kind}\n")
        write(f"sys/bus/pci/devices/0000:0{number}:00.0/numa_node", "3\n")
    return root


@pytest.mark.parametrize(
    ("setting", "policy", "nodes", "memory_mib"),
    [
        ("0", linux.MPOL_BIND, (0,), 8),
        ("1,0", linux.MPOL_BIND, (0, 1), 16),
        ("0-1", linux.MPOL_BIND, (0, 1), 16),
        ("gpu", linux.MPOL_BIND, (1,), 8),
        ("interleave", linux.MPOL_INTERLEAVE, (0, 1), None),
        ("default", linux.MPOL_DEFAULT, (), None),
    ],
)
def test_each_numa_setting_means_nodes_of_this_machine(
    tmp_path: Path, setting: str, policy: int, nodes: tuple[int, ...], memory_mib: int | None
) -> None:
    found = placement(setting, machine(tmp_path, nodes="0-2", gpus=("1", "1")))
    assert found == Placement(setting, policy, nodes, memory_mib and memory_mib * MIB)


@pytest.mark.parametrize(
    ("setting", "tree", "says"),
    [
        ("7", {}, "no node 7 with memory, this machine has 0, 1"),
        ("0-2", {}, "no node 2 with memory"),
        ("1", {"allowed": "0"}, "may not use memory of node 1, only of 0; allow it in the cpuset"),
        ("0,2-1", {"nodes": "0-3"}, "2-1 runs backwards; write 1-2"),
        ("gpu", {}, "no NVIDIA GPU on this machine's PCI bus; name the nodes"),
        ("gpu", {"gpus": ("0", "-1")}, "does not know the node of a GPU; name the nodes"),
        ("gpu", {"gpus": ("1",), "allowed": "0"}, "may not use memory of node 1"),
        ("0", {"nodes": ""}, "no NUMA nodes.*leave --l1-numa out"),
        ("interleave", {"nodes": ""}, "no NUMA nodes"),
    ],
)
def test_nodes_that_the_machine_lacks_are_an_error_that_says_what_to_do(
    tmp_path: Path, setting: str, tree: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"l1.numa: '{setting}': .*{says}") as refused:
        placement(setting, machine(tmp_path, **tree))  # type: ignore[arg-type]
    assert refused.value.field == "l1.numa"


def test_on_a_machine_of_one_node_a_gpu_without_a_node_is_next_to_it(tmp_path: Path) -> None:
    assert placement("gpu", machine(tmp_path, nodes="0", allowed="0", gpus=("-1",))).nodes == (0,)


@pytest.mark.parametrize("value", ["", "gpus", "0-", "a", "-1", "0;1", "99999", "0, 1"])
def test_unknown_numa_settings_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"l1\.numa") as refused:
        load(ServerSettings, flags={"l1": {"numa": value}})
    assert refused.value.field == "l1.numa"


def test_huge_pages_that_nobody_touches_ahead_cannot_be_placed() -> None:
    l1 = {"numa": "0", "use_hugepages": True, "prefault_threads": 0}
    with pytest.raises(
        ConfigError, match=r"l1\.prefault_threads: 0 with l1\.use_hugepages.*prefault_threads to 1"
    ):
        plan(load(ServerSettings, flags={"l1": l1}), {})


def opened(settings: SegmentSettings, wanted: Placement) -> Segment:
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return Segment.open(SegmentSettings(**{**fields, "placement": wanted}))


def policy_at(address: int) -> tuple[int, int]:
    """The kernel's policy for the page at an address, and the nodes as a mask."""
    mode, mask = array.array("i", [-1]), array.array("Q", bytes(linux.MAX_NODES // 8))
    number = GET_MEMPOLICY[platform.machine()]
    linux._syscall(
        number, mode.buffer_info()[0], mask.buffer_info()[0], linux.MAX_NODES + 1, address, MPOL_F_ADDR
    )
    return mode[0], mask[0]


@needs_numa
@pytest.mark.parametrize("mapped", ["first", "last"])
def test_the_whole_pool_is_placed_for_every_process_that_maps_it(
    settings: SegmentSettings, mapped: str
) -> None:
    segment = opened(settings, placement("0"))
    other = ExtentsMap(segment.descriptors.extents, settings.extents_bytes)
    within = 0 if mapped == "first" else settings.extents_bytes - 1
    assert policy_at(segment.pool.extents_address + within) == (linux.MPOL_BIND, 1)
    assert policy_at(other.address + within) == (linux.MPOL_BIND, 1)
    other.close()
    segment.close()


@needs_numa
def test_an_adopted_pool_gets_the_present_placement(settings: SegmentSettings) -> None:
    for word, policy in (
        ("0", linux.MPOL_BIND),
        ("interleave", linux.MPOL_INTERLEAVE),
        ("default", linux.MPOL_DEFAULT),
    ):
        segment = opened(settings, placement(word))
        assert policy_at(segment.pool.extents_address)[0] == policy
        segment.close()
    segment = opened(settings, placement("default"))
    assert segment.adopted
    segment.close()


@needs_numa
def test_status_tells_where_touched_pages_lie(settings: SegmentSettings) -> None:
    segment = opened(settings, placement("0"))
    assert segment.numa_status()["sampled_pages"] == {}
    segment.pool.prefault_start(1)
    while segment.pool.prefaulted_bytes < settings.extents_bytes:
        assert segment.pool.stats()["prefault_error"] == 0
    assert segment.numa_status() == {
        "setting": "0",
        "nodes": [0],
        "gpu_nodes": sorted(set(numa.nodes_of_gpus())),
        "sampled_pages": {"0": 64},
    }
    segment.close()


def test_nodes_that_are_too_small_are_an_error_before_anything_is_made(settings: SegmentSettings) -> None:
    with pytest.raises(
        ConfigError, match=r"l1\.numa: '0': L1 of 4194304 bytes is bound to nodes with 4096 bytes"
    ):
        opened(settings, Placement("0", linux.MPOL_BIND, (0,), 4096))
    assert not settings.directory.exists()


@needs_numa
def test_a_refused_placement_is_an_error_and_leaves_nothing(settings: SegmentSettings) -> None:
    """Nodes that do not exist stand in for a container that forbids the call: both are the kernel's refusal."""
    with pytest.raises(
        SegmentError, match=r"l1\.numa: '900': the kernel refuses.*--cap-add SYS_NICE"
    ) as refused:
        opened(settings, Placement("900", linux.MPOL_BIND, (900,)))
    assert refused.value.field == "l1.numa"
    assert not settings.directory.exists()
    segment = opened(settings, placement("0"))
    segment.close()
    with pytest.raises(SegmentError):
        opened(settings, Placement("900", linux.MPOL_BIND, (900,)))
    segment = opened(settings, placement("0"))
    assert segment.adopted
    segment.close()
