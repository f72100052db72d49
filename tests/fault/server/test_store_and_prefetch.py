"""Storing and loading at the same time, through adapters that go wrong at random."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvstrata.policy.store import EvictAhead, StorePolicy
from kvstrata.server.l2.fetch import FetchOutcome
from kvstrata.testing.faults import Fault, FaultPlan
from kvstrata.testing.strategies import payload_of
from tests.fault.server.fs_tiers import Loads, Puts
from tests.harness.amount import amount
from tests.harness.l1 import LATER_S, RECORD, SIZE, chain
from tests.harness.waiting import until


@pytest.mark.parametrize("seed", range(amount(2, 4)))
async def test_whatever_goes_wrong_no_byte_is_wrong_and_nothing_leaks(l1, tier, seed):
    draw = random.Random(seed)
    plan = FaultPlan(seed, rate=0.3, only=set(Fault) - {Fault.SLOW})
    faulty = await tier(plan=plan, deadline_ms=50, failures=3)
    other = await tier(StorePolicy.ON_EVICT, capacity_bytes=30 * 57_344)
    puts = Puts(l1, faulty, other, evict_ahead=EvictAhead(low_watermark=0.3, step=0.25))
    loads = Loads(l1, faulty, other, in_flight_bytes=6 * RECORD)
    prompts = [chain(f"p{n}", 6, 2) for n in range(12)]
    waits: list[asyncio.Task[FetchOutcome]] = []
    for _ in range(70):
        keys = draw.choice(prompts)
        action = draw.randrange(5)
        if action < 2:
            puts.controller.committed(l1.store(keys, 2))
        elif action == 2:
            waits.append(asyncio.create_task(loads.fetch(keys, 2, within_s=draw.choice([0.01, 0.2]))))
        elif action == 3:
            l1.lose(keys[draw.randrange(6) * 2 :])
        else:
            faulty.faults.release()
        if draw.random() < 0.1 and waits:
            draw.choice(waits).cancel()
        await asyncio.sleep(draw.choice([0, 0.001]))
        l1.pool.validate()
        for key in keys:
            assert l1.read(key) in (None, payload_of(key, SIZE)), plan
    plan.rate = 0.0
    faulty.faults.release()
    await asyncio.gather(*waits, return_exceptions=True)
    await loads.controller.idle()
    await puts.controller.idle()
    await loads.controller.stop(LATER_S)
    await puts.controller.stop(LATER_S)
    await until(lambda: faulty.guard.stuck_bytes == 0)
    assert puts.backlog_bytes == 0
    assert loads.controller.stats()["keys_loading"] == 0
    assert all(gate["loading_bytes"] == 0 for gate in loads.controller.stats()["adapters"].values())
    l1.nothing_in_use()
