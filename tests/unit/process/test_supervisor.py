"""process/supervisor.py: owned tasks, and the bounded lane."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvstrata.errors import Refused
from kvstrata.process.supervisor import PoolLane, Supervisor


async def test_the_first_task_that_crashes_is_reported_with_its_name() -> None:
    supervisor = Supervisor(asyncio.get_running_loop())
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

    async def crash() -> None:
        raise ZeroDivisionError("oh no")

    supervisor.spawn(crash(), "heart")
    assert await asyncio.wait_for(supervisor.failure, 30) == "task heart crashed: ZeroDivisionError('oh no')"
    assert len(supervisor) == 0


async def test_a_job_that_crashes_ends_alone_and_the_log_has_its_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor = Supervisor(asyncio.get_running_loop())

    async def crash() -> None:
        raise ZeroDivisionError("oh no")

    with pytest.raises(ZeroDivisionError):
        await supervisor.job(crash(), "prewarm-1")
    assert (supervisor.failure.done(), supervisor.failed_jobs, len(supervisor)) == (False, 1, 0)
    [record] = caplog.records
    assert record.getMessage() == "job prewarm-1 failed" and record.exc_info


async def test_a_full_lane_refuses_work_and_takes_it_once_it_has_room() -> None:
    lane = PoolLane(asyncio.get_running_loop(), threads=1, queue=1)
    gate = threading.Event()
    running = lane.run(gate.wait, 30)
    waiting = lane.run(int, "5")
    with pytest.raises(Refused):
        lane.run(int, "6")
    gate.set()
    assert await running
    assert await waiting == 5
    assert await lane.run(int, "7") == 7
    lane.close()


async def test_work_on_the_lane_goes_on_when_its_caller_is_cancelled() -> None:
    lane = PoolLane(asyncio.get_running_loop(), threads=1, queue=4)
    started, gate, finished = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        gate.wait(30)
        finished.set()

    async def wait() -> None:
        await asyncio.shield(lane.run(work))

    waiter = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert started.wait(30)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    gate.set()
    lane.close()
    assert finished.is_set()
