"""The disk log against the bare disk.

Figures: `disk_put`, `disk_load`, `exists_1024_disk`, `disk_restart_1m`, `disk_write_amp_on_disk`.

Sketch: a put is one direct write per record, with a header of 4 KiB, and one fdatasync per batch; the bare disk syncs
each record.  A load is one direct read and two checksums.  `exists` for 1,024 keys is 1,024 look-ups in a hash table.
A restart reads 56 bytes per record from the tables of full segments.  When a segment retires, at most a fifth of it is
written again.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
import time
import timeit
from pathlib import Path
from typing import Any

from benchmarks import raw_io
from benchmarks.common import figure, median_spread, scratch, sized
from benchmarks.media import THREADS, put_and_load_figures
from kvstrata.native.core import crc32c
from kvstrata.storage.base import LoadItem, PutItem, PutStatus
from kvstrata.storage.lanes import Lane
from kvstrata.storage.media.disk.adapter import disk_adapter
from kvstrata.storage.native_adapter import NativeAdapter
from tests.oracles import disk_log

MB = 1 << 20
GB = 1 << 30
PUT_TARGET, LOAD_TARGET = 0.8, 0.8
KEYS = 1024
EXISTS_TARGET_US = 100
SEGMENTS, RECORDS_PER_SEGMENT = sized((250, 4000), (6, 4000))
"""Segments of the log that is reopened, and records of 1 MiB in each; only segments' headers and tables are written."""
SEGMENT_BYTES = 4 * GB
RESTART_TARGET_S = 2.0
AMP_CAP_BYTES, AMP_PUT_BYTES = sized((GB, 3 * GB), (128 * MB, 256 * MB))
AMP_TARGET = 1.3


def _disk(base: Path, capacity_bytes: int = 8 * GB, segment_bytes: int = 0) -> NativeAdapter:
    own = {Lane.PUT: THREADS, Lane.LOAD: THREADS}
    return disk_adapter(
        base_path=str(base), capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, per_op_workers=own
    )


def _key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def _write_log(folder: Path) -> None:
    """Write the headers and tables of full segments (docs/formats.md); the rest of each file is a hole."""
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


async def _write_amplification(folder: Path) -> tuple[float, float]:
    """Put and load beyond a log's capacity. Return the bytes written per byte put, and the share of loads that hit.

    After every 16 puts come 8 loads of records, drawn uniformly from the newest ones, which fill 90 % of the log.
    """
    extents = raw_io.Extents(MB, 16)
    adapter = _disk(folder, AMP_CAP_BYTES)
    await raw_io.opened(adapter)
    draw = random.Random(1)
    stored: list[bytes] = []
    loads = hits = 0
    try:
        while len(stored) * MB < AMP_PUT_BYTES:
            extents.seal()
            items = [PutItem(extents.keys[i], extents.hold(i)) for i in range(16)]  # type: ignore[arg-type]
            for item, outcome in zip(items, await adapter.put(items), strict=True):
                if outcome.status is PutStatus.STORED:
                    stored.append(item.key)
            recent = stored[-AMP_CAP_BYTES // MB * 9 // 10 :]
            asked = draw.sample(recent, min(8, len(recent)))
            found = await adapter.exists(asked)
            present = [key for key, answer in zip(asked, found, strict=True) if answer.record_bytes]
            await adapter.load([LoadItem(key, extents.hold(i)) for i, key in enumerate(present)])  # type: ignore[arg-type]
            loads += len(asked)
            hits += len(present)
        numbers = adapter.numbers()
    finally:
        await adapter.close()
    return numbers["written_bytes"] / numbers["put_bytes"], hits / loads


def run() -> list[dict[str, Any]]:
    """Measure the figures that the module names."""
    with scratch("disk") as folder:
        figures = put_and_load_figures("disk", _disk, folder, (PUT_TARGET, LOAD_TARGET))
        amplification, hit_share = asyncio.run(_write_amplification(folder / "amp"))
        (folder / "million").mkdir()
        _write_log(folder / "million")
        runs = [asyncio.run(_restart(folder / "million")) for _ in range(5)]
    seconds, spread = median_spread([run[0] for run in runs])
    times, bare_us = runs[-1][1], runs[-1][2]
    median_us, exists_spread = median_spread(times)
    return [
        *figures,
        figure(
            "exists_1024_disk",
            value=median_us,
            unit="µs",
            ratio=median_us / bare_us,
            ratio_to="1,024 look-ups in a Python dict",
            target=f"≤ {EXISTS_TARGET_US} µs",
            ok=median_us <= EXISTS_TARGET_US,
            spread=exists_spread,
        ),
        figure(
            "disk_restart_1m",
            value=seconds,
            unit="s",
            ratio=seconds / RESTART_TARGET_S,
            ratio_to="the target",
            target=f"≤ {RESTART_TARGET_S:g} s",
            ok=seconds <= RESTART_TARGET_S,
            spread=spread,
        ),
        figure(
            "disk_write_amp_on_disk",
            value=amplification,
            unit="written/put",
            ratio=amplification / AMP_TARGET,
            ratio_to="the target",
            target="reported: 3 GiB put into a log of 1 GiB; per two puts one load, drawn from the newest 90 %",
            ok=True,
            hit_share=hit_share,
        ),
    ]
