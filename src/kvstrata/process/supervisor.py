"""Owner of all tasks of a process, and the thread lanes for pool calls that take longer than the loop may.

A task that ends with an exception is our own mistake: the supervisor keeps the first one in `failure`, and
the process ends with it.  Request tasks answer their errors themselves (server/requests/handlers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvstrata.errors import Refused
from kvstrata.observability.logging import EventLog

T = TypeVar("T")


class Supervisor:
    """Starts tasks, notices the first that crashes, and cancels and awaits the rest at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log = EventLog("supervisor")
        self.failure: asyncio.Future[str] = loop.create_future()
        """Result: which task crashed and how."""

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine as an owned task."""
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def idle(self) -> None:
        """Returns when no task runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Cancel what runs and wait until it has ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._log.error("task_crashed", task=task.get_name(), error=repr(error))
            if not self.failure.done():
                self.failure.set_result(f"task {task.get_name()} crashed: {error!r}")
                self._loop.call_exception_handler(
                    {"message": f"task {task.get_name()} crashed", "exception": error, "task": task}
                )


class PoolLane:
    """A few threads and a queue for long pool calls (all of them drop the GIL).

    A server has two.  What clients ask for shares one with a bounded queue.  The server's own work has one that
    never refuses: its callers are a known number of tasks, each of which waits for its call.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        threads: int = 2,
        queue: int | None = 128,
        name: str = "kv-pool",
    ) -> None:
        """`queue`: calls that may wait; None where the callers bound their number themselves."""
        self._loop = loop
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = None if queue is None else threads + queue

    def run(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Run `work` on a thread. Await it shielded: cancelling does not stop the thread.

        Raises Refused when too much waits already.
        """
        if self._free is not None:
            if self._free <= 0:
                raise Refused("the server is busy with long operations on the pool; try again")
            self._free -= 1
        future = self._loop.run_in_executor(self._threads, work, *arguments)
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """Wait for what runs; drop what waits."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _done(self, future: asyncio.Future[Any]) -> None:
        if self._free is not None:
            self._free += 1
