"""Threads for pool calls that take longer than the loop may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

from kvstrata.errors import Refused
from kvstrata.naming import name_thread

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class PoolLane:
    """A few threads and a queue for long pool calls, all of which drop the GIL.

    A server has two lanes.  Requests of clients share a lane with a bounded queue.  The server's own tasks share a lane
    that never refuses, since the number of these tasks is bounded and each waits for its call.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        threads: int = 2,
        queue: int | None = 128,
        name: str = "kv-pool",
    ) -> None:
        """`queue`: most calls that may wait; None: the callers bound their number themselves."""
        self._loop = loop
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=name_thread)
        self._free = None if queue is None else threads + queue

    def run(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> asyncio.Future[T]:
        """Run `work` on a thread. Await the future shielded, since cancelling it does not stop the thread.

        Raises Refused if too many calls wait already.
        """
        if self._free is not None:
            if self._free <= 0:
                raise Refused("the server is busy with long operations on the pool; try again")
            self._free -= 1
        future = self._loop.run_in_executor(self._threads, work, *arguments)
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """Drop the calls that wait, and wait for those that run."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _done(self, future: asyncio.Future[Any]) -> None:
        if self._free is not None:
            self._free += 1
