"""Lanes: bounded queues and threads in which an adapter does its blocking work.

There is one lane per class of operation: lookup, load, put, delete.  A lane named in `per_op_workers` has
threads of its own; the others share a common group of `num_workers` threads, where a waiting lookup goes
before a load, a load before a delete and a delete before a put.

Invariants
1. `submit` never blocks: a full lane answers None and the work was not taken.
2. Work that was taken runs exactly once, also when nobody awaits its future any more and while the lanes
   close.  So whatever the work owns (holds, descriptors) it can drop itself.
3. In the common group puts never occupy the last free thread, so that a burst of puts delays no lookup or
   load; beside a common group of one thread, lookups have a thread of their own.

Threads start with the first work they are needed for.  Nothing here knows what the work is.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Lane(enum.StrEnum):
    """A class of operations; the value is its name in `per_op_workers`, in order of precedence."""

    LOOKUP = "lookup"
    LOAD = "retrieve"
    DELETE = "delete"
    PUT = "store"


class _Threads:
    """Threads that serve the queues of some lanes. All state is guarded by `_changed`."""

    def __init__(self, name: str, lanes: tuple[Lane, ...], workers: int, queue_limit: int) -> None:
        self._name = name
        self._workers = workers
        self._max_puts = workers - 1 if len(lanes) > 1 and workers > 1 else workers
        self._queue_limit = queue_limit
        self._queues: dict[Lane, collections.deque[_Work]] = {
            lane: collections.deque() for lane in Lane if lane in lanes
        }
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._puts_running = 0
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None

    def submit(self, lane: Lane, work: Callable[[], T], beyond_limit: bool) -> asyncio.Future[T] | None:
        loop = asyncio.get_running_loop()
        with self._changed:
            if self._closing:
                raise RuntimeError(f"{self._name}: closed")
            queue = self._queues[lane]
            if len(queue) >= self._queue_limit and not beyond_limit:
                return None
            if self._loop is None:
                self._loop, self._ended = loop, asyncio.Event()
            future: asyncio.Future[T] = loop.create_future()
            queue.append((work, future))
            waiting = sum(map(len, self._queues.values()))
            if waiting > self._idle and len(self._threads) < self._workers:
                thread = threading.Thread(
                    target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            else:
                self._changed.notify()
        return future

    def waiting(self, lane: Lane) -> int:
        with self._changed:
            return len(self._queues[lane])

    async def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            threads = list(self._threads)
        if threads and self._ended is not None:
            await self._ended.wait()
            for thread in threads:
                thread.join()

    def _take(self) -> tuple[Lane, _Work] | None:
        """The next work that may run now. Called with the lock held."""
        for lane, queue in self._queues.items():
            if queue and (lane is not Lane.PUT or self._puts_running < self._max_puts):
                return lane, queue.popleft()
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                while (taken := self._take()) is None:
                    if self._closing and not any(self._queues.values()):
                        self._leave()
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                lane, (work, future) = taken
                self._puts_running += lane is Lane.PUT
            try:
                result, error = work(), None
            except Exception as raised:  # the supervisor of this thread: the awaiting side gets it
                result, error = None, raised
            with self._changed:
                self._puts_running -= lane is Lane.PUT
                if lane is Lane.PUT or self._closing:
                    self._changed.notify_all()  # a put that had to wait for this one may be next
            self._tell(_finish, future, result, error)
            del work, future, result, error, taken  # an idle thread keeps nothing alive

    def _leave(self) -> None:
        """The last thread to leave tells `close`. Called with the lock held."""
        self._threads.remove(threading.current_thread())
        if not self._threads and self._ended is not None:
            self._tell(self._ended.set)

    def _tell(self, callback: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            pass  # the loop is closed: the process ends and nobody awaits this any more


def _finish(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():
        return  # cancelled by who awaited it; the work itself has run to its end
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Lanes:
    """The four lanes of one adapter. Everything but the work itself happens on one event loop.

    `num_workers` threads serve the lanes that `per_op_workers` does not name; at most `queue_limit` pieces of
    work wait per lane.
    """

    def __init__(
        self,
        name: str,
        *,
        num_workers: int = 4,
        per_op_workers: Mapping[Lane, int] | None = None,
        queue_limit: int = 1024,
    ) -> None:
        own = dict(per_op_workers or {})
        if num_workers == 1:
            own.setdefault(Lane.LOOKUP, 1)
        common = tuple(lane for lane in Lane if lane not in own)
        self._groups = [
            _Threads(f"{name}-{lane.name.lower()}", (lane,), workers, queue_limit)
            for lane, workers in own.items()
        ]
        self._by_lane = dict(zip(own, self._groups, strict=True))
        if common:
            shared = _Threads(f"{name}-common", common, num_workers, queue_limit)
            self._groups.append(shared)
            self._by_lane.update(dict.fromkeys(common, shared))

    def submit(
        self, lane: Lane, work: Callable[[], T], *, beyond_limit: bool = False
    ) -> asyncio.Future[T] | None:
        """Queue `work`; the future carries its result or exception. None: the lane is full, nothing is taken.

        `beyond_limit` is for the end of work that was admitted before (one piece per admitted batch).
        Cancelling the future ends the wait only. Raises RuntimeError after `close`.
        """
        return self._by_lane[lane].submit(lane, work, beyond_limit)

    def waiting(self, lane: Lane) -> int:
        """Pieces of work in a lane that no thread has begun."""
        return self._by_lane[lane].waiting(lane)

    async def close(self) -> None:
        """Take nothing more, run what was taken to its end, end the threads. Idempotent."""
        for group in self._groups:
            await group.close()
