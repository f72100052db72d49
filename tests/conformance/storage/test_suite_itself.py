"""The shipped contract suite accepts an adapter without files and threads, and notices adapters that break it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.clock import SystemClock
from kvstrata.storage.base import (
    AdapterContext,
    Capabilities,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
)
from kvstrata.testing.adapter_contract import AdapterContract, Medium
from kvstrata.testing.strategies import key_of, load_item, put_item, watched
from tests.harness.faulty import Fault, FaultPlan, FaultyAdapter
from tests.harness.shelf import Shelf, ShelfAdapter


class Records(Shelf, Medium):
    """A shelf as a medium."""

    def keys(self) -> set[bytes]:
        return set(self.records)

    def read(self, key: bytes) -> bytes:
        return self.records[key]

    def write(self, key: bytes, stored: bytes) -> None:
        self.records[key] = stored

    def remove(self, key: bytes) -> None:
        del self.records[key]

    def used_bytes(self) -> int:
        return sum(map(len, self.records.values()))


class Forgets(ShelfAdapter):
    """Its `close` clears the shelf."""

    async def close(self) -> None:
        await super().close()
        self.shelf.records.clear()


class TestShelf(AdapterContract):
    has_cap = False
    waits_in_threads = False

    def make_medium(self, folder: Path) -> Records:
        return Records()

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Records)
        return Forgets(medium)


class DropsEarly(Forgets):
    def _put_one(self, item: PutItem) -> PutOutcome:
        view = item.hold.view()
        item.hold.drop()
        self.shelf.records[item.key] = bytes(view)
        return PutOutcome(PutStatus.STORED)


class NeverDrops(Forgets):
    def _put_one(self, item: PutItem) -> PutOutcome:
        self.shelf.records[item.key] = bytes(item.hold.view())
        return PutOutcome(PutStatus.STORED)


class WritesLate(Forgets):
    def _load_one(self, item: LoadItem) -> LoadOutcome:
        view = item.hold.view()
        item.hold.drop()
        view[:] = self.shelf.records[item.key]
        return LoadOutcome(LoadStatus.LOADED)


class Trusts(Forgets):
    def _load_one(self, item: LoadItem) -> LoadOutcome:
        item.hold.view()[:] = self.shelf.records[item.key].ljust(item.hold.length)[: item.hold.length]
        item.hold.drop()
        return LoadOutcome(LoadStatus.LOADED)


class KeepsCorrupt(Forgets):
    def _load_one(self, item: LoadItem) -> LoadOutcome:
        stored = self.shelf.records.get(item.key)
        outcome = super()._load_one(item)
        if stored is not None:
            self.shelf.records[item.key] = stored
        return outcome


class Reverses(Forgets):
    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        return (await super().put(items))[::-1]


class Claims(Forgets):
    def __init__(self, shelf: Records) -> None:
        super().__init__(shelf)
        self.capabilities = Capabilities(persistent=True, shared=False, max_batch=16)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (DropsEarly, "test_a_record_is_loaded_with_the_bytes_that_were_put"),
        (NeverDrops, "test_a_record_is_loaded_with_the_bytes_that_were_put"),
        (WritesLate, "test_a_record_is_loaded_with_the_bytes_that_were_put"),
        (Trusts, "test_swapped_records_are_corrupt"),
        (KeepsCorrupt, "test_swapped_records_are_corrupt"),
        (Reverses, "test_outcomes_come_in_the_order_of_the_items"),
        (Claims, "test_records_survive_a_reopening_where_persistence_is_claimed"),
    ],
)
async def test_the_suite_notices_an_adapter_that_breaks_its_contract(
    broken: type[Forgets], test: str
) -> None:
    suite = TestShelf()
    suite.make_adapter = lambda medium, capacity_bytes=0: broken(medium)
    with pytest.raises((AssertionError, KeyError)):
        await getattr(suite, test)(Records())


@pytest.mark.parametrize("fault", list(Fault))
async def test_an_injected_fault_does_what_its_name_says(fault: Fault) -> None:
    plan = FaultPlan(1, slow_s=0.0)
    adapter = FaultyAdapter(Forgets(shelf := Records()), plan)
    await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))
    plan.schedule(fault)
    item = put_item(key_of(1), 5_000)
    whole = watched(item).bytes()
    wait = asyncio.create_task(adapter.put([item]))
    await asyncio.wait([wait], timeout=None if fault is not Fault.HANG else 0.01)
    if fault is Fault.HANG:
        assert not wait.done()
        assert adapter.hanging == 1
        assert not watched(item).dropped.is_set()
        adapter.release()
    if fault is Fault.RAISE:
        with pytest.raises(Exception, match=r"seed=1"):
            await wait
    else:
        [outcome] = await wait
        watched(item).check()
        statuses = {
            Fault.ERROR: PutStatus.FAILED,
            Fault.LOST_ACK: PutStatus.FAILED,
            Fault.THROTTLED: PutStatus.THROTTLED,
        }
        assert outcome.status is statuses.get(fault, PutStatus.STORED)
    is_stored = fault not in (Fault.ERROR, Fault.RAISE, Fault.THROTTLED)
    assert (key_of(1) in shelf.records) == is_stored
    if is_stored:
        assert (shelf.records[key_of(1)] == whole) == (fault not in (Fault.TORN, Fault.FLIPPED))
        load = load_item(key_of(1), 5_000)
        [loaded] = await adapter.load([load])
        is_whole = fault not in (Fault.TORN, Fault.FLIPPED)
        assert loaded.status is (LoadStatus.LOADED if is_whole else LoadStatus.CORRUPT)
    await adapter.close()
