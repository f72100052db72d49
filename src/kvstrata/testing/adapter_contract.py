"""The storage contract as a test suite; all our adapters run it, and authors of other adapters can run it too:

    class TestMine(AdapterContract):
        def make_medium(self, folder): return MyMedium(folder)
        def make_adapter(self, medium, capacity_bytes=0): return MyAdapter(medium.address, capacity_bytes)

`Medium` reaches the storage without going through the adapter, because an adapter that is asked about itself can be
consistently wrong.  The adapter gets watched holds (strategies.WatchedHold), which detect that the adapter reads or
writes after it has dropped a hold.

Needs pytest and pytest-asyncio (the `test` extra).  To see in failures what was compared, call
`pytest.register_assert_rewrite("kvstrata.testing.adapter_contract")` in a conftest.py before importing this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.errors import StorageError
from kvstrata.testing.strategies import (
    WAIT_S,
    Settled,
    ask_for,
    key_of,
    lent_context,
    load_item,
    loaded_payload,
    payload_of,
    put_item,
    record_length,
    settled,
    watched,
)
from kvstrata.tiers.base import MORE_KEYS, Outcome, Presence, StorageAdapter
from kvstrata.tiers.config import configure_tier
from kvstrata.tiers.host.parent import HostedAdapter

SIZE = 10_000
"""Payload bytes of most records here; not a multiple of a block."""
SIZES = (1, 4096, 4097, 10_000, 300_001)

STORED = Settled(Outcome.STORED)
EXISTS = Settled(Outcome.EXISTS)
LOADED = Settled(Outcome.LOADED)
ABSENT = Settled(Outcome.ABSENT)


class Medium(ABC):
    """An adapter's storage, reached without the adapter. `flip`, `truncate`, `extend` and `swap` damage its bytes."""

    @abstractmethod
    def keys(self) -> set[bytes]:
        """Keys of all stored records."""

    @abstractmethod
    def read(self, key: bytes) -> bytes:
        """The stored bytes of a record."""

    @abstractmethod
    def write(self, key: bytes, stored: bytes) -> None:
        """Replace the stored bytes of a record."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Remove a record behind the adapter's back."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that the storage takes in all, leftovers of earlier records included."""

    def flip(self, key: bytes, at: int) -> None:
        """Invert one bit of a stored byte."""
        stored = bytearray(self.read(key))
        stored[at] ^= 0x10
        self.write(key, bytes(stored))

    def truncate(self, key: bytes, length: int) -> None:
        """Keep only the first bytes."""
        self.write(key, self.read(key)[:length])

    def extend(self, key: bytes, count: int) -> None:
        """Add zeros at the end."""
        self.write(key, self.read(key) + bytes(count))

    def swap(self, one: bytes, other: bytes) -> None:
        """Exchange the stored bytes of two records."""
        first, second = self.read(one), self.read(other)
        self.write(one, second)
        self.write(other, first)


async def put_numbers(adapter: StorageAdapter, *numbers: int, size: int = SIZE) -> list[Settled]:
    """Put records by number and check their holds."""
    items = [put_item(key_of(n), size) for n in numbers]
    outcomes = await settled(adapter.put, items)
    for item in items:
        watched(item).check()
    return outcomes


async def load_numbers(adapter: StorageAdapter, *numbers: int, size: int = SIZE) -> list[Settled]:
    """Load records by number; check their holds, and the bytes of the LOADED ones."""
    items = [load_item(key_of(n), size) for n in numbers]
    outcomes = await settled(adapter.load, items)
    for number, item, outcome in zip(numbers, items, outcomes, strict=True):
        watched(item).check()
        if outcome.outcome is Outcome.LOADED:
            right = loaded_payload(item, size) == payload_of(item.key, size)
            assert right, f"record {number} was loaded with other bytes"
    return outcomes


