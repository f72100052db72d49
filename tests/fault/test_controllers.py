"""Store and prefetch controllers on a real pool, with adapters that fail, hang, lie and fill up."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec
import pytest

from kvstrata.policy.prefetch import Hole, Plan, Source
from kvstrata.policy.store import EvictAhead, RetryRule, StorePolicy
from kvstrata.rpc.wire import ReserveOutcome
from kvstrata.server.l2.prefetch import FetchOutcome, PrefetchController, PrefetchLimits, _Fetch
from kvstrata.server.l2.store import StoreController, StoreLimits
from kvstrata.server.l2.tiers import AdapterSet
from kvstrata.storage.base import AdapterContext, Found, LoadItem, LoadOutcome, PutItem, PutOutcome
from kvstrata.storage.media.fs.adapter import FsAdapter, FsSettings
from kvstrata.storage.registry import ConfiguredAdapter
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits
from kvstrata.testing.faults import Fault, FaultPlan
from kvstrata.testing.faulty_adapter import FaultyAdapter
from kvstrata.testing.strategies import IDENTITY, payload_of
from kvstrata.types import MissReason
from tests.harness.l1 import CLOCK, L1, L1_BYTES, LATER_S, RECORD, SIZE, chain


class Watched(FaultyAdapter):
    """A faulty adapter that counts what it was asked for."""

    def __init__(self, inner: FsAdapter, plan: FaultPlan) -> None:
        super().__init__(inner, plan)
        self.asked: collections.Counter[str] = collections.Counter()
        self.loaded: collections.Counter[bytes] = collections.Counter()
        self.stored: collections.Counter[bytes] = collections.Counter()

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        self.asked["exists"] += 1
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        self.asked["put"] += 1
        self.stored.update(item.key for item in items)
        return await super().put(items)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        self.asked["load"] += 1
        self.loaded.update(item.key for item in items)
        return await super().load(items)


class Tier:
    """One adapter as the server has it, with what a test steers it by."""

    def __init__(self, name: str, faults: Watched, guard: DeadlineAdapter, policy: StorePolicy) -> None:
        self.faults = faults
        self.guard = guard
        self.configured = ConfiguredAdapter(name, guard, policy, guard)

    @property
    def records(self) -> set[bytes]:
        inner = self.faults.inner
        assert isinstance(inner, FsAdapter)
        return {bytes.fromhex(path.stem) for path in Path(inner.settings.base_path).glob("??/??/*.kvc")}

    def path(self, key: bytes) -> Path:
        inner = self.faults.inner
        assert isinstance(inner, FsAdapter)
        return inner.path(key)


OpenTier = Callable[..., Awaitable[Tier]]


@pytest.fixture
def l1() -> Iterator[L1]:
    made = L1()
    yield made
    made.nothing_in_use()
    made.pool.close()


@pytest.fixture
async def tier(tmp_path: Path, l1: L1):
    """Opens adapters; closes them at the end."""
    opened: list[Tier] = []

    async def open_tier(
        policy: StorePolicy = StorePolicy.THROUGH,
        *,
        deadline_ms: int = 600_000,
        plan: FaultPlan | None = None,
        max_stuck_bytes: int = 1 << 30,
        capacity_bytes: int = 0,
        failures: int = 1000,
    ) -> Tier:
        name = f"fs-{len(opened)}"
        settings = FsSettings(
            base_path=str(tmp_path / name), min_free_bytes=0, capacity_bytes=capacity_bytes, num_workers=3
        )
        faults = Watched(FsAdapter(settings, name=name), plan or FaultPlan(0))
        limits = DeadlineLimits(
            deadline_ms=deadline_ms, max_stuck_bytes=max_stuck_bytes, failures=failures, open_s=0.0
        )
        guard = DeadlineAdapter(faults, limits, CLOCK)
        made = Tier(name, faults, guard, policy)
        opened.append(made)
        await guard.open(AdapterContext("test", CLOCK, 0, 0, lambda key: None))
        return made

    yield open_tier
    for one in opened:
        await one.guard.close()


class Puts:
    """A store controller with what it reported."""

    def __init__(self, l1: L1, *tiers: Tier, **limits: object) -> None:
        self.skipped: list[tuple[bytes, str]] = []
        values = {
            "backlog_bytes": L1_BYTES // 4,
            "batch_bytes": 4 * RECORD,
            "retry": RetryRule(retries=2, first_s=0.0, longest_s=0.0),
            **limits,
        }
        self.controller = StoreController(
            l1.pool,
            AdapterSet([one.configured for one in tiers]),
            StoreLimits(**values),
            lambda key, reason: self.skipped.append((key, reason)),
        )
        self.controller.start()

    def counts(self, name: str = "fs-0") -> dict[str, int]:
        return self.controller.stats()["adapters"][name]["outcomes"]

    @property
    def backlog_bytes(self) -> int:
        return self.controller.stats()["backlog_bytes"]


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until something that must happen has happened."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for is in a thread or on the disk)
            await asyncio.sleep(0.001)


# -- store -----------------------------------------------------------------------------------------------------


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


async def test_a_chunk_committed_again_is_answered_as_there_already(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 3))
    puts.controller.committed(keys)
    await puts.controller.idle()
    puts.controller.committed(keys)
    await puts.controller.idle()
    assert puts.counts() == {"stored": 3, "exists": 3}
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
    # New prompts fill the pool: what is skipped may go, what waits for its put may not.
    for n in range(6):
        assert len(l1.store(chain(f"new {n}", 8))) == 8
    assert l1.has(*keys[:n_pinned])
    assert not l1.has(*keys[n_pinned:])
    one.faults.release()
    await puts.controller.idle()
    assert one.records == set(keys[:n_pinned])
    await puts.controller.stop(0)


async def test_what_the_backlog_had_no_room_for_is_put_once_it_is_empty(l1: L1, tier: OpenTier) -> None:
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


async def test_a_chunk_that_was_skipped_twice_is_put_once(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 40))
    puts.controller.committed([*keys, *keys[20:]])
    await puts.controller.idle()
    assert one.records == set(keys)
    assert set(one.faults.stored.values()) == {1}
    assert puts.backlog_bytes == 0
    await puts.controller.stop(0)


async def test_no_turn_of_the_loop_looks_at_all_that_was_skipped(l1: L1, tier: OpenTier) -> None:
    """The pool may have lost tens of thousands of chunks since they were skipped."""
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
    puts.controller._pool = Counting()
    puts.controller._puts["fs-0"].unpinned.update(dict.fromkeys(chain("lost", 1000)))
    ticking = [asyncio.get_running_loop().call_soon(next_turn)]
    puts.controller.committed(l1.store(chain("a", 1)))
    await puts.controller.idle()
    ticking[0].cancel()
    assert holds.total() == 1001
    assert max(holds.values()) <= 64
    await puts.controller.stop(0)


async def test_a_put_in_flight_keeps_its_pin_though_its_wait_has_ended(l1: L1, tier: OpenTier) -> None:
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


async def test_a_throttled_put_is_tried_again_and_in_the_end_skipped(l1: L1, tier: OpenTier) -> None:
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
async def test_a_failed_put_is_skipped_with_its_reason_and_later_ones_go_on(
    l1: L1, tier: OpenTier, fault: Fault
) -> None:
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


async def test_an_unguarded_adapter_that_raises_does_not_stop_the_controller(l1: L1, tier: OpenTier) -> None:
    one = await tier(plan=(plan := FaultPlan(0)))
    one.configured = ConfiguredAdapter("fs-0", one.faults, StorePolicy.THROUGH, one.guard)
    puts = Puts(l1, one)
    first, second = l1.store(chain("a", 2))
    plan.schedule(*[Fault.RAISE] * 4)
    for _ in range(4):
        puts.controller.committed([first])
        await puts.controller.idle()
    puts.controller.committed([second])
    await puts.controller.idle()
    assert puts.counts() == {"skipped:adapter_error": 4, "stored": 1}
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


async def test_stop_is_bounded_and_says_what_it_left(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0, rate=1.0, only=[Fault.HANG])
    one = await tier(plan=plan)
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 14))
    puts.controller.committed(keys)
    await until(lambda: one.faults.hanging == 2)
    await puts.controller.stop(0)
    assert sorted(puts.skipped) == sorted((key, "stopping") for key in keys)
    assert puts.backlog_bytes == 0
    assert l1.pool.stats()["holds"] == 8, "two batches of four are the medium's"
    puts.controller.committed(keys[:1])
    assert puts.skipped[-1] == (keys[0], "stopping")
    await puts.controller.stop(0)
    one.faults.release()
    await until(lambda: l1.pool.stats()["holds"] == 0)


async def test_stop_drains_what_it_can(l1: L1, tier: OpenTier) -> None:
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


async def test_on_evict_counts_chunks_that_left_before_their_put(l1: L1, tier: OpenTier) -> None:
    one = await tier(StorePolicy.ON_EVICT)
    puts = Puts(l1, one)
    [key] = l1.store(chain("a", 1))
    puts.controller.committed([key])
    l1.lose([key])
    puts.controller.evicted([key])
    assert puts.skipped == [(key, "evicted")]
    await puts.controller.stop(0)


async def test_second_touch_puts_what_was_used_again(l1: L1, tier: OpenTier) -> None:
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


async def test_a_medium_that_is_only_read_gets_and_loses_nothing_and_can_leave(
    l1: L1, tier: OpenTier
) -> None:
    one, read_only = await tier(), await tier(StorePolicy.ON_EVICT)
    guard = read_only.guard
    guard.capabilities = msgspec.structs.replace(guard.capabilities, takes_puts=False)
    puts = Puts(l1, one, read_only)
    keys = chain("a", 8)
    puts.controller.committed(l1.store(keys))
    puts.controller.offer(read_only.guard.name, keys)
    puts.controller.evicted(keys[:2])
    await puts.controller.idle_of("fs-1")
    await puts.controller.idle()
    assert one.records == set(keys)
    assert read_only.faults.asked["put"] == 0
    assert puts.skipped == []
    assert await puts.controller.clear() == 8
    puts.controller.draining("fs-1")
    assert await puts.controller.leave("fs-1") == 0
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
    assert one.records == set(), "what was being put is deleted once it has ended"
    assert sorted(puts.skipped) == sorted((key, "cleared") for key in keys)
    await puts.controller.stop(0)


# -- prefetch --------------------------------------------------------------------------------------------------


class Loads:
    """A prefetch controller for one pool."""

    def __init__(self, l1: L1, *tiers: Tier, **limits: object) -> None:
        values = {"in_flight_bytes": L1_BYTES // 16, "batch_bytes": 2 * RECORD, **limits}
        self.lost: list[tuple[str, bytes]] = []
        self.controller = PrefetchController(
            l1.pool,
            AdapterSet([one.configured for one in tiers]),
            PrefetchLimits(**values),
            CLOCK,
            lambda name, keys: self.lost.extend((name, key) for key in keys),
        )

    async def fetch(
        self,
        keys: list[bytes],
        n_slices: int = 1,
        *,
        within_s: float = LATER_S,
        parent: list[bytes] | None = None,
        identity: bytes = IDENTITY,
        budget_bytes: int | None = None,
    ) -> FetchOutcome:
        return await self.controller.fetch(
            b"".join(keys),
            n_slices,
            identity=identity,
            tenant=1,
            deadline_s=CLOCK.monotonic_s() + within_s,
            parent=b"".join(parent or []),
            budget_bytes=budget_bytes,
        )


async def in_l2(
    l1: L1, one: Tier, keys: list[bytes], n_slices: int = 1, *, identity: bytes = IDENTITY
) -> None:
    """Make an adapter hold these chunks and L1 none of them."""
    puts = Puts(l1, one, backlog_bytes=L1_BYTES)
    stored = l1.store(keys, n_slices, identity=identity)
    assert sorted(stored) == sorted(keys)
    puts.controller.committed(stored)
    await puts.controller.stop(LATER_S)
    assert one.records >= set(keys)
    l1.lose(keys)
    one.faults.asked.clear()


@pytest.mark.parametrize("n_slices", [1, 2, 3])
async def test_what_l2_holds_is_brought_to_l1(l1: L1, tier: OpenTier, n_slices: int) -> None:
    one = await tier()
    keys = chain("a", 10, n_slices)
    await in_l2(l1, one, keys, n_slices)
    loads = Loads(l1, one)
    assert await loads.fetch(keys, n_slices) == FetchOutcome(10, 10, "")
    assert l1.has(*keys)
    assert l1.pool.peek(b"".join(keys), n_slices) == 10
    await loads.controller.stop(0)


async def test_what_l1_holds_is_not_asked_for(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = l1.store(chain("a", 6))
    loads = Loads(l1, one)
    assert await loads.fetch(keys) == FetchOutcome(6, 0, "")
    assert one.faults.asked == {}


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


async def test_the_prefix_goes_on_where_l1_has_what_l2_lacks(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 4)
    await in_l2(l1, one, [keys[0], keys[1], keys[3]])
    l1.store(keys[:3], first=2)
    loads = Loads(l1, one)
    assert await loads.fetch(keys) == FetchOutcome(4, 3, "")
    assert l1.has(*keys)


async def test_the_prefix_ends_at_the_first_chunk_that_nobody_has(l1: L1, tier: OpenTier) -> None:
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
    plan.schedule(*[None] * 3, Fault.HANG)  # three ask what is there, then the first load hangs
    waits = [asyncio.create_task(loads.fetch(keys[:n])) for n in (6, 6, 3)]
    await until(lambda: one.faults.hanging == 1)
    one.faults.release()
    assert await asyncio.gather(*waits) == [
        FetchOutcome(6, 6, ""),
        FetchOutcome(6, 6, ""),
        FetchOutcome(3, 3, ""),
    ]
    assert one.faults.loaded == dict.fromkeys(keys, 1)


async def test_at_the_deadline_it_answers_with_what_is_there_and_the_rest_arrives_later(
    l1: L1, tier: OpenTier
) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan)
    keys = chain("a", 6)
    await in_l2(l1, one, keys)
    loads = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    plan.schedule(None, None, None, Fault.HANG)  # what is there; two records; the third hangs
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


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "another's"])
async def test_a_bad_record_ends_the_prefix_and_is_healed_by_the_next_store(
    l1: L1, tier: OpenTier, damage: str
) -> None:
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
async def test_a_record_that_turned_out_bad_is_put_again_by_every_policy(
    l1: L1, tier: OpenTier, damage: str
) -> None:
    """A policy that puts a chunk once must learn that the adapter does not have it after all."""
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


async def test_work_of_a_fetch_grows_with_its_holes_not_with_their_square() -> None:
    """Thousands of holes are filled one by one where another fetch already loads them."""

    def steps(n: int) -> int:
        """Lines of Python that it takes to fill n holes in their order."""
        fetch = _Fetch(chain("a", n), 1, [], IDENTITY, 1, 0.0)
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


async def test_nothing_is_loaded_beyond_a_chunk_that_could_not_be(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 8)
    await in_l2(l1, one, keys)
    one.path(keys[2]).write_bytes(bytes(RECORD))
    loads = Loads(l1, one, in_flight_bytes=RECORD)  # one record at a time
    assert (await loads.fetch(keys)).n_chunks == 2
    await loads.controller.idle()
    assert set(one.faults.loaded) == set(keys[:3])


async def test_a_record_of_another_identity_is_no_hit_and_is_removed(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 3)
    await in_l2(l1, one, keys, identity=hashlib.sha256(b"somebody else").digest())
    loads = Loads(l1, one)
    outcome = await loads.fetch(keys)
    assert outcome == FetchOutcome(0, 0, MissReason.CORRUPT, "corrupt")
    await loads.controller.idle()
    assert one.records == set()


async def test_what_one_adapter_cannot_load_comes_from_the_next(l1: L1, tier: OpenTier) -> None:
    plan = FaultPlan(0)
    near, far = await tier(plan=plan), await tier()
    keys = chain("a", 6)
    await in_l2(l1, near, keys)
    await in_l2(l1, far, keys)
    broken = near.path(keys[2])
    broken.write_bytes(bytes(100))
    plan.schedule(None, Fault.ERROR)  # what is there; the first batch fails
    loads = Loads(l1, near, far)
    assert await loads.fetch(keys) == FetchOutcome(6, 6, "")
    assert set(far.faults.loaded) == set(keys[:3])
    assert l1.has(*keys)


async def test_an_adapter_that_does_not_say_what_it_has_is_passed_over(l1: L1, tier: OpenTier) -> None:
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


async def test_a_hung_load_is_answered_by_the_adapters_deadline_and_its_bytes_stay_safe(
    l1: L1, tier: OpenTier
) -> None:
    plan = FaultPlan(0)
    one = await tier(plan=plan, deadline_ms=5)
    keys = chain("a", 2)
    puts = Puts(l1, one)
    one.guard.limits = DeadlineLimits(max_stuck_bytes=1 << 30, deadline_ms=600_000)
    puts.controller.committed(l1.store(keys))
    await puts.controller.stop(LATER_S)
    l1.lose(keys)
    one.guard.limits = DeadlineLimits(max_stuck_bytes=1 << 30, deadline_ms=5)
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


async def test_loads_from_several_adapters_may_take_more_than_a_sessions_share(
    l1: L1, tier: OpenTier
) -> None:
    """A session may reserve an eighth of the pool; the server's own loads are bounded adapter by adapter."""
    one, other = await tier(), await tier()
    keys, more = chain("a", 20), chain("b", 20)
    await in_l2(l1, one, keys)
    await in_l2(l1, other, more)
    loads = Loads(l1, one, other, in_flight_bytes=L1_BYTES, batch_bytes=6 * RECORD)
    outcomes = await asyncio.gather(loads.fetch(keys), loads.fetch(more))
    assert outcomes == [FetchOutcome(20, 20, "")] * 2
    assert "reserve:session_limit" not in loads.controller.stats()["counts"]


