"""The GPU checks of `kvstrata doctor`: driver, each device's link, pinned memory, and the speed of each way of copying.

Only engines with KV on a GPU need a GPU, so a missing or refusing GPU is at most a warning.  The checks take some
130 MB of each device's memory for a moment.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.cli.finding import Finding
from kvstrata.memory.memory_limit import cgroup_limit_bytes
from kvstrata.memory.numa import nodes_of_gpus
from kvstrata.types import GB

if TYPE_CHECKING:
    from kvstrata.native.cuda import DeviceFacts

PCI_DEVICES = Path("/sys/bus/pci/devices")
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
PINNED_BYTES = 64 << 20
"""Bytes that a worker registers in one call (client/pinning.py)."""
SLOW = 0.5
"""Copies slower than this share of the link's bandwidth cause a warning."""

LAYERS = 32
BLOCKS = 16
RUN_BYTES = 16 * 8 * 128 * 2
"""Keys or values of 16 tokens in one layer of Llama 8B: 8 kv heads of 128 numbers of 2 bytes."""


class Link(NamedTuple):
    """The PCIe link of a device: its present speed and width, and the most that the device can."""

    gt_per_s: float
    lanes: int
    most_gt_per_s: float
    most_lanes: int

    @property
    def gb_per_s(self) -> float:
        """Bytes a second in one direction, without the overhead of packets."""
        encoded = 8 / 10 if self.gt_per_s < 8 else 128 / 130
        return self.gt_per_s * self.lanes * encoded / 8

    @property
    def reduced(self) -> bool:
        """Whether the device could do more."""
        return self.gt_per_s < self.most_gt_per_s or self.lanes < self.most_lanes


def read_link(bus_id: str, devices: Path = PCI_DEVICES) -> Link | None:
    """The link of the device with this PCI id; None if the kernel does not show it."""
    folder = devices / bus_id.lower()
    try:
        # "32.0 GT/s PCIe"; "Unknown" without a link (virtual machines).
        now, most = (
            float((folder / f"{which}_link_speed").read_text().split()[0]) for which in ("current", "max")
        )
        lanes, most_lanes = (
            int((folder / f"{which}_link_width").read_text()) for which in ("current", "max")
        )
    except (OSError, ValueError, IndexError):
        return None
    return Link(now, lanes, most, most_lanes) if lanes else None


def check_gpus() -> list[Finding]:
    """All findings about GPUs."""
    try:
        from kvstrata.native.cuda import CudaError, device_facts, driver_facts
    except ImportError as error:
        return [Finding("GPU driver", "fail", str(error), "build it: pip install . or `make setup`")]
    try:
        driver = driver_facts()
    except CudaError as error:
        state = "warn" if _gpu_expected() else "ok"
        return [_refused("GPU driver", error, "only engines with their KV on a GPU need one", state)]
    version = f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}"
    devices = f"{driver.devices} device" + ("s" if driver.devices > 1 else "")
    if driver.batched_copies:
        found = [Finding("GPU driver", "ok", f"{version}, {devices}, batched copies")]
    else:
        advice = "update it to CUDA 12.8 (570) or newer: copies of small blocks are faster there"
        found = [Finding("GPU driver", "warn", f"{version}, {devices}, no batched copies", advice)]
    if driver.kernels:
        advice = "build kvstrata where nvcc is (`make cuda`); until then copies go by `dma` only"
        found.append(Finding("GPU kernels", "warn", driver.kernels, advice))
    else:
        found.append(Finding("GPU kernels", "ok", "built"))
    for ordinal in range(driver.devices):
        try:
            device = device_facts(ordinal)
        except CudaError as error:
            found.append(_refused(f"GPU {ordinal}", error, "nvidia-smi -q tells its state"))
            continue
        found += _check_device(device)
    return found


def _check_device(device: DeviceFacts) -> list[Finding]:
    major, minor = device.capability
    node = f"NUMA node {device.numa_node}" if device.numa_node >= 0 else "no NUMA node"
    name = f"GPU {device.ordinal}"
    found = (
        f"{device.name}, {device.memory_bytes / GB:.1f} GB, sm_{major}{minor}, {device.pci_bus_id}, {node}"
    )
    pinned = _check_pinned(device)
    # An idle GPU slows its link down, so the link is read right after copies.
    copies, gb_per_s = _check_copies(device)
    return [Finding(name, "ok", found), pinned, copies, _check_link(device, gb_per_s)]


