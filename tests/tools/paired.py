"""`make bench-paired WITH=commit BENCH="ping lookup_rpc"`: the same benchmarks of this checkout and of an older one.

The commit is cloned and set up in a temporary folder (`--clone` names one that is set up already).  Each round runs
every benchmark once in each checkout, with that checkout's own code, and the two take turns at going first, so that a
machine which becomes slower is slow for both.  The table has the medians over the rounds, and the median of each
round's ratio, this checkout ÷ the older one, with the least and the greatest.  The command judges nothing: the reader
sees the spread and decides what is noise.
"""

from __future__ import annotations

import argparse
import compileall
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.harness.child import ROOT

RESULTS = Path("build") / "bench.json"
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


def measure(clone: Path, name: str) -> Figures:
    """Run one benchmark in a checkout; its figures by name. Raises BenchmarkFailed."""
    kept = clone / RESULTS
    kept.unlink(missing_ok=True)
    done = subprocess.run(
        [str(clone / ".venv/bin/python"), "-m", "benchmarks.run", name],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not kept.exists():
        raise BenchmarkFailed(f"{name} in {clone}:\n{(done.stdout + done.stderr)[-2000:]}")
    figures: Figures = json.loads(kept.read_text())
    return figures


def median_of(rounds: list[float]) -> str:
    """`median (least-greatest)`, three digits each."""
    return f"{statistics.median(rounds):.3g} ({min(rounds):.3g}-{max(rounds):.3g})"


def table(this: list[Figures], older: list[Figures]) -> str:
    """A Markdown table of the figures that both checkouts gave in every round."""
    lines = ["| figure | unit | this | older | this ÷ older |", "|---|---|---|---|---|"]
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("names", nargs="+", metavar="BENCHMARK")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give at least 1")
    folder = Path(tempfile.mkdtemp(prefix="paired-", dir=ROOT / "build"))
    try:
        older = options.clone.resolve() if options.clone else set_up(options.commit, folder)
        for clone in (ROOT, older):
            # Otherwise the first start of each checkout would compile its modules, and if bytecode may not be written,
            # so would every start.
            compileall.compile_dir(clone / "src", quiet=2)
        for name in options.names:
            taken: dict[Path, list[Figures]] = {ROOT: [], older: []}
            for number in range(options.rounds):
                for clone in (ROOT, older) if number % 2 else (older, ROOT):
                    taken[clone].append(measure(clone, name))
            print(table(taken[ROOT], taken[older]), flush=True)
    except BenchmarkFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
