"""The store controller on a real pool, with adapters that fail, hang, lie and fill up."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvstrata import failpoints
from kvstrata.policy.store import EvictAhead, StorePolicy
from kvstrata.testing.faults import Fault, FaultPlan
from tests.fault.server.fs_tiers import OpenTier, Puts
from tests.harness.l1 import L1, L1_BYTES, LATER_S, RECORD, chain
from tests.harness.waiting import until


async def test_every_committed_chunk_reaches_every_adapter(l1: L1, tier: OpenTier) -> None:
    one, other = await tier(), await tier()
    puts = Puts(l1, one, other)
    keys = chain("a", 12)
    puts.controller.committed(l1.store(keys))
    await puts.controller.idle()
    assert one.records == other.records == set(keys)
    assert puts.counts("fs-0") == puts.counts("fs-1") == {"stored": 12}
    assert puts.skipped == []
    assert puts.backlog_bytes == 0
    await puts.controller.stop(0)


async def test_chunks_beyond_the_backlog_are_skipped_counted_and_evictable(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    plan.schedule(*[Fault.HANG] * 2)
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 40))
    puts.controller.committed(keys)
    await until(lambda: one.faults.hanging == 2)
    assert puts.backlog_bytes <= L1_BYTES // 4
    n_pinned = L1_BYTES // 4 // RECORD
    assert puts.skipped == [(key, "backlog") for key in keys[n_pinned:]]
    assert puts.counts() == {"skipped:backlog": 40 - n_pinned}
    # New prompts fill the pool: skipped chunks may leave, chunks that wait for their put may not.
    for n in range(6):
        assert len(l1.store(chain(f"new {n}", 8))) == 8
    assert l1.has(*keys[:n_pinned])
    assert not l1.has(*keys[n_pinned:])
    one.faults.release()
    await puts.controller.idle()
    assert one.records == set(keys[:n_pinned])
    await puts.controller.stop(0)


async def test_chunks_that_the_full_backlog_skipped_are_put_once_it_is_empty(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 40))
    puts.controller.committed(keys)
    await puts.controller.idle()
    n_skipped = puts.counts()["skipped:backlog"]
    assert n_skipped > 0
    assert puts.counts()["taken_up"] == n_skipped and one.records == set(keys)
    assert puts.backlog_bytes == 0
    await puts.controller.stop(0)


async def test_no_turn_of_the_loop_looks_at_all_skipped_chunks(l1: L1, tier: OpenTier) -> None:
    """Tens of thousands of skipped chunks may have left the pool since."""
    holds: collections.Counter[int] = collections.Counter()
    turn = 0

    class Counting:
        def hold(self, key: bytes) -> object:
            holds[turn] += 1
            return l1.pool.hold(key)

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        ticking[0] = asyncio.get_running_loop().call_soon(next_turn)

    one = await tier()
    puts = Puts(l1, one)
    of_tier = puts.controller._puts["fs-0"]
    pool: Any = Counting()
    of_tier._pool = pool
    of_tier._unpinned.update(dict.fromkeys(chain("lost", 1000)))
    ticking = [asyncio.get_running_loop().call_soon(next_turn)]
    puts.controller.committed(l1.store(chain("a", 1)))
    await puts.controller.idle()
    ticking[0].cancel()
    assert holds.total() == 1001
    assert max(holds.values()) <= 64
    await puts.controller.stop(0)


@pytest.fixture
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm({})


async def test_puts_go_on_after_one_crashed(l1, tier, caplog, disarmed):
    """The chunks of its batch are skipped and unpinned."""
    one = await tier()
    puts = Puts(l1, one, batches_in_flight=1)
    failpoints.arm({"KVSTRATA_TESTING": "1", "KVSTRATA_FAILPOINTS": "put.started=crash"})
    lost = l1.store(chain("a", 2))
    puts.controller.committed(lost)
    await puts.controller.idle()
    assert "put-fs-0 crashed" in caplog.text and "failpoint put.started" in caplog.text
    assert sorted(puts.skipped) == sorted((key, "crashed") for key in lost)
    assert puts.backlog_bytes == 0
    kept = l1.store(chain("b", 2))
    puts.controller.committed(kept)
    await puts.controller.idle()
    assert one.records == set(kept)
    assert puts.counts() == {"crashed": 1, "skipped:crashed": 2, "stored": 2}
    puts.controller.committed(lost)
    await puts.controller.idle()
    assert one.records == {*kept, *lost}
    await puts.controller.stop(0)


async def test_a_put_in_flight_keeps_its_pin_after_its_deadline(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan, deadline_ms=1)
    plan.schedule(Fault.HANG)
    puts = Puts(l1, one)
    [key] = l1.store(chain("a", 1))
    puts.controller.committed([key])
    await puts.controller.idle()
    assert puts.skipped == [(key, "deadline")]
    assert puts.backlog_bytes == 0
    assert l1.pool.stats()["holds"] == 1
    for n in range(12):
        l1.store(chain(f"new {n}", 8))
    assert l1.has(key)
    one.faults.release()
    await until(lambda: one.records == {key})
    await until(lambda: l1.pool.stats()["holds"] == 0)
    await puts.controller.stop(0)


async def test_a_throttled_put_is_repeated_and_at_last_skipped(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    puts = Puts(l1, one)
    first, second = l1.store(chain("a", 2))
    plan.schedule(Fault.THROTTLED, Fault.THROTTLED)
    puts.controller.committed([first])
    await puts.controller.idle()
    assert one.records == {first}
    plan.schedule(*[Fault.THROTTLED] * 3)
    puts.controller.committed([second])
    await puts.controller.idle()
    assert puts.skipped == [(second, "injected")]
    assert puts.counts() == {"throttled": 4, "stored": 1, "skipped:injected": 1}
    assert puts.backlog_bytes == 0
    await puts.controller.stop(0)


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.RAISE, Fault.LOST_ACK])
async def test_a_failed_put_is_skipped_with_its_reason_and_later_ones_go_on(l1, tier, fault):
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    puts = Puts(l1, one)
    first, second = l1.store(chain("a", 2))
    plan.schedule(fault)
    puts.controller.committed([first])
    await puts.controller.idle()
    assert puts.skipped == [(first, "adapter_error" if fault is Fault.RAISE else "injected")]
    puts.controller.committed([first, second])
    await puts.controller.idle()
    assert one.records == {first, second}
    await until(lambda: l1.pool.stats()["holds"] == 0)
    await puts.controller.stop(0)


async def test_a_hung_adapter_costs_the_other_nothing(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0, rate=1.0, only=[Fault.HANG])
    hung, good = await tier(plan=plan), await tier()
    puts = Puts(l1, hung, good)
    keys = l1.store(chain("a", 14))
    puts.controller.committed(keys)
    await until(lambda: good.records == set(keys))
    assert hung.records == set()
    plan.rate = 0.0
    hung.faults.release()
    await puts.controller.idle()
    assert hung.records == set(keys)
    await puts.controller.stop(0)


async def test_stop_is_bounded_and_reports_the_chunks_it_did_not_put(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0, rate=1.0, only=[Fault.HANG])
    one = await tier(plan=plan)
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 14))
    puts.controller.committed(keys)
    await until(lambda: one.faults.hanging == 2)
    await puts.controller.stop(0)
    assert sorted(puts.skipped) == sorted((key, "stopping") for key in keys)
    assert puts.backlog_bytes == 0
    assert l1.pool.stats()["holds"] == 8, "the medium still uses two batches of four"
    puts.controller.committed(keys[:1])
    assert puts.skipped[-1] == (keys[0], "stopping")
    await puts.controller.stop(0)
    one.faults.release()
    await until(lambda: l1.pool.stats()["holds"] == 0)


async def test_stop_puts_the_waiting_chunks_while_its_time_lasts(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 14))
    puts.controller.committed(keys)
    await puts.controller.stop(LATER_S)
    assert one.records == set(keys)
    assert puts.skipped == []


async def test_more_keys_than_one_turn_takes_are_all_put_or_accounted_for(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one, max_waiting_keys=100)
    keys = l1.store(chain("a", 10))
    puts.controller.committed([*keys, *chain("never stored", 150)])
    await puts.controller.idle()
    reasons = collections.Counter(reason for _, reason in puts.skipped)
    assert reasons == {"queue_full": 60, "evicted": 90}
    assert one.records == set(keys)
    await puts.controller.stop(0)


async def test_on_evict_puts_chunks_before_they_leave(l1: L1, tier: OpenTier) -> None:
    one = await tier(StorePolicy.ON_EVICT)
    puts = Puts(l1, one, evict_ahead=EvictAhead(low_watermark=0.5, step=0.25))
    l1_keys: list[bytes] = []
    few = l1.store(chain("few", 8))
    puts.controller.committed(few)
    await puts.controller.idle()
    assert one.records == set(), "below the watermark nothing is put"
    l1_keys += few
    for n in range(30):
        keys = l1.store(chain(f"p{n}", 4))
        assert len(keys) == 4
        l1_keys += keys
        puts.controller.committed(keys)
        await puts.controller.idle()
        puts.controller.evicted([key for kind, key, _ in l1.pool.events() if kind == 1])
    assert puts.skipped == []
    for key in l1_keys:
        assert key in one.records or l1.has(key)
    assert max(one.faults.stored.values()) == 1, "a chunk is put once"
    await puts.controller.stop(0)


async def test_second_touch_puts_chunks_that_were_used_again(l1: L1, tier: OpenTier) -> None:
    one = await tier(StorePolicy.SECOND_TOUCH)
    puts = Puts(l1, one)
    once, twice, thrice = l1.store(chain("a", 3))
    puts.controller.committed([once, twice, thrice])
    await puts.controller.idle()
    assert one.records == set()
    puts.controller.touched([twice, thrice])
    await puts.controller.idle()
    puts.controller.touched([thrice])
    await puts.controller.idle()
    assert one.records == {twice, thrice}
    assert one.faults.stored[thrice] == 1
    await puts.controller.stop(0)


async def test_a_read_only_medium_gets_and_loses_nothing(l1: L1, tier: OpenTier) -> None:
    one, read_only = await tier(), await tier(StorePolicy.ON_EVICT)
    guard = read_only.guard
    guard.capabilities = msgspec.structs.replace(guard.capabilities, takes_puts=False)
    puts = Puts(l1, one, read_only)
    keys = chain("a", 8)
    puts.controller.committed(l1.store(keys))
    puts.controller.evicted(keys[:2])
    await puts.controller.idle()
    assert one.records == set(keys)
    assert read_only.faults.asked["put"] == 0
    assert puts.skipped == []
    assert await puts.controller.clear() == 8
    await puts.controller.stop(0)


async def test_clear_empties_queue_and_adapters(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    puts = Puts(l1, one, batches_in_flight=1)
    done = l1.store(chain("done", 2))
    puts.controller.committed(done)
    await puts.controller.idle()
    plan.schedule(Fault.HANG)
    keys = l1.store(chain("a", 12))
    puts.controller.committed(keys)
    await until(lambda: one.faults.hanging == 1)
    assert await puts.controller.clear() == 2
    assert sorted(puts.skipped) == sorted((key, "cleared") for key in keys[4:])
    one.faults.release()
    await puts.controller.idle()
    assert one.records == set(), "a record whose put was under way is deleted once the put has ended"
    assert sorted(puts.skipped) == sorted((key, "cleared") for key in keys)
    await puts.controller.stop(0)
