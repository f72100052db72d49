"""server/cluster/events.py and the pool's events for it: in order, and within bounds."""

from __future__ import annotations

import hashlib

from kvstrata.rpc.cluster_fields import TAG_BYTES
from kvstrata.rpc.cluster_wire import MAX_RUNS, Change, tags_of
from kvstrata.server.cluster.events import (
    BATCH_TAGS,
    L1_TIER,
    MAX_L2_TAGS,
    MAX_QUEUED_RUNS,
    MAX_QUEUED_TAGS,
    EventQueue,
    TierTags,
)
from kvstrata.testing.strategies import IDENTITY
from tests.harness.l1 import L1, chain


def tag(number: int) -> bytes:
    return number.to_bytes(TAG_BYTES, "little")


def test_events_keep_their_order_and_neighbours_of_one_kind_are_merged() -> None:
    queue = EventQueue()
    for change, number in ((Change.ADMIT, 1), (Change.ADMIT, 2), (Change.EVICT, 1), (Change.ADMIT, 1)):
        queue.add(change, L1_TIER, tag(number))
    queue.add(Change.ADMIT, "fs-0", tag(1))
    queue.add(Change.CLEAR, "fs-0")
    assert queue.n_tags == 5
    assert [tuple(run) for run in map(tuple_of, queue.take())] == [
        (Change.ADMIT, L1_TIER, tag(1) + tag(2)),
        (Change.EVICT, L1_TIER, tag(1)),
        (Change.ADMIT, L1_TIER, tag(1)),
        (Change.ADMIT, "fs-0", tag(1)),
        (Change.CLEAR, "fs-0", b""),
    ]
    assert queue.n_tags == 0
    assert queue.take() == []


def tuple_of(run: object) -> tuple[object, ...]:
    return (run.change, run.tier, run.tags)  # type: ignore[attr-defined]


def test_a_message_of_events_is_bounded_and_the_rest_follows() -> None:
    queue = EventQueue()
    for number in range(3 * BATCH_TAGS):
        queue.add(Change.ADMIT, L1_TIER, tag(number))
    taken = []
    while runs := queue.take():
        assert sum(len(run.tags) for run in runs) <= 2 * BATCH_TAGS * TAG_BYTES
        taken += [run.tags for run in runs]
    assert b"".join(taken) == b"".join(tag(number) for number in range(3 * BATCH_TAGS))
    for number in range(2 * MAX_RUNS):
        queue.add(Change(number % 2), L1_TIER, tag(number))
    assert len(queue.take()) == MAX_RUNS


def test_an_overflow_drops_all_events_and_is_reported_until_it_is_cleared() -> None:
    queue = EventQueue()
    for _ in range(MAX_QUEUED_TAGS // 1_024):
        queue.add(Change.ADMIT, L1_TIER, bytes(1_024 * TAG_BYTES))
    assert not queue.overflowed
    queue.add(Change.ADMIT, L1_TIER, tag(1))
    assert queue.overflowed
    assert (len(queue), queue.n_tags) == (0, 0)
    queue.add(Change.ADMIT, L1_TIER, tag(1))
    assert len(queue) == 0
    queue.clear()
    queue.add(Change.ADMIT, L1_TIER, tag(1))
    assert len(queue) == 1


def test_many_short_runs_of_events_overflow_too() -> None:
    queue = EventQueue()
    for number in range(MAX_QUEUED_RUNS + 1):
        queue.add(Change(number % 2), L1_TIER, tag(number))
    assert queue.overflowed


def test_the_memory_of_a_tiers_chunks_is_bounded() -> None:
    tiers = TierTags()
    keys = [hashlib.sha256(b"%d" % number).digest() for number in range(3)]
    tiers.admit("fs-0", keys)
    tiers.evict("fs-0", keys[1:2])
    tiers.evict("other", keys)
    assert tiers.of("fs-0") == tags_of(keys[0] + keys[2])
    tiers.clear("fs-0")
    assert tiers.of("fs-0") == b""
    tiers.admit("fs-0", (tag(number) for number in range(MAX_L2_TAGS + 5)))
    assert tiers.count("fs-0") == MAX_L2_TAGS
    assert tiers.of("fs-0")[:TAG_BYTES] == tag(5)


def test_the_pool_lists_the_tags_of_what_is_visible_in_slices() -> None:
    l1 = L1()
    keys = l1.store(chain("a", 20))
    l1.pool.reserve(chain("b", 1)[0], b"", 60_000, l1.row, IDENTITY)
    l1.lose(keys[15:])
    found, entry = bytearray(), 0
    while True:
        tags, entry = l1.pool.ready_tags(entry, 3)
        assert len(tags) <= 3 * TAG_BYTES
        found += tags
        if not entry:
            break
    assert sorted(found[at : at + 8] for at in range(0, len(found), 8)) == sorted(
        key[:TAG_BYTES] for key in keys[:15]
    )
    assert l1.pool.ready_tags(1 << 40, 1) == (b"", 0)
