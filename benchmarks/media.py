"""Puts and loads of an adapter on a local disk against the bare disk (benchmarks/raw_io.py).

`fs_put`, `fs_load`, `exists_1024_fs`.  Sketch: a put is one direct write and one fdatasync for each record, as on the
bare disk, then a rename and the syncs of the directories.  Four threads work in parallel, so that 32 renames and their
syncs take about as long as the fdatasync of one or two records.  A load is one direct read and a checksum at 10 GB/s or
more a core.  `exists` for 1,024 keys is 1,024 look-ups in a hash table.

`disk_put`, `disk_load`, `exists_1024_disk`, `disk_restart_1m`, of the disk log.  Sketch: a put is one direct write per
record, with a header of 4 KiB, and one fdatasync per batch; the bare disk syncs each record.  A load is one direct read
and two checksums.  A restart reads 56 bytes per record from the tables of full segments.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import struct
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import raw_io
from benchmarks.common import compared, scratch, sized
from kvstrata.native.core import crc32c
from kvstrata.tiers.base import StorageAdapter
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.disk import disk_adapter
from kvstrata.tiers.media.fs import FsAdapter
from kvstrata.tiers.native_adapter import NativeAdapter
from tests.oracles import disk_log

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
    extents = raw_io.Records(mib * MB, count)
    gb = mib * MB * count / 1e9
    puts, writes, loads, reads = [], [], [], []
    for repeat in range(REPEATS + 1):
        raw = folder / "raw"
        raw.mkdir()
        extents.renew()
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
    """Return the figure of the size with the smallest ratio; `sizes` has those of all."""
    to = f"raw O_DIRECT {what} of the same sizes, {THREADS} threads, same batch"
    sizes = {size: compared(name, ours, "GB/s", to, raw, least=target) for size, (ours, raw) in parts.items()}
    worst = min(sizes.values(), key=lambda size: float(size["ratio"]))
    return {
        **worst,
        "sizes": {
            size: {k: one[k] for k in ("value", "spread", "beside", "ratio")} for size, one in sizes.items()
        },
    }


FS_PUT_TARGET, FS_LOAD_TARGET = 0.7, 0.8
RECORDS = sized(20_000, 1_000)
KEYS = 1024
FS_EXISTS_US = 1000


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


def run_fs_medium() -> list[dict[str, Any]]:
    """Measure the figures of `fs`."""
    with scratch("fs") as folder:
        figures = put_and_load_figures("fs", _fs, folder, (FS_PUT_TARGET, FS_LOAD_TARGET))
        times, bare_us = asyncio.run(_exists(folder / "names"))
    return [
        *figures,
        compared(
            "exists_1024_fs",
            times,
            "µs",
            "1,024 look-ups in a Python dict",
            bare_us,
            most_value=FS_EXISTS_US,
        ),
    ]


GB = 1 << 30
DISK_PUT_TARGET, DISK_LOAD_TARGET = 0.8, 0.8
DISK_EXISTS_US = 100
SEGMENTS, RECORDS_PER_SEGMENT = sized((250, 4000), (6, 4000))
"""Segments of the log that is reopened, and records of 1 MiB in each; only segments' headers and tables are written."""
SEGMENT_BYTES = 4 * GB
RESTART_TARGET_S = 2.0


def _disk(base: Path, capacity_bytes: int = 8 * GB, segment_bytes: int = 0) -> NativeAdapter:
    own = {Lane.PUT: THREADS, Lane.LOAD: THREADS}
    return disk_adapter(
        base_path=str(base), capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, per_op_workers=own
    )


def _key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def _write_log(folder: Path) -> None:
    """Write the headers and tables of full segments (docs/internals/formats.md); the rest of each file is a hole."""
    for segment in range(SEGMENTS):
        header = disk_log.SEGMENT.pack(b"KVSEGMNT", disk_log.VERSION, 0, segment, 1, SEGMENT_BYTES, 0, 0, 0)[
            :-4
        ]
        first = segment * RECORDS_PER_SEGMENT
        entries = b"".join(
            disk_log.ENTRY.pack(
                _key(first + i), first + i + 1, 1 + 258 * i, MB + 4096, disk_log.RECORD, bytes(6)
            )
            for i in range(RECORDS_PER_SEGMENT)
        )
        end = disk_log.TABLE_END.pack(
            b"KVTABLE1", segment, RECORDS_PER_SEGMENT, 1, 7, first + RECORDS_PER_SEGMENT,
            (1 + 258 * RECORDS_PER_SEGMENT) * 4096, bytes(8), crc32c(entries), 0,
        )[:-4]  # fmt: skip
        end += struct.pack("<I", crc32c(end))
        table_bytes = -(-(len(entries) + 64) // 4096) * 4096
        with open(folder / f"{segment:08x}.seg", "wb") as file:
            file.write(header + struct.pack("<I", crc32c(header)))
            file.truncate(SEGMENT_BYTES)
            file.seek(SEGMENT_BYTES - table_bytes)
            file.write(entries.ljust(table_bytes - 64, b"\0") + end)


async def _restart(folder: Path) -> tuple[float, list[float], float]:
    """Return the seconds to open the log, and the µs of `exists` and of look-ups in a dict for 1,024 keys."""
    # More capacity than the segments need, so that none is retired meanwhile; unused capacity takes no disk space.
    adapter = _disk(folder, (SEGMENTS + 2) * SEGMENT_BYTES, SEGMENT_BYTES)
    started = time.perf_counter()
    await raw_io.opened(adapter)
    seconds = time.perf_counter() - started
    try:
        records = (await adapter.usage()).records
        if records != SEGMENTS * RECORDS_PER_SEGMENT:
            raise RuntimeError(f"the log holds {records} records, not {SEGMENTS * RECORDS_PER_SEGMENT}")
        # Keys that the log holds alternate with keys that it does not.
        asked = [
            _key(n)
            for pair in zip(range(KEYS // 2), range(-1, -KEYS // 2 - 1, -1), strict=True)
            for n in pair
        ]
        times = [s * 1e6 for s in await raw_io.exists_s(adapter, asked, 200)]
        bare = {_key(n): 0 for n in range(20_000)}
        bare_us = min(timeit.repeat(lambda: [bare.get(key) for key in asked], number=20, repeat=5)) / 20 * 1e6
    finally:
        await adapter.close()
    return seconds, times, bare_us


def run_disk_medium() -> list[dict[str, Any]]:
    """Measure the figures of the disk log."""
    with scratch("disk") as folder:
        figures = put_and_load_figures("disk", _disk, folder, (DISK_PUT_TARGET, DISK_LOAD_TARGET))
        (folder / "million").mkdir()
        _write_log(folder / "million")
        runs = [asyncio.run(_restart(folder / "million")) for _ in range(5)]
    _, times, bare_us = runs[-1]
    restart_s = [one[0] for one in runs]
    return [
        *figures,
        compared(
            "exists_1024_disk",
            times,
            "µs",
            "1,024 look-ups in a Python dict",
            bare_us,
            most_value=DISK_EXISTS_US,
        ),
        compared(
            "disk_restart_1m", restart_s, "s", "the target", RESTART_TARGET_S, most_value=RESTART_TARGET_S
        ),
    ]
