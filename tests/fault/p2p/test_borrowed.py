"""Chunks that L1 only borrowed from peers leave it once they are not used."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from kvstrata.p2p.borrowed import LINGER_S, Borrowed
from kvstrata.process.lane import PoolLane
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
async def lane() -> AsyncIterator[PoolLane]:
    made = PoolLane(asyncio.get_running_loop())
    yield made
    made.close()


async def test_a_borrowed_chunk_is_dropped_after_its_time_but_not_while_leased(l1, lane):
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


async def test_evicted_chunks_are_forgotten_and_beyond_the_bound_the_oldest(l1: L1, lane: PoolLane) -> None:
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


async def test_kept_chunks_stay_whether_they_were_read_before_or_meanwhile(l1: L1, lane: PoolLane) -> None:
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


async def test_keeping_waits_until_a_drop_under_way_has_ended(l1: L1, lane: PoolLane) -> None:
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
