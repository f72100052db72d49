"""What an adapter has under way by itself: waits end with their callers, work does not, and no failure is silent."""

from __future__ import annotations

import asyncio

import pytest

from kvstrata.storage.work import Work


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


async def test_work_in_the_background_that_fails_is_logged_and_remarked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = Work("fs-0")

    async def fails() -> None:
        raise ValueError("a mistake of ours")

    work.background(fails(), "sweeper")
    await asyncio.sleep(0.0)
    await work.stop()
    assert work.remarks() == {"sweeper_failed": "ValueError: a mistake of ours"}
    assert "fs-0: its background task sweeper failed" in caplog.text
