"""Lanes: bounded queues and threads in which an adapter does its blocking work.

There is one lane per class of operation: lookup, load, put, delete.  A lane named in `per_op_workers` has
threads of its own; the others share a common group of `num_workers` threads, which takes waiting lookups first,
then loads, deletes and puts.  Queues and threads are native (ext/core/src/lanes/lanes.h); this module connects
them with the event loop.

Invariants
1. `submit` never blocks: if the lane is full it returns None and queues nothing.
2. Work that was queued runs exactly once, even if its future is no longer awaited, and even while the lanes close.  So
   the work itself can drop the holds and descriptors that it owns.
3. In the common group puts never occupy the last free thread, so that a burst of puts delays no lookup or
   load; if the common group has only one thread, lookups have a thread of their own.

The lanes do not depend on what the work does.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvstrata.native.connector import NativeLanes
from kvstrata.process.supervisor import answer_future

T = TypeVar("T")


class Lane(enum.StrEnum):
    """A class of operations, in order of precedence; the value is its name in `per_op_workers`."""

    LOOKUP = "lookup"
    LOAD = "retrieve"
    DELETE = "delete"
    PUT = "store"


_NUMBER = {lane: number for number, lane in enumerate(Lane)}


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
        own = per_op_workers or {}
        self._native: NativeLanes | None = NativeLanes(
            name, num_workers, [own.get(lane, 0) for lane in Lane], queue_limit
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left: asyncio.Event | None = None

    def submit(
        self, lane: Lane, work: Callable[[], T], *, beyond_limit: bool = False
    ) -> asyncio.Future[T] | None:
        """Queue `work`; the future carries its result or exception. None: the lane is full, and `work` was not queued.

        `beyond_limit` is for finishing work that was admitted before (one piece per admitted batch). Cancelling the
        future ends the wait only. Raises RuntimeError after `close`.
        """
        return self.submit_native(NativeLanes.submit, lane, work, beyond_limit)

    def run(self, lane: Lane, work: Callable[[], T]) -> asyncio.Future[T]:
        """Like `submit`, for work that even a full lane accepts: the rest of admitted work, or work that runs once."""
        future = self.submit(lane, work, beyond_limit=True)
        assert future is not None, "refused work that has no limit"
        return future

    def submit_native(
        self, submit: Callable[..., bool], lane: Lane, *what: Any
    ) -> asyncio.Future[Any] | None:
        """Like `submit`, for work that a method of NativeLanes makes from its arguments."""
        if self._native is None:
            raise RuntimeError("the lanes are closed")
        if self._loop is None:
            self._watch()
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        return future if submit(self._native, _NUMBER[lane], *what, future) else None

    async def close(self) -> None:
        """Accept no more work, finish all queued work, end the threads. Idempotent.

        The native lanes and their descriptor are freed at once, not by a later garbage collection.
        """
        if self._native is None:
            return
        if self._left is None:
            self._watch()
        assert self._loop is not None and self._left is not None
        self._native.stop()
        self._read()
        await self._left.wait()
        native, self._native = self._native, None
        if native is not None:  # if None, another call of `close` has freed them
            self._loop.remove_reader(native.event_fd)
            native.close()

    def _watch(self) -> None:
        assert self._native is not None
        self._loop, self._left = asyncio.get_running_loop(), asyncio.Event()
        self._loop.add_reader(self._native.event_fd, self._read)

    def _read(self) -> None:
        self._take_done()
        if self._native is not None and self._native.idle and self._left is not None:
            # Idle lanes write no more to the descriptor: work that ended since `_take_done` must be collected now.
            self._take_done()
            self._left.set()

    def _take_done(self) -> None:
        for future, result, error in [] if self._native is None else self._native.take_done():
            answer_future(future, result, error)
