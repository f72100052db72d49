"""The `disk` adapter: an append-only log of segments on a local disk, in C++ (ext/core/src/disk/log.h).

    <base_path>/00000000.seg ...     segments of fixed length, made as the log grows (docs/internals/formats.md)
    <base_path>/.kvstrata.lock       held by the server that owns the directory

A stored record has been synced, and survives crashes and power cuts until it is deleted or the cap evicts it (oldest
segment first).  Files that are not named like segments are never touched.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.config.common_model import says
from kvstrata.native.connector import MIN_CAPACITY_BYTES, disk_connector
from kvstrata.tiers.config import Make, Medium
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.shared import NumWorkers, PerOpWorkers, absolute, folder_at
from kvstrata.tiers.native_adapter import NativeAdapter
from kvstrata.tiers.structs import Place
from kvstrata.types import GB

MB = 1 << 20
BLOCK_BYTES = 4096
LEAST_BLOCKS = 16
"""Minimum number of blocks in a segment."""


def disk_adapter(
    base_path: str,
    *,
    capacity_bytes: int,
    segment_bytes: int = 0,
    min_free_bytes: int = 0,
    use_odirect: bool = True,
    reinsert_percent: int = 20,
    num_workers: int = 4,
    per_op_workers: Mapping[Lane, int] | None = None,
    name: str = "disk",
) -> NativeAdapter:
    """The adapter, not open. One server owns the directory from `open` to `close`.

    `kvstrata.native.connector.disk_connector` describes the settings of the log, tiers/lanes.py those of the threads.
    """
    capsule = disk_connector(
        base_path,
        capacity_bytes=capacity_bytes,
        segment_bytes=segment_bytes,
        min_free_bytes=min_free_bytes,
        direct=use_odirect,
        reinsert_percent=reinsert_percent,
    )
    return NativeAdapter(capsule, name=name, num_workers=num_workers, per_op_workers=per_op_workers)


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A log of segments in a directory of its own on a local disk."""

    # fmt: off
    base_path: Annotated[str, says("The log's directory; only one server may use it.", min_length=1)]
    capacity_gb: Annotated[float, says(
        "GB that the log may take; the oldest segment is evicted first.",
        ge=MIN_CAPACITY_BYTES / GB, le=1 << 30, extra={"missing": "must be the maximum size of the log in GB"})]
    segment_mb: Annotated[Annotated[float, Meta(ge=LEAST_BLOCKS * BLOCK_BYTES / MB, le=8 << 10)] | None, says(
        "MB of a segment, at most a sixteenth of `capacity_gb`; not set: derived from `capacity_gb`.")] = None
    min_free_gb: Annotated[float, says("GB to leave free on the file system.", ge=0, le=1 << 30)] = 1
    use_odirect: Annotated[bool, says("Write and read without the page cache.")] = True
    reinsert_percent: Annotated[int, says(
        "Percent of a retiring segment that is rewritten: its most recently used records.", ge=0, le=50)] = 20
    # fmt: on
    num_workers: NumWorkers = 4
    per_op_workers: PerOpWorkers = {}


def _prepare(config: DiskConfig, place: Place, name: str) -> Make:
    capacity_bytes = int(config.capacity_gb * GB)
    segment_bytes = int((config.segment_mb or 0) * MB) // BLOCK_BYTES * BLOCK_BYTES
    if segment_bytes > capacity_bytes // 16:
        must = f"must be at most a sixteenth of capacity_gb, {capacity_bytes / 16 / MB:g} MB"
        raise place.wrong("segment_mb", config.segment_mb, must)
    path = absolute(config.base_path, place, "base_path")
    return functools.partial(
        disk_adapter,
        path,
        capacity_bytes=capacity_bytes,
        segment_bytes=segment_bytes,
        min_free_bytes=int(config.min_free_gb * GB),
        use_odirect=config.use_odirect,
        reinsert_percent=config.reinsert_percent,
        num_workers=config.num_workers,
        per_op_workers=config.per_op_workers,
        name=name,
    )


MEDIUM = Medium(DiskConfig, _prepare, folder=lambda config: folder_at(config.base_path))
