"""The `disk` adapter: an append-only log of segments on a local disk, in C++ (ext/core/include/kvstrata/disk_log.h).

    <base_path>/00000000.seg ...     segments of fixed length, made as the log grows (docs/formats.md)
    <base_path>/.kvstrata.lock       held by the server that owns the directory

What was stored has been synced and survives a crash and a power cut until the cap evicts it, oldest segment first, or
somebody deletes it.  Files that are not named like segments are never touched.
"""

from __future__ import annotations

import msgspec

from kvstrata.native.disk import disk_connector
from kvstrata.storage.lanes import Lane
from kvstrata.storage.native_adapter import NativeAdapter


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked settings; sizes in bytes. See `kvstrata.native.disk.disk_connector` for those of the log."""

    base_path: str
    capacity_bytes: int
    segment_bytes: int = 0
    min_free_bytes: int = 0
    use_odirect: bool = True
    reinsert_percent: int = 20
    scrub_bytes_per_s: int = 0
    num_workers: int = 4
    per_op_workers: dict[Lane, int] = {}


def disk_adapter(settings: DiskSettings, *, name: str = "disk") -> NativeAdapter:
    """The adapter, not open. One server owns a directory from `open` to `close`."""
    capsule = disk_connector(
        settings.base_path,
        capacity_bytes=settings.capacity_bytes,
        segment_bytes=settings.segment_bytes,
        min_free_bytes=settings.min_free_bytes,
        direct=settings.use_odirect,
        reinsert_percent=settings.reinsert_percent,
        scrub_bytes_per_s=settings.scrub_bytes_per_s,
    )
    return NativeAdapter(
        capsule, name=name, num_workers=settings.num_workers, per_op_workers=settings.per_op_workers
    )
