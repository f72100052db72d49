"""Prefetch from L2 through the server's real parts: what is loaded, when, and what a failing tier costs."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import random
import sys
from collections.abc import Coroutine
from types import FrameType
from typing import Any

import pytest

from kvstrata.observability.load_line import LoadTimes
from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.testing.strategies import IDENTITY, record_length
from kvstrata.tiers import fetch, loads
from kvstrata.tiers.base import Ask
from kvstrata.tiers.choice import PROBE_S
from kvstrata.tiers.config import StorePolicy
from kvstrata.tiers.fetch import FetchOutcome, Spent
from kvstrata.tiers.tier import TierLimits
from kvstrata.types import MissReason
from tests.fault.server.conftest import Loads, OpenTier, Puts, Rig, Start, Tier, in_l2
from tests.harness.amount import amount
from tests.harness.l1 import CLOCK, L1, L1_BYTES, LATER_S, RECORD, chain
from tests.harness.shelf import SHELVES, Fault
from tests.harness.waiting import expire, until


async def test_only_holes_are_loaded(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 8)
    await in_l2(l1, one, keys)
    l1.store(keys[:2])
    l1.store(keys[:5], first=4)
    fetches = Loads(l1, one)
    assert await fetches.fetch(keys) == FetchOutcome(8, 5, "")
    assert set(one.shelf.loaded) == {*keys[2:4], *keys[5:]}
    assert l1.has(*keys)


async def test_the_prefix_ends_at_the_first_chunk_that_is_nowhere(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 9)
    await in_l2(l1, one, keys[:4])
    await in_l2(l1, one, keys[6:])
    fetches = Loads(l1, one)
    assert await fetches.fetch(keys) == FetchOutcome(4, 4, MissReason.NEVER_STORED)
    assert set(one.shelf.loaded) == set(keys[:4])


async def test_fetches_of_the_same_keys_load_them_once(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 6)
    await in_l2(l1, one, keys)
    fetches = Loads(l1, one)
    one.shelf.schedule(*[None] * 3, Fault.HANG)  # three calls of exists, then the first load hangs
    waits = [asyncio.create_task(fetches.fetch(keys[:n])) for n in (6, 6, 3)]
    await until(lambda: one.shelf.hanging == 1)
    one.shelf.release()
    assert await asyncio.gather(*waits) == [
        FetchOutcome(6, 6, ""),
        FetchOutcome(6, 6, ""),
        FetchOutcome(3, 3, ""),
    ]
    assert one.shelf.loaded == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("damage", ["flip", "gone", "another's"])
async def test_a_bad_record_ends_the_prefix_and_is_healed_by_the_next_store(l1, tier, damage):
    one = await tier()
    keys = chain("a", 6)
    other = chain("b", 1)
    await in_l2(l1, one, keys + other)
    records = one.shelf.records
    if damage == "flip":
        stored = bytearray(records[keys[3]])
        stored[-7] ^= 1
        records[keys[3]] = bytes(stored)
    elif damage == "gone":
        del records[keys[3]]
        one.shelf.ghosts = {keys[3]}
    else:
        records[keys[3]] = records[other[0]]
    fetches = Loads(l1, one)
    outcome = await fetches.fetch(keys)
    assert outcome[:2] == (3, 3)
    assert outcome.reason == (MissReason.EVICTED if damage == "gone" else MissReason.CORRUPT)
    await fetches.controller.idle()
    assert l1.has(*keys[:3])
    assert l1.read(keys[3]) is None
    puts = Puts(l1, one)
    puts.controller.committed(l1.store(keys, first=3))
    await puts.controller.stop(LATER_S)
    l1.lose(keys)
    assert (await fetches.fetch(keys)).n_chunks == 6
    assert l1.has(*keys)


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
    if damage == "flip":
        one.shelf.records[key] = one.shelf.records[key][:-1] + b"?"
    elif damage == "gone":
        del one.shelf.records[key]
        one.shelf.ghosts = {key}
    fetches = Loads(l1, one)
    assert (await fetches.fetch(keys)).n_chunks == 0
    await fetches.controller.idle()
    assert fetches.lost == [("shelf-0", key)]
    assert one.records == set()
    for name, lost in fetches.lost:
        puts.controller.dropped(name, [lost])
    l1.store(keys)
    await puts.put([key, key])
    assert one.records == {key}


async def test_no_turn_of_the_loop_does_more_for_a_longer_prompt(start: Start, l1: L1) -> None:
    """Counted in calls of functions of these two files; what concerns all keys is one call of native code."""
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
            turns[turn] += event == "call" and frame.f_code.co_filename in (fetch.__file__, loads.__file__)

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
    one.shelf.records[keys[2]] = bytes(RECORD)
    fetches = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    assert (await fetches.fetch(keys)).n_chunks == 2
    await fetches.controller.idle()
    assert set(one.shelf.loaded) == set(keys[:3])


async def test_a_chunk_that_one_adapter_cannot_load_comes_from_the_next(l1: L1, tier: OpenTier) -> None:
    near, far = await tier(), await tier()
    keys = chain("a", 6)
    await in_l2(l1, near, keys)
    await in_l2(l1, far, keys)
    near.shelf.records[keys[2]] = bytes(100)
    near.shelf.schedule(None, Fault.ERROR)  # exists answers; the first batch fails
    fetches = Loads(l1, near, far)
    assert await fetches.fetch(keys) == FetchOutcome(6, 6, "")
    assert set(far.shelf.loaded) == set(keys[:3])
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
    one.shelf.schedule(None, None, None, Fault.HANG)  # exists and two records answer; the third record hangs
    wait = asyncio.create_task(fetches.fetch(keys, within_s=60.0))
    await until(lambda: one.shelf.hanging == 1)
    expire(60.0)
    assert await wait == FetchOutcome(2, 2, MissReason.DEADLINE, "deadline")
    one.shelf.release()
    await fetches.controller.idle()
    assert l1.has(*keys)


async def test_an_adapter_that_does_not_answer_exists_is_passed_over(l1: L1, tier: OpenTier) -> None:
    near, far = await tier(), await tier()
    keys = chain("a", 4)
    await in_l2(l1, far, keys)
    near.shelf.schedule(Fault.HANG)
    fetches = Loads(l1, near, far, patience_share=0.00001)
    assert await fetches.fetch(keys) == FetchOutcome(4, 4, "")
    near.shelf.release()


async def test_fetches_that_hang_on_one_adapter_do_not_stop_another(l1: L1, tier: OpenTier) -> None:
    hung, good = await tier(), await tier()
    prompts = [chain(f"p{n}", 1) for n in range(4)]
    for keys in prompts:
        await in_l2(l1, hung, keys)
    other = chain("other", 3)
    await in_l2(l1, good, other)
    fetches = Loads(l1, hung, good, max_in_flight=2, in_flight_bytes=10 * RECORD)
    hung.shelf.schedule(*[None] * 4, Fault.HANG, Fault.HANG, None)
    waits = [asyncio.create_task(fetches.fetch(keys)) for keys in prompts]
    await until(lambda: hung.shelf.hanging == 2)
    assert await fetches.fetch(other) == FetchOutcome(3, 3, "")
    assert hung.shelf.hanging == 2, "no more than max_in_flight load from one adapter"
    assert fetches.controller.document()["adapters"]["shelf-0"]["waiting"] == 2
    while not all(wait.done() for wait in waits):
        hung.shelf.release()
        await asyncio.sleep(0.001)
    assert [wait.result().n_chunks for wait in waits] == [1] * 4


async def test_bytes_in_flight_are_bounded(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 20)
    await in_l2(l1, one, keys)
    one.shelf.schedule(None, *[Fault.HANG] * 20)
    fetches = Loads(l1, one, in_flight_bytes=5 * RECORD, batch_bytes=2 * RECORD)
    wait = asyncio.create_task(fetches.fetch(keys))
    await until(lambda: one.shelf.hanging == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert one.shelf.hanging == 2
    assert l1.pool.stats()["bytes"]["reserved"] <= 5 * 57_344
    while not wait.done():
        one.shelf.release()
        await asyncio.sleep(0.001)
    assert wait.result() == FetchOutcome(20, 20, "")


async def test_a_hung_load_is_answered_by_the_adapters_deadline_and_its_bytes_stay_safe(l1, tier):
    one = await tier()
    keys = chain("a", 2)
    puts = Puts(l1, one)
    puts.controller.committed(l1.store(keys))
    await puts.controller.stop(LATER_S)
    l1.lose(keys)
    one.shelf.schedule(None, Fault.HANG)
    fetches = Loads(l1, one)
    plain = one.exists

    async def exists(keys: bytes, ask: Ask) -> bytes:
        found = await plain(keys, ask)
        one.limits = TierLimits(max_stuck_bytes=1 << 30, deadline_ms=1)
        return found

    one.exists = exists
    assert await fetches.fetch(keys) == FetchOutcome(0, 0, MissReason.DEADLINE, "deadline")
    one.exists = plain
    stats = l1.pool.stats()
    assert stats["bytes"]["reserved"] == 0
    assert stats["bytes"]["quarantined"] == 2 * 57_344
    for n in range(10):
        l1.store(chain(f"new {n}", 8))
    one.shelf.release()
    await until(lambda: l1.pool.stats()["holds"] == 0)
    assert l1.pool.stats()["bytes"]["quarantined"] == 0
    one.limits = TierLimits(max_stuck_bytes=1 << 30, deadline_ms=600_000)
    assert await fetches.fetch(keys) == FetchOutcome(2, 2, "")
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


async def test_reservations_of_hung_adapters_do_not_stop_loads_from_others(l1: L1, tier: OpenTier) -> None:
    """Together the hung adapters hold more than a session may reserve."""
    hung = [await tier(), await tier()]
    sound = await tier()
    prompts = [chain(name, 5) for name in "ab"]
    for one, keys in zip(hung, prompts, strict=True):
        await in_l2(l1, one, keys)
    keys = chain("c", 10)
    await in_l2(l1, sound, keys)
    fetches = Loads(l1, *hung, sound, in_flight_bytes=10 * RECORD, batch_bytes=5 * RECORD)
    waits = []
    for one, stuck in zip(hung, prompts, strict=True):
        one.shelf.schedule(None, Fault.HANG)
        waits.append(asyncio.create_task(fetches.fetch(stuck)))
        await until(lambda one=one: one.shelf.hanging == 1)
    assert l1.pool.stats()["bytes"]["reserved"] > L1_BYTES // 8
    assert await fetches.fetch(keys) == FetchOutcome(10, 10, "")
    for one in hung:
        one.shelf.release()
    assert [outcome.n_chunks for outcome in await asyncio.gather(*waits)] == [5, 5]


@pytest.mark.parametrize(
    ("budget_bytes", "n"), [(0, 0), (3 * RECORD - 1, 2), (3 * RECORD, 3), (3 * RECORD + 1, 3)]
)
async def test_a_budget_bounds_what_a_prewarm_loads(l1, tier, budget_bytes, n):
    one = await tier()
    keys = chain("a", 8)
    await in_l2(l1, one, keys)
    fetches, spent = Loads(l1, one), Spent()
    outcome = await fetches.fetch(keys, budget_bytes=budget_bytes, prewarm=spent)
    assert outcome == FetchOutcome(n, n, MissReason.REFUSED, "budget")
    assert l1.pool.peek(b"".join(keys), 1) == n
    assert (spent.keys, spent.bytes) == (n, n * RECORD)
    assert not n or min(spent.phases[phase] for phase in ("lookup", "medium", "promote")) > 0, spent
    assert not fetches.controller.phases, "no user waited"


async def test_prewarms_wait_for_users_and_users_never_for_the_prewarms_that_wait(l1, tier):
    one = await tier()
    prompts = [chain(name, 4) for name in "abcdef"]
    for keys in prompts:
        await in_l2(l1, one, keys)
    *users, first, second, queued, late = prompts
    fetches = Loads(l1, one, max_in_flight=2, in_flight_bytes=16 * RECORD, batch_bytes=4 * RECORD)

    async def begun(keys: list[bytes], prewarm: Spent | None = None) -> asyncio.Task[FetchOutcome]:
        one.shelf.schedule(None)  # exists
        task, before = asyncio.create_task(fetches.fetch(keys, prewarm=prewarm)), one.shelf.asked["exists"]
        await until(lambda: one.shelf.asked["exists"] > before)
        for _ in range(20):
            await asyncio.sleep(0)
        return task

    one.shelf.later = Fault.HANG
    loading = [await begun(keys) for keys in users]
    waiting = [await begun(first, Spent()), await begun(second, Spent())]
    loading.append(await begun(queued))
    assert one.shelf.hanging == 2, "prewarms wait while users load, and so does a third user"
    users.append(queued)
    one.shelf.release()
    await until(lambda: one.shelf.hanging == 1 and loading[0].done() and loading[1].done())
    for _ in range(20):
        await asyncio.sleep(0)
    assert set(one.shelf.loaded) == set().union(*users), (
        "the third user is first, and alone, although a slot is free"
    )
    one.shelf.release()
    await until(lambda: one.shelf.hanging == 1 and loading[2].done())
    assert one.shelf.loaded.keys() - set().union(*users) == {first[0]}, "one small batch of one prewarm"
    loading.append(await begun(late))
    assert one.shelf.hanging == 2 and set(late) <= set(one.shelf.loaded), "a user passes the waiting prewarms"
    one.shelf.release()
    assert [outcome.n_chunks for outcome in await asyncio.gather(*loading)] == [4] * 4
    one.shelf.later = None
    while not all(task.done() for task in waiting):
        one.shelf.release()
        await asyncio.sleep(0.001)
    assert [task.result().n_chunks for task in waiting] == [4, 4]


async def test_a_prewarm_begins_no_load_after_its_time(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 6)
    await in_l2(l1, one, keys)
    fetches, spent = Loads(l1, one, in_flight_bytes=RECORD), Spent()  # one record at a time
    one.shelf.schedule(None, None, Fault.HANG)  # exists and one record answer; the second record hangs
    wait = asyncio.create_task(fetches.fetch(keys, within_s=60.0, prewarm=spent))
    await until(lambda: one.shelf.hanging == 1)
    expire(60.0)
    assert await wait == FetchOutcome(1, 1, MissReason.DEADLINE, "deadline")
    one.shelf.release()
    await fetches.controller.idle()
    assert (l1.pool.peek(b"".join(keys), 1), spent.keys, one.shelf.asked["load"]) == (2, 2, 2)


async def test_a_cancelled_fetch_begins_no_more_loads(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 10)
    await in_l2(l1, one, keys)
    fetches = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    one.shelf.schedule(None, Fault.HANG)
    wait = asyncio.create_task(fetches.fetch(keys))
    await until(lambda: one.shelf.hanging == 1)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    one.shelf.release()
    await fetches.controller.idle()
    assert one.shelf.asked == {"exists": 1, "load": 1}
    assert l1.has(keys[0])
    assert l1.read(keys[1]) is None


async def test_stop_is_bounded_and_its_bytes_stay_until_the_medium_has_finished(l1, tier):
    one = await tier()
    keys = chain("a", 4)
    await in_l2(l1, one, keys)
    one.shelf.schedule(None, Fault.HANG)
    fetches = Loads(l1, one)
    wait = asyncio.create_task(fetches.fetch(keys))
    await until(lambda: one.shelf.hanging == 1)
    await fetches.controller.stop(0)
    assert (await wait).n_chunks == 0
    assert l1.pool.stats()["bytes"]["reserved"] == 0
    assert l1.pool.stats()["bytes"]["quarantined"] > 0
    assert (await fetches.fetch(keys)).reason == MissReason.BREAKER_OPEN
    one.shelf.release()
    await until(lambda: l1.pool.stats()["holds"] == 0)


Places = set[tuple[int, int]]


class Prompt:
    """A prompt of some chunks and slices. `in_l1`, `in_l2`: the (chunk, slice) that are there."""

    def __init__(self, name: str, n_chunks: int, spans: list[int]) -> None:
        self.n_chunks, self.spans = n_chunks, spans
        self.keys = chain(name, n_chunks, len(spans))
        self.places = [(chunk, number) for chunk in range(n_chunks) for number in range(len(spans))]
        self.in_l1: Places = set()
        self.in_l2: Places = set()

    def key(self, place: tuple[int, int]) -> bytes:
        return self.keys[place[0] * len(self.spans) + place[1]]

    async def lay(self, rig: Rig, l1: L1) -> None:
        """Put the records where they are to be."""
        stored = l1.store(self.keys, len(self.spans))
        assert set(stored) == set(self.keys)
        rig.store.committed(stored)
        await rig.store.idle()
        for place in reversed(self.places):
            if place not in self.in_l1:
                assert l1.pool.remove(self.key(place))
            if place not in self.in_l2:
                del SHELVES["a"].records[self.key(place)]

    def needs(self, n: int) -> Places:
        return {
            (chunk, number)
            for number, span in enumerate(self.spans)
            for chunk in (range(n)[-span:] if span else range(n))
        }

    def longest(self, there: Places, max_loads: int | None = None) -> int:
        """The longest hit of what is there; with `max_loads` needing no more loads than these."""
        return max(
            n
            for n in range(self.n_chunks + 1)
            if self.needs(n) <= there and (max_loads is None or len(self.needs(n) - self.in_l1) <= max_loads)
        )

    async def fetch(self, rig: Rig, budget_bytes: int | None = None) -> FetchOutcome:
        return await rig.prefetch.fetch(
            b"".join(self.keys),
            len(self.spans),
            identity=IDENTITY,
            tenant=1,
            deadline_s=CLOCK.monotonic_s() + LATER_S,
            limits=[RECORD] * len(self.spans),
            budget_bytes=budget_bytes,
            spans=self.spans,
        )

    def now_in(self, l1: L1) -> Places:
        return {place for place in self.places if l1.pool.peek(self.key(place))}

    def leased(self, l1: L1) -> int:
        """Lease what L1 has, and return the length."""
        ticket, n_chunks, *_ = l1.pool.lease(
            b"".join(self.keys), len(self.spans), [l1.row], IDENTITY, self.spans
        )
        assert not ticket or l1.pool.release(ticket, l1.row)
        return n_chunks


def random_prompt(rng: random.Random, name: str) -> Prompt:
    spans = [rng.choice([0, 0, 1, 2, 3, 12]) for _ in range(rng.randrange(1, 4))]
    prompt = Prompt(name, rng.randrange(1, 9), [*spans, rng.randrange(1, 4)][-3:])
    often = rng.choice([0.2, 0.5, 0.8])
    prompt.in_l1 = {place for place in prompt.places if rng.random() < often}
    prompt.in_l2 = {place for place in prompt.places if rng.random() < 0.8}
    return prompt


@pytest.mark.parametrize("seed", range(amount(10, 40)))
async def test_a_fetch_loads_what_the_longest_hit_needs_and_nothing_else(start, l1, seed):
    rig = start()
    await rig.open("a")
    rng = random.Random(seed)
    prompt = random_prompt(rng, f"prompt {seed}")
    await prompt.lay(rig, l1)
    budget = rng.choice([None, None, rng.randrange(8)])
    n = prompt.longest(prompt.in_l1 | prompt.in_l2, budget)
    outcome = await prompt.fetch(rig, None if budget is None else budget * RECORD)
    assert outcome.n_chunks == n
    assert bool(outcome.reason) is (n < prompt.n_chunks)
    assert prompt.now_in(l1) == prompt.in_l1 | prompt.needs(n)
    assert prompt.leased(l1) == n


@pytest.mark.parametrize("seed", range(amount(5, 20)))
async def test_a_fetch_whose_loads_fail_tells_the_hit_that_l1_then_leases(start, l1, seed):
    rig = start()
    await rig.open("a")
    rng = random.Random(seed)
    prompt = random_prompt(rng, f"prompt {seed}")
    prompt.in_l2 = set(prompt.places)
    await prompt.lay(rig, l1)
    shelf = SHELVES["a"]
    shelf.shut("load")
    fetch = asyncio.create_task(prompt.fetch(rig))
    await until(lambda: fetch.done() or shelf.waiting["load"] > 0)
    lost = rng.sample(sorted(prompt.needs(prompt.n_chunks)), 1)
    for place in lost:
        del shelf.records[prompt.key(place)]
    shelf.let_go()
    outcome = await fetch
    assert outcome.n_chunks == prompt.longest(prompt.now_in(l1)) == prompt.leased(l1)
    assert (outcome.n_chunks < prompt.n_chunks) is bool(set(lost) - prompt.in_l1)


async def test_windows_that_no_hit_needs_are_neither_loaded_nor_missed(start: Start, l1: L1) -> None:
    rig = start()
    await rig.open("a")
    prompt = Prompt("long", 12, [0, 2])
    prompt.in_l2 = {(chunk, 0) for chunk in range(12)} | {(10, 1), (11, 1)}
    await prompt.lay(rig, l1)
    outcome = await prompt.fetch(rig)
    assert (outcome.n_chunks, outcome.reason) == (12, "")
    assert prompt.now_in(l1) == prompt.in_l2


async def test_a_window_with_a_gap_is_not_loaded(start: Start, l1: L1) -> None:
    rig = start()
    await rig.open("a")
    prompt = Prompt("gap", 6, [0, 3])
    prompt.in_l2 = set(prompt.places) - {(3, 1), (1, 1)}
    await prompt.lay(rig, l1)
    outcome = await prompt.fetch(rig)
    assert (outcome.n_chunks, outcome.reason) == (1, MissReason.NEVER_STORED)
    assert prompt.now_in(l1) == {(0, 0), (0, 1)}


def knows(tier: Tier, mb_s: float) -> None:
    """Let a tier be one whose loads have had this rate."""
    tier.load_times = LoadTimes()
    for number in range(1, 20):
        tier.load_times.measured(number * RECORD, number * RECORD / mb_s / 1e6, CLOCK.monotonic_s())


@pytest.mark.parametrize(
    ("near_mb_s", "far_mb_s", "end"), [(9e3, 9e3, 6), (9e3, 1, 3), (1, 9e3, 0), (1, 1, 0)]
)
async def test_each_tier_is_loaded_or_left_as_a_whole_and_so_is_what_follows_it(
    l1, tier, near_mb_s, far_mb_s, end
):
    near, far = await tier(), await tier()
    keys = chain("a", 6)
    for one, part, mb_s in ((near, keys[:3], near_mb_s), (far, keys[3:], far_mb_s)):
        await in_l2(l1, one, part)
        knows(one, mb_s)
    fetches = Loads(l1, near, far)
    outcome = await fetches.fetch(keys, compute_s=lambda first, last: 0.02 * (last - first))
    assert outcome.n_chunks == end == len([key for key in keys if l1.has(key)])
    assert outcome.reason == (MissReason.RECOMPUTE if end < 6 else "")
    assert [(one.loads, one.chunks) for one in outcome.choices] == [(end > 0, 6), (end == 6, 3)]
    assert not fetches.controller.counts["probes"], "both tiers were just measured"
    knows(near, 1)
    knows(far, 1)
    assert (await fetches.fetch(keys)).n_chunks == 6, "a prewarm, or an engine of unknown speed"


@pytest.mark.parametrize(("far_mb_s", "end"), [(9e3, 4), (1, 0)])
async def test_a_hit_with_windows_is_loaded_or_left_as_a_whole(l1: L1, tier: OpenTier, far_mb_s, end) -> None:
    near, far = await tier(), await tier()
    keys = chain("a", 4, 2)
    await in_l2(l1, near, keys[:4], 2)
    await in_l2(l1, far, keys[4:], 2)
    knows(near, 9e3)
    knows(far, far_mb_s)
    fetches = Loads(l1, near, far)
    outcome = await fetches.fetch(keys, 2, spans=(0, 2), compute_s=lambda first, last: 0.04 * (last - first))
    assert (outcome.n_chunks, {one.loads for one in outcome.choices}) == (end, {end > 0})


async def test_what_other_lookups_load_counts_as_time_before_a_load_and_a_tier_that_is_left_is_probed(
    l1, tier, monkeypatch
):
    monkeypatch.setattr(loads, "PROBE_BYTES", 2 * RECORD)
    one = await tier()
    before, keys = chain("before", 8), chain("a", 4)
    await in_l2(l1, one, before + keys)
    knows(one, 10.0)
    need_s = 4 * RECORD / 10e6
    fetches = Loads(l1, one, in_flight_bytes=4 * RECORD)

    def fetch() -> Coroutine[Any, Any, FetchOutcome]:
        return fetches.fetch(keys, within_s=5, compute_s=lambda first, last: 2 * need_s * (last - first) / 4)

    one.shelf.schedule(None, Fault.HANG, Fault.HANG)
    waits = asyncio.create_task(fetches.fetch(before))
    await until(lambda: one.shelf.hanging == 2)
    outcome = await fetch()
    assert (outcome.n_chunks, outcome.reason) == (0, MissReason.RECOMPUTE)
    assert outcome.choices[0].load_s == pytest.approx(3 * need_s, rel=0.1)
    while not waits.done():
        one.shelf.release()
        await asyncio.sleep(0.001)
    await fetches.controller.idle()  # and measured
    knows(one, 0.001)  # 50 s for a record
    one.load_times.measured_s -= PROBE_S
    for _ in range(3):  # one probe, of the last two chunks
        assert (await fetch()).n_chunks == 0
    assert fetches.controller.counts["probes"] == 1
    await fetches.controller.idle()
    assert [l1.has(key) for key in keys] == [False, False, True, True]
    assert one.load_times.expected_s(RECORD) < RECORD / 1e3, "the probe was faster"
