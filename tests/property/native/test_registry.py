"""A wrong call of the registry is refused with the argument that is wrong, and changes nothing."""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.core import Registry
from tests.oracles.registry import TAG_MASK


def visible(registry: Registry, group: int = 0) -> int:
    slot = registry.open_slot(group)
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


def test_tags_collide_as_seldom_as_the_page_says() -> None:
    registry = Registry()
    slot = visible(registry)
    tag = 0x0123456789ABCDEF
    registry.admit(slot, array("Q", [tag]))
    found = registry.holders(array("Q", [tag ^ 1 << bit for bit in range(64)]))
    assert [bit for bit in range(64) if found[bit]] == list(range(7))


def test_other_threads_can_look_up_while_a_report_is_applied() -> None:
    registry = Registry()
    steady = visible(registry, group=1)
    known = array("Q", [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(1, 513)])
    registry.admit(steady, known)
    begun, wrong = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            best = registry.lookup_prefix(known, except_group=2)
            if best != [(1, 512)]:
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
