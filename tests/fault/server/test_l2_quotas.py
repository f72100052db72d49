"""Tenants' quotas on L2: which chunks are put, which are deleted to make room, and which are skipped with a reason."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvstrata.errors import StorageError
from kvstrata.policy.store import StorePolicy
from kvstrata.server.l2.gate import PrefetchLimits
from kvstrata.server.l2.news import News
from kvstrata.server.l2.prefetch import PrefetchController
from kvstrata.server.l2.puts import StoreLimits
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tiers import TierSet
from kvstrata.storage.base import AdapterContext, Capabilities
from kvstrata.storage.stack import Layer, Stack
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits
from kvstrata.testing.strategies import IDENTITY
from tests.harness.amount import amount
from tests.harness.l1 import CLOCK, L1, L1_BYTES, LATER_S, RECORD, chain
from tests.harness.shelf import SHELVES, Shelf, ShelfAdapter
from tests.harness.waiting import until

TENANT = 1
"""The tenant of all chunks that `L1.store` stores."""


class Rig:
    """Both controllers over one adapter on a shelf, with a quota in records."""

    def __init__(
        self, l1: L1, quota_records: float, tenant: int = TENANT, *, listeners: Sequence[Any] = ()
    ) -> None:
        self.l1 = l1
        self.skipped: list[tuple[bytes, str]] = []
        self.trimmed: list[bytes] = []
        self.adapter = ShelfAdapter("a")
        limits = DeadlineLimits(deadline_ms=600_000, max_stuck_bytes=1 << 30)
        self.guard = DeadlineAdapter(self.adapter, limits, CLOCK)
        configured = Stack("shelf-0", StorePolicy.THROUGH, [Layer("deadline", self.guard)])
        adapters = TierSet([configured])
        self.store = StoreController(
            l1.pool,
            adapters,
            StoreLimits(backlog_bytes=L1_BYTES // 4, batch_bytes=4 * RECORD),
            lambda key, reason: self.skipped.append((key, reason)),
            quotas={tenant: int(quota_records * RECORD)},
            trimmed=lambda name, keys: self.trimmed.extend(keys),
            news=News(listeners),
        )
        self.prefetch = PrefetchController(
            l1.pool,
            adapters,
            PrefetchLimits(in_flight_bytes=8 * RECORD),
            CLOCK,
            self.store.dropped,
            self.store.found,
        )

    async def open(self) -> Rig:
        await self.guard.open(AdapterContext("test", CLOCK, 0, 0, lambda key: None))
        self.store.start()
        return self

    @property
    def shelf(self) -> Shelf:
        return self.adapter.shelf

    @property
    def used_records(self) -> float:
        [row] = self.store.tenants()
        return row["bytes"] / RECORD

    async def put(self, keys: list[bytes]) -> None:
        assert self.l1.store(keys) == keys
        self.store.committed(keys)
        await self.store.idle()

    async def load(self, keys: list[bytes]) -> int:
        self.l1.lose([key for key in keys if self.l1.has(key)])
        found = await self.prefetch.fetch(
            b"".join(keys), 1, identity=IDENTITY, tenant=TENANT, deadline_s=CLOCK.monotonic_s() + LATER_S
        )
        return found.n_chunks


@pytest.fixture
async def with_quota(l1: L1):
    """Makes rigs with a quota; stops them at the end of the test."""
    SHELVES.clear()
    made: list[Rig] = []

    async def starter(quota_records: float, **more: Any) -> Rig:
        made.append(Rig(l1, quota_records, **more))
        return await made[-1].open()

    yield starter
    for rig in made:
        rig.shelf.let_go()
        await rig.prefetch.stop(LATER_S)
        await rig.store.stop(LATER_S)
        assert rig.store.stats()["backlog_bytes"] == 0
        await rig.guard.close()


WithQuota = Callable[..., Any]


class Watcher:
    """The keys of one adapter, as the directory learns them."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()

    def tier_got(self, adapter: str, key: bytes) -> None:
        self.there.add(key)

    def tier_lost(self, adapter: str, keys: Sequence[bytes]) -> None:
        self.there.difference_update(keys)

    def tier_emptied(self, adapter: str) -> None:
        self.there.clear()


async def test_a_tenant_at_its_quota_makes_room_of_its_least_recently_used_records(
    with_quota: WithQuota,
) -> None:
    rig = await with_quota(8)
    keys = chain("a", 8)
    await rig.put(keys)
    assert rig.used_records == 8 and not rig.trimmed
    assert await rig.load(keys[:1]) == 1, "the load counts as a use"
    more = chain("more", 2)
    await rig.put(more)
    assert rig.trimmed == keys[1 : 1 + len(rig.trimmed)] and len(rig.trimmed) >= 2
    assert set(rig.shelf.records) == {*keys, *more} - set(rig.trimmed)
    assert rig.used_records == len(rig.shelf.records) <= 8
    assert rig.skipped == []
    assert rig.store.stats_of("shelf-0")["outcomes"] == {"stored": 10, "trimmed": len(rig.trimmed)}


@pytest.mark.long
async def test_a_record_larger_than_the_quota_is_skipped_and_evicts_nothing(with_quota: WithQuota) -> None:
    rig = await with_quota(0.5)
    [key] = chain("a", 1)
    await rig.put([key])
    assert rig.skipped == [(key, "quota")] and rig.used_records == 0
    assert rig.store.stats_of("shelf-0")["outcomes"] == {"skipped:quota": 1}


