"""The prefetch controller on a real pool: deadlines, hung adapters, bounds, no room, cancel and stop."""

from __future__ import annotations

import asyncio

import pytest

from kvstrata.server.l2.fetch import FetchOutcome
from kvstrata.storage.wrap.deadline import DeadlineLimits
from kvstrata.testing.faults import Fault, FaultPlan
from kvstrata.types import MissReason
from tests.fault.server.fs_tiers import Loads, OpenTier, Puts, in_l2
from tests.harness.l1 import L1, L1_BYTES, LATER_S, RECORD, chain
from tests.harness.waiting import until


async def test_at_the_deadline_a_fetch_answers_with_the_loaded_chunks_and_the_rest_arrives_later(l1, tier):
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    keys = chain("a", 6)
    await in_l2(l1, one, keys)
    loads = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    plan.schedule(None, None, None, Fault.HANG)  # exists and two records answer; the third record hangs
    outcome = await loads.fetch(keys, within_s=2.0)
    assert outcome == FetchOutcome(2, 2, MissReason.DEADLINE, "deadline")
    one.faults.release()
    await loads.controller.idle()
    assert l1.has(*keys)


async def test_a_hung_exists_is_answered_at_the_deadline(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    loads = Loads(l1, one)
    plan.schedule(Fault.HANG)
    assert await loads.fetch(chain("a", 2), within_s=0.01) == FetchOutcome(
        0, 0, MissReason.DEADLINE, "deadline"
    )
    one.faults.release()
    await loads.controller.idle()


async def test_an_adapter_that_does_not_answer_exists_is_passed_over(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    near, far = await tier(plan=plan), await tier()
    keys = chain("a", 4)
    await in_l2(l1, far, keys)
    plan.schedule(Fault.HANG)
    loads = Loads(l1, near, far, patience_share=0.00001)
    assert await loads.fetch(keys) == FetchOutcome(4, 4, "")
    near.faults.release()


async def test_fetches_that_hang_on_one_adapter_do_not_stop_another(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    hung, good = await tier(plan=plan), await tier()
    prompts = [chain(f"p{n}", 1) for n in range(4)]
    for keys in prompts:
        await in_l2(l1, hung, keys)
    other = chain("other", 3)
    await in_l2(l1, good, other)
    loads = Loads(l1, hung, good, max_in_flight=2, in_flight_bytes=10 * RECORD)
    plan.schedule(*[None] * 4, Fault.HANG, Fault.HANG, None)
    waits = [asyncio.create_task(loads.fetch(keys)) for keys in prompts]
    await until(lambda: hung.faults.hanging == 2)
    assert await loads.fetch(other) == FetchOutcome(3, 3, "")
    assert hung.faults.hanging == 2, "no more than max_in_flight load from one adapter"
    assert loads.controller.stats()["adapters"]["fs-0"]["waiting"] == 2
    while not all(wait.done() for wait in waits):
        hung.faults.release()
        await asyncio.sleep(0.001)
    assert [wait.result().n_chunks for wait in waits] == [1] * 4


async def test_bytes_in_flight_are_bounded(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    keys = chain("a", 20)
    await in_l2(l1, one, keys)
    plan.schedule(None, *[Fault.HANG] * 20)
    loads = Loads(l1, one, in_flight_bytes=5 * RECORD, batch_bytes=2 * RECORD)
    wait = asyncio.create_task(loads.fetch(keys))
    await until(lambda: one.faults.hanging == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert one.faults.hanging == 2
    assert l1.pool.stats()["bytes"]["reserved"] <= 5 * 57_344
    while not wait.done():
        one.faults.release()
        await asyncio.sleep(0.001)
    assert wait.result() == FetchOutcome(20, 20, "")


async def test_a_hung_load_is_answered_by_the_adapters_deadline_and_its_bytes_stay_safe(l1, tier):
    plan = FaultPlan(0)
    one = await tier(plan=plan, deadline_ms=5)
    keys = chain("a", 2)
    puts = Puts(l1, one)
    one.guard.limits = DeadlineLimits(max_stuck_bytes=1 << 30, deadline_ms=600_000)
    puts.controller.committed(l1.store(keys))
    await puts.controller.stop(LATER_S)
    l1.lose(keys)
    one.guard.limits = DeadlineLimits(max_stuck_bytes=1 << 30, deadline_ms=200)
    plan.schedule(None, Fault.HANG)
    loads = Loads(l1, one)
    assert await loads.fetch(keys) == FetchOutcome(0, 0, MissReason.DEADLINE, "deadline")
    stats = l1.pool.stats()
    assert stats["bytes"]["reserved"] == 0
    assert stats["bytes"]["quarantined"] == 2 * 57_344
    for n in range(10):
        l1.store(chain(f"new {n}", 8))
    one.faults.release()
    await until(lambda: l1.pool.stats()["holds"] == 0)
    assert l1.pool.stats()["bytes"]["quarantined"] == 0
    one.guard.limits = DeadlineLimits(max_stuck_bytes=1 << 30, deadline_ms=600_000)
    assert await loads.fetch(keys) == FetchOutcome(2, 2, "")
    assert l1.has(*keys)


async def test_a_pool_without_room_ends_the_prefix_at_once_and_leaks_nothing(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 10)
    await in_l2(l1, one, keys)
    holds = []
    for n in range(9):
        for key in l1.store(chain(f"pinned {n}", 8)):
            hold = l1.pool.hold(key)
            if hold is not None:
                holds.append(hold)
    loads = Loads(l1, one)
    outcome = await loads.fetch(keys)
    assert outcome.n_chunks < 10
    assert (outcome.reason, outcome.detail) == (MissReason.REFUSED, "pool_pinned")
    for hold in holds:
        hold.drop()
    assert (await loads.fetch(keys)).n_chunks == 10


async def test_a_prompt_larger_than_the_pool_does_not_evict_its_own_beginning(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 100)
    for at in range(0, 100, 20):
        await in_l2(l1, one, keys[at : at + 20])
    loads = Loads(l1, one)
    outcome = await loads.fetch(keys)
    assert 40 <= outcome.n_chunks < 100
    assert outcome.reason == MissReason.REFUSED
    assert l1.pool.peek(b"".join(keys), 1) == outcome.n_chunks


async def test_loads_from_several_adapters_may_take_more_than_a_sessions_share(l1, tier):
    """A session may reserve an eighth of the pool; the server's own loads are bounded adapter by adapter."""
    one, other = await tier(), await tier()
    keys, more = chain("a", 20), chain("b", 20)
    await in_l2(l1, one, keys)
    await in_l2(l1, other, more)
    loads = Loads(l1, one, other, in_flight_bytes=L1_BYTES, batch_bytes=6 * RECORD)
    outcomes = await asyncio.gather(loads.fetch(keys), loads.fetch(more))
    assert outcomes == [FetchOutcome(20, 20, "")] * 2
    assert "reserve:session_limit" not in loads.controller.stats()["counts"]


async def test_reservations_of_hung_adapters_do_not_stop_loads_from_others(l1: L1, tier: OpenTier) -> None:
    """Together the hung adapters hold more than a session may reserve."""
    plans = [FaultPlan(seed) for seed in range(2)]
    hung = [await tier(plan=plan) for plan in plans]
    sound = await tier()
    prompts = [chain(name, 5) for name in "ab"]
    for one, keys in zip(hung, prompts, strict=True):
        await in_l2(l1, one, keys)
    keys = chain("c", 10)
    await in_l2(l1, sound, keys)
    loads = Loads(l1, *hung, sound, in_flight_bytes=10 * RECORD, batch_bytes=5 * RECORD)
    waits = []
    for one, plan, stuck in zip(hung, plans, prompts, strict=True):
        plan.schedule(None, Fault.HANG)
        waits.append(asyncio.create_task(loads.fetch(stuck)))
        await until(lambda one=one: one.faults.hanging == 1)
    assert l1.pool.stats()["bytes"]["reserved"] > L1_BYTES // 8
    assert await loads.fetch(keys) == FetchOutcome(10, 10, "")
    for one in hung:
        one.faults.release()
    assert [outcome.n_chunks for outcome in await asyncio.gather(*waits)] == [5, 5]


async def test_a_budget_bounds_what_a_prewarm_loads(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 8)
    await in_l2(l1, one, keys)
    loads = Loads(l1, one)
    outcome = await loads.fetch(keys, budget_bytes=3 * RECORD + 1)
    assert outcome == FetchOutcome(3, 3, MissReason.REFUSED, "budget")
    assert l1.pool.peek(b"".join(keys), 1) == 3


async def test_a_cancelled_fetch_begins_no_more_loads(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    keys = chain("a", 10)
    await in_l2(l1, one, keys)
    loads = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    plan.schedule(None, Fault.HANG)
    wait = asyncio.create_task(loads.fetch(keys))
    await until(lambda: one.faults.hanging == 1)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    one.faults.release()
    await loads.controller.idle()
    assert one.faults.asked == {"exists": 1, "load": 1}
    assert l1.has(keys[0])
    assert l1.read(keys[1]) is None


async def test_stop_is_bounded_and_its_bytes_stay_until_the_medium_has_finished(l1, tier):
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    keys = chain("a", 4)
    await in_l2(l1, one, keys)
    plan.schedule(None, Fault.HANG)
    loads = Loads(l1, one)
    wait = asyncio.create_task(loads.fetch(keys))
    await until(lambda: one.faults.hanging == 1)
    await loads.controller.stop(0)
    assert (await wait).n_chunks == 0
    assert l1.pool.stats()["bytes"]["reserved"] == 0
    assert l1.pool.stats()["bytes"]["quarantined"] > 0
    assert (await loads.fetch(keys)).reason == MissReason.BREAKER_OPEN
    one.faults.release()
    await until(lambda: l1.pool.stats()["holds"] == 0)
