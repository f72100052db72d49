"""tiers/staging.py: who waits for room is served in order, and a wait that is cancelled takes nothing."""

from __future__ import annotations

import asyncio

import pytest

from kvstrata.tiers.staging import Block, Staging

SIZE = 1 << 20


async def full() -> tuple[Staging, Block]:
    staging = Staging(SIZE)
    whole = await staging.take(SIZE, for_put=False)
    assert whole is not None
    return staging, whole


async def test_a_wait_that_is_cancelled_while_room_becomes_free_takes_nothing_and_stops_nobody() -> None:
    staging, whole = await full()
    waits = [asyncio.create_task(staging.take(SIZE, for_put=False)) for _ in range(2)]
    await asyncio.sleep(0)
    del whole  # those who wait are served in a later turn of the loop
    waits[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits[0]
    block = await waits.pop()
    assert block is not None
    del block
    assert staging.used_bytes == 0


async def test_loads_that_wait_are_served_before_puts() -> None:
    staging, whole = await full()
    put = asyncio.create_task(staging.take(SIZE // 2, for_put=True))
    await asyncio.sleep(0)
    load = asyncio.create_task(staging.take(SIZE, for_put=False))
    await asyncio.sleep(0)
    del whole
    block = await load
    assert block is not None
    assert not put.done()
    del block, load
    block = await put
    assert block is not None
