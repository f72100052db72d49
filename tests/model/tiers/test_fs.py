"""The `fs` adapter against a model of its promises: a record that it reports as PRESENT loads whole, or not at all.

The model keeps, for each key, whether its record must exist, may exist, or must not; damage done behind the adapter
turns "must exist" into "must not load as it is". Restarts keep all records; a cap evicts the oldest ones.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import os
import shutil
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.clock import SystemClock
from kvstrata.testing.strategies import (
    ask_for,
    key_of,
    load_item,
    loaded_payload,
    payload_of,
    put_item,
    record_length,
    settled,
    watched,
)
from kvstrata.tiers.base import AdapterContext, Outcome, Presence
from kvstrata.tiers.media.fs import FsAdapter

T = TypeVar("T")

NUMBERS = range(10)
SIZES = [100, 5_000, 9_000]
CAP_BYTES = 60_000


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def charge_of(number: int) -> int:
    return -(-record_length(size_of(number)) // 4096) * 4096


class Is(enum.Enum):
    """The model's knowledge of a key."""

    ABSENT = "absent"
    WHOLE = "whole"
    DAMAGED = "damaged"
    """A file has the key's name, but does not hold its record."""


numbers = st.sampled_from(NUMBERS)
batches = st.lists(numbers, min_size=1, max_size=5)


class FsMachine(RuleBasedStateMachine):
    capacity_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        # On tmpfs a sync costs nothing; other tests use real disks.
        memory = Path("/dev/shm")
        place = memory if os.access(memory, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="kvstrata-model-", dir=place))
        self.known: dict[int, Is] = dict.fromkeys(NUMBERS, Is.ABSENT)
        self.order: list[int] = []
        """Whole or damaged keys, least recently used first."""
        self.evicted: list[bytes] = []
        self.adapter: FsAdapter | None = None

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize()
    def start(self) -> None:
        self.adapter = FsAdapter(
            base_path=str(self.folder / "kv"),
            capacity_bytes=self.capacity_bytes,
            min_free_bytes=0,
            num_workers=1,  # the items of a batch are done one after the other, as the model does them
        )
        self.run(self.adapter.open(AdapterContext("model", SystemClock(), 0, 0, self.evicted.append)))

    def teardown(self) -> None:
        if self.adapter is not None:
            self.run(self.adapter.close())
        self.loop.close()
        shutil.rmtree(self.folder)

    def path(self, number: int) -> Path:
        name = key_of(number).hex()
        return self.folder / "kv" / name[:2] / name[2:4] / f"{name}.kvc"

    def used(self, number: int) -> None:
        if number in self.order:
            self.order.remove(number)
        self.order.append(number)

    def forget(self, number: int) -> None:
        self.known[number] = Is.ABSENT
        if number in self.order:
            self.order.remove(number)

    def take_evictions(self) -> None:
        """Take the adapter's reports of evictions; assert that they are the least recently used records."""
        for key in self.evicted:
            number = next(n for n in NUMBERS if key_of(n) == key)
            assert self.capacity_bytes
            assert number == self.order[0], "a newer record was evicted before the least recently used"
            self.forget(number)
        self.evicted.clear()

    @rule(batch=batches)
    def put(self, batch: list[int]) -> None:
        items = [put_item(key_of(n), size_of(n)) for n in batch]
        outcomes = self.run(settled(self.adapter.put, items))
        if not self.capacity_bytes:
            self.take_evictions()
        first_seen: set[int] = set()
        for number, outcome, item in zip(batch, outcomes, items, strict=True):
            watched(item).check()
            if number in first_seen or self.known[number] is not Is.ABSENT:
                assert outcome.outcome is Outcome.EXISTS
            else:
                assert outcome.outcome is Outcome.STORED
            first_seen.add(number)
        stored = [n for n in dict.fromkeys(batch) if self.known[n] is Is.ABSENT]
        self.settle_puts(stored)

    def settle_puts(self, stored: list[int]) -> None:
        """Stored records become the newest, in their order; evictions fall between them."""
        left = collections.deque(next(n for n in NUMBERS if key_of(n) == key) for key in self.evicted)
        self.evicted.clear()

        def leave() -> None:
            number = left.popleft()
            assert number == self.order[0], "a newer record was evicted before the least recently used"
            self.forget(number)

        for number in stored:
            while self.known[number] is Is.WHOLE:  # evicted for an earlier item of the batch, then put again
                leave()
            self.known[number] = Is.WHOLE
            self.used(number)
        while left:
            leave()

    @rule(batch=batches)
    def load(self, batch: list[int]) -> None:
        items = [load_item(key_of(n), size_of(n)) for n in batch]
        outcomes = self.run(settled(self.adapter.load, items))
        damaged = {n for n in batch if self.known[n] is Is.DAMAGED}
        removed: set[int] = set()
        for number, outcome, item in zip(batch, outcomes, items, strict=True):
            watched(item).check()
            if number in damaged:
                assert outcome.outcome is (Outcome.ABSENT if number in removed else Outcome.CORRUPT)
                removed.add(number)
            elif self.known[number] is Is.WHOLE:
                assert outcome.outcome is Outcome.LOADED
                assert loaded_payload(item, size_of(number)) == payload_of(key_of(number), size_of(number))
                self.used(number)
            else:
                assert outcome.outcome is Outcome.ABSENT
        for number in damaged:
            self.forget(number)

    @rule(batch=batches)
    def delete(self, batch: list[int]) -> None:
        there = [n for n in set(batch) if self.known[n] is not Is.ABSENT]
        assert self.run(self.adapter.delete(b"".join([key_of(n) for n in batch]))) == len(there)
        for number in there:
            self.forget(number)

    @rule(number=numbers, at=st.integers(0, 1 << 20), how=st.sampled_from(["flip", "cut", "longer", "zeros"]))
    def damage(self, number: int, at: int, how: str) -> None:
        if self.known[number] is not Is.WHOLE:
            return
        path = self.path(number)
        stored = bytearray(path.read_bytes())
        header = len(stored) - size_of(number)
        if how == "flip":
            stored[header + at % size_of(number)] ^= 1 << at % 8
        elif how == "cut":
            del stored[at % len(stored) :]
        elif how == "longer":
            stored += bytes(1 + at % 5000)
        else:
            stored[:] = bytes(len(stored))
        path.write_bytes(stored)
        self.known[number] = Is.DAMAGED

    @rule(one=numbers, other=numbers)
    def swap(self, one: int, other: int) -> None:
        if one == other or {self.known[one], self.known[other]} != {Is.WHOLE}:
            return
        first, second = self.path(one).read_bytes(), self.path(other).read_bytes()
        self.path(one).write_bytes(second)
        self.path(other).write_bytes(first)
        self.known[one] = self.known[other] = Is.DAMAGED

    @rule(again=st.booleans())
    def restart(self, again: bool) -> None:
        self.run(self.adapter.close())
        self.start()
        self.run(self.adapter.usage())
        self.after_restart()
        if again:
            self.restart(False)

    def after_restart(self) -> None:
        """Load damaged records, which removes them: the model does not know which of them a restart recognises."""
        for number in NUMBERS:
            if self.known[number] is Is.DAMAGED:
                self.run(self.adapter.load([load_item(key_of(number), size_of(number))]))
                self.forget(number)

    @invariant()
    def presence_is_that_of_the_model(self) -> None:
        if self.adapter is None:
            return
        found = self.run(ask_for(self.adapter, [key_of(n) for n in NUMBERS]))
        for number, (presence, _) in zip(NUMBERS, found, strict=True):
            assert presence is (Presence.ABSENT if self.known[number] is Is.ABSENT else Presence.PRESENT)

    @invariant()
    def usage_is_that_of_the_files(self) -> None:
        if self.adapter is None:
            return
        usage = self.run(self.adapter.usage())
        there = [n for n in NUMBERS if self.known[n] is not Is.ABSENT]
        assert usage.records == len(there)
        assert usage.used_bytes == sum(charge_of(n) for n in there)
        if self.capacity_bytes:
            assert usage.used_bytes <= self.capacity_bytes
        assert not list((self.folder / "kv" / "tmp").iterdir())


