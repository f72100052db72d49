"""`fs_put`, `fs_load`, `exists_1024_fs`: `fs` against the bare disk (benchmarks/raw_io.py).

Sketch: a put is one direct write and one fdatasync for each record, as on the bare disk, then a rename and the syncs of
the directories.  Four threads work in parallel, so that 32 renames and their syncs take about as long as the fdatasync
of one or two records.  A load is one direct read and a checksum at 10 GB/s or more a core.  `exists` for 1,024 keys is
1,024 look-ups in a hash table.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import timeit
from pathlib import Path
from typing import Any

from benchmarks import raw_io
from benchmarks.common import figure, median_spread, scratch, sized
from benchmarks.media import THREADS, put_and_load_figures
from kvstrata.storage.lanes import Lane
from kvstrata.storage.media.fs.adapter import FsAdapter

PUT_TARGET, LOAD_TARGET = 0.7, 0.8
RECORDS = sized(20_000, 1_000)
KEYS = 1024
EXISTS_TARGET_US = 1000


def _fs(base: Path) -> FsAdapter:
    own = {Lane.PUT: THREADS, Lane.LOAD: THREADS}
    return FsAdapter(base_path=str(base), min_free_bytes=0, per_op_workers=own)


async def _exists(base: Path) -> tuple[list[float], float]:
    """Return the µs of each `exists` for 1,024 keys among 20,000 records, and the µs of bare look-ups.

    Half of the keys are stored.
    """
    keys = [hashlib.sha256(b"%d" % n).digest() for n in range(RECORDS + KEYS // 2)]
    for key in keys[:RECORDS]:  # `exists` looks only at names and lengths
        name = key.hex()
        folder = base / name[:2] / name[2:4]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.kvc").touch()
        os.truncate(folder / f"{name}.kvc", 65_536)
    adapter = await raw_io.opened(_fs(base))
    try:
        await adapter.usage()  # returns when the names have been read
        asked = [key for pair in zip(keys[: KEYS // 2], keys[RECORDS:], strict=True) for key in pair]
        times = [s * 1e6 for s in await raw_io.exists_s(adapter, asked, 200)]
        bare = dict.fromkeys(keys[:RECORDS], 65_536)
        bare_us = min(timeit.repeat(lambda: [bare.get(key) for key in asked], number=20, repeat=5)) / 20 * 1e6
    finally:
        await adapter.close()
    return times, bare_us


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    with scratch("fs") as folder:
        figures = put_and_load_figures("fs", _fs, folder, (PUT_TARGET, LOAD_TARGET))
        times, bare_us = asyncio.run(_exists(folder / "names"))
    median_us, spread = median_spread(times)
    return [
        *figures,
        figure(
            "exists_1024_fs",
            value=median_us,
            unit="µs",
            ratio=median_us / bare_us,
            ratio_to="1,024 look-ups in a Python dict",
            target=f"≤ {EXISTS_TARGET_US} µs",
            ok=median_us <= EXISTS_TARGET_US,
            spread=spread,
        ),
    ]
