"""storage/media/object_store/sharing.py: which thread takes which item, and what becomes of those that none takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvstrata.native.pool import Hold
from kvstrata.storage.base import PutItem
from kvstrata.storage.media.object_store.sharing import share


class CountedHold:
    """Counts its drops."""

    def __init__(self) -> None:
        self.dropped = 0

    def drop(self) -> None:
        self.dropped += 1


class Threads:
    """Takes work as a lane does, and runs it when the test says so."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._waiting: list[tuple[Callable[[], None], asyncio.Future[None]]] = []

    def submit(self, work: Callable[[], None]) -> asyncio.Future[None] | None:
        if len(self._waiting) >= self._room:
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        return future

    def run_one(self) -> None:
        work, future = self._waiting.pop(0)
        try:
            work()
        except ValueError as error:
            future.set_exception(error)
        else:
            future.set_result(None)


def items_of(count: int) -> tuple[list[PutItem], list[CountedHold]]:
    holds = [CountedHold() for _ in range(count)]
    return [PutItem(bytes([i]) * 32, cast("Hold", hold)) for i, hold in enumerate(holds)], holds


def work(item: PutItem) -> int:
    item.hold.drop()
    if item.key[0] == 2:
        raise ValueError("item 2")
    return item.key[0]


async def begun(threads: Threads, items: list[PutItem]) -> asyncio.Task[list[Any]]:
    task = asyncio.create_task(share(threads.submit, 3, items, work, "full"))
    await asyncio.sleep(0)
    return task


async def test_a_thread_that_has_not_come_is_not_waited_for() -> None:
    threads, (items, holds) = Threads(room=3), items_of(2)
    task = await begun(threads, items)
    threads.run_one()
    assert await asyncio.wait_for(task, 20) == [0, 1]
    threads.run_one()  # the thread that comes late finds nothing left
    assert [hold.dropped for hold in holds] == [1, 1]


async def test_a_full_lane_refuses_all_items_and_ends_their_holds() -> None:
    items, holds = items_of(4)
    assert await (await begun(Threads(room=0), items)) == ["full"] * 4
    assert [hold.dropped for hold in holds] == [1] * 4


async def test_an_exception_ends_the_holds_of_the_items_that_no_thread_has_taken() -> None:
    threads, (items, holds) = Threads(room=1), items_of(5)
    task = await begun(threads, items)
    threads.run_one()
    with pytest.raises(ValueError, match="item 2"):
        await task
    assert [hold.dropped for hold in holds] == [1] * 5
