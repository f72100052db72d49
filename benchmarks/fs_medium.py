"""`fs_put`, `fs_load` and `exists_1024_fs`: the `fs` adapter against the bare disk (benchmarks/raw_io.py).

Sketch: a put is one direct write and one fdatasync a record, as the bare disk's, then a rename and the syncs of the
directories, which four threads ask for side by side: 32 of them cost about as much as one or two records' fdatasync.  A
load is one direct read and a checksum at 10 GB/s and more a core.  1,024 keys are 1,024 look-ups in a hash table.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import timeit
from pathlib import Path
from typing import Any

from benchmarks import raw_io
from benchmarks.common import figure, median_spread, scratch
from kvstrata.storage.fs import FsAdapter, FsSettings
from kvstrata.storage.lanes import Lane

MB = 1 << 20
SIZES = ((1, 64, 32), (4, 32, 16), (32, 8, 4))
"""MiB of a record, records of a repeat, records of a batch."""
THREADS = 4
REPEATS = 7
PUT_TARGET, LOAD_TARGET = 0.7, 0.8
RECORDS = 20_000
KEYS = 1024
EXISTS_TARGET_US = 1000


def _fs(base: Path) -> FsAdapter:
    own = {Lane.PUT: THREADS, Lane.LOAD: THREADS}
    return FsAdapter(FsSettings(base_path=str(base), min_free_bytes=0, per_op_workers=own))


async def _rounds(folder: Path, mib: int, count: int, batch: int) -> tuple[list[float], ...]:
    """GB/s of puts, raw writes, loads and raw reads, a value for each repeat; what is compared takes turns."""
    extents = raw_io.Extents(mib * MB, count)
    gb = mib * MB * count / 1e9
    puts, writes, loads, reads = [], [], [], []
    for repeat in range(REPEATS + 1):
        raw = folder / "raw"
        raw.mkdir()
        extents.seal()
        adapter = await raw_io.opened(_fs(folder / "kv"))
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
    """Of the smallest ratio among the sizes; each size is in `parts`."""
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


async def _exists(base: Path) -> tuple[list[float], float]:
    """Microseconds of `exists` of 1,024 keys, half of them there, among 20,000; and of a bare dict."""
    keys = [hashlib.sha256(b"%d" % n).digest() for n in range(RECORDS + KEYS // 2)]
    for key in keys[:RECORDS]:  # names and lengths are all that matters
        name = key.hex()
        folder = base / name[:2] / name[2:4]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.kvc").touch()
        os.truncate(folder / f"{name}.kvc", 65_536)
    adapter = await raw_io.opened(_fs(base))
    try:
        await adapter.usage()  # the names are read
        asked = [key for pair in zip(keys[: KEYS // 2], keys[RECORDS:], strict=True) for key in pair]
        times = [s * 1e6 for s in await raw_io.exists_s(adapter, asked, 200)]
        bare = dict.fromkeys(keys[:RECORDS], 65_536)
        bare_us = min(timeit.repeat(lambda: [bare.get(key) for key in asked], number=20, repeat=5)) / 20 * 1e6
    finally:
        await adapter.close()
    return times, bare_us


def run() -> list[dict[str, Any]]:
    """The three figures."""
    put_parts, load_parts = {}, {}
    with scratch("fs") as folder:
        for mib, count, batch in SIZES:
            puts, writes, loads, reads = asyncio.run(_rounds(folder, mib, count, batch))
            put_parts[f"{mib} MiB"] = (puts, writes)
            load_parts[f"{mib} MiB"] = (loads, reads)
        times, bare_us = asyncio.run(_exists(folder / "names"))
    median_us, spread = median_spread(times)
    return [
        _figure("fs_put", "write + fdatasync", PUT_TARGET, put_parts),
        _figure("fs_load", "read", LOAD_TARGET, load_parts),
        figure(
            "exists_1024_fs",
            value=median_us,
            unit="µs",
            ratio=median_us / bare_us,
            ratio_to="1,024 look-ups in a Python dict",
            target=f"≤ {EXISTS_TARGET_US} µs with `shared: false`",
            ok=median_us <= EXISTS_TARGET_US,
            spread=spread,
        ),
    ]
