"""Bounded queues and threads for an adapter's blocking work (ext/core/include/kvstrata/lanes.h).

Lanes are numbered in order of precedence: 0 lookup, 1 load, 2 delete, 3 put.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

class NativeConnector:
    """A storage medium in C++ (ext/core/include/kvstrata/connector.h), out of the capsule that its module made.

    Owns the medium, and shares it with the work that is under way.  Raises ValueError for anything but an unused
    capsule of this version.
    """

    def __init__(self, capsule: object) -> None: ...

    capabilities: dict[str, Any]
    """The fields of `kvstrata::ConnectorCapabilities` by name, without `items_per_piece`."""

    ready: bool
    """Whether `exists_now` would answer at once, and `submit_list` be right to ask: the medium has been read in."""

    def exists_now(self, keys: Sequence[bytes], found: Callable[[int, int, str], T]) -> list[T] | None:
        """What `found(presence, record_bytes, reason)` makes of each key; equal ones share one.

        Asked in the calling thread, without the GIL; None while the connector would wait. Raises ValueError for a
        key that has not 32 bytes.
        """

    def counts(self) -> dict[str, int]:
        """What the connector counts, by name."""

    def take_notes(self) -> list[tuple[bool, str]]:
        """(is a warning, sentence) of what happened since the last call that belongs into the log."""

class NativeLanes:
    """The four lanes of one adapter. Thread-safe. Threads start with the first work they are needed for.

    Without `close`, work that still runs when the object goes is left to its thread; the process can end.
    """

    def __init__(self, name: str, common_workers: int, own_workers: Sequence[int], queue_limit: int) -> None:
        """`own_workers[lane]` threads for that lane alone; 0: the `common_workers` serve it.

        At most `queue_limit` pieces of work wait in one lane. Raises ValueError for numbers out of bounds.
        """

    event_fd: int
    """Readable while work has ended and was not taken, and once when the last thread has left after `stop`."""
    idle: bool
    """Stopped, and no thread is left."""

    def submit(self, lane: int, work: Callable[[], Any], token: object, beyond_limit: bool) -> bool:
        """Queue `work`, called once in a thread of that lane; False, and nothing happens, when the lane is full.

        Raises RuntimeError after `stop`, OSError when no thread can be started.
        """

    def submit_open(
        self,
        lane: int,
        connector: NativeConnector,
        instance_id: str,
        region: int,
        region_bytes: int,
        token: object,
    ) -> bool:
        """Open the connector; the result is what is wrong, or an empty string. Never refused for want of room."""

    def submit_exists(
        self,
        lane: int,
        connector: NativeConnector,
        keys: Sequence[bytes],
        found: Callable[[int, int, str], Any],
        token: object,
    ) -> bool:
        """The result is as of `NativeConnector.exists_now`."""

    def submit_heads(
        self, lane: int, connector: NativeConnector, keys: Sequence[bytes], token: object
    ) -> bool:
        """The result is the first bytes of each record, at most 512 (`StorageAdapter.heads`)."""

    def submit_list(
        self, lane: int, connector: NativeConnector, cursor: int, most: int, token: object
    ) -> bool:
        """The result is (keys, where to go on: 0 after the last). REQUIRES `connector.ready`."""

    def submit_put(
        self, lane: int, connector: NativeConnector, items: Sequence[tuple[bytes, Any]], token: object
    ) -> bool:
        """Put (key, hold) each; takes over the holds, also when it answers False or raises.

        A hold has `address`, `length` and `drop()`.  The result is ([(PutStatus, reason)], keys that the
        connector's cap dropped since it was last asked).
        """

    def submit_load(
        self, lane: int, connector: NativeConnector, items: Sequence[tuple[bytes, Any]], token: object
    ) -> bool:
        """Load (key, hold) each, likewise; the result is ([(LoadStatus, reason)], keys dropped)."""

    def submit_delete(
        self, lane: int, connector: NativeConnector, keys: Sequence[bytes], token: object
    ) -> bool:
        """The result is how many were there. Never refused for want of room, as the next three."""

    def submit_clear(self, lane: int, connector: NativeConnector, token: object) -> bool:
        """The result is how many there were."""

    def submit_usage(self, lane: int, connector: NativeConnector, token: object) -> bool:
        """The result is (used bytes, capacity in bytes, records)."""

    def submit_close(self, lane: int, connector: NativeConnector, token: object) -> bool:
        """Close the connector; REQUIRES that nothing else of it is queued or runs."""

    def take_done(self) -> list[tuple[Any, Any, BaseException | None]]:
        """(token, result, error) of what has ended and was not taken, in the order of ending."""

    def counts(self, lane: int) -> dict[str, int]:
        """waiting, running (pieces now), refused, done (jobs ever)."""

    def stop(self) -> None:
        """Take nothing more; what was taken runs to its end."""

    def close(self) -> None:
        """`stop`, wait for everything, join the threads. Without the GIL."""