@pytest.mark.long
async def test_puts_beyond_the_quota_are_skipped_when_nothing_can_be_deleted(with_quota: WithQuota) -> None:
    rig = await with_quota(4)
    rig.guard.capabilities = Capabilities(persistent=False, shared=False, max_batch=4, can_delete=False)
    keys = chain("a", 6)
    await rig.put(keys[:4])
    await rig.put(keys[4:])
    assert set(rig.shelf.records) == set(keys[:4])
    assert rig.skipped == [(key, "quota") for key in keys[4:]]


@pytest.mark.long
async def test_a_failed_delete_makes_no_room(with_quota: WithQuota, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await with_quota(4)

    async def deletes_nothing(keys: list[bytes]) -> int:
        return 0

    monkeypatch.setattr(rig.adapter, "delete", deletes_nothing)
    keys = chain("a", 6)
    await rig.put(keys[:4])
    await rig.put(keys[4:])
    assert rig.skipped == [(key, "quota") for key in keys[4:]]
    assert rig.used_records == 4 == len(rig.shelf.records)


@pytest.mark.long
async def test_records_from_before_the_start_count_once_they_are_used(with_quota: WithQuota, l1: L1) -> None:
    before = await with_quota(100)
    keys = chain("a", 6)
    await before.put(keys)
    rig = await with_quota(4)
    assert rig.used_records == 0
    rig.store.committed(keys[:2])
    await rig.store.idle()
    assert rig.used_records == 2, "the put found the records"
    assert await rig.load(keys) == 6
    assert rig.used_records == 6, "records from before may exceed the quota"
    await rig.put(chain("more", 1))
    assert rig.used_records <= 4 and len(rig.trimmed) >= 3


@pytest.mark.long
async def test_clearing_forgets_the_counted_records_and_the_waiting_puts(
    with_quota: WithQuota, l1: L1
) -> None:
    rig = await with_quota(4)
    await rig.put(chain("a", 4))

    async def clear() -> int:
        rig.shelf.records.clear()
        return 4

    rig.guard.inner.clear = clear  # type: ignore[method-assign]
    rig.shelf.shut("exists")
    more = l1.store(chain("more", 2))
    rig.store.committed(more)
    await until(lambda: rig.shelf.waiting["exists"])
    await rig.store.clear()
    rig.shelf.let_go()
    await rig.store.idle()
    assert rig.skipped == [(key, "cleared") for key in more] and rig.used_records == 0


@pytest.mark.long
async def test_a_clear_of_one_tenant_gives_up_its_own_waiting_puts_alone(
    with_quota: WithQuota, l1: L1
) -> None:
    """The shelf has no heads, so none of its records is deleted."""
    rig = await with_quota(4)
    await rig.put(chain("a", 4))
    rig.shelf.shut("exists")
    more = l1.store(chain("more", 2))
    rig.store.committed(more)
    await until(lambda: rig.shelf.waiting["exists"])
    for tenant, skipped in ((2, []), (1, [(key, "cleared") for key in more])):
        with pytest.raises(StorageError, match="cannot tell whose its records are"):
            await rig.store.clear(tenant, lambda root: True)
        assert rig.skipped == skipped
    rig.shelf.let_go()
    await rig.store.idle()


@pytest.mark.parametrize(("put_first", "ends_after"), [(True, False), (False, False), (False, True)])
@pytest.mark.long
@pytest.mark.parametrize("can_delete", [True, False])
async def test_a_record_put_while_its_adapter_is_cleared_is_deleted_or_counted(
    with_quota: WithQuota, l1: L1, put_first: bool, ends_after: bool, can_delete: bool
) -> None:
    watcher = Watcher()
    rig = await with_quota(4, listeners=[watcher])
    if not can_delete:
        rig.guard.capabilities = msgspec.structs.replace(rig.guard.capabilities, can_delete=False)
    may_clear = asyncio.Event()

    async def clear() -> int:
        if not put_first:
            rig.shelf.records.clear()
        await may_clear.wait()
        if put_first:
            rig.shelf.records.clear()
        return 0

    rig.guard.inner.clear = clear  # type: ignore[method-assign]
    rig.shelf.shut("put")
    keys = l1.store(chain("a", 2))
    rig.store.committed(keys)
    await until(lambda: rig.shelf.waiting["put"])
    clearing = asyncio.create_task(rig.store.clear())
    await asyncio.sleep(0)
    if not ends_after:
        rig.shelf.let_go()
        await until(lambda: rig.shelf.records)
    may_clear.set()
    await clearing
    rig.shelf.let_go()
    await rig.store.idle()
    there = set() if put_first or can_delete else set(keys)
    assert rig.used_records == len(there) == len(rig.shelf.records)
    assert watcher.there == there
    assert rig.skipped == [(key, "cleared") for key in keys if key not in there]


@pytest.mark.parametrize("seed", range(amount(2, 6)))
async def test_puts_never_bring_the_medium_above_the_quota(with_quota: WithQuota, l1: L1, seed: int) -> None:
    rng = random.Random(seed)
    rig = await with_quota(10)
    prompts: list[list[bytes]] = []
    for n in range(40):
        match rng.randrange(4):
            case 0 | 1:
                keys = l1.store(chain(f"{seed} {n}", rng.randrange(1, 5)))
                rig.store.committed(keys)
                if keys:
                    prompts.append(keys)
            case 2 if prompts:
                await rig.store.idle()
                await rig.load(rng.choice(prompts)[:1])
            case 3:
                gone = rng.sample(sorted(rig.shelf.records), min(2, len(rig.shelf.records)))
                for key in gone:
                    del rig.shelf.records[key]
                rig.store.dropped("shelf-0", gone)
        assert len(rig.shelf.records) <= 10
        await asyncio.sleep(0)
    await rig.store.idle()
    rig.store._puts["shelf-0"].ledger.validate()
    assert len(rig.shelf.records) <= rig.used_records <= 10
