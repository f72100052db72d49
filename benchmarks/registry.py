"""`registry_*`: the controller's map of 100 instances with 1,000,000 chunks each.

benchmarks/native/registry_table.cpp, which has the same native code as the compiled modules, fills an empty registry: 1
% of the keys are on all instances, and each instance has a fifth of its keys in L1 and the others on disk. Its times
are CPU times of its one thread; the time that the registry's own thread takes to touch memory ahead is counted
separately (`touching_ms`). Between the lookups the program reads random lines of other memory of the same size
(`raw_ns`): no lookup can be faster.

Sketch: a lookup is one line of 64 bytes at the latency of memory, or at its throughput in batches; a report reads and
writes one line a key.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import compared, sized

ROOT = Path(__file__).resolve().parents[1]
INSTANCES, CHUNKS = sized((100, 1_000_000), (4, 10_000))


def table(instances: int, chunks: int) -> dict[str, Any]:
    """Run the C++ program; return its numbers. Raises RuntimeError when it cannot be compiled or fails."""
    program = "build/native/bench/registry_table"
    command = [sys.executable, "ext/make", "program", "benchmarks/native/registry_table.cpp", program]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if made.returncode:
        raise RuntimeError(f"registry_table: {made.stdout}")
    done = subprocess.run(
        [ROOT / program, str(instances), str(chunks)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def measure(instances: int, chunks: int) -> list[dict[str, Any]]:
    """Measure the figures."""
    measured = table(instances, chunks)
    middle = {name: statistics.median(times) for name, times in measured.items() if isinstance(times, list)}
    size = f"{instances} x {chunks}"
    batch_us = max(middle["batch_ns"], middle["prefix_ns"]) / 1e3
    peak_gb = max(measured["resident_bytes"], measured["registry_bytes"]) / 1e9
    # Reports that made the table larger, and reports that replaced earlier ones.
    reports_ms = [value / 1e6 for value in measured["fill_ns"][-20:] + measured["report_ns"]]
    departed_ms = max(measured["depart_ns"]) / 1e6
    return [
        compared(
            "registry_lookup",
            [one_ns / 1e3 for one_ns in measured["one_ns"]],
            "µs, one key",
            "a random read of a line of other memory of the same size",
            middle["raw_ns"] / 1e3,
            most_value=0.08,
            ok=batch_us <= 0.04,
            size=size,
            of_512_us=middle["batch_ns"] / 1e3,
            prefix_of_512_us=middle["prefix_ns"] / 1e3,
        ),
        compared(
            "registry_memory",
            peak_gb,
            "GB",
            "the target",
            2.0,
            most_value=2,
            size=size,
            counted_gb=measured["registry_bytes"] / 1e9,
            placements=measured["placements"],
            shared_tags=measured["shared_tags"],
        ),
        compared(
            "registry_report",
            reports_ms,
            "ms for a million keys",
            "the target",
            60.0,
            most_value=60,
            size=size,
            replacing_ms=middle["report_ns"] / 1e6,
            touching_ms=statistics.median(measured["touch_ns"][-20:]) / 1e6,
            sweep_ms=middle["sweep_ns"] / 1e6,
        ),
        # The lookup right after the departure is in its time.
        compared("registry_deregister", departed_ms, "ms", "the target", 0.1, most_value=0.1, size=size),
    ]


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    return measure(INSTANCES, CHUNKS)
