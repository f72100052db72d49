"""Divides a batch among the threads of a lane: each thread takes one item after another.

So the event loop is woken once for each thread, and not for each item, which for records in a local directory took a
fifth of the time.  A thread that is still busy with another batch is not waited for once the other threads have done
all items; it finds none left when it comes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

from kvstrata.storage.base import LoadItem, LoadStatus, PutItem

T = TypeVar("T")
Item = TypeVar("Item", PutItem, LoadItem)


class Part(NamedTuple):
    """The outcome of reading one part of a record."""

    status: LoadStatus
    reason: str = ""
    e_tag: str | None = None


def refused(items: Sequence[PutItem] | Sequence[LoadItem], outcome: T) -> list[T]:
    """End the holds of items that nothing is done with; returns `outcome` for each of them."""
    for item in items:
        item.hold.drop()
    return [outcome] * len(items)


async def share(
    submit: Callable[[Callable[[], None]], asyncio.Future[None] | None],
    n_threads: int,
    items: Sequence[Item],
    work: Callable[[Item], T],
    full: T,
) -> list[T]:
    """The outcomes of `work`, which ends the hold of its item, for these items; `full` if `submit` takes nothing.

    An exception of `work` ends the holds of the items that no thread has taken yet.
    """
    outcomes: list[T | None] = [None] * len(items)
    left = deque(enumerate(items))

    def run() -> None:
        for number, item in _taken(left):
            outcomes[number] = work(item)

    submitted = [submit(run) for _ in range(min(len(items), n_threads))]
    waits = {wait for wait in submitted if wait is not None}
    if not waits:
        return refused(items, full)
    try:
        while None in outcomes:
            done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
    except BaseException:
        refused([item for _, item in _taken(left)], full)
        raise
    return cast("list[T]", outcomes)


def _taken(left: deque[T]) -> Iterator[T]:
    """Take one item after another; several threads may do so at the same time."""
    while True:
        try:
            yield left.popleft()
        except IndexError:
            return
