"""Puts and loads of an adapter on a local disk against the bare disk (benchmarks/raw_io.py)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import raw_io
from benchmarks.common import figure, median_spread, sized
from kvstrata.storage.base import StorageAdapter

MB = 1 << 20
SIZES = sized(((1, 64, 32), (4, 32, 16), (32, 8, 4)), ((1, 8, 4),))
"""(MiB of a record, records of a repeat, records of a batch)"""
THREADS = 4
REPEATS = sized(7, 1)

MakeAdapter = Callable[[Path], StorageAdapter]
"""Makes an adapter on a folder, not opened yet, with THREADS workers for puts and THREADS for loads."""


def put_and_load_figures(
    name: str, make: MakeAdapter, folder: Path, targets: tuple[float, float]
) -> list[dict[str, Any]]:
    """Measure `<name>_put` and `<name>_load`; their ratio is the smallest of all sizes, and `sizes` has each size."""
    put_parts, load_parts = {}, {}
    for mib, count, batch in SIZES:
        puts, writes, loads, reads = asyncio.run(_rounds(make, folder, mib, count, batch))
        put_parts[f"{mib} MiB"] = (puts, writes)
        load_parts[f"{mib} MiB"] = (loads, reads)
    return [
        _figure(f"{name}_put", "write + fdatasync", targets[0], put_parts),
        _figure(f"{name}_load", "read", targets[1], load_parts),
    ]


async def _rounds(
    make: MakeAdapter, folder: Path, mib: int, count: int, batch: int
) -> tuple[list[float], ...]:
    """Return GB/s of puts, raw writes, loads and raw reads, which take turns; one value for each repeat."""
    extents = raw_io.Extents(mib * MB, count)
    gb = mib * MB * count / 1e9
    puts, writes, loads, reads = [], [], [], []
    for repeat in range(REPEATS + 1):
        raw = folder / "raw"
        raw.mkdir()
        extents.seal()
        adapter = await raw_io.opened(make(folder / "kv"))
        try:
            wrote = raw_io.raw_write_s(raw, extents, THREADS, batch)
            put = await raw_io.put_s(adapter, extents, batch)
            load = await raw_io.load_s(adapter, extents, batch)
            read = raw_io.raw_read_s(raw, extents, THREADS, batch)
            if repeat:  # the first one warms up
                puts.append(gb / put)
                writes.append(gb / wrote)
                loads.append(gb / load)
                reads.append(gb / read)
            await adapter.clear()
        finally:
            await adapter.close()
        shutil.rmtree(raw)
    return puts, writes, loads, reads


def _figure(
    name: str, what: str, target: float, parts: dict[str, tuple[list[float], list[float]]]
) -> dict[str, Any]:
    """Return the figure, with the smallest ratio of all sizes; `parts` has the rates of each size."""
    sizes = {}
    for size, (ours, raw) in parts.items():
        value, spread = median_spread(ours)
        bare, bare_spread = median_spread(raw)
        ratio = median_spread([a / b for a, b in zip(ours, raw, strict=True)])[0]
        sizes[size] = {
            "gb_per_s": value, "spread": spread, "raw_gb_per_s": bare, "raw_spread": bare_spread, "ratio": ratio,
        }  # fmt: skip
    worst = min(sizes.values(), key=lambda size: size["ratio"])
    return figure(
        name,
        value=worst["gb_per_s"],
        unit="GB/s",
        ratio=worst["ratio"],
        ratio_to=f"raw O_DIRECT {what} of the same sizes, {THREADS} threads, same batch",
        target=f"≥ {target} × raw for 1, 4 and 32 MiB",
        ok=worst["ratio"] >= target,
        spread=worst["spread"],
        sizes=sizes,
    )
