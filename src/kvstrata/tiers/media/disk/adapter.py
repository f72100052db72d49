"""The `disk` adapter: an append-only log of segments on a local disk, in C++ (ext/core/src/disk/log.h).

    <base_path>/00000000.seg ...     segments of fixed length, made as the log grows (docs/formats.md)
    <base_path>/.kvstrata.lock       held by the server that owns the directory

A stored record has been synced, and survives crashes and power cuts until it is deleted or the cap evicts it (oldest
segment first).  Files that are not named like segments are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.native.connector import disk_connector
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.native_adapter import NativeAdapter


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
