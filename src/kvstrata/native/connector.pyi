"""Storage media in C++, and the threads that their calls run in."""

from collections.abc import Callable, Sequence
from typing import Any

# Storage media in C++, as Python objects.

class NativeConnector:
    """A storage medium in C++ (ext/core/include/kvstrata/connector.h), taken out of the capsule that its module made.

    This object and the jobs that use the medium own it together.  Raises ValueError for anything but an unused
    capsule of this version.
    """

    def __init__(self, capsule: object) -> None: ...

    capabilities: dict[str, Any]
    """The fields of `kvstrata::ConnectorCapabilities` by name, without `items_per_piece`."""

    ready: bool
    """Whether the connector has read its medium's index, so that `exists_now` and `list_keys` answer at once."""

    def exists_now(self, keys: bytes) -> tuple[bytes, str] | None:
        """A presence for each of the 32-byte keys, and the reason why some are unknown.

        Asks in the calling thread, without the GIL; returns None if the connector would have to wait.  Raises
        ValueError if the keys do not have 32 bytes each.
        """

    # For threads of lanes; none of these keeps the GIL.

    def open(self, instance_id: str, region: int, region_bytes: int) -> str:
        """Open the connector; returns an error message, or an empty string."""

    def list_keys(self, cursor: int, most: int) -> tuple[list[bytes], int]:
        """Keys, and the next cursor: 0 after the last. REQUIRES: `ready`, and `most` is at least 1."""

    def remove(self, keys: bytes) -> int:
        """Delete keys; returns how many records were removed."""

    def clear(self) -> int:
        """Remove all records; returns how many were removed."""

    def usage(self) -> tuple[int, int, int]:
        """(used bytes, capacity in bytes, records)"""

    def close(self) -> None:
        """Close the connector. REQUIRES: no other call of it runs."""

    def counts(self) -> dict[str, int]:
        """The connector's counters, by name."""

    def take_notes(self) -> list[tuple[bool, str]]:
        """Notes for the log since the last call: (is a warning, sentence)."""

# Bounded queues and threads for an adapter's blocking work (ext/core/src/lanes/lanes.h).
#
# Lanes are numbered in order of precedence: 0 lookup, 1 load, 2 delete, 3 put.

class NativeLanes:
    """The four lanes of one adapter. Thread-safe. A thread starts with the first work that needs it.

    If the object is destroyed without `close`, its threads finish the running work by themselves, and do not keep the
    process from ending.
    """

    def __init__(self, name: str, common_workers: int, own_workers: Sequence[int], queue_limit: int) -> None:
        """A lane has `own_workers[lane]` threads of its own; lanes with 0 share `common_workers` threads.

        At most `queue_limit` pieces of work wait in one lane. Raises ValueError for numbers out of bounds.
        """

    event_fd: int
    """Readable while work has ended and was not taken, and once when the last thread has left after `stop`."""
    idle: bool
    """Whether the lanes were stopped and no thread is left."""

    def submit(self, lane: int, work: Callable[[], Any], beyond_limit: bool, token: object) -> bool:
        """Queue `work`, to be called once in a thread of that lane; False, and nothing happens, when the lane is full.

        `token` names the work in `take_done`.  With `beyond_limit` the work is queued even if the lane is full.
        Raises RuntimeError after `stop`, OSError when no thread can be started.  The other `submit_…` methods raise
        likewise.
        """

    def submit_exists(self, lane: int, connector: NativeConnector, keys: bytes, token: object) -> bool:
        """Ask which keys exist; the result is that of `NativeConnector.exists_now`."""

    def submit_put(
        self,
        lane: int,
        connector: NativeConnector,
        items: Sequence[Any],
        outcomes: Sequence[Any],
        token: object,
    ) -> bool:
        """Put records given as items with `key` and `hold`; drops the holds, even if it returns False or raises.

        A hold has `address`, `length` and `drop()`.  `take_done` sets the `outcome` of each item to that of
        `outcomes` with the number of its PutStatus, and its `reason`.  The result is (0.0, keys that the connector's
        cap dropped since it was last asked, 0.0).
        """

    def submit_load(
        self,
        lane: int,
        connector: NativeConnector,
        items: Sequence[Any],
        outcomes: Sequence[Any],
        token: object,
    ) -> bool:
        """Load records into the extents of items; holds and outcomes (by LoadStatus) as in `submit_put`.

        The result is (seconds until a thread of the lane began, keys that the connector's cap dropped since it was
        last asked, seconds of the rest in which records were verified).
        """

    def take_done(self) -> list[tuple[Any, Any, BaseException | None]]:
        """(token, result, error) of each job that has ended and was not taken yet, in the order of their ends."""

    def stop(self) -> None:
        """Accept no more work; work accepted before runs to its end."""

    def close(self) -> None:
        """Stop, wait for all work, and join the threads, without the GIL."""

# The disk log as a connector (ext/core/src/disk/log.h).

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
) -> object:
    """A capsule for `NativeConnector`; its log is not opened yet.

    `folder`: an absolute path, created if it is missing.  `capacity_bytes`: at least MIN_CAPACITY_BYTES.
    `segment_bytes`: a multiple of 4096, at most a sixteenth of the capacity; 0: by the capacity.
    `min_free_bytes`: the log grows only if it leaves this much free on the file system.  `direct`: use O_DIRECT if the
    file system supports it.  `reinsert_percent`: when a segment retires, this share of it is written again: its most
    recently used records.
    """

# The native connector of `fs` (ext/core/src/fs/connector.h).

def fs_connector(
    base_path: str,
    relative_tmp_dir: str,
    *,
    shared: bool,
    use_odirect: bool,
    capacity_bytes: int,
    min_free_bytes: int | None,
) -> object:
    """The capsule for `kvstrata.tiers.native_adapter.NativeAdapter`; its directory is not opened yet.

    `capacity_bytes` 0: no cap.  `min_free_bytes` None: the default of ext/core/src/fs/directory.h.
    """
