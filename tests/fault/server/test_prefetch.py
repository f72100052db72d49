"""Prefetch from L2 through the server's real parts: what is loaded, when, and what a failing tier costs."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import sys
from types import FrameType

import pytest

from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.testing.strategies import IDENTITY, record_length
from kvstrata.tiers import loads
from kvstrata.tiers.config import StorePolicy
from kvstrata.tiers.loads import FetchOutcome
from kvstrata.types import MissReason
from tests.fault.server.conftest import Loads, OpenTier, Puts, Start, in_l2
from tests.harness.faulty import Fault
from tests.harness.l1 import CLOCK, L1, L1_BYTES, LATER_S, RECORD, chain
from tests.harness.waiting import until


async def test_only_holes_are_loaded(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 8)
    await in_l2(l1, one, keys)
    l1.store(keys[:2])
    l1.store(keys[:5], first=4)
    fetches = Loads(l1, one)
    assert await fetches.fetch(keys) == FetchOutcome(8, 5, "")
    assert set(one.faults.loaded) == {*keys[2:4], *keys[5:]}
    assert l1.has(*keys)


async def test_fetches_of_the_same_keys_load_them_once(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 6)
    await in_l2(l1, one, keys)
    fetches = Loads(l1, one)
    one.plan.schedule(*[None] * 3, Fault.HANG)  # three calls of exists, then the first load hangs
    waits = [asyncio.create_task(fetches.fetch(keys[:n])) for n in (6, 6, 3)]
    await until(lambda: one.faults.hanging == 1)
    one.faults.release()
    assert await asyncio.gather(*waits) == [
        FetchOutcome(6, 6, ""),
        FetchOutcome(6, 6, ""),
        FetchOutcome(3, 3, ""),
    ]
    assert one.faults.loaded == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("damage", ["flip", "gone", "foreign"])
async def test_every_policy_puts_a_chunk_again_whose_record_was_bad(l1, tier, damage):
    """A policy that puts a chunk once must learn that the adapter does not have the chunk."""
    one = await tier(StorePolicy.SECOND_TOUCH)
    puts = Puts(l1, one, backlog_bytes=L1_BYTES)
    [key] = keys = chain("a", 1)
    l1.store(keys, identity=hashlib.sha256(b"other").digest() if damage == "foreign" else IDENTITY)
    await puts.put([key, key])
    assert one.records == {key}
    l1.lose(keys)
    path = one.path(key)
    if damage == "flip":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    elif damage == "gone":
        path.unlink()
    fetches = Loads(l1, one)
    reason = MissReason.EVICTED if damage == "gone" else MissReason.CORRUPT
    assert (await fetches.fetch(keys))[:3] == (0, 0, reason)
    await fetches.controller.idle()
    assert fetches.lost == [("fs-0", key)] and l1.read(key) is None
    assert one.records == set()
    for name, lost in fetches.lost:
        puts.controller.dropped(name, [lost])
    l1.store(keys)
    await puts.put([key, key])
    assert one.records == {key}


async def test_no_turn_of_the_loop_does_more_for_a_longer_prompt(start: Start, l1: L1) -> None:
    """Counted in calls of the functions of tiers/loads.py; what concerns all keys is one call of native code."""
    rig, size = start(), 1000
    await rig.open("a")

    async def most_calls(n: int) -> int:
        keys = l1.store(chain(f"{n}", n), size=size)
        assert len(keys) == n
        rig.store.committed(keys)
        await rig.store.idle()
        l1.lose(keys)
        turns: collections.Counter[int] = collections.Counter()
        turn = 0

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            ticking[0] = asyncio.get_running_loop().call_soon(next_turn)

        def called(frame: FrameType, event: str, _: object) -> None:
            turns[turn] += event == "call" and frame.f_code.co_filename == loads.__file__

        ticking = [asyncio.get_running_loop().call_soon(next_turn)]
        before = sys.getprofile()
        sys.setprofile(called)
        try:
            fetched = await rig.prefetch.fetch(
                b"".join(keys),
                1,
                identity=IDENTITY,
                tenant=1,
                deadline_s=CLOCK.monotonic_s() + LATER_S,
                limits=[record_length(size)],
            )
        finally:
            sys.setprofile(before)
            ticking[0].cancel()
        assert fetched == FetchOutcome(n, n, "")
        l1.lose(keys)
        return max(turns.values())

    assert await most_calls(400) < 1.3 * await most_calls(130)


async def test_nothing_is_loaded_beyond_a_chunk_that_could_not_be_loaded(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 8)
    await in_l2(l1, one, keys)
    one.path(keys[2]).write_bytes(bytes(RECORD))
    fetches = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    assert (await fetches.fetch(keys)).n_chunks == 2
    await fetches.controller.idle()
    assert set(one.faults.loaded) == set(keys[:3])


async def test_a_chunk_that_one_adapter_cannot_load_comes_from_the_next(l1: L1, tier: OpenTier) -> None:
    near, far = await tier(), await tier()
    keys = chain("a", 6)
    await in_l2(l1, near, keys)
    await in_l2(l1, far, keys)
    broken = near.path(keys[2])
    broken.write_bytes(bytes(100))
    near.plan.schedule(None, Fault.ERROR)  # exists answers; the first batch fails
    fetches = Loads(l1, near, far)
    assert await fetches.fetch(keys) == FetchOutcome(6, 6, "")
    assert set(far.faults.loaded) == set(keys[:3])
    assert l1.has(*keys)


async def test_a_chunk_that_a_worker_is_storing_ends_the_prefix(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 4)
    await in_l2(l1, one, keys)
    ticket, outcomes, _ = l1.pool.reserve(keys[2], keys[1], RECORD, l1.row, IDENTITY, 1)
    assert outcomes[0] == ReserveOutcome.RESERVED
    fetches = Loads(l1, one)
    assert await fetches.fetch(keys) == FetchOutcome(2, 2, MissReason.IN_FLIGHT, "in_flight")
    l1.pool.abort(ticket)
    assert (await fetches.fetch(keys)).n_chunks == 4


async def test_a_fetch_may_begin_in_the_middle_of_a_prompt(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 6, 2)
    await in_l2(l1, one, keys, 2)
    l1.store(keys[:6], 2)
    fetches = Loads(l1, one)
    assert await fetches.fetch(keys[6:], 2, parent=keys[4:6]) == FetchOutcome(3, 3, "")
    assert l1.pool.peek(b"".join(keys), 2) == 6


async def test_at_the_deadline_a_fetch_answers_with_the_loaded_chunks_and_the_rest_arrives_later(l1, tier):
    one = await tier()
    keys = chain("a", 6)
    await in_l2(l1, one, keys)
    fetches = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    one.plan.schedule(None, None, None, Fault.HANG)  # exists and two records answer; the third record hangs
    outcome = await fetches.fetch(keys, within_s=2.0)
    assert outcome == FetchOutcome(2, 2, MissReason.DEADLINE, "deadline")
    one.faults.release()
    await fetches.controller.idle()
    assert l1.has(*keys)


async def test_bytes_in_flight_are_bounded(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 20)
    await in_l2(l1, one, keys)
    one.plan.schedule(None, *[Fault.HANG] * 20)
    fetches = Loads(l1, one, in_flight_bytes=5 * RECORD, batch_bytes=2 * RECORD)
    wait = asyncio.create_task(fetches.fetch(keys))
    await until(lambda: one.faults.hanging == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert one.faults.hanging == 2
    assert l1.pool.stats()["bytes"]["reserved"] <= 5 * 57_344
    while not wait.done():
        one.faults.release()
        await asyncio.sleep(0.001)
    assert wait.result() == FetchOutcome(20, 20, "")


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
    fetches = Loads(l1, one)
    outcome = await fetches.fetch(keys)
    assert outcome.n_chunks < 10
    assert (outcome.reason, outcome.detail) == (MissReason.REFUSED, "pool_pinned")
    for hold in holds:
        hold.drop()
    assert (await fetches.fetch(keys)).n_chunks == 10


async def test_a_prompt_larger_than_the_pool_does_not_evict_its_own_beginning(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 100)
    for at in range(0, 100, 20):
        await in_l2(l1, one, keys[at : at + 20])
    fetches = Loads(l1, one)
    outcome = await fetches.fetch(keys)
    assert 40 <= outcome.n_chunks < 100
    assert outcome.reason == MissReason.REFUSED
    assert l1.pool.peek(b"".join(keys), 1) == outcome.n_chunks


async def test_loads_from_several_adapters_may_take_more_than_a_sessions_share(l1, tier):
    """A session may reserve an eighth of the pool; the server's own loads are bounded adapter by adapter."""
    one, other = await tier(), await tier()
    keys, more = chain("a", 20), chain("b", 20)
    await in_l2(l1, one, keys)
    await in_l2(l1, other, more)
    fetches = Loads(l1, one, other, in_flight_bytes=L1_BYTES, batch_bytes=6 * RECORD)
    outcomes = await asyncio.gather(fetches.fetch(keys), fetches.fetch(more))
    assert outcomes == [FetchOutcome(20, 20, "")] * 2
    assert "reserve:session_limit" not in fetches.controller.document()["counts"]


