"""Owns all tasks of a process, and threads for work that would block the loop too long.

A task that ends with an exception is our own mistake.  Without the tasks of `spawn` the process cannot serve: the
supervisor keeps the first exception in `failure`, and the process ends with it.  A `job` is work for a single caller (a
request, a prewarm, a pin): its exception ends the job alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

from kvstrata.errors import Refused
from kvstrata.naming import name_thread
from kvstrata.observability.logging import EventLog

log = logging.getLogger(__name__)

T = TypeVar("T")


class Supervisor:
    """Starts tasks, notices the first of `spawn` that crashes, and cancels and awaits the rest at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log = EventLog("supervisor")
        self.failure: asyncio.Future[str] = loop.create_future()
        """Its result names the crashed task of `spawn` and the error."""
        self.failed_jobs = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine without which the process cannot serve as an owned task."""
        return self._start(work, name, self._ended)

    def job(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine that may fail by itself as an owned task; the log has its exception."""
        return self._start(work, name, self._job_ended)

    def _start(
        self, work: Coroutine[Any, Any, T], name: str, ended: Callable[[asyncio.Task[Any]], None]
    ) -> asyncio.Task[T]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    async def idle(self) -> None:
        """Wait until no task runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Cancel the tasks that run and wait until they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _job_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed_jobs += 1
            log.error("job %s failed", task.get_name(), exc_info=error)

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


SWITCH_S = 0.000_5
"""Time for which a busy thread may keep the event loop waiting for the interpreter (`sys.setswitchinterval`)."""


def answer_future(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    """Complete a future with the outcome of its work, unless it was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def on_a_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work`, which may never end, on a thread that does not keep the process alive; awaits its result.

    Cancelling the future ends only the wait.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def body() -> None:
        name_thread()
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer_future, future, result, failure)
        failure = None  # it refers to this frame, and together they would keep what `work` had until they are collected

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


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
        """`queue`: maximum number of waiting calls; None: the callers bound their number themselves."""
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
