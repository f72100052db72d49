"""A wrong call of the registry is refused with the argument that is wrong, and changes nothing."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.native.core import Registry
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


def test_tags_collide_as_seldom_as_the_page_says() -> None:
    registry = Registry()
    slot = visible(registry)
    tag = 0x0123456789ABCDEF
    registry.admit(slot, array("Q", [tag]))
    found = [bit for bit in range(64) if registry.lookup(tag ^ 1 << bit)]
    assert found == list(range(7))
