"""`lanes_hol*`: how long lookups of 1,024 keys take while an adapter stores much, against how long alone.

`kvstrata bench l2 --burst 4` with several adapters: four callers put 1,024 records of 1 MiB at the same time, 256 each
in batches of 64, and a lookup is due every 20 ms.  Everything goes through what a server has around an adapter.

- `lanes_hol`: an adapter whose `exists` is one stat a key in the lookup lane and whose puts are durable
  (benchmarks/stat_files.py), with threads of their own for lookups and for puts.  Beside it, in the figure: the same
  with one shared pool of as many threads, in which lanes keep one free of puts, and with as many threads at one queue
  that serves first what came first, which is what an adapter has without lanes.
- `lanes_hol_fs`, `lanes_hol_disk`: those adapters, which answer `exists` from memory on the event loop.

Sketch: with a thread of its own a lookup waits for a core, which four threads that write want for microseconds a
record: the p99 is that alone, and on two cores a little more.  In one queue it waits behind up to 256 records, which is
what the disk takes for 256 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import figure, scratch, sized
from kvstrata.cli import bench_l2

ROUNDS = sized(5, 1)
RECORDS: list[str] = sized([], ["--count", "16", "--batch", "4"])
"""Of a caller's pass, as flags of `kvstrata bench l2`; its own default to measure."""
OWN = {"lookup": 1, "retrieve": 1, "store": 4}
COMMON = 1
TARGET = 3.0
DEADLINE_MS = 60_000
"""Of puts, on a disk that others use too."""


def burst(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What `kvstrata bench l2 --burst` says of an adapter."""
    words = [
        "--l2-adapter",
        json.dumps({**entry, "deadline_ms": DEADLINE_MS}),
        "--burst",
        "4",
        "--rounds",
        str(ROUNDS),
        *RECORDS,
    ]
    report = bench_l2.run(bench_l2.parser().parse_args(words))
    print(f"{bench_l2.shown(report)}\n", flush=True)
    size: dict[str, Any] = report["sizes"][0]
    return size


def stat_files(
    base: Path, threads: int, own: Mapping[str, int], *, first_come: bool = False
) -> dict[str, Any]:
    """An entry for benchmarks/stat_files.py: `threads` beside those of lanes with their `own`."""
    parameters = {
        "base_path": str(base),
        "num_workers": threads,
        "per_op_workers": own,
        "first_come": first_come,
    }
    return {
        "type": "plugin",
        "module_path": "benchmarks.stat_files",
        "class_name": "make",
        "adapter_params": parameters,
    }


def hol_figure(name: str, found: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Of the p99 in the burst."""
    idle, put = found["idle"]["ms"], found["burst"]
    return figure(
        name,
        value=put["ms"]["p99"],
        unit="ms",
        ratio=found["p99_ratio"],
        ratio_to="the p99 alone",
        target=f"≤ {TARGET:g} × the p99 alone",
        ok=found["p99_ratio"] <= TARGET,
        idle_ms=idle,
        burst_ms=put["ms"],
        put_gb_per_s=put["gb_per_s"],
        **more,
    )


def run() -> list[dict[str, Any]]:
    """The figures."""
    threads = sum(OWN.values()) + COMMON
    with scratch("lanes") as folder:
        own = burst(stat_files(folder / "own", COMMON, OWN))
        pool = burst(stat_files(folder / "pool", threads, {}))
        first_come = burst(stat_files(folder / "first-come", threads, {}, first_come=True))
        fs = burst({"type": "fs", "base_path": str(folder / "fs"), "min_free_gb": 0, "per_op_workers": OWN})
        disk = burst(
            {"type": "disk", "base_path": str(folder / "disk"), "capacity_gb": 8, "per_op_workers": OWN}
        )
    p99 = own["burst"]["ms"]["p99"]
    return [
        hol_figure(
            "lanes_hol",
            own,
            shared_pool={**pool, "p99_to_lanes": pool["burst"]["ms"]["p99"] / p99},
            first_come={**first_come, "p99_to_lanes": first_come["burst"]["ms"]["p99"] / p99},
        ),
        hol_figure("lanes_hol_fs", fs),
        hol_figure("lanes_hol_disk", disk),
    ]
