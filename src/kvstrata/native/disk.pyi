"""The disk log as a connector (ext/core/include/kvstrata/disk_log.h)."""

MIN_CAPACITY_BYTES: int
"""A log needs so much."""

def segment_bytes_for(capacity_bytes: int) -> int:
    """Length of a segment in a log of this capacity where none is given."""

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
    """A capsule for `kvstrata.native.lanes.NativeConnector`, not open.

    `folder`: absolute, made if need be.  `capacity_bytes`: at least MIN_CAPACITY_BYTES.  `segment_bytes`: a multiple
    of 4096, at most a sixteenth of the capacity; 0: `segment_bytes_for`.  `min_free_bytes`: the log does not grow where
    less would be left on the file system.  `direct`: O_DIRECT where the file system has it.  `reinsert_percent`: share
    of a segment that is written again when it retires, of what was loaded last.  `scrub_bytes_per_s`: 0 for none.
    """
