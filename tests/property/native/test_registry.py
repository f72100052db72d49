"""A wrong call of the registry is refused with the argument that is wrong, and changes nothing."""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.core import MAX_SLOTS, Registry, RegistryError
from tests.oracles.registry import TAG_MASK


def visible(registry: Registry, group: int = 0, rank: int = 0) -> int:
    slot = registry.open_slot(group, rank=rank)
    assert slot is not None
    registry.publish(slot)
    return slot


@given(st.binary(max_size=80).filter(lambda tags: len(tags) % 8))
def test_truncated_tags_are_refused(tags: bytes) -> None:
    registry = Registry()
    slot = visible(registry)
    calls: list[Callable[[], object]] = [
        lambda: registry.admit(slot, tags),
        lambda: registry.evict(slot, tags),
        lambda: registry.holders(tags),
        lambda: registry.lookup_prefix(tags),
        lambda: registry.restore(tags, b"", b""),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"tags: .* not {len(tags)}"):
            call()
    assert registry.usage().placements == 0


@given(st.lists(st.integers(0, 2**64 - 1), unique_by=lambda tag: tag & TAG_MASK), st.integers(0, 7))
def test_tags_are_read_wherever_they_lie_in_a_message(tags: list[int], offset: int) -> None:
    registry = Registry()
    slot = visible(registry)
    message = memoryview(bytes(offset) + struct.pack(f"<{len(tags)}Q", *tags) + b"end")
    part = message[offset : offset + 8 * len(tags)]
    assert registry.admit(slot, part) == len(tags)
    assert registry.holders(part) == [(slot,)] * len(tags)
    dumped, slots, cursor = registry.dump(0, 1 << 40)
    assert cursor == 0
    assert sorted(dumped) == sorted(tag & TAG_MASK for tag in tags)
    assert set(slots) <= {slot}


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda registry: Registry(max_bytes=1 << 20), "max_bytes"),
        (lambda registry: Registry(max_bytes=1 << 50), "max_bytes"),
        (lambda registry: Registry(max_slots=0), "max_slots"),
        (lambda registry: Registry(max_slots=MAX_SLOTS + 1), "max_slots"),
        (lambda registry: registry.open_slot(65_536), "group"),
        (lambda registry: registry.open_slot(-1), "group"),
        (lambda registry: registry.open_slot(0, rank=256), "rank"),
        (lambda registry: registry.slot(1 << 16), "slot"),
        (lambda registry: registry.admit(-1, b""), "slot"),
        (lambda registry: registry.publish(1, retire=0), "retire"),
        (lambda registry: registry.lookup_prefix(bytes(24), n_slices=2), "tags"),
        (lambda registry: registry.lookup_prefix(bytes(24), n_slices=0), "tags"),
        (lambda registry: registry.lookup_prefix(bytes(24), best=0), "best"),
        (lambda registry: registry.lookup_prefix(bytes(24), except_group=1 << 16), "except_group"),
        (lambda registry: registry.restore(bytes(16), bytes(2), b""), "slots"),
        (lambda registry: registry.restore(bytes(8), b"x", b""), "slots"),
        (lambda registry: registry.dump(2000), "cursor"),
    ],
)
def test_a_value_out_of_range_is_named(call: Callable[[Registry], object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        call(Registry())


@pytest.mark.parametrize("tag", [-1, 1 << 64])
def test_a_tag_has_64_bits(tag: int) -> None:
    with pytest.raises(OverflowError):
        Registry().lookup(tag)


@pytest.mark.parametrize("slot", [0, 5, MAX_SLOTS])
def test_a_slot_that_is_not_open_is_refused(slot: int) -> None:
    registry = Registry(max_slots=4)
    for call in (
        lambda: registry.admit(slot, bytes(8)),
        lambda: registry.evict(slot, bytes(8)),
        lambda: registry.publish(slot),
        lambda: registry.retire(slot),
        lambda: registry.restore(bytes(8), array("H", [1]), array("H", [0, slot or 9])),
    ):
        with pytest.raises(RegistryError) as refused:
            call()
        assert refused.value.reason == "bad_slot"
    assert registry.slot(slot) is None
    assert registry.usage().placements == 0


def test_no_slot_is_free_until_a_retired_one_is_swept() -> None:
    registry = Registry(max_slots=2)
    first, second = visible(registry), visible(registry)
    assert registry.open_slot(0) is None
    registry.retire(first)
    assert registry.open_slot(0) is None
    assert registry.sweep(1) > 0
    assert registry.open_slot(0) is None
    while registry.sweep():
        pass
    assert registry.open_slot(0) == first != second


def test_a_hidden_slot_replaces_another_one_at_once() -> None:
    registry = Registry()
    before = visible(registry)
    registry.admit(before, array("Q", [1 << 40, 2 << 40]))
    now = registry.open_slot(0)
    assert now is not None
    registry.admit(now, array("Q", [2 << 40, 3 << 40]))
    assert registry.lookup(2 << 40) == (before,)
    registry.publish(now, retire=before)
    assert [registry.lookup(tag << 40) for tag in (1, 2, 3)] == [(), (now,), (now,)]


def test_tags_collide_as_seldom_as_the_page_says() -> None:
    registry = Registry()
    slot = visible(registry)
    tag = 0x0123456789ABCDEF
    registry.admit(slot, array("Q", [tag]))
    found = [bit for bit in range(64) if registry.lookup(tag ^ 1 << bit)]
    assert found == list(range(7))


def test_other_threads_can_look_up_while_a_report_is_applied() -> None:
    registry = Registry()
    steady = visible(registry, group=1)
    known = array("Q", [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(1, 513)])
    registry.admit(steady, known)
    begun, wrong = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            best = registry.lookup_prefix(known, except_group=2)
            if [(each.group, each.chunks) for each in best] != [(1, 512)]:
                wrong.append(best)
            begun.set()

    done = threading.Event()
    reader = threading.Thread(target=look)
    reader.start()
    try:
        assert begun.wait(60)
        for report in range(5):
            slot = registry.open_slot(2)
            assert slot is not None
            numbers = range(report << 32, (report << 32) + 5000)
            registry.admit(slot, known)
            registry.admit(slot, array("Q", [number * 0xD6E8FEB86659FD93 % 2**64 for number in numbers]))
            registry.publish(slot)
            registry.retire(slot)
            while registry.sweep():
                pass
    finally:
        done.set()
        reader.join()
    assert not wrong
    assert registry.usage().placements == 512
