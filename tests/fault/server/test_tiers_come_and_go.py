"""Tiers are added, drained, resumed and removed at random while chunks are stored and loaded."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable

import pytest

from kvstrata.errors import (
    BadRequest,
)
from tests.fault.server.tier_rig import Start
from tests.harness.amount import amount
from tests.harness.l1 import L1, LATER_S, chain
from tests.harness.shelf import SHELVES
from tests.harness.waiting import until


@pytest.mark.parametrize("seed", range(amount(2, 8)))
async def test_whatever_comes_and_goes_every_chunk_is_put_or_skipped_and_nothing_is_left(
    start: Start, l1: L1, seed: int
) -> None:
    rng = random.Random(seed)
    rig = start()
    anchor = await rig.add("anchor")
    stored: list[list[bytes]] = []

    async def storing() -> None:
        for n in range(30):
            keys = l1.store(chain(f"{seed} {n}", rng.randrange(1, 5)))
            rig.store.committed(keys)
            if keys:
                stored.append(keys)
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
            if rng.random() < 0.3:
                await rig.store.idle()

    async def looking_up() -> None:
        for _ in range(30):
            if stored:
                keys = rng.choice(stored)
                if not l1.pool.stats()["pinned_bytes"]:
                    for key in reversed(keys):
                        l1.pool.remove(key)
                found = await rig.fetch(keys, within_s=rng.choice([0.0, 0.01, LATER_S]))
                assert 0 <= found.n_chunks <= len(keys)
            await asyncio.sleep(0)

    async def changing() -> None:
        for n in range(20):
            names = [name for name in rig.names() if name != anchor]
            shelf = SHELVES[f"shelf {n % 4}"]
            match rng.randrange(6):
                case 0 | 1:
                    position = rng.choice([None, 0, len(rig.adapters.placed)])
                    await rig.add(f"shelf {n % 4}", position=position, backfill=rng.random() < 0.3)
                case 2 if names:
                    await rig.control.drain(rng.choice(names), loads=rng.random() < 0.5, wait_s=0.001)
                case 5 if names:
                    with contextlib.suppress(BadRequest):  # the tier is being removed
                        await rig.control.resume(rng.choice(names), backfill=rng.random() < 0.3)
                case 3 if names:
                    if rng.random() < 0.5:
                        shelf.shut(rng.choice(["put", "load", "exists"]))
                    asyncio.get_running_loop().call_later(0.01, shelf.let_go)
                    await rig.control.remove(rng.choice(names), wait_s=rng.choice([0.0, 0.002, 1.0]))
            await asyncio.sleep(0.001)

    work: list[Awaitable[None]] = [storing(), looking_up(), changing()]
    await asyncio.gather(*work)
    for shelf in SHELVES.values():
        shelf.let_go()
    await rig.prefetch.idle()
    await rig.store.idle()
    skipped = {key for key, _ in rig.skipped}
    for keys in stored:
        for key in keys:
            assert key in SHELVES["anchor"].records or key in skipped, "a chunk was neither put nor skipped"
    outcomes = rig.store.stats_of(anchor)["outcomes"]
    assert outcomes.get("stored", 0) == len(SHELVES["anchor"].records)
    for name in [name for name in rig.names() if name != anchor]:
        await rig.control.remove(name, wait_s=LATER_S)
    await until(lambda: rig.names() == [anchor])
    assert rig.store.stats()["backlog_bytes"] == 0