async def test_a_cancelled_fetch_begins_no_more_loads(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 10)
    await in_l2(l1, one, keys)
    fetches = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    one.plan.schedule(None, Fault.HANG)
    wait = asyncio.create_task(fetches.fetch(keys))
    await until(lambda: one.faults.hanging == 1)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    one.faults.release()
    await fetches.controller.idle()
    assert one.faults.asked == {"exists": 1, "load": 1}
    assert l1.has(keys[0])
    assert l1.read(keys[1]) is None


async def test_stop_is_bounded_and_its_bytes_stay_until_the_medium_has_finished(l1, tier):
    one = await tier()
    keys = chain("a", 4)
    await in_l2(l1, one, keys)
    one.plan.schedule(None, Fault.HANG)
    fetches = Loads(l1, one)
    wait = asyncio.create_task(fetches.fetch(keys))
    await until(lambda: one.faults.hanging == 1)
    await fetches.controller.stop(0)
    assert (await wait).n_chunks == 0
    assert l1.pool.stats()["bytes"]["reserved"] == 0
    assert l1.pool.stats()["bytes"]["quarantined"] > 0
    assert (await fetches.fetch(keys)).reason == MissReason.BREAKER_OPEN
    one.faults.release()
    await until(lambda: l1.pool.stats()["holds"] == 0)
