"""controller/syncs.py: batches of events in order, gaps that call for a full sync, and the parts of one."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.controller.member import Member
from kvstrata.controller.syncs import MAX_PARTS_AHEAD
from kvstrata.errors import KvstrataError
from kvstrata.native.core import crc32c
from kvstrata.rpc import cluster_wire as wire
from tests.harness.cluster_instance import tags_of
from tests.harness.known_members import KnownMembers
from tests.unit.controller.member_messages import CURRENT, events, heartbeat, in_state

pytestmark = pytest.mark.usefixtures("patience_of_production")


def part(index: int, sync: int = 1, tags: bytes = b"", **changes: Any) -> wire.SyncPart:
    tags = tags or tags_of([index])
    fields = {"tier": "l1", "tags": tags, "crc": crc32c(tags), **changes}
    return wire.SyncPart(1, "a", CURRENT, sync, index, **fields)


def end(parts: int, count: int, sync: int = 1) -> wire.SyncEnd:
    return wire.SyncEnd(1, "a", CURRENT, sync, parts, {"l1": count})


# --- events -----------------------------------------------------------------------------------------------------


def test_a_sync_that_does_not_begin_is_asked_for_again():
    known = in_state("confirmed")
    known.events(events(5))
    (first,) = known.heartbeat(heartbeat(last_event=5), 10.0)
    known.heartbeat(heartbeat(last_event=5, results=[wire.CommandResult(first.number, True, "")]), 11.0)
    (second,) = known.heartbeat(heartbeat(last_event=5), 16.0)
    assert second.number > first.number


def test_a_missing_last_batch_counts_as_lost_after_a_while():
    known = in_state("confirmed")
    for now_s in (1.0, 2.0):
        assert known.heartbeat(heartbeat(last_event=1), now_s) == []
    assert known.get("a").confirmed  # the batch may be under way
    known.heartbeat(heartbeat(last_event=1), 3.5)
    assert not known.get("a").confirmed


def test_a_last_batch_that_comes_late_does_not_count_as_lost():
    known = in_state("confirmed")
    known.heartbeat(heartbeat(last_event=2), 1.0)
    known.events(events(1))
    known.heartbeat(heartbeat(last_event=2), 3.5)
    known.events(events(2))
    known.heartbeat(heartbeat(last_event=2), 9.0)
    assert known.get("a").confirmed


def test_an_invalid_batch_is_dropped_and_calls_for_a_full_sync():
    for bad in (
        events(1, tags=b"1234567"),
        events(1, tier="disk-9"),
        wire.Events("a", CURRENT, 1, [wire.Run(wire.Change.CLEAR, "l1", bytes(8))]),
    ):
        known = in_state("confirmed")
        assert known.events(bad) is None and not known.get("a").confirmed


# --- full syncs ---------------------------------------------------------------------------------------------------


def begun() -> tuple[KnownMembers, Member]:
    known = in_state("confirmed")
    member, _ = known.sync_begin(wire.SyncBegin(1, "a", CURRENT, 2, 4), 1.0)
    return known, member


def test_a_wrong_part_is_refused_and_changes_nothing():
    for wrong, field in (
        (part(0, 3), "sync"),
        (part(0, 2, tier="disk-9"), "tier"),
        (part(0, 2, tags=b"1234567"), "tags"),
        (part(0, 2, crc=0), "crc"),
        (part(1 << 30, 2), "index"),
    ):
        known, member = begun()
        with pytest.raises(KvstrataError) as denied:
            known.sync_part(wrong, 1.0)
        assert (denied.value.code, denied.value.field) == ("bad_sync", field)
        assert member.sync is not None and member.sync.parts == 0 and not member.sync.tags


def test_parts_that_arrive_ahead_of_a_missing_one_are_bounded():
    known, _ = begun()
    for index in range(1, MAX_PARTS_AHEAD + 1):
        known.sync_part(part(index, 2), 1.0)
    with pytest.raises(KvstrataError, match="part 0 is missing"):
        known.sync_part(part(MAX_PARTS_AHEAD + 1, 2), 1.0)


def test_an_end_with_wrong_counts_does_not_end_the_full_sync():
    for parts, count, sent in ((1, 1, []), (1, 2, [0]), (0, 0, [0])):
        known, member = begun()
        for index in sent:
            known.sync_part(part(index, 2), 1.0)
        with pytest.raises(KvstrataError) as denied:
            known.sync_end(end(parts, count, 2), 1.0)
        assert (denied.value.code, denied.value.retryable) == ("bad_sync", True)
        assert member.sync is None and not member.confirmed and member.synced_number == 1


def test_a_full_sync_that_has_ended_cannot_begin_again_but_its_end_may_be_repeated():
    known, member = begun()
    _, sync = known.sync_end(end(0, 0, 2), 1.0)
    assert known.sync_end(end(0, 0, 2), 1.0)[1] is None
    assert known.syncs.done(member, sync, 1.0) and not known.syncs.done(member, sync, 1.0)
    assert known.sync_end(end(0, 0, 2), 1.0)[1] is None
    with pytest.raises(KvstrataError, match="greater"):
        known.sync_begin(wire.SyncBegin(1, "a", CURRENT, 2, 4), 1.0)


def test_no_full_sync_begins_while_another_is_being_applied():
    known, member = begun()
    _, sync = known.sync_end(end(0, 0, 2), 1.0)
    with pytest.raises(KvstrataError) as denied:
        known.sync_begin(wire.SyncBegin(1, "a", CURRENT, 3, 4), 1.0)
    assert denied.value.retryable and member.sync is sync
