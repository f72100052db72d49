"""The shipped contract suite accepts an adapter without files and threads, and notices adapters that break it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.clock import SystemClock
from kvstrata.native.record import CopyOutcome, verify_stored_record
from kvstrata.storage.base import (
    AdapterContext,
    Capabilities,
    Found,
    LoadItem,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    StorageAdapter,
    Usage,
)
from kvstrata.testing.adapter_contract import AdapterContract, Medium
from kvstrata.testing.faults import Fault, FaultPlan
from kvstrata.testing.faulty_adapter import FaultyAdapter
from kvstrata.testing.strategies import key_of, load_item, put_item, watched


class Shelf(Medium):
    """A dictionary of stored bytes."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}

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


class ShelfAdapter(StorageAdapter):
    """Keeps records on a shelf, on the event loop; each step takes a turn of the loop. Its `close` clears the shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self.name = "shelf"
        self.capabilities = Capabilities(persistent=False, shared=False, max_batch=16)
        self._shelf = shelf
        self._is_open = False
        self._running: set[asyncio.Task[object]] = set()

    async def open(self, context: AdapterContext) -> None:
        self._is_open = True

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        if not self._is_open:
            return [Found(Presence.UNKNOWN, 0, "closed")] * len(keys)
        there = self._shelf.records
        return [
            Found(Presence.PRESENT, len(there[k])) if k in there else Found(Presence.ABSENT) for k in keys
        ]

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        return await self._own([self._put_one(item) for item in items])

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        return await self._own([self._load_one(item) for item in items])

    async def _own(self, parts):
        async def in_order():
            return [await part for part in parts]

        task = asyncio.ensure_future(in_order())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _put_one(self, item: PutItem) -> PutOutcome:
        try:
            if not self._is_open or len(item.key) != 32:
                return PutOutcome(PutStatus.FAILED, "bad_item" if self._is_open else "closed")
            if item.key in self._shelf.records:
                return PutOutcome(PutStatus.EXISTS)
            self._shelf.records[item.key] = bytes(item.hold.view())
            await asyncio.sleep(0)
            return PutOutcome(PutStatus.STORED)
        finally:
            item.hold.drop()

    async def _load_one(self, item: LoadItem) -> LoadOutcome:
        try:
            if not self._is_open:
                return LoadOutcome(LoadStatus.FAILED, "closed")
            stored = self._shelf.records.get(item.key)
            if stored is None:
                return LoadOutcome(LoadStatus.ABSENT)
            await asyncio.sleep(0)
            if len(stored) == item.hold.length:
                item.hold.view()[:] = stored
                if verify_stored_record(item.hold.address, item.hold.length, item.key) == CopyOutcome.OK:
                    return LoadOutcome(LoadStatus.LOADED)
            self._shelf.records.pop(item.key, None)
            return LoadOutcome(LoadStatus.CORRUPT)
        finally:
            item.hold.drop()

    async def delete(self, keys: Sequence[bytes]) -> int:
        if not self._is_open:
            return 0
        return sum(self._shelf.records.pop(key, None) is not None for key in keys)

    async def usage(self) -> Usage:
        return Usage(self._shelf.used_bytes(), 0, len(self._shelf.records))

    async def close(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
        self._is_open = False
        self._shelf.records.clear()


class TestShelf(AdapterContract):
    has_cap = False
    waits_in_threads = False

    def make_medium(self, folder: Path) -> Shelf:
        return Shelf()

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Shelf)
        return ShelfAdapter(medium)


class DropsEarly(ShelfAdapter):
    async def _put_one(self, item: PutItem) -> PutOutcome:
        view = item.hold.view()
        item.hold.drop()
        self._shelf.records[item.key] = bytes(view)
        return PutOutcome(PutStatus.STORED)


class NeverDrops(ShelfAdapter):
    async def _put_one(self, item: PutItem) -> PutOutcome:
        self._shelf.records[item.key] = bytes(item.hold.view())
        return PutOutcome(PutStatus.STORED)


class WritesLate(ShelfAdapter):
    async def _load_one(self, item: LoadItem) -> LoadOutcome:
        view = item.hold.view()
        item.hold.drop()
        view[:] = self._shelf.records[item.key]
        return LoadOutcome(LoadStatus.LOADED)


class Trusts(ShelfAdapter):
    async def _load_one(self, item: LoadItem) -> LoadOutcome:
        item.hold.view()[:] = self._shelf.records[item.key].ljust(item.hold.length)[: item.hold.length]
        item.hold.drop()
        return LoadOutcome(LoadStatus.LOADED)


class KeepsCorrupt(ShelfAdapter):
    async def _load_one(self, item: LoadItem) -> LoadOutcome:
        stored = self._shelf.records.get(item.key)
        outcome = await super()._load_one(item)
        if stored is not None:
            self._shelf.records[item.key] = stored
        return outcome


class Reverses(ShelfAdapter):
    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        return (await super().put(items))[::-1]


class Claims(ShelfAdapter):
    def __init__(self, shelf: Shelf) -> None:
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
    broken: type[ShelfAdapter], test: str
) -> None:
    suite = TestShelf()
    suite.make_adapter = lambda medium, capacity_bytes=0: broken(medium)
    with pytest.raises((AssertionError, KeyError)):
        await getattr(suite, test)(Shelf())


@pytest.mark.parametrize("fault", list(Fault))
async def test_an_injected_fault_does_what_its_name_says(fault: Fault) -> None:
    plan = FaultPlan(1, slow_s=0.0)
    adapter = FaultyAdapter(ShelfAdapter(shelf := Shelf()), plan)
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
