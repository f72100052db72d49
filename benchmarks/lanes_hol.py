"""`lanes_hol*`: how long lookups of 1,024 keys take during a burst of puts, against how long they take alone.

`kvstrata bench l2 --burst 4` runs with several adapters: four callers put 1,024 records of 1 MiB at the same time, 256
each in batches of 64, and a lookup is due every 20 ms.  All calls go through the layers that a server has around an
adapter.

- `lanes_hol`: an adapter whose `exists` makes one stat a key in the lookup lane and whose puts are durable
  (benchmarks/stat_files.py), with separate threads for lookups and for puts.  The figure also has the same adapter with
  two other ways to share as many threads: one pool in which the lanes keep one thread free of puts, and one queue that
  is served in order, as if there were no lanes.
- `lanes_hol_fs`, `lanes_hol_disk`: these adapters answer `exists` from memory on the event loop.

Sketch: with a thread of its own, a lookup waits only for a core, which each of the four writing threads needs for
microseconds a record: so the p99 is that of lookups alone, or a little more on two cores.  In one queue a lookup waits
for up to 256 records, which is as long as the disk takes for 256 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import figure, scratch, sized
from kvstrata.cli.bench import l2 as bench_l2

ROUNDS = sized(5, 1)
RECORDS: list[str] = sized([], ["--count", "16", "--batch", "4"])
"""Flags of `kvstrata bench l2` for the records of a caller; at full size its defaults hold."""
OWN = {"lookup": 1, "retrieve": 1, "store": 4}
COMMON = 1
TARGET = 3.0
DEADLINE_MS = 60_000
"""Deadline of puts; other programs may use the disk too."""


def burst(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Run `kvstrata bench l2 --burst` on an adapter; return its report."""
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
    """Return the entry of the adapter of benchmarks/stat_files.py, with `threads` common threads and `own` per lane."""
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
    """Return the figure for the p99 of lookups during the burst."""
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
    """Measure the figures."""
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
