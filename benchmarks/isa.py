"""`make bench-isa [BENCH=name]`: each benchmark with all vector instructions of this CPU and without AVX-512.

Every benchmark runs in two processes, one of which has `KVSTRATA_SIMD=avx2` and the same restriction for glibc's memcpy
and memset.  They take turns at going first, round after round, so that changes of the machine's speed favour neither.
The table on standard output has both columns, in the form of docs/performance.md; its figures are not written to
build/bench.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

BENCHMARKS = (
    "lookup_rpc",
    "registry",
    "start_ready",
    "host_cost",
    "mooncake",
    "mooncake_hol",
    "object_store",
)
"""Run by default: those with figures that differed between machines with AVX-512 and without."""
AVX2 = {
    "KVSTRATA_SIMD": "avx2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD",
}
Figures = dict[str, dict[str, Any]]


def has_avx512() -> bool:
    """Whether this CPU and its kernel have the AVX-512 that our kernels use."""
    flags = Path("/proc/cpuinfo").read_text()
    return all(f" {name}" in flags for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl"))


def measure(name: str, more: dict[str, str], small: bool) -> Figures:
    """Run one benchmark in a process with `more` in its environment; return its figures by name.

    Raises RuntimeError with the end of its output when it fails.
    """
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        results = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.run", "--results", str(results), name]
        done = subprocess.run(
            [*command, *(["--small"] if small else [])],
            env=os.environ | more,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name}:\n{(done.stdout + done.stderr)[-2000:]}")
        figures: Figures = json.loads(results.read_text())
        return figures


def both(name: str, rounds: int, small: bool) -> tuple[list[Figures], list[Figures]]:
    """The figures of each round, with AVX-512 and without."""
    sides: tuple[list[Figures], list[Figures]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            sides[side].append(measure(name, AVX2 if side else {}, small))
    return sides


def cell(rounds: Sequence[Figures], name: str) -> str:
    """`median unit (least-greatest); ratio (floor)`, three digits each; the floor only of figures that have one."""
    values = [float(figures[name]["value"]) for figures in rounds]
    ratio = statistics.median(float(figures[name]["ratio"]) for figures in rounds)
    spread = f" ({min(values):.3g}-{max(values):.3g})" if len(values) > 1 else ""
    floors = [float(figures[name]["floor_ratio"]) for figures in rounds if "floor_ratio" in figures[name]]
    floor = f" (floor {statistics.median(floors):.3g})" if floors else ""
    return f"{statistics.median(values):.3g} {rounds[0][name]['unit']}{spread}; {ratio:.3g} ×{floor}"


def rows(avx512: Sequence[Figures], avx2: Sequence[Figures]) -> list[str]:
    """A row of the table for each figure; `met` only if each column met its target in most of its rounds."""
    lines = []
    for name, first in avx512[0].items():
        met = all(statistics.median(bool(one[name]["ok"]) for one in side) > 0.5 for side in (avx512, avx2))
        cells = [f"`{name}`", cell(avx512, name), cell(avx2, name), str(first["target"])]
        lines.append(f"| {' | '.join(cells)} | {'yes' if met else '**no**'} |")
    return lines


def main() -> int:
    """Run the command line; the exit status says whether each benchmark ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"benchmarks to run, by default: {', '.join(BENCHMARKS)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="only show that the benchmarks work")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give at least 1")
    if not has_avx512():
        print("This CPU has no AVX-512, so both columns would be the same; run `make bench` instead.")
        return 1
    failed = False
    print("| name | AVX-512 | AVX2 | target | met |\n|---|---|---|---|---|", flush=True)
    for name in options.names or BENCHMARKS:
        try:
            print("\n".join(rows(*both(name, options.rounds, options.small))), flush=True)
        except RuntimeError as error:
            failed = True
            print(error, file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
