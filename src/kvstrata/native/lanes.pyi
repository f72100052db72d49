"""Bounded queues and threads for an adapter's blocking work (ext/core/include/kvstrata/lanes.h).

Lanes are numbered in order of precedence: 0 lookup, 1 load, 2 delete, 3 put.
"""

from collections.abc import Callable, Sequence
from typing import Any

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

    def take_done(self) -> list[tuple[Any, Any, BaseException | None]]:
        """(token, result, error) of what has ended and was not taken, in the order of ending."""

    def counts(self, lane: int) -> dict[str, int]:
        """waiting, running (pieces now), refused, done (jobs ever)."""

    def stop(self) -> None:
        """Take nothing more; what was taken runs to its end."""

    def close(self) -> None:
        """`stop`, wait for everything, join the threads. Without the GIL."""
