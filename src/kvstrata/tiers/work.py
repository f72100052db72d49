"""The asyncio tasks of an adapter: a cancelled call ends the wait for its task, not the task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from kvstrata.config.secrets import scrubbed
from kvstrata.tiers.base import MAX_REMARK_CHARS

log = logging.getLogger(__name__)

T = TypeVar("T")


class Work:
    """The tasks of one adapter, on one event loop."""

    def __init__(self, name: str) -> None:
        """`name` of the adapter, for the log."""
        self._name = name
        self._running: set[asyncio.Future[Any]] = set()
        self._background: list[asyncio.Task[Any]] = []
        self._failed: dict[str, str] = {}

    async def own(self, work: Awaitable[T]) -> T:
        """The result of `work`, which runs to its end even if the caller is cancelled."""
        return await asyncio.shield(self.keep(work))

    def start(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run `work` as a task that need not be awaited."""
        task = asyncio.create_task(work, name=name or None)
        self.keep(task)
        return task

    def keep(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Make `ended` wait for `work` too; returns its future."""
        future = asyncio.ensure_future(work)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` for the adapter's life, until `stop`; if it fails, the error is logged and stays in `remarks`."""

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() or (error := task.exception()) is None:
                return
            self._failed[f"{name}_failed"] = f"{type(error).__name__}: {scrubbed(error)}"
            log.error("%s: its background task %s failed", self._name, name, exc_info=error)

        task = asyncio.create_task(work, name=f"{self._name}-{name}")
        task.add_done_callback(ended)
        self._background.append(task)

    def remarks(self) -> dict[str, str]:
        """The background tasks that have failed, with their errors; for `StorageAdapter.remarks`."""
        return {name: why[:MAX_REMARK_CHARS] for name, why in self._failed.items()}

    async def stop(self) -> None:
        """Cancel the background tasks and wait until they have ended."""
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        self._background.clear()

    async def ended(self) -> None:
        """Wait for the end of all work passed to `own`, `start` or `keep`."""
        while self._running:
            await asyncio.wait(set(self._running))
