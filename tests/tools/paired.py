"""`make bench-paired WITH=commit BENCH="ping lookup_rpc"`: the same benchmarks of this checkout and of another side.

The other side is an older commit, cloned and set up in a temporary folder (`--clone` names one that is set up already),
or with `--simd avx2` this checkout without AVX-512, glibc's memcpy and memset included (`make bench-isa`).  Each round
runs every benchmark once on each side, with that side's own code, and the two take turns at going first, so that a
machine which becomes slower is slow for both.  The table has the medians over the rounds, and the median of each
round's ratio, this checkout ÷ the other side, with the least and the greatest.  The command judges nothing: the reader
sees the spread and decides what is noise.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.child import ROOT

RESULTS = Path("build") / "bench.json"
AVX2 = {
    "KVSTRATA_SIMD": "avx2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD",
}
Figures = dict[str, dict[str, Any]]


class BenchmarkFailed(Exception):
    """A benchmark ended with an error; the message has its last lines."""


def set_up(commit: str, folder: Path) -> Path:
    """Clone this repository at a commit, with its environment; return the clone."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", commit], check=True)
    subprocess.run(["make", "-C", str(clone), "setup"], check=True)
    return clone


class Side(NamedTuple):
    """A checkout, and what its processes have in their environment besides."""

    clone: Path
    more: dict[str, str]


def measure(side: Side, name: str) -> Figures:
    """Run one benchmark on a side; its figures by name. Raises BenchmarkFailed."""
    kept = side.clone / RESULTS
    kept.unlink(missing_ok=True)
    done = subprocess.run(
        [str(side.clone / ".venv/bin/python"), "-m", "benchmarks.run", name],
        cwd=side.clone,
        env=os.environ | side.more,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not kept.exists():
        raise BenchmarkFailed(f"{name} in {side.clone}:\n{(done.stdout + done.stderr)[-2000:]}")
    figures: Figures = json.loads(kept.read_text())
    return figures


def median_of(rounds: list[float]) -> str:
    """`median (least-greatest)`, three digits each."""
    return f"{statistics.median(rounds):.3g} ({min(rounds):.3g}-{max(rounds):.3g})"


def table(this: list[Figures], older: list[Figures]) -> str:
    """A Markdown table of the figures that both sides gave in every round."""
    lines = ["| figure | unit | this | other | this ÷ other |", "|---|---|---|---|---|"]
    names = set.intersection(*(set(figures) for figures in (*this, *older)))
    for name in sorted(names):
        values = [[float(figures[name]["value"]) for figures in side] for side in (this, older)]
        ratios = [new / old if old else float("nan") for new, old in zip(*values, strict=True)]
        cells = [f"`{name}`", this[0][name]["unit"], *map(median_of, (*values, ratios))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--commit", help="the older commit; cloned and set up in a temporary folder")
    wanted.add_argument("--clone", type=Path, help="a checkout of it that is set up already")
    wanted.add_argument(
        "--simd", choices=["avx2"], help="this checkout, with these vector instructions at most"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("names", nargs="+", metavar="BENCHMARK")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give at least 1")
    folder = Path(tempfile.mkdtemp(prefix="paired-", dir=ROOT / "build"))
    try:
        if options.simd:
            other = Side(ROOT, AVX2)
        else:
            other = Side(options.clone.resolve() if options.clone else set_up(options.commit, folder), {})
        sides = (Side(ROOT, {}), other)
        for side in sides:
            # Otherwise the first start of each checkout would compile its modules, and if bytecode may not be written,
            # so would every start.
            compileall.compile_dir(side.clone / "src", quiet=2)
        for name in options.names:
            taken: tuple[list[Figures], list[Figures]] = ([], [])
            for number in range(options.rounds):
                for which in (0, 1) if number % 2 else (1, 0):
                    taken[which].append(measure(sides[which], name))
            print(table(*taken), flush=True)
    except BenchmarkFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
