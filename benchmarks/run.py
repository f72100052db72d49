"""`make bench [BENCH=name]`: runs the benchmarks and merges their figures by name into build/bench.json.

A function `run() -> list[dict]` of a module here is the benchmark of the module's name, a function `run_NAME` the
benchmark NAME; a figure is a dict with at least `name`, `value`, `unit`, `ratio`, `target`, `ok`.  `--results FILE`
writes them elsewhere.  `--report` prints the figures of build/bench.json as a table, like that of docs/performance.md.
`--small` shows that the benchmarks work: they run at sizes that say nothing about speed, and figures are written only
with `--results`; a test runs each benchmark like that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.common import SMALL, NotHere
from tests.harness.forks import Forks
from tests.harness.vllm_api import VllmApi
from tests.harness.vllm_run import VllmProcess

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "bench.json"
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
SCRATCH_GB = 20
MINUTES = 40


def benchmarks() -> dict[str, tuple[str, str]]:
    """Return (module, function) by the name of each benchmark: `run` has the module's name, `run_NAME` is NAME."""
    found = {}
    for file in sorted((ROOT / "benchmarks").glob("*.py")):
        for name in re.findall(r"^def run(?:_(\w+))?\(\)", file.read_text(), re.MULTILINE):
            found[name or file.stem] = (file.stem, f"run_{name}" if name else "run")
    return dict(sorted(found.items()))


def run(name: str) -> list[dict[str, Any]]:
    """Run one benchmark; return its figures."""
    module, function = benchmarks()[name]
    figures: list[dict[str, Any]] = getattr(importlib.import_module(f"benchmarks.{module}"), function)()
    return figures


def merge(figures: list[dict[str, Any]], results: Path) -> None:
    """Write figures into the result file under their names; the figures of other names stay."""
    results.parent.mkdir(exist_ok=True)
    merged = json.loads(results.read_text()) if results.exists() else {}
    for figure in figures:
        merged[figure["name"]] = {key: value for key, value in figure.items() if key != "name"}
    part = results.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    part.replace(results)


def show(value: Any) -> str:
    """Return a number with three significant digits, another value as its text."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report() -> str:
    """Return the figures as a Markdown table."""
    merged = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    lines = ["| name | value | spread | ratio | to | target | met |", "|---|---|---|---|---|---|---|"]
    for name, figure in sorted(merged.items()):
        spread = "-".join(show(float(end)) for end in figure.get("spread") or ())
        cells = [
            f"{show(figure['value'])} {figure['unit']}",
            spread,
            show(figure.get("ratio")),
            figure.get("ratio_to", ""),
            figure.get("target", ""),
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {'yes' if figure.get('ok') else 'no'} |")
    return "\n".join(lines)


def main() -> int:
    """Run the command line; the exit status says whether each benchmark ran, not whether targets were met."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "names", nargs="*", help=f"benchmarks to run, by default all: {', '.join(benchmarks())}"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask first")
    parser.add_argument(
        "--small", action="store_true", help="only show that the benchmarks work; write no figures"
    )
    parser.add_argument(
        "--report", action="store_true", help="print the figures of build/bench.json as a table"
    )
    parser.add_argument(
        "--results", type=Path, help="file of the figures, build/bench.json by default; with --small too"
    )
    arguments = parser.parse_args()
    if arguments.report:
        print(report())
        return 0
    unknown = sorted(set(arguments.names) - set(benchmarks()))
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; the benchmarks are: {', '.join(benchmarks())}")
    # An installed server has bytecode; without it, each process that a benchmark starts would compile all its modules.
    os.environ.pop(NO_BYTECODE, None)
    if arguments.small:
        os.environ[SMALL] = "1"
        VllmProcess.fork_server = VllmApi.fork_server = Forks.inherited()
    if not (arguments.names or arguments.yes or arguments.small):
        free_gb = shutil.disk_usage(ROOT).free >> 30
        print(f"All benchmarks take up to {MINUTES} minutes and {SCRATCH_GB} GB of {free_gb} GB free here.")
        if not sys.stdin.isatty() or input("Run them? [y/N] ").strip().lower() != "y":
            print("Not run. `make bench BENCH=name` runs one, `make bench ARGS=-y` all without asking.")
            return 1
    failed = []
    for name in arguments.names or benchmarks():
        started = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            figures = run(name)
        except NotHere as missing:
            print(f"   not run: {missing}")
            # A run of all benchmarks skips those that this machine cannot run.
            failed += [name] if arguments.names else []
            continue
        except Exception as error:
            # Supervisor of the benchmarks: the failure of one must not cost the figures of the others.
            print(f"   failed: {type(error).__name__}: {error}")
            traceback.print_exc()
            failed.append(name)
            continue
        if arguments.results or not arguments.small:
            merge(figures, arguments.results or RESULTS)
        for figure in figures:
            mark = "small" if arguments.small else "met" if figure.get("ok") else "NOT MET"
            value = f"{show(figure['value'])} {figure['unit']}, ratio {show(figure.get('ratio'))}"
            print(f"   {figure['name']}: {value}, target {figure.get('target')}: {mark}")
        print(f"   {time.monotonic() - started:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
