"""The registry against its oracle: any order of slots opened, filled, published, retired, swept and used again.

Tags come from a small set, in few partitions and neighbourhoods, and some are equal in the stored bits, so that they
collide; some batches are so large that partitions grow.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.native.core import Registry, RegistryError
from tests.oracles.registry import TAG_MASK, OracleRegistry

MAX_SLOTS = 12
GROUPS = 4
FEW = [
    partition << 54 | home << 22 | low
    for partition in (0, 1023)
    for home in (0, 1, 2**32 - 1)
    for low in (0, 64)
]
FEW += [tag | 63 for tag in FEW[:3]]

few_tags = st.lists(st.sampled_from(FEW), max_size=8)
# Enough tags of one partition to make it grow; some of them lie in lines of their own.
many_tags = st.builds(
    lambda begin, count, partition: [
        partition << 54 | (number * 0x9E3779B97F4A7C15 & 2**54 - 1) for number in range(begin, begin + count)
    ],
    st.integers(0, 3000),
    st.integers(0, 4000),
    st.sampled_from([0, 1023]),
)
tag_lists = st.one_of(few_tags, few_tags, many_tags)


def packed(tags: Sequence[int]) -> array[int]:
    return array("Q", tags)


class RegistryMachine(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.registry = Registry(max_slots=MAX_SLOTS, max_bytes=64 << 20)
        self.oracle = OracleRegistry()
        self.seen: set[int] = set(FEW)

    def slots(self) -> list[int]:
        return sorted(self.oracle.state)

    @rule(group=st.integers(0, GROUPS - 1), publish=st.booleans())
    def open_slot(self, group: int, publish: bool) -> None:
        slot = self.registry.open_slot(group)
        if slot is None:
            assert len(self.oracle.state) == MAX_SLOTS
            return
        self.oracle.open_slot(slot, group)
        if publish:
            self.registry.publish(slot)
            self.oracle.publish(slot, None)

    @precondition(lambda self: self.oracle.state)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots()))
        retire = data.draw(st.one_of(st.none(), st.sampled_from(self.slots())))
        if self.oracle.publish(slot, retire):
            self.registry.publish(slot, retire=retire)
        else:
            with pytest.raises(RegistryError) as refused:
                self.registry.publish(slot, retire=retire)
            assert refused.value.reason == "bad_slot"

    @rule(slot=st.integers(0, MAX_SLOTS + 1))
    def retire(self, slot: int) -> None:
        if self.oracle.retire(slot):
            self.registry.retire(slot)
        else:
            with pytest.raises(RegistryError):
                self.registry.retire(slot)

    @rule(slot=st.integers(0, MAX_SLOTS + 1), tags=tag_lists, admit=st.sampled_from([True, True, False]))
    def admit_or_evict(self, slot: int, tags: list[int], admit: bool) -> None:
        change = self.registry.admit if admit else self.registry.evict
        if not self.oracle.can_be_filled(slot):
            with pytest.raises(RegistryError):
                change(slot, packed(tags))
            return
        self.seen.update(tags[:8])
        expected = (self.oracle.admit if admit else self.oracle.evict)(slot, tags)
        assert change(slot, packed(tags)) == expected

    @rule(tags=few_tags)
    def all_slots_admit(self, tags: list[int]) -> None:
        for slot in self.slots():
            if self.oracle.can_be_filled(slot):
                assert self.registry.admit(slot, packed(tags)) == self.oracle.admit(slot, tags)

    @rule(steps=st.integers(1, 3))
    def sweep(self, steps: int) -> None:
        for _ in range(steps):
            self.registry.sweep(1 << 30)
        for slot in self.slots():
            if self.registry.slot(slot) is None:
                self.oracle.free(slot)

    @rule()
    def two_passes_free_all_that_is_retired(self) -> None:
        while self.registry.sweep(3000):
            pass
        for slot in self.slots():
            row = self.registry.slot(slot)
            assert (row is None) == (self.oracle.state[slot] == "retired")
            if row is None:
                self.oracle.free(slot)

    @rule(
        data=st.data(),
        n_slices=st.integers(1, 2),
        best=st.integers(1, 3),
        allowed=st.one_of(st.none(), st.binary(max_size=2)),
        except_group=st.one_of(st.none(), st.integers(0, GROUPS - 1)),
    )
    def prefix(
        self, data: st.DataObject, n_slices: int, best: int, allowed: bytes | None, except_group: int | None
    ) -> None:
        chunks = data.draw(st.lists(st.sampled_from(sorted(self.seen)), max_size=12))
        tags = chunks[: len(chunks) // n_slices * n_slices]

        def counts(slot: int) -> bool:
            here = allowed is None or (slot >> 3 < len(allowed) and allowed[slot >> 3] >> (slot & 7) & 1)
            return bool(here) and self.oracle.group[slot] != except_group

        found = self.registry.lookup_prefix(
            packed(tags), n_slices=n_slices, allowed=allowed, except_group=except_group, best=best
        )
        expected = self.oracle.lookup_prefix(tags, n_slices, counts)
        assert [chunks for _, chunks in found] == sorted(expected.values(), reverse=True)[:best]
        assert len(dict(found)) == len(found) and dict(found).items() <= expected.items()

    @rule(damage=st.integers(0, 2**30))
    def dump_and_restore(self, damage: int) -> None:
        """Also with a bit that has flipped, after which nothing of its partition may be there."""
        dumps = list(iter(map(self.registry.dump, itertools.count()).__next__, b""))
        content, tags = b"".join(dumps), sorted(self.seen)
        other = Registry(max_slots=MAX_SLOTS + 1, max_bytes=64 << 20)
        slot_of = array("H", [other.open_slot(0) or 0] * 65_536)
        visible = sorted(slot for slot, state in self.oracle.state.items() if state == "visible")
        for slot in visible:
            slot_of[slot] = other.open_slot(slot) or 0
            other.publish(slot_of[slot])
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            assert other.restore(file.name, 0, len(content), slot_of) == other.usage().placements
            for slots, tag in zip(other.holders(packed(tags)), tags, strict=True):
                assert {row.group for slot in slots if (row := other.slot(slot))} == self.oracle.holders(tag)
            for slot in visible:  # the restored one can be changed as any
                other.evict(slot_of[slot], packed(tags))
            assert not any(other.holders(packed(tags)))
            at = damage % len(content)
            os.pwrite(file.fileno(), bytes([content[at] ^ 1 << damage % 8]), at)
            broken = Registry(max_bytes=64 << 20)
            with pytest.raises(RegistryError) as damaged:
                broken.restore(file.name, 0, len(content), array("H", [broken.open_slot(0) or 0] * 65_536))
            assert damaged.value.reason == "damaged"

    @invariant()
    def lookups_and_counts_are_the_oracles(self) -> None:
        tags = sorted(self.seen)
        expected = [self.oracle.holders(tag) for tag in tags]
        found = self.registry.holders(packed(tags))
        assert [set(each) for each in found] == expected
        assert all(len(set(each)) == len(each) for each in found)
        found_rows = map(self.registry.slot, range(1, MAX_SLOTS + 1))
        rows = {row.slot: row for row in found_rows if row is not None}
        assert {slot: row.state for slot, row in rows.items()} == self.oracle.state
        for slot, row in rows.items():
            assert row.group == self.oracle.group[slot]
            if row.state != "retired":
                assert row.keys == len(self.oracle.tags[slot])
        usage = self.registry.usage()
        assert usage.placements == sum(row.keys for row in rows.values())
        assert (usage.slots, usage.retired) == (
            len(rows),
            sum(row.state == "retired" for row in rows.values()),
        )
        assert usage.refused == 0


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRegistryMachine = RegistryMachine.TestCase


def test_tags_that_differ_only_in_bits_that_are_not_stored_are_one() -> None:
    registry = Registry()
    slot = registry.open_slot(7)
    assert slot is not None
    registry.publish(slot)
    assert registry.admit(slot, packed([2**64 - 1, 2**64 - 128])) == 1
    assert registry.holders(packed([TAG_MASK, 2**64 - 1])) == [(slot,), (slot,)]