async def test_what_hung_adapters_hold_ends_no_load_of_another(l1: L1, tier: OpenTier) -> None:
    """Together they hold more than a session may have."""
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


async def test_a_budget_bounds_what_a_prewarm_loads(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 8)
    await in_l2(l1, one, keys)
    loads = Loads(l1, one)
    outcome = await loads.fetch(keys, budget_bytes=3 * RECORD + 1)
    assert outcome == FetchOutcome(3, 3, MissReason.REFUSED, "budget")
    assert l1.pool.peek(b"".join(keys), 1) == 3


async def test_a_fetch_may_begin_in_the_middle_of_a_prompt(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    keys = chain("a", 6, 2)
    await in_l2(l1, one, keys, 2)
    l1.store(keys[:6], 2)
    loads = Loads(l1, one)
    assert await loads.fetch(keys[6:], 2, parent=keys[4:6]) == FetchOutcome(3, 3, "")
    assert l1.pool.peek(b"".join(keys), 2) == 6


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


async def test_stop_is_bounded_and_its_bytes_stay_until_the_medium_has_finished(
    l1: L1, tier: OpenTier
) -> None:
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


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_goes_wrong_no_byte_is_wrong_and_nothing_leaks(
    l1: L1, tier: OpenTier, seed: int
) -> None:
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
