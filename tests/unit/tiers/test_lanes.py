"""Lanes: bounded queues whose work always runs, where puts never delay lookups; what a closed adapter leaves."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvstrata.native.connector import NativeConnector, fs_connector
from kvstrata.testing.strategies import key_of, lent_context, put_item, settled
from kvstrata.tiers.base import Outcome
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.lanes import Lane, Lanes
from kvstrata.tiers.work import Work
from tests.harness.alone import alone
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


def threads() -> set[str]:
    """Numbers of this process's threads, those without Python among them."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize(
    "entry", [{"type": "fs"}, {"type": "fs", "shared": True}, {"type": "disk", "capacity_gb": 1}]
)
@alone
async def test_a_closed_adapter_leaves_no_thread_and_no_descriptor(tmp_path, entry):
    context = lent_context(lambda key: None)
    before, open_before = threads(), len(os.listdir("/proc/self/fd"))
    adapter = configure_tier({**entry, "base_path": str(tmp_path)}, 0).make()
    await adapter.open(context)
    puts = [put_item(key_of(n), 5_000) for n in range(16)]  # some threads begin with the first work
    assert all(outcome.outcome is Outcome.STORED for outcome in await settled(adapter.put, puts))
    assert threads() - before
    await adapter.close()
    await until(lambda: threads() <= before)  # a joined thread is listed a moment longer
    assert len(os.listdir("/proc/self/fd")) == open_before


@alone
async def test_an_adapter_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    first, second = (configure_tier({"type": "fs", "base_path": str(tmp_path)}, n).make() for n in range(2))
    await first.open(lent_context(lambda key: None))
    before = threads()
    with pytest.raises(Exception, match="another running server"):
        await second.open(lent_context(lambda key: None))
    await until(lambda: threads() <= before)
    await first.close()


DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


@pytest.mark.parametrize("taken", [True, False])
def test_a_capsules_destructor_is_called_only_when_its_connector_was_not_taken(tmp_path, taken):
    calls: list[int] = []
    # Whoever took the connector frees it: a destructor that did so too would free it twice.
    destructor = DESTRUCTOR(lambda _: calls.append(1))
    capsule = fs_connector(
        str(tmp_path), "tmp", shared=False, use_odirect=False, capacity_bytes=0, min_free_bytes=0
    )
    set_destructor = ctypes.pythonapi.PyCapsule_SetDestructor
    set_destructor.argtypes = [ctypes.py_object, DESTRUCTOR]
    assert set_destructor(capsule, destructor) == 0
    connector = NativeConnector(capsule) if taken else None
    del capsule
    gc.collect()
    assert len(calls) == (not taken)
    del connector
