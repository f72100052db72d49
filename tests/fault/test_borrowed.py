"""Chunks read from peers that are not to stay leave L1 once nobody uses them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from kvstrata.p2p.borrowed import LINGER_S, Borrowed
from kvstrata.process.supervisor import PoolLane
from tests.harness.l1 import L1, chain


class TestClock:
    __test__ = False

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return 0


@pytest.fixture
def l1() -> Iterator[L1]:
    made = L1()
    yield made
    made.nothing_in_use()
    made.pool.close()


@pytest.fixture
async def lane() -> AsyncIterator[PoolLane]:
    made = PoolLane(asyncio.get_running_loop())
    yield made
    made.close()


async def test_what_was_read_goes_after_its_time_but_not_while_it_is_leased(l1: L1, lane: PoolLane) -> None:
    clock = TestClock()
    borrowed = Borrowed(l1.pool, lane, clock)
    keys, own = chain("read", 4), chain("own", 3)
    l1.store(keys)
    l1.store(own)
    borrowed.read(keys)
    assert await borrowed.drop_due() == 0
    ticket, *_ = l1.pool.lease(b"".join(keys[:2]), 1, [l1.row])
    clock.now_s = LINGER_S
    assert await borrowed.drop_due() == 2
    assert l1.has(*keys[:2], *own)
    l1.pool.release(ticket)
    assert await borrowed.drop_due() == 0
    clock.now_s = 2 * LINGER_S
    assert await borrowed.drop_due() == 2
    assert len(borrowed) == 0
    assert [l1.read(key) for key in keys] == [None] * 4
    assert l1.has(*own)


async def test_what_left_by_itself_is_forgotten_and_the_oldest_are_beyond_the_bound(
    l1: L1, lane: PoolLane
) -> None:
    clock = TestClock()
    borrowed = Borrowed(l1.pool, lane, clock, max_keys=3)
    keys = chain("read", 5)
    l1.store(keys)
    borrowed.read(keys)
    l1.lose(keys[4:])
    clock.now_s = LINGER_S
    assert await borrowed.drop_due() == 2
    assert len(borrowed) == 0
    assert l1.has(*keys[:2])


async def test_what_was_asked_for_stays_whether_it_is_read_now_or_was_before(l1: L1, lane: PoolLane) -> None:
    clock = TestClock()
    borrowed = Borrowed(l1.pool, lane, clock)
    keys = chain("read", 4)
    l1.store(keys)
    borrowed.read(keys[:2])
    async with borrowed.keeping(keys[:3]), borrowed.keeping(keys[:1]):
        borrowed.read(keys)
        assert len(borrowed) == 1
    clock.now_s = LINGER_S
    assert await borrowed.drop_due() == 1
    assert l1.has(*keys[:3])
    borrowed.read(keys[:3])
    assert len(borrowed) == 3


async def test_what_is_being_dropped_when_it_is_asked_for_is_gone_before_the_asker_looks(
    l1: L1, lane: PoolLane
) -> None:
    clock = TestClock()
    one_thread = PoolLane(asyncio.get_running_loop(), threads=1)
    borrowed = Borrowed(l1.pool, one_thread, clock)
    keys = chain("read", 4)
    l1.store(keys)
    borrowed.read(keys)
    clock.now_s = LINGER_S
    may_drop = threading.Event()
    one_thread.run(may_drop.wait, 60)
    dropping = asyncio.create_task(borrowed.drop_due())
    await asyncio.sleep(0)

    async def ask() -> int:
        async with borrowed.keeping(keys):
            return l1.pool.peek(b"".join(keys), 1)

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    may_drop.set()
    assert await dropping == 4
    assert await asking == 0
    one_thread.close()
