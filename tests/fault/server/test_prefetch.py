"""The prefetch controller on a real pool: which chunks are loaded from which adapter, also where records are bad."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from kvstrata.policy.prefetch import Hole, Plan, Source
from kvstrata.policy.store import StorePolicy
from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.server.l2.fetch import Fetch, FetchOutcome
from kvstrata.testing.faults import Fault, FaultPlan
from kvstrata.testing.strategies import IDENTITY
from kvstrata.types import MissReason
from tests.fault.server.fs_tiers import Loads, OpenTier, Puts, in_l2
from tests.harness.l1 import L1, L1_BYTES, LATER_S, RECORD, chain
from tests.harness.waiting import until


@pytest.mark.parametrize("n_slices", [1, 3])
async def test_chunks_in_l2_are_brought_to_l1(l1: L1, tier: OpenTier, n_slices: int) -> None:
    one = await tier()
    keys = chain("a", 10, n_slices)
    await in_l2(l1, one, keys, n_slices)
    loads = Loads(l1, one)
    assert await loads.fetch(keys, n_slices) == FetchOutcome(10, 10, "")
    assert l1.has(*keys)
    assert l1.pool.peek(b"".join(keys), n_slices) == 10
    await loads.controller.stop(0)


async def test_only_holes_are_loaded(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 8)
    await in_l2(l1, one, keys)
    l1.store(keys[:2])
    l1.store(keys[:5], first=4)
    loads = Loads(l1, one)
    assert await loads.fetch(keys) == FetchOutcome(8, 5, "")
    assert set(one.faults.loaded) == {*keys[2:4], *keys[5:]}
    assert l1.has(*keys)


async def test_the_prefix_ends_at_the_first_chunk_that_is_nowhere(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 9)
    await in_l2(l1, one, keys[:4])
    await in_l2(l1, one, keys[6:])
    loads = Loads(l1, one)
    assert await loads.fetch(keys) == FetchOutcome(4, 4, MissReason.NEVER_STORED)
    assert set(one.faults.loaded) == set(keys[:4])


async def test_fetches_of_the_same_keys_load_them_once(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    keys = chain("a", 6)
    await in_l2(l1, one, keys)
    loads = Loads(l1, one)
    plan.schedule(*[None] * 3, Fault.HANG)  # three calls of exists, then the first load hangs
    waits = [asyncio.create_task(loads.fetch(keys[:n])) for n in (6, 6, 3)]
    await until(lambda: one.faults.hanging == 1)
    one.faults.release()
    assert await asyncio.gather(*waits) == [
        FetchOutcome(6, 6, ""),
        FetchOutcome(6, 6, ""),
        FetchOutcome(3, 3, ""),
    ]
    assert one.faults.loaded == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("damage", ["flip", "gone", "another's"])
async def test_a_bad_record_ends_the_prefix_and_is_healed_by_the_next_store(l1, tier, damage):
    one = await tier()
    keys = chain("a", 6)
    other = chain("b", 1)
    await in_l2(l1, one, keys + other)
    path = one.path(keys[3])
    if damage == "flip":
        stored = bytearray(path.read_bytes())
        stored[-7] ^= 1
        path.write_bytes(stored)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(one.path(other[0]).read_bytes())
    loads = Loads(l1, one)
    outcome = await loads.fetch(keys)
    assert outcome[:2] == (3, 3)
    assert outcome.reason == (MissReason.EVICTED if damage == "gone" else MissReason.CORRUPT)
    await loads.controller.idle()
    assert l1.has(*keys[:3])
    assert l1.read(keys[3]) is None
    puts = Puts(l1, one)
    puts.controller.committed(l1.store(keys, first=3))
    await puts.controller.stop(LATER_S)
    l1.lose(keys)
    assert (await loads.fetch(keys)).n_chunks == 6
    assert l1.has(*keys)


@pytest.mark.parametrize("damage", ["flip", "gone", "foreign"])
async def test_every_policy_puts_a_chunk_again_whose_record_was_bad(l1, tier, damage):
    """A policy that puts a chunk once must learn that the adapter does not have the chunk."""
    one = await tier(StorePolicy.SECOND_TOUCH)
    puts = Puts(l1, one, backlog_bytes=L1_BYTES)
    [key] = keys = chain("a", 1)
    l1.store(keys, identity=hashlib.sha256(b"other").digest() if damage == "foreign" else IDENTITY)
    puts.controller.committed([key, key])
    await puts.controller.idle()
    assert one.records == {key}
    l1.lose(keys)
    path = one.path(key)
    if damage == "flip":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    elif damage == "gone":
        path.unlink()
    loads = Loads(l1, one)
    assert (await loads.fetch(keys)).n_chunks == 0
    await loads.controller.idle()
    assert loads.lost == [("fs-0", key)]
    assert one.records == set()
    for name, lost in loads.lost:
        puts.controller.dropped(name, [lost])
    l1.store(keys)
    puts.controller.committed([key, key])
    await puts.controller.idle()
    assert one.records == {key}
    await puts.controller.stop(0)


async def test_the_work_of_a_fetch_grows_linearly_with_its_holes(l1: L1) -> None:
    """Thousands of holes may be filled one by one because another fetch already loads them."""

    def steps(n: int) -> int:
        """Count the lines of Python that run to fill n holes in their order."""
        fetch = Fetch(l1.pool, chain("a", n), 1, [], IDENTITY, 1, 0.0)
        fetch.planned(Plan(n, [Hole(i, key, Source(0, RECORD)) for i, key in enumerate(fetch.keys)], ""))
        count = 0

        def trace(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            while fetch.pending and not fetch.in_vain():
                first = fetch.pending[0]
                fetch.take([first])
                fetch.there(first)
        finally:
            sys.settrace(before)
        assert fetch.outcome().n_chunks == n
        return count

    assert steps(400) < 3 * steps(200)


async def test_nothing_is_loaded_beyond_a_chunk_that_could_not_be_loaded(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 8)
    await in_l2(l1, one, keys)
    one.path(keys[2]).write_bytes(bytes(RECORD))
    loads = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    assert (await loads.fetch(keys)).n_chunks == 2
    await loads.controller.idle()
    assert set(one.faults.loaded) == set(keys[:3])


async def test_a_chunk_that_one_adapter_cannot_load_comes_from_the_next(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    near, far = await tier(plan=plan), await tier()
    keys = chain("a", 6)
    await in_l2(l1, near, keys)
    await in_l2(l1, far, keys)
    broken = near.path(keys[2])
    broken.write_bytes(bytes(100))
    plan.schedule(None, Fault.ERROR)  # exists answers; the first batch fails
    loads = Loads(l1, near, far)
    assert await loads.fetch(keys) == FetchOutcome(6, 6, "")
    assert set(far.faults.loaded) == set(keys[:3])
    assert l1.has(*keys)


async def test_a_chunk_that_a_worker_is_storing_ends_the_prefix(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 4)
    await in_l2(l1, one, keys)
    ticket, outcomes, _ = l1.pool.reserve(keys[2], keys[1], RECORD, l1.row, IDENTITY, 1)
    assert outcomes[0] == ReserveOutcome.RESERVED
    loads = Loads(l1, one)
    assert await loads.fetch(keys) == FetchOutcome(2, 2, MissReason.IN_FLIGHT, "in_flight")
    l1.pool.abort(ticket)
    assert (await loads.fetch(keys)).n_chunks == 4


async def test_a_fetch_may_begin_in_the_middle_of_a_prompt(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 6, 2)
    await in_l2(l1, one, keys, 2)
    l1.store(keys[:6], 2)
    loads = Loads(l1, one)
    assert await loads.fetch(keys[6:], 2, parent=keys[4:6]) == FetchOutcome(3, 3, "")
    assert l1.pool.peek(b"".join(keys), 2) == 6