class CappedMachine(FsMachine):
    """A cap that holds about half of the records. Nothing is damaged, since that would change the sum of lengths."""

    capacity_bytes = CAP_BYTES

    @rule(number=numbers)
    @precondition(lambda self: False)
    def damage(self, number: int) -> None:
        """Damage nothing; the rule never runs."""

    @rule(number=numbers)
    @precondition(lambda self: False)
    def swap(self, number: int) -> None:
        """Swap nothing; the rule never runs."""

    @rule(batch=batches)
    def put(self, batch: list[int]) -> None:
        before = dict(self.known)
        items = [put_item(key_of(n), size_of(n)) for n in batch]
        outcomes = self.run(settled(self.adapter.put, items))
        for item in items:
            watched(item).check()
        for number, outcome in zip(batch, outcomes, strict=True):
            assert outcome.outcome in (Outcome.STORED, Outcome.EXISTS)
            if before[number] is Is.ABSENT and batch.count(number) == 1:
                assert outcome.outcome is Outcome.STORED
        stored = [n for n, outcome in zip(batch, outcomes, strict=True) if outcome.outcome is Outcome.STORED]
        self.settle_puts(stored)

    def after_restart(self) -> None:
        """Read the order from the files' times, which remember it and which the machine does not control."""
        self.order = [n for n in NUMBERS if self.path(n).exists()]
        self.run(self.adapter.load([load_item(key_of(n), size_of(n)) for n in self.order]))


BUDGET = settings(max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck))
TestFsModel = pytest.mark.integration(FsMachine.TestCase)
TestFsModel.settings = BUDGET
TestCappedFsModel = pytest.mark.integration(CappedMachine.TestCase)
TestCappedFsModel.settings = BUDGET
