"""Lanes: bounded queues whose work always runs, and where puts never stand in the way of lookups; work of adapters."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.work import Work
from tests.harness.amount import amount
from tests.harness.waiting import until

WAIT_S = 60.0


class Blocker:
    """Work that waits for the test and tells when it began."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.go.wait(WAIT_S)
        return "done"

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.began.wait, WAIT_S)


async def test_a_full_lane_takes_nothing() -> None:
    lanes = Lanes("t", num_workers=2, queue_limit=3)
    blocker = Blocker()
    first = lanes.submit(Lane.PUT, blocker)
    await blocker.until_begun()
    ran: list[int] = []
    queued = [lanes.submit(Lane.PUT, lambda i=i: ran.append(i)) for i in range(3)]
    assert lanes.submit(Lane.PUT, lambda: ran.append(99)) is None
    assert lanes.submit(Lane.LOAD, lambda: None) is not None, "another lane has its own queue"
    last = lanes.submit(Lane.PUT, lambda: ran.append(3), beyond_limit=True)
    blocker.go.set()
    await asyncio.gather(first, *queued, last)
    assert ran == [0, 1, 2, 3]
    await lanes.close()


@pytest.mark.parametrize("num_workers", [1, 2, 4])
async def test_puts_that_block_every_thread_they_may_have_delay_no_lookup(num_workers: int) -> None:
    lanes = Lanes("t", num_workers=num_workers)
    blockers = [Blocker() for _ in range(2 * num_workers)]
    puts = [lanes.submit(Lane.PUT, blocker) for blocker in blockers]
    await blockers[0].until_begun()
    lookup = lanes.submit(Lane.LOOKUP, lambda: "found")
    assert lookup is not None
    assert await asyncio.wait_for(lookup, WAIT_S) == "found"
    if num_workers > 1:
        load = lanes.submit(Lane.LOAD, lambda: "loaded")
        assert load is not None
        assert await asyncio.wait_for(load, WAIT_S) == "loaded"
    for blocker in blockers:
        blocker.go.set()
    await asyncio.gather(*puts)
    await lanes.close()


async def test_close_runs_what_was_taken_and_ends_the_threads() -> None:
    lanes = Lanes("t", num_workers=3, per_op_workers={Lane.LOAD: 2})
    ran: list[int] = []
    threads: set[int] = set()

    def work(i: int) -> None:
        ran.append(i)
        threads.add(threading.get_native_id())

    futures = [lanes.submit(lane, lambda i=i: work(i)) for i, lane in enumerate([Lane.PUT, Lane.LOAD] * 50)]
    await lanes.close()
    assert sorted(ran) == list(range(100))
    await asyncio.gather(*futures)
    # A joined thread is listed a moment longer.
    await until(lambda: threads.isdisjoint(map(int, os.listdir("/proc/self/task"))))
    await lanes.close()
    with pytest.raises(RuntimeError):
        lanes.submit(Lane.PUT, lambda: None)


async def test_work_that_ends_while_the_lanes_close_is_reported() -> None:
    for _ in range(amount(50, 300)):
        lanes = Lanes("t", num_workers=2)
        futures = [lanes.submit(Lane.PUT, lambda: 1) for _ in range(3)]
        await lanes.close()
        assert all(future is not None and future.done() for future in futures)


def test_a_process_can_end_while_work_runs() -> None:
    """As with an adapter that hangs: neither waits for it nor dies of it."""
    script = """
import asyncio, threading, time
from kvstrata.tiers.lanes import Lane, Lanes

began = threading.Event()

def forever():
    began.set()
    while True:
        time.sleep(0.0005)

async def main():
    lanes = Lanes("t")
    kept.append((lanes, lanes.submit(Lane.PUT, forever), lanes.submit(Lane.LOAD, forever)))
    assert await asyncio.to_thread(began.wait, 60)

kept = []
asyncio.run(main())
"""
    for _ in range(amount(2, 5)):
        ended = subprocess.run(
            [sys.executable, "-c", script], timeout=WAIT_S, capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")


async def test_a_cancelled_call_ends_its_wait_and_not_the_work() -> None:
    work, go, done = Work("fs-0"), asyncio.Event(), asyncio.Event()

    async def long() -> None:
        await go.wait()
        done.set()

    call = asyncio.create_task(work.own(long()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not done.is_set()
    go.set()
    await work.ended()
    assert done.is_set()


async def test_work_in_the_background_that_fails_is_logged_and_remarked(caplog):
    work = Work("fs-0")

    async def fails() -> None:
        raise ValueError("a mistake of ours")

    work.background(fails(), "sweeper")
    await asyncio.sleep(0.0)
    await work.stop()
    assert work.remarks() == {"sweeper_failed": "ValueError: a mistake of ours"}
    assert "fs-0: its background task sweeper failed" in caplog.text
