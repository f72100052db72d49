"""The shipped contract suite accepts an adapter without files and threads, and notices adapters that break it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.testing.adapter_contract import AdapterContract, Medium
from kvstrata.tiers.base import Capabilities, Item, Outcome, StorageAdapter
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
    def _put_one(self, item: Item) -> None:
        view = item.hold.view()
        item.settle(Outcome.STORED)
        self.shelf.records[item.key] = bytes(view)


class NeverDrops(Forgets):
    def _put_one(self, item: Item) -> None:
        self.shelf.records[item.key] = bytes(item.hold.view())
        item.outcome = Outcome.STORED


class WritesLate(Forgets):
    def _load_one(self, item: Item) -> None:
        view = item.hold.view()
        item.settle(Outcome.LOADED)
        view[:] = self.shelf.records[item.key]


class Trusts(Forgets):
    def _load_one(self, item: Item) -> None:
        item.hold.view()[:] = self.shelf.records[item.key].ljust(item.hold.length)[: item.hold.length]
        item.settle(Outcome.LOADED)


class KeepsCorrupt(Forgets):
    def _load_one(self, item: Item) -> None:
        stored = self.shelf.records.get(item.key)
        super()._load_one(item)
        if stored is not None:
            self.shelf.records[item.key] = stored


class Reverses(Forgets):
    async def put(self, items: Sequence[Item]) -> None:
        await super().put(items)
        for item, outcome in zip(items, [item.outcome for item in reversed(items)], strict=True):
            item.outcome = outcome


class LeavesOne(Forgets):
    async def put(self, items: Sequence[Item]) -> None:
        await super().put(items)
        items[-1].outcome = Outcome.UNSETTLED


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
        (LeavesOne, "test_outcomes_come_in_the_order_of_the_items"),
        (Reverses, "test_outcomes_come_in_the_order_of_the_items"),
        (Claims, "test_records_survive_a_reopening_where_persistence_is_claimed"),
    ],
)
async def test_the_suite_notices_an_adapter_that_breaks_its_contract(broken, test):
    suite = TestShelf()
    suite.make_adapter = lambda medium, capacity_bytes=0: broken(medium)
    with pytest.raises((AssertionError, KeyError)):
        await getattr(suite, test)(Records())
