"""`kvstrata doctor`: finds what keeps server or connector from working on this machine, and ends with what to do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.cli.boundary import guarded
from kvstrata.cli.doctor_gpu import check_gpus
from kvstrata.cli.doctor_vllm import check_engine_settings, check_model, check_vllm
from kvstrata.cli.finding import Finding
from kvstrata.config.command_line import server_settings
from kvstrata.errors import KvstrataError
from kvstrata.memory.memory_limit import cgroup_limit_bytes
from kvstrata.types import GB


def check_extension() -> Finding:
    """Check that the compiled modules load."""
    try:
        from kvstrata.native import copying, hashing, pool  # noqa: F401
    except ImportError as error:
        return Finding("extension", "fail", str(error), "build it: pip install . or `make setup`")
    return Finding("extension", "ok", f"loaded, checksum by {copying.crc32c_path()}")


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


CHECKS: Sequence[Callable[[], Finding | list[Finding]]] = (
    check_cpu,
    check_memory,
    check_numa,
    check_limits,
    check_vllm,
    check_engine_settings,
    check_gpus,
)
"""What is looked at whatever the settings are."""


def findings(arguments: Sequence[str], model: str) -> list[Finding]:
    """All findings, in order. `arguments`: the server's flags; `model`: the path of a model, or empty."""
    extension = check_extension()
    found = [extension]
    for check in CHECKS:
        result = check()
        found += result if isinstance(result, list) else [result]
    if extension.state == "fail":  # nothing of the server can be imported
        return found
    from kvstrata.cli.doctor_server import server_findings
    from kvstrata.server.plan import default_l1_bytes

    l1_bytes = 0
    try:
        _, read = server_settings(arguments, os.environ)
        settings = read()
        found += server_findings(settings, os.environ)
        l1_bytes = round((settings.l1.size_gb or 0) * GB) or default_l1_bytes()
    except KvstrataError as error:
        found += [Finding("settings", "fail", line, "correct it") for line in error.lines]
    if model:
        found += check_model(model, l1_bytes)
    return found


def to_do(found: Sequence[Finding]) -> list[str]:
    """What to do, the most urgent first."""
    bad = (each for each in found if each.advice and each.state != "ok")
    urgent = sorted(bad, key=lambda each: each.state != "fail")
    return [f"{each.check}: {each.advice}" for each in urgent]


def parser() -> argparse.ArgumentParser:
    """The command line of `kvstrata doctor`."""
    top = argparse.ArgumentParser(
        prog="kvstrata doctor",
        description=__doc__,
        epilog="All flags of `lmcache-server` may follow, so that the server that they describe is looked at.",
        allow_abbrev=False,
    )
    top.add_argument("--json", action="store_true", help="print JSON")
    top.add_argument(
        "--model", default="", metavar="PATH", help="tell how vLLM's connector sees this model (none)"
    )
    return top


@guarded("kvstrata doctor")
def main(arguments: Sequence[str] | None) -> int:
    """Print the report; the exit status is 1 when a check failed."""
    options, flags = parser().parse_known_args(arguments)
    found = findings(flags, options.model)
    if options.json:
        print(json.dumps([finding._asdict() for finding in found], indent=1))
    else:
        width = max(len(finding.check) for finding in found)
        for finding in found:
            note = f" ({finding.advice})" if finding.advice and finding.state == "ok" else ""
            print(f"{finding.state:<5} {finding.check:<{width}}  {finding.found}{note}")
        steps = [f"  {number}. {step}" for number, step in enumerate(to_do(found), 1)]
        print("\nWhat to do:", *(steps or ["  nothing: everything is in order"]), sep="\n")
    return 1 if any(finding.state == "fail" for finding in found) else 0
