"""The owner of all tasks of a process.

A task that ends with an exception is our own mistake.  Without the tasks of `spawn` the process cannot serve: the
supervisor keeps the first exception in `failure`, and the process ends with it.  A `job` is work that somebody asked
for (a request, a prewarm, a pin): its exception ends the job alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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
        """Its result says which task of `spawn` crashed and how."""
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
        """Returns when no task runs."""
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
