"""`index_*`: our indexes beside RocksDB, LMDB and SQLite, on one trace.

    python -m benchmarks.index_study [--trace FILE [--requests N]]

Eight instances keep the least recently used blocks, and conversations stay at one of them.  Each request of the trace
asks the index how many leading chunks some instance has, and then the index is told what the request's instance has
stored and evicted for it: one batch of changes.  All run from Python, each in a process of its own
(benchmarks/index_engines.py), which ends without closing anything; another process then opens what is there.

Durability: `registry` writes a snapshot every 30 s of the trace and loses later changes with its process (instances
tell them again); its ingest does not contain the snapshots, which a thread of its own writes.  `disk` and the engines
with `_sync` have each batch on the medium when it returns.  `rocksdb` and `sqlite` (WAL, synchronous NORMAL) survive
the death of the process but not of the machine; `lmdb` without syncs may even be damaged then.

`disk` keeps each instance's chunks as records of 8 KiB in a log, which is asked for the chunks of one instance; its
bytes contain a header of 4 KiB for each record, and the figures of disk and of writes leave out the records.  The log
writes the records too, which the others do not have, so its ingest is not that of an index alone.

A figure's `ratio` is ours to the best rival: of the registry to the engines without syncs, and for `_durable` of the
log to those with syncs.  Written bytes are those of write calls, compared with 34 bytes for each change.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import NotHere, figure, percentile, scratch, sized
from benchmarks.index_engines import ENGINES, INSTANCES, RECORD_BYTES, Visit
from benchmarks.run import RESULTS, merge
from benchmarks.traces import TraceRequest, read_trace, synthetic_trace
from tests.tools import fetch_wheels

REQUESTS = sized(6000, 150)
BLOCKS_EACH = sized(4000, 100)
REPEATS = sized(3, 1)
MOST_CHAIN = 256
"""Longer prompts are cut, so that a visit's changes are one batch of the log."""
CHANGE_BYTES = 34
RIVALS = ("rocksdb", "lmdb", "sqlite")
ROOT = Path(__file__).resolve().parents[1]


def visits_of(trace: list[TraceRequest]) -> list[Visit]:
    """What requests ask of the index and tell it."""
    held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(INSTANCES)]
    visits: list[Visit] = []
    for request in trace:
        chain = list(dict.fromkeys(request.blocks[:MOST_CHAIN]))
        prefixes = [next((n for n, b in enumerate(chain) if b not in one), len(chain)) for one in held]
        instance = len(visits) % INSTANCES
        if max(prefixes) > 1:  # more than the block that all prompts of a trace may begin with
            instance = prefixes.index(max(prefixes))
        kept = held[instance]
        admitted = [block for block in chain if block not in kept]
        for block in reversed(chain):
            kept[block] = None
            kept.move_to_end(block)
        evicted = [kept.popitem(last=False)[0] for _ in range(len(kept) - BLOCKS_EACH)]
        evicted = [block for block in evicted if block not in admitted]
        admitted = [block for block in admitted if block in kept]
        visits.append(
            Visit(request.at_ms, instance, chain, admitted, evicted, max(prefixes), prefixes[instance])
        )
    return visits


def measured(name: str, visits: str, environment: dict[str, str]) -> dict[str, Any]:
    """Load and recover one engine. Raises RuntimeError with the process's errors."""
    told: dict[str, Any] = {}
    with scratch("index") as folder:
        for phase in ("load", "recover"):
            command = [sys.executable, "-m", "benchmarks.index_engines", name, str(folder), phase]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, input=visits, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
            told |= json.loads(done.stdout.splitlines()[-1])
    return told


def row(name: str, visits: list[Visit], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """An engine's numbers: medians of its runs."""
    changes = sum(len(visit.admitted) + len(visit.evicted) for visit in visits)
    last = sum(len(visit.admitted) - len(visit.evicted) for visit in visits)
    admitted = sum(len(visit.admitted) for visit in visits)
    payload = RECORD_BYTES if name == "disk" else 0
    one = runs[0]
    if name != "registry" and one["placements"] != last:
        raise RuntimeError(f"{name}: {one['placements']} of {last} placements are there after a restart")
    return {
        "ingest_per_s": round(changes / median(run["ingest_s"] for run in runs)),
        "scan_p50_us": round(median(percentile(run["scans_us"], 0.5) for run in runs), 1),
        "scan_p99_us": round(median(percentile(run["scans_us"], 0.99) for run in runs), 1),
        "recovery_ms": round(median(run["recovery_s"] for run in runs) * 1000, 1),
        "disk_bytes_a_placement": round(one["disk_bytes"] / last - payload, 1),
        "write_amplification": round((one["written_bytes"] - payload * admitted) / changes / CHANGE_BYTES, 2),
    }


def study(trace: list[TraceRequest], what: str) -> list[dict[str, Any]]:
    """Measure the figures on one trace; each has the rows of all engines. Raises NotHere."""
    try:
        environment = fetch_wheels.environment(fetch_wheels.INDEXES)
    except fetch_wheels.Unavailable as error:
        raise NotHere(str(error)) from None
    visits = visits_of(trace)
    text = json.dumps(visits)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    for _ in range(REPEATS):
        for name, ran in runs.items():
            ran.append(measured(name, text, environment))
    rows = {name: row(name, visits, ran) for name, ran in runs.items()}
    figures = []
    for name, number, unit, more_is_better in (
        ("ingest", "ingest_per_s", "changes/s", True),
        ("scan", "scan_p99_us", "µs", False),
        ("recovery", "recovery_ms", "ms", False),
        ("disk", "disk_bytes_a_placement", "bytes", False),
        ("writes", "write_amplification", "written/changed", False),
    ):
        for ours, suffix, sync in (("registry", "", ""), ("disk", "_durable", "_sync")):
            best = (max if more_is_better else min)(rows[rival + sync][number] for rival in RIVALS)
            value = rows[ours][number]
            figures.append(
                figure(
                    f"index_{name}{suffix}",
                    value=value,
                    unit=unit,
                    ratio=value / best,
                    ratio_to=f"the best rival ({best})",
                    target="reported: the log writes records too"
                    if suffix
                    else "no worse than the best rival",
                    ok=bool(suffix) or (value >= best if more_is_better else value <= best),
                    trace=what,
                    rows=rows,
                )
            )
    return figures


def run() -> list[dict[str, Any]]:
    """Measure the figures on a synthetic trace."""
    return study(synthetic_trace(REQUESTS), "synthetic")


def main() -> None:
    """Run the command line: measure on a trace, and write the figures into build/bench.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSON lines, as for benchmarks.policies (a synthetic one)")
    parser.add_argument("--requests", type=int, help="take only so many requests of the file (all)")
    arguments = parser.parse_args()
    if arguments.trace is None:
        found = run()
    else:
        found = study(read_trace(arguments.trace)[: arguments.requests], arguments.trace.name)
    merge(found, RESULTS)
    print(json.dumps(found[0]["rows"], indent=1))


if __name__ == "__main__":
    main()