@pytest.mark.asyncio
class AdapterContract(ABC):
    """The contract, see the module. A subclass sets `has_cap` and the names after it for its adapter."""

    has_cap = True
    """Whether `make_adapter` honours `capacity_bytes`."""
    cap_scale = 1
    """Factor for caps and numbers of records, for a medium whose smallest possible cap is large."""
    ends_first = False
    """Whether the cap evicts no chunk before those that continue it. A record's header names its parent."""
    waits_in_threads = True
    """Whether the adapter asks holds for their bytes in a thread, where tests can block the adapter."""
    damages = (
        "magic",
        "header_crc",
        "key",
        "section_table",
        "payload",
        "last_byte",
        "cut",
        "short",
        "longer",
    )
    """How records are spoiled that the adapter must notice."""

    @abstractmethod
    def make_medium(self, folder: Path) -> Medium:
        """A new, empty medium; it may use the temporary directory `folder`."""

    @abstractmethod
    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        """An adapter on that medium, not opened yet; with `capacity_bytes` 0 it has no cap."""

    @contextlib.asynccontextmanager
    async def opened(
        self, medium: Medium, capacity_bytes: int = 0, evicted: list[bytes] | None = None
    ) -> AsyncIterator[StorageAdapter]:
        """An open adapter, which is closed at the end of the block."""
        dropped = evicted if evicted is not None else []
        adapter = self.make_adapter(medium, capacity_bytes)
        await adapter.open(lent_context(dropped.append))
        try:
            yield adapter
        finally:
            await adapter.close()

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        """The medium of one test."""
        return self.make_medium(tmp_path)

    put = staticmethod(put_numbers)
    load = staticmethod(load_numbers)

    # -- batches -------------------------------------------------------------------------------------------

    async def test_a_record_is_loaded_with_the_bytes_that_were_put(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            for number, size in enumerate(SIZES):
                assert await self.put(adapter, number, size=size) == [STORED]
            for number, size in enumerate(SIZES):
                assert await self.load(adapter, number, size=size) == [LOADED]
            assert medium.keys() == {key_of(number) for number in range(len(SIZES))}

    async def test_outcomes_come_in_the_order_of_the_items(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 3)
            assert await self.put(adapter, 0, 1, 2, 3) == [STORED, EXISTS, STORED, EXISTS]
            assert await self.load(adapter, 7, 3, 8, 0) == [ABSENT, LOADED, ABSENT, LOADED]

    async def test_an_empty_batch_is_answered_with_nothing(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            assert await settled(adapter.put, []) == []
            assert await settled(adapter.load, []) == []
            assert await ask_for(adapter, []) == []
            assert await adapter.delete(b"") == 0

    async def test_a_full_batch_is_taken(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            numbers = range(adapter.capabilities.max_batch)
            assert await self.put(adapter, *numbers, size=100) == [STORED] * len(numbers)
            assert await self.load(adapter, *numbers, size=100) == [LOADED] * len(numbers)

    async def test_a_key_twice_in_a_batch_is_stored_once_and_loaded_twice(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            assert sorted(await self.put(adapter, 5, 5)) == sorted([STORED, EXISTS])
            assert await self.load(adapter, 5, 5) == [LOADED, LOADED]
            assert medium.keys() == {key_of(5)}

    async def test_puts_of_one_key_at_the_same_time_store_it_once(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            outcomes = await asyncio.gather(*(self.put(adapter, 1, 2) for _ in range(4)))
            for i in range(2):
                assert sorted(outcome[i] for outcome in outcomes) == sorted([STORED, *[EXISTS] * 3])
            assert await self.load(adapter, 1, 2) == [LOADED, LOADED]

    async def test_one_bad_item_does_not_fail_its_batch(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 2, 3)
            medium.flip(key_of(2), -1)
            outcomes = await self.load(adapter, 1, 2, 3)
            assert [o.outcome for o in outcomes] == [Outcome.LOADED, Outcome.CORRUPT, Outcome.LOADED]

    # -- presence ------------------------------------------------------------------------------------------

    async def test_exists_tells_presence(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 2)
            found = await ask_for(adapter, [key_of(2), key_of(9), key_of(1)])
            assert [f.presence for f in found] == [Presence.PRESENT, Presence.ABSENT, Presence.PRESENT]

    async def test_a_record_shorter_than_its_room_is_loaded(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            for number, size in enumerate(SIZES):
                await self.put(adapter, number, size=size)
                item = load_item(key_of(number), size, more_bytes=5_000)
                assert await settled(adapter.load, [item]) == [LOADED]
                watched(item).check()
                assert loaded_payload(item, size) == payload_of(item.key, size)

    async def test_a_record_longer_than_its_room_is_not_loaded(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 2, size=50_000)
            item = load_item(key_of(1), SIZE)
            [outcome] = await settled(adapter.load, [item])
            assert outcome.outcome in (Outcome.FAILED, Outcome.CORRUPT)
            watched(item).check()
            assert await self.load(adapter, 2, size=50_000) == [LOADED]

    async def test_an_absent_key_is_an_outcome(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            assert await self.load(adapter, 1) == [ABSENT]
            assert await adapter.delete(key_of(1)) == 0

    async def test_a_record_removed_behind_the_adapter_is_absent_and_can_be_put_again(
        self, medium: Medium
    ) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1)
            medium.remove(key_of(1))
            assert await self.load(adapter, 1) == [ABSENT]
            assert await self.put(adapter, 1) == [STORED]
            assert await self.load(adapter, 1) == [LOADED]

    # -- listing -------------------------------------------------------------------------------------------

    async def listed(
        self, adapter: StorageAdapter, most: int, between: Callable[[], Awaitable[object]] | None = None
    ) -> list[bytes]:
        """All keys, read in pages of `most`; calls `between` between the pages, and waits until the medium can list."""
        keys: list[bytes] = []
        cursor = 0
        async with asyncio.timeout(WAIT_S):
            while True:
                page = await adapter.list_keys(cursor, most)
                if page is None:
                    assert not keys, "a listing that had begun was cut short"
                    await asyncio.sleep(0.001)
                    continue
                assert len(page.keys) <= most + MORE_KEYS
                keys += page.keys
                cursor = page.cursor
                if not cursor:
                    return keys
                if between is not None:
                    await between()

    async def test_all_stored_keys_are_listed(self, medium: Medium) -> None:
        numbers = range(30)
        async with self.opened(medium) as adapter:
            if not adapter.capabilities.lists:
                return
            assert await self.listed(adapter, 8) == []
            assert await self.put(adapter, *numbers, size=100) == [STORED] * 30
            for most in (1, 7, 8, 1000):
                assert set(await self.listed(adapter, most)) == {key_of(n) for n in numbers}
            if adapter.capabilities.can_delete:
                await adapter.delete(b"".join([key_of(n) for n in range(10)]))
                assert set(await self.listed(adapter, 8)) == {key_of(n) for n in range(10, 30)}
        if adapter.capabilities.persistent:
            async with self.opened(medium) as adapter:
                assert set(await self.listed(adapter, 8)) == medium.keys()

    async def test_keys_stored_throughout_a_listing_are_listed_while_others_come_and_go(
        self, medium: Medium
    ) -> None:
        async with self.opened(medium) as adapter:
            if not (adapter.capabilities.lists and adapter.capabilities.can_delete):
                return
            stay, go, new = range(20), list(range(20, 40)), iter(range(40, 400))
            await self.put(adapter, *stay, *go, size=100)

            async def churn() -> None:
                if go:
                    await adapter.delete(b"".join([key_of(go.pop())]))
                await self.put(adapter, *(n for n, _ in zip(new, range(3), strict=False)), size=100)

            found = set(await self.listed(adapter, 5, churn))
            assert {key_of(n) for n in stay} <= found <= {key_of(n) for n in range(400)}

    # -- corruption ----------------------------------------------------------------------------------------

    async def test_damaged_records_are_corrupt_and_healed_by_the_next_put(self, medium: Medium) -> None:
        numbers = range(1, len(self.damages) + 1)
        async with self.opened(medium) as adapter:
            await self.put(adapter, 0, *numbers)
            for number, damage in zip(numbers, self.damages, strict=True):
                self.damage(medium, number, damage)
                await self.expect_healing(adapter, number, damage)
            if not adapter.capabilities.persistent:
                return
        for number, damage in zip(numbers, self.damages, strict=True):
            self.damage(medium, number, damage)
        async with self.opened(medium) as adapter:
            for number, damage in zip(numbers, self.damages, strict=True):
                await self.expect_healing(adapter, number, f"{damage} while it was closed")

    def damage(self, medium: Medium, number: int, damage: str) -> None:
        """Spoil a record."""
        key = key_of(number)
        length = len(medium.read(key))
        if damage == "cut":
            medium.truncate(key, length - 1)
        elif damage == "short":
            medium.truncate(key, 300)
        elif damage == "longer":
            medium.extend(key, 4096)
        else:
            header = record_length(SIZE) - SIZE
            places = {"magic": 0, "header_crc": 252, "key": 16, "section_table": 520, "payload": header + 10}
            medium.flip(key, places.get(damage, length - 1))

    async def expect_healing(self, adapter: StorageAdapter, number: int, damage: str) -> None:
        """Check that a record is not served, that a put stores it again, and that record 0 is untouched."""
        [outcome] = await self.load(adapter, number)
        assert outcome.outcome in (Outcome.CORRUPT, Outcome.ABSENT), damage
        [found] = await ask_for(adapter, [key_of(number)])
        assert found.presence is Presence.ABSENT, damage
        assert await self.put(adapter, number) == [STORED], damage
        assert await self.load(adapter, number, 0) == [LOADED, LOADED], damage

    async def test_swapped_records_are_corrupt(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 2)
            medium.swap(key_of(1), key_of(2))
            outcomes = await self.load(adapter, 1, 2)
            assert [o.outcome for o in outcomes] == [Outcome.CORRUPT] * 2
            assert await self.put(adapter, 1, 2) == [STORED] * 2
            assert await self.load(adapter, 1, 2) == [LOADED] * 2

    async def test_swapped_records_of_different_length_are_corrupt_and_healed(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1)
            await self.put(adapter, 2, size=77)
            medium.swap(key_of(1), key_of(2))
            for number, size in ((1, SIZE), (2, 77)):
                [outcome] = await self.load(adapter, number, size=size)
                assert outcome.outcome is Outcome.CORRUPT
                assert await self.put(adapter, number, size=size) == [STORED]
                assert await self.load(adapter, number, size=size) == [LOADED]

    # -- holds ---------------------------------------------------------------------------------------------

    async def test_holds_of_every_outcome_are_dropped_once(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            assert await self.put(adapter, 1, 1, 2) != []  # `put` and `load` check the holds
            medium.flip(key_of(2), -1)
            assert await self.load(adapter, 1, 2, 3) != []

    async def test_a_cancelled_put_keeps_its_holds_until_the_medium_is_done(self, medium: Medium) -> None:
        gate = threading.Event() if self.waits_in_threads else None
        async with self.opened(medium) as adapter:
            items = [put_item(key_of(n), SIZE, gate=gate) for n in range(3)]
            wait = asyncio.create_task(settled(adapter.put, items))
            if gate is not None:
                await watched(items[0]).until_asked()
            else:
                await asyncio.sleep(0)
            wait.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wait
            if gate is not None:
                assert not any(watched(item).dropped.is_set() for item in items)
                gate.set()
            for item in items:
                await watched(item).until_dropped()
                watched(item).check()
            outcomes = await self.put(adapter, 0, 1, 2)
            assert {o.outcome for o in outcomes} <= {Outcome.STORED, Outcome.EXISTS}
            assert await self.load(adapter, 0, 1, 2) == [LOADED] * 3

    async def test_a_cancelled_load_keeps_its_hold_until_the_medium_is_done(self, medium: Medium) -> None:
        gate = threading.Event() if self.waits_in_threads else None
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1)
            item = load_item(key_of(1), SIZE, gate=gate)
            wait = asyncio.create_task(settled(adapter.load, [item]))
            if gate is not None:
                await watched(item).until_asked()
            else:
                await asyncio.sleep(0)
            wait.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wait
            if gate is not None:
                assert not watched(item).dropped.is_set()
                gate.set()
            await watched(item).until_dropped()
            watched(item).check()
            assert await self.load(adapter, 1) == [LOADED]

    async def test_close_ends_what_is_in_flight_and_drops_its_holds(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1)
            puts = [put_item(key_of(n), SIZE) for n in range(2, 6)]
            loads = [load_item(key_of(1), SIZE) for _ in range(4)]
            waits = [
                asyncio.create_task(settled(adapter.put, puts)),
                asyncio.create_task(settled(adapter.load, loads)),
            ]
            await asyncio.sleep(0)
            await adapter.close()
            await asyncio.gather(*waits)
            for hold in (*map(watched, puts), *map(watched, loads)):
                hold.check()

    async def test_puts_that_block_delay_no_lookup(self, medium: Medium) -> None:
        if not self.waits_in_threads:
            pytest.skip("this adapter cannot be blocked in a thread")
        gate = threading.Event()
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1)
            items = [put_item(key_of(n), SIZE, gate=gate) for n in range(10, 30)]
            wait = asyncio.create_task(settled(adapter.put, items))
            await asyncio.wait(
                [asyncio.create_task(watched(item).until_asked()) for item in items],
                return_when=asyncio.FIRST_COMPLETED,
            )
            found = await ask_for(adapter, [key_of(1), key_of(2)])
            assert [f.presence for f in found] == [Presence.PRESENT, Presence.ABSENT]
            gate.set()
            assert await wait == [STORED] * len(items)

    # -- leaving -------------------------------------------------------------------------------------------

    async def test_delete_removes_and_counts_what_was_there(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            if not adapter.capabilities.can_delete:
                pytest.skip("this adapter says that it cannot delete")
            await self.put(adapter, 1, 2, 3)
            assert await adapter.delete(b"".join([key_of(1), key_of(9), key_of(3), key_of(1)])) == 2
            assert medium.keys() == {key_of(2)}
            assert await self.load(adapter, 1, 2, 3) == [ABSENT, LOADED, ABSENT]
            assert await self.put(adapter, 1) == [STORED]

    async def test_a_load_during_a_delete_ends_well_or_as_absent(self, medium: Medium) -> None:
        gate = threading.Event() if self.waits_in_threads else None
        async with self.opened(medium) as adapter:
            if not adapter.capabilities.can_delete:
                pytest.skip("this adapter says that it cannot delete")
            await self.put(adapter, 1)
            item = load_item(key_of(1), SIZE, gate=gate)
            wait = asyncio.create_task(settled(adapter.load, [item]))
            if gate is not None:
                await watched(item).until_asked()
            removal = asyncio.create_task(adapter.delete(key_of(1)))
            await asyncio.sleep(0)
            if gate is not None:
                gate.set()
            [outcome] = await wait
            assert await removal == 1
            assert outcome in (LOADED, ABSENT)
            if outcome == LOADED:
                assert loaded_payload(item, SIZE) == payload_of(item.key, SIZE)
            watched(item).check()
            assert medium.keys() == set()
            assert await self.put(adapter, 1) == [STORED]

    async def test_clear_removes_all_or_says_that_it_cannot(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 2, 3)
            try:
                removed = await adapter.clear()
            except StorageError:
                assert medium.keys() == {key_of(n) for n in (1, 2, 3)}
                return
            assert removed == 3
            assert medium.keys() == set()
            assert await self.load(adapter, 1) == [ABSENT]
            assert await self.put(adapter, 1) == [STORED]

    # -- the cap -------------------------------------------------------------------------------------------

    async def test_the_cap_holds_and_the_newest_stay(self, medium: Medium) -> None:
        if not self.has_cap:
            pytest.skip("this adapter has no cap of its own")
        count, cap_bytes = 20 * self.cap_scale, 6 * self.cap_scale * (record_length(SIZE) + 4096)
        evicted: list[bytes] = []
        async with self.opened(medium, cap_bytes, evicted) as adapter:
            for number in range(count):
                assert await self.put(adapter, number) == [STORED]
                assert medium.used_bytes() <= cap_bytes
            # A medium may evict in the background, and report the evictions with the next batch.
            deadline_s = time.monotonic() + WAIT_S
            while True:
                kept = medium.keys()
                assert await self.load(adapter, count - 1) == [LOADED]
                if set(evicted) == {key_of(n) for n in range(count)} - kept:
                    break
                assert time.monotonic() < deadline_s, "the adapter has evicted keys without reporting them"
            assert key_of(count - 1) in kept
            assert len(kept) >= 3 * self.cap_scale
            assert kept == {key_of(n) for n in range(count - len(kept), count)}
            assert len(evicted) == len(set(evicted))

    async def test_a_load_keeps_a_record_from_being_the_next_to_leave(self, medium: Medium) -> None:
        if not self.has_cap:
            pytest.skip("this adapter has no cap of its own")
        async with self.opened(medium, 4 * self.cap_scale * (record_length(SIZE) + 4096)) as adapter:
            await self.put(adapter, 0)
            for number in range(1, 12 * self.cap_scale):
                await self.put(adapter, number)
                assert await self.load(adapter, 0) == [LOADED]

    async def test_of_a_prompt_the_cap_evicts_the_end_first(self, medium: Medium) -> None:
        if not self.ends_first:
            pytest.skip("this adapter has no cap of its own, or may evict by age alone")
        draw, parents, room = random.Random(1), dict[bytes, bytes](), 48 + 12 * self.cap_scale
        ends = [bytes(32)] * 4  # the last chunks of four sessions
        async with self.opened(medium, room * (record_length(SIZE) + 4096)) as adapter:
            while len(parents) < 6 * room:
                at, chunks = draw.randrange(4), []
                if draw.random() < 16 / room:
                    ends[at] = bytes(32)  # another session begins
                for _ in range(draw.randint(1, 3)):
                    key = key_of(len(parents))
                    chunks.append(put_item(key, SIZE, parent=ends[at]))
                    parents[key] = ends[at]
                    ends[at] = key
                assert await settled(adapter.put, chunks) == [STORED] * len(chunks)
            kept = medium.keys()
        reached = {bytes(32)}
        for key, parent in parents.items():
            if key in kept and parent in reached:
                reached.add(key)
        assert kept == kept & reached, "a chunk was evicted before one that continues it"

    async def test_a_batch_larger_than_the_cap_never_exceeds_it(self, medium: Medium) -> None:
        if not self.has_cap:
            pytest.skip("this adapter has no cap of its own")
        count, cap_bytes = 30 * self.cap_scale, 8 * self.cap_scale * (record_length(SIZE) + 4096)
        async with self.opened(medium, cap_bytes) as adapter:
            outcomes = await self.put(adapter, *range(count))
            assert medium.used_bytes() <= cap_bytes
            assert outcomes[-1] == STORED
            kept = medium.keys()
            assert key_of(count - 1) in kept

    async def test_a_record_larger_than_the_cap_is_refused_and_evicts_nothing(self, medium: Medium) -> None:
        if not self.has_cap:
            pytest.skip("this adapter has no cap of its own")
        async with self.opened(medium, 3 * self.cap_scale * (record_length(SIZE) + 4096)) as adapter:
            await self.put(adapter, 1)
            [outcome] = await self.put(adapter, 2, size=10 * self.cap_scale * SIZE)
            assert outcome.outcome in (Outcome.THROTTLED, Outcome.FAILED)
            assert outcome.reason
            assert await self.load(adapter, 1) == [LOADED]

    async def test_the_cap_counts_what_earlier_servers_left(self, medium: Medium) -> None:
        if not self.has_cap:
            pytest.skip("this adapter has no cap of its own")
        one = self.cap_scale * (record_length(SIZE) + 4096)
        async with self.opened(medium, 8 * one) as adapter:
            if not adapter.capabilities.persistent:
                pytest.skip("this adapter keeps nothing across restarts")
            await self.put(adapter, *range(6 * self.cap_scale))
        async with self.opened(medium, 4 * one) as adapter:
            assert await self.put(adapter, 50 * self.cap_scale) == [STORED]
            assert medium.used_bytes() <= 4 * one
            kept = medium.keys()
            assert key_of(50 * self.cap_scale) in kept

    # -- life ----------------------------------------------------------------------------------------------

    async def test_records_survive_a_reopening_where_persistence_is_claimed(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 2)
            before = await adapter.usage()
        async with self.opened(medium) as adapter:
            if not adapter.capabilities.persistent:
                loads = await self.load(adapter, 1, 2)
                assert set(loads) <= {ABSENT, *([LOADED] if adapter.capabilities.shared else [])}
                return
            assert adapter.capabilities.shared or await adapter.usage() == before
            assert await self.load(adapter, 1, 2) == [LOADED, LOADED]
            assert await self.put(adapter, 1) == [EXISTS]

    async def test_usage_counts_records_and_bytes(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            assert (await adapter.usage()).records == 0
            await self.put(adapter, 1, 2)
            usage = await adapter.usage()
            assert usage.records == 2
            assert usage.used_bytes >= 2 * record_length(SIZE)
            if adapter.capabilities.can_delete:
                await adapter.delete(b"".join([key_of(1), key_of(2)]))
                assert (await adapter.usage()).used_bytes == 0

    async def test_close_may_be_called_twice(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1)
            await adapter.close()
            await adapter.close()

    async def test_an_adapter_closed_before_it_was_opened_is_closed(self, medium: Medium) -> None:
        adapter = self.make_adapter(medium)
        await adapter.close()


class HostedContract(AdapterContract):
    """The contract for an adapter in an adapter host (`"isolation": "process"`), and for crashes of that host.

    This process watches the holds while the host uses their bytes, so tests cannot block the adapter in a thread.
    """

    waits_in_threads = False

    @abstractmethod
    def entry(self, medium: Medium, capacity_bytes: int = 0) -> dict[str, Any]:
        """The entry of `l2_adapters` for the adapter on that medium."""

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> HostedAdapter:
        """The adapter of `entry`, in an adapter host."""
        entry = self.entry(medium, capacity_bytes)
        return HostedAdapter(configure_tier(entry, 0), kill_ms=600_000, max_pause_s=0.1)

    @pytest.mark.parametrize("seed", range(3))
    async def test_a_crash_of_the_host_frees_its_bytes_and_loses_nothing_stored(
        self, medium: Medium, seed: int
    ) -> None:
        chance = random.Random(seed)
        stored: set[int] = set()
        adapter = self.make_adapter(medium)
        await adapter.open(lent_context(lambda key: None))
        try:
            for number in range(12):
                await _until_up(adapter)
                if number == 0 or chance.random() < 0.25:
                    asyncio.get_running_loop().call_later(chance.uniform(0, 0.004), _crash, adapter)
                numbers = [2 * number, 2 * number + 1, chance.randrange(2 * number + 1)]
                for n, outcome in zip(numbers, await self.put(adapter, *numbers), strict=True):
                    if outcome.outcome in (Outcome.STORED, Outcome.EXISTS):
                        stored.add(n)
                    else:
                        assert outcome.reason in ("host_died", "host_down"), (seed, outcome)
                loads = await self.load(adapter, *numbers)  # checks the bytes of loaded records
                assert Outcome.CORRUPT not in [load.outcome for load in loads], (seed, loads)
            await _until_up(adapter)
            restarts = adapter.host_status()["restarts"]
            persistent = adapter.capabilities.persistent
        finally:
            await adapter.close()
        assert restarts >= 1, seed
        async with self.opened(medium) as reopened:
            for number in range(24):
                [load] = await self.load(reopened, number)
                may_be_absent = not (persistent and number in stored)
                assert load == LOADED or (may_be_absent and load == ABSENT), (seed, number, load)
                assert (await self.put(reopened, number))[0].outcome in (Outcome.STORED, Outcome.EXISTS)


def _crash(adapter: HostedAdapter) -> None:
    pid = adapter.host_status()["pid"]
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _until_up(adapter: HostedAdapter) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while adapter.host_status()["state"] != "up":
        assert time.monotonic() < deadline_s, f"the host does not come back: {adapter.host_status()}"
        await asyncio.sleep(0.005)