def _check_pinned(device: DeviceFacts) -> Finding:
    from kvstrata.native.copying import buffer_address
    from kvstrata.native.cuda import CudaError, HostRegion

    name = f"GPU {device.ordinal} pinned memory"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cgroup = cgroup_limit_bytes()
    limits = "locked memory " + ("unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 20} MB")
    limits += f", cgroup {cgroup / GB:.1f} GB" if cgroup else ", no cgroup limit"
    if not device.can_register_host:
        advice = "copies go unpinned, at a fraction of the speed; use a machine that has the whole GPU"
        return Finding(name, "warn", f"the device cannot register host memory ({limits})", advice)
    memory = mmap.mmap(-1, PINNED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    try:
        begun_s = time.perf_counter()
        region = HostRegion(device.ordinal, buffer_address(memory), PINNED_BYTES)
        took_ms = 1e3 * (time.perf_counter() - begun_s)
        region.unregister()
    except CudaError as error:
        finding = _refused(name, error, "copies go unpinned, at a fraction of the speed")
        return finding._replace(found=f"{finding.found} ({limits})")
    finally:
        memory.close()
    return Finding(name, "ok", f"{PINNED_BYTES >> 20} MB in {took_ms:.0f} ms; {limits}")


def _check_copies(device: DeviceFacts) -> tuple[Finding, float]:
    """Measure the ways of copying; returns the finding and the GB/s of the fastest way, 0 if none was measured."""
    from kvstrata.native.copying import CopyPlan
    from kvstrata.native.cuda import CudaCopyEngine, CudaError

    name = f"GPU {device.ordinal} copies"
    plan = CopyPlan(
        [layer * 2 * BLOCKS * RUN_BYTES for layer in range(1, LAYERS + 1)],
        BLOCKS,
        [RUN_BYTES] * LAYERS,
        [(2, BLOCKS * RUN_BYTES)],
        RUN_BYTES,
    )
    # No block is followed by its neighbour, as in a cache that has been in use for a long time.
    blocks = [7 * at % BLOCKS for at in range(BLOCKS)]
    try:
        engine = CudaCopyEngine(device.ordinal)
        try:
            engine.choose(plan, 0, 0, blocks)
        finally:
            engine.close()
    except CudaError as error:
        return _refused(name, error, "`nvidia-smi` tells what else uses the GPU"), 0.0
    rates = ", ".join(f"{way} {rate:.1f}" for way, rate in engine.measured.items())
    found, fastest = f"{engine.engine}, of {rates} GB/s; {engine.reason}", max(engine.measured.values())
    if "kernel" not in engine.measured:
        return Finding(name, "warn", found, "only `dma` works; the finding names the reason"), fastest
    return Finding(name, "ok", found), fastest


def _check_link(device: DeviceFacts, gb_per_s: float) -> Finding:
    name = f"GPU {device.ordinal} link"
    link = read_link(device.pci_bus_id)
    if link is None:
        return Finding(name, "ok", f"unknown: {PCI_DEVICES / device.pci_bus_id.lower()} does not tell")
    generation = GENERATIONS.get(link.gt_per_s)
    found = f"PCIe {generation}" if generation else f"{link.gt_per_s} GT/s"
    found += f" x{link.lanes}, {link.gb_per_s:.0f} GB/s at most"
    if link.reduced:
        can = f"the device can {link.most_gt_per_s:g} GT/s x{link.most_lanes}"
        advice = f"{can}: check the slot, its riser and the BIOS (lspci -vv, LnkSta)"
        return Finding(name, "warn", found, advice)
    if 0 < gb_per_s < SLOW * link.gb_per_s:
        advice = (
            f"copies reach {gb_per_s:.1f} GB/s: run the engine on the CPUs and memory next to the GPU "
            f"(numactl --cpunodebind={max(0, device.numa_node)}), and check what else uses the link"
        )
        return Finding(name, "warn", found, advice)
    return Finding(name, "ok", found)


def _refused(name: str, error: Exception, otherwise: str, state: str = "warn") -> Finding:
    """A finding made from an error. The error's text after `; ` becomes the advice; without such text, `otherwise`."""
    found, _, remedy = str(error).partition("; ")
    return Finding(name, state, found, remedy or otherwise)


def _gpu_expected() -> bool:
    """An NVIDIA device is on the bus, or the driver's library is installed."""
    if nodes_of_gpus():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
