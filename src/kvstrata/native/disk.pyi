"""The disk log as a connector (ext/core/src/disk/log.h)."""

MIN_CAPACITY_BYTES: int
"""The smallest capacity of a log."""

def disk_connector(
    folder: str,
    *,
    capacity_bytes: int,
    segment_bytes: int = 0,
    min_free_bytes: int = 0,
    direct: bool = True,
    reinsert_percent: int = 20,
    scrub_bytes_per_s: int = 0,
) -> object:
    """A capsule for `kvstrata.native.connector.NativeConnector`; its log is not opened yet.

    `folder`: an absolute path, created if it is missing.  `capacity_bytes`: at least MIN_CAPACITY_BYTES.
    `segment_bytes`: a multiple of 4096, at most a sixteenth of the capacity; 0: by the capacity.
    `min_free_bytes`: the log grows only if it leaves this much free on the file system.  `direct`: use O_DIRECT if the
    file system supports it.  `reinsert_percent`: when a segment retires, this share of it is written again: its most
    recently loaded records.  `scrub_bytes_per_s`: 0 turns scrubbing off.
    """
