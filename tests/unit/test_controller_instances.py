"""controller/members.py: every state of a member × every message, and the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvstrata.clock import SystemClock
from kvstrata.controller.members import (
    COMMAND_TTL_S,
    MAX_DEAD,
    MAX_PARTS_AHEAD,
    MAX_WAITING,
    Denied,
    Member,
    Members,
    MemberState,
)
from kvstrata.controller.orders import Orders
from kvstrata.native.copying import crc32c
from kvstrata.rpc import cluster_wire as wire
from tests.harness.cluster_instance import LOAD, tags_of

OLD, CURRENT, NEXT = 1, 2, 3
"""Incarnations: superseded, that of the member, another one."""


def members(**changes: Any) -> Members:
    settings: dict[str, Any] = {
        "orders": Orders(SystemClock()),
        "heartbeat_s": 10.0,
        "dead_after_s": 30.0,
        "max_instances": 8,
        "first_command": 100,
        "now_s": 0.0,
    }
    return Members(**{**settings, **changes})


def register(incarnation: int = CURRENT, name: str = "a", **changes: Any) -> wire.Register:
    fields: dict[str, Any] = {
        "protocol": wire.CLUSTER_PROTOCOL_VERSION,
        "version": "1",
        "tiers": ["l1", "disk-0"],
        "l1_bytes": 1 << 30,
        "chunk_tokens": 256,
        "peer_endpoint": "tcp://h:1",
        "http_url": "",
        "host": "one",
    }
    return wire.Register(1, instance=name, incarnation=incarnation, **{**fields, **changes})


def heartbeat(
    incarnation: int = CURRENT, last_event: int = 0, results: list[wire.CommandResult] | None = None
) -> wire.Heartbeat:
    return wire.Heartbeat(1, "a", incarnation, last_event, "ready", LOAD, [], results or [])


def events(seq: int, incarnation: int = CURRENT, tier: str = "l1", tags: bytes = b"") -> wire.Events:
    return wire.Events("a", incarnation, seq, [wire.Run(wire.Change.ADMIT, tier, tags or tags_of([seq]))])


def part(index: int, sync: int = 1, tags: bytes = b"", **changes: Any) -> wire.SyncPart:
    tags = tags or tags_of([index])
    fields = {"tier": "l1", "tags": tags, "crc": crc32c(tags), **changes}
    return wire.SyncPart(1, "a", CURRENT, sync, index, **fields)


def end(parts: int, count: int, sync: int = 1) -> wire.SyncEnd:
    return wire.SyncEnd(1, "a", CURRENT, sync, parts, {"l1": count})


def synced(known: Members, now_s: float = 0.0, sync: int = 1, seq: int = 0) -> Member:
    member, begun = known.sync_begin(wire.SyncBegin(1, "a", CURRENT, sync, seq), now_s)
    assert begun is not None
    _, ended = known.sync_end(wire.SyncEnd(1, "a", CURRENT, sync, 0, {}), now_s)
    assert ended is begun and known.sync_done(member, begun, now_s)
    return member


def in_state(state: str) -> Members:
    """With a member `a` of incarnation CURRENT in this state, after one of incarnation OLD."""
    known = members()
    if state == "unknown":
        return known
    if state == "restored":
        known.restore(register(), now_s=0.0)
        return known
    known.register(register(OLD), 0.0)
    known.register(register(), 0.0)
    if state == "confirmed":
        synced(known)
    if state == "dead":
        for now_s in range(0, 33, 3):
            known.tick(float(now_s))
    if state == "gone":
        known.goodbye(wire.Goodbye(1, "a", CURRENT), 0.0)
    return known


REQUESTS: dict[str, Callable[[Members, int], Any]] = {
    "register": lambda known, who: known.register(register(who), 33.0),
    "goodbye": lambda known, who: known.goodbye(wire.Goodbye(1, "a", who), 33.0),
    "heartbeat": lambda known, who: known.heartbeat(heartbeat(who), 33.0),
    "sync": lambda known, who: known.sync_begin(wire.SyncBegin(1, "a", who, 7, 0), 33.0),
}
OK = ""
TABLE = {
    # state: (of the member's own incarnation, of the superseded one, of another one); by request
    "unknown": {"register": (OK, OK, OK), "goodbye": (OK, OK, OK), "heartbeat": ("unknown_instance",) * 3,
                "sync": ("unknown_instance",) * 3},
    "restored": {"register": (OK, OK, OK), "goodbye": ("unknown_instance",) * 3,
                 "heartbeat": ("unknown_instance",) * 3, "sync": ("unknown_instance",) * 3},
    "live": {"register": (OK, "superseded", OK), "goodbye": (OK, OK, "unknown_instance"),
             "heartbeat": (OK, "superseded", "unknown_instance"), "sync": (OK, "superseded", "unknown_instance")},
    "confirmed": {"register": (OK, "superseded", OK), "goodbye": (OK, OK, "unknown_instance"),
                  "heartbeat": (OK, "superseded", "unknown_instance"), "sync": (OK, "superseded", "unknown_instance")},
    "dead": {"register": (OK, "superseded", OK), "goodbye": ("unknown_instance", OK, "unknown_instance"),
             "heartbeat": ("unknown_instance", "superseded", "unknown_instance"),
             "sync": ("unknown_instance", "superseded", "unknown_instance")},
    "gone": {"register": (OK, OK, OK), "goodbye": (OK, OK, OK), "heartbeat": ("unknown_instance",) * 3,
             "sync": ("unknown_instance",) * 3},
}  # fmt: skip


@pytest.mark.parametrize("who", [CURRENT, OLD, NEXT])
@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("state", TABLE)
def test_each_request_in_each_state(state, request_name, who):
    known = in_state(state)
    before = known.get("a")
    expected = TABLE[state][request_name][(CURRENT, OLD, NEXT).index(who)]
    if expected:
        with pytest.raises(Denied) as denied:
            REQUESTS[request_name](known, who)
        assert denied.value.code == expected
        assert known.get("a") is before
    else:
        REQUESTS[request_name](known, who)
    after = known.get("a")
    if request_name == "register" and not expected:
        assert after is not None and (after.state, after.incarnation) == (MemberState.LIVE, who)


@pytest.mark.parametrize(
    ("state", "who", "dropped"),
    [
        ("unknown", CURRENT, "unknown_instance"),
        ("gone", CURRENT, "unknown_instance"),
        ("restored", CURRENT, "restored_instance"),
        ("dead", CURRENT, "dead_instance"),
        ("live", OLD, "superseded"),
        ("live", NEXT, "superseded"),
        ("live", CURRENT, ""),
        ("confirmed", CURRENT, ""),
    ],
)
def test_events_count_only_of_who_lives(state, who, dropped):
    known = in_state(state)
    applied = known.events(events(1, who))
    assert (applied is None) == bool(dropped)
    assert known.dropped == ({dropped: 1} if dropped else {})


def test_what_another_incarnation_had_is_forgotten_and_its_commands_end():
    known = in_state("confirmed")
    member = known.get("a")
    issued = known.issue(member, wire.CommandKind.STATUS, {}, 1.0)
    known.forgotten.clear()
    known.register(register(NEXT), 2.0)
    assert known.forgotten == [member] and known.ended == [issued]
    assert issued.result is not None and not issued.result.ok


def test_an_id_on_another_host_waits_for_the_death_of_the_first():
    known = in_state("confirmed")
    with pytest.raises(Denied) as denied:
        known.register(register(NEXT, host="two"), 12.0)
    assert denied.value.code == "instance_id_taken" and denied.value.retry_after_ms == 18_000
    with pytest.raises(Denied):
        known.register(register(NEXT, host=""), 12.0)
    for now_s in range(0, 33, 3):
        known.tick(float(now_s))
    assert known.register(register(NEXT, host="two"), 31.0)[0].incarnation == NEXT


def test_a_member_is_dead_after_its_silence_and_not_before():
    known = in_state("confirmed")
    member = known.get("a")
    for now_s in (4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 29.9):
        known.tick(now_s)
        assert member.state is MemberState.LIVE
    known.tick(30.0)
    assert member.state is MemberState.DEAD and known.forgotten[-1] is member
    assert not member.readable and not member.confirmed


def test_each_request_is_a_sign_of_life():
    for speak in (
        lambda known: known.heartbeat(heartbeat(), 25.0),
        lambda known: known.sync_begin(wire.SyncBegin(1, "a", CURRENT, 5, 0), 25.0),
    ):
        known = in_state("confirmed")
        speak(known)
        for now_s in range(0, 52, 3):
            known.tick(float(now_s))
        assert known.get("a").state is MemberState.LIVE


@pytest.mark.parametrize("jump_s", [6.0, 1e3, 1e9])
def test_time_in_which_we_stood_still_is_nobodys_silence(jump_s):
    known = in_state("confirmed")
    known.tick(1.0)
    known.tick(1.0 + jump_s)
    assert known.get("a").heard_s <= 1.0 + jump_s
    known.tick(1.5 + jump_s)
    assert known.get("a").state is MemberState.LIVE
    for step in range(0, 40, 4):
        known.tick(1.5 + jump_s + step)
    assert known.get("a").state is MemberState.DEAD


def test_a_time_that_goes_back_kills_nobody():
    known = in_state("confirmed")
    known.heartbeat(heartbeat(), 4.0)
    known.tick(4.0)
    known.heartbeat(heartbeat(), 1.0)
    known.tick(2.0)
    assert known.get("a").state is MemberState.LIVE and known.get("a").heard_s == 4.0


def test_members_and_dead_ones_are_bounded():
    known = members(max_instances=3)
    for number in range(3):
        known.register(register(name=f"i{number}"), 0.0)
    with pytest.raises(Denied) as denied:
        known.register(register(name="more"), 0.0)
    assert denied.value.code == "refused" and denied.value.retry_after_ms > 0
    known.register(register(NEXT, name="i0"), 0.0)  # who is in stays in
    known = members(max_instances=1)
    for number in range(MAX_DEAD + 10):
        begin_s = 40.0 * number
        known.tick(begin_s)
        known.register(register(name=f"i{number}"), begin_s)
        for now_s in range(0, 33, 3):
            known.tick(begin_s + now_s)
    assert len(known) == MAX_DEAD and known.get("i0") is None and known.get(f"i{MAX_DEAD + 9}") is not None


# --- events -----------------------------------------------------------------------------------------------------


def test_batches_are_applied_once_and_in_order():
    known = in_state("confirmed")
    assert [known.events(events(seq)) is not None for seq in (1, 2, 2, 1, 3)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert known.get("a").confirmed and known.dropped == {"repeated": 2}


def test_a_gap_makes_inexact_and_asks_for_a_full_sync_until_it_begins():
    known = in_state("confirmed")
    member = known.get("a")
    assert known.events(events(3)) is member and not member.confirmed
    (asked,) = known.heartbeat(heartbeat(last_event=3), 10.0)
    assert asked.kind is wire.CommandKind.RESYNC
    assert known.heartbeat(heartbeat(last_event=3), 11.0) == [asked]
    synced(known, 12.0, sync=2, seq=3)
    assert member.confirmed and known.heartbeat(heartbeat(last_event=3), 13.0) == []


def test_a_sync_that_does_not_begin_is_asked_for_again():
    known = in_state("confirmed")
    known.events(events(5))
    (first,) = known.heartbeat(heartbeat(last_event=5), 10.0)
    known.heartbeat(heartbeat(last_event=5, results=[wire.CommandResult(first.number, True, "")]), 11.0)
    (second,) = known.heartbeat(heartbeat(last_event=5), 16.0)
    assert second.number > first.number


def test_a_tail_that_never_comes_is_lost_after_a_while():
    known = in_state("confirmed")
    for now_s in (1.0, 2.0):
        assert known.heartbeat(heartbeat(last_event=1), now_s) == []
    assert known.get("a").confirmed  # it may be on its way
    known.heartbeat(heartbeat(last_event=1), 3.5)
    assert not known.get("a").confirmed


def test_a_tail_that_comes_late_is_not_lost():
    known = in_state("confirmed")
    known.heartbeat(heartbeat(last_event=2), 1.0)
    known.events(events(1))
    known.heartbeat(heartbeat(last_event=2), 3.5)
    known.events(events(2))
    known.heartbeat(heartbeat(last_event=2), 9.0)
    assert known.get("a").confirmed


@pytest.mark.parametrize(
    "bad",
    [
        events(1, tags=b"1234567"),
        events(1, tier="disk-9"),
        wire.Events("a", CURRENT, 1, [wire.Run(wire.Change.CLEAR, "l1", bytes(8))]),
    ],
)
def test_a_batch_that_makes_no_sense_is_dropped_and_calls_for_a_sync(bad):
    known = in_state("confirmed")
    assert known.events(bad) is None and not known.get("a").confirmed


# --- full syncs ---------------------------------------------------------------------------------------------------


def begun() -> tuple[Members, Member]:
    known = in_state("confirmed")
    member, _ = known.sync_begin(wire.SyncBegin(1, "a", CURRENT, 2, 4), 1.0)
    return known, member


def test_parts_come_in_any_order_and_repeated():
    known, member = begun()
    taken = [known.sync_part(part(index, 2), 1.0)[2] for index in (2, 0, 0, 2, 1)]
    assert taken == [True, True, False, False, True]
    assert known.sync_end(end(3, 3, 2), 1.0)[1] is member.sync


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (part(0, 3), "sync"),
        (part(0, 2, tier="disk-9"), "tier"),
        (part(0, 2, tags=b"1234567"), "tags"),
        (part(0, 2, crc=0), "crc"),
        (part(1 << 30, 2), "index"),
    ],
)
def test_a_wrong_part_is_refused_and_changes_nothing(wrong, field):
    known, member = begun()
    with pytest.raises(Denied) as denied:
        known.sync_part(wrong, 1.0)
    assert (denied.value.code, denied.value.field) == ("bad_sync", field)
    assert member.sync is not None and member.sync.parts == 0 and not member.sync.tags


def test_parts_ahead_are_bounded():
    known, _ = begun()
    for index in range(1, MAX_PARTS_AHEAD + 1):
        known.sync_part(part(index, 2), 1.0)
    with pytest.raises(Denied, match="part 0 is missing"):
        known.sync_part(part(MAX_PARTS_AHEAD + 1, 2), 1.0)


@pytest.mark.parametrize(
    ("parts", "count", "sent"), [(1, 1, []), (1, 2, [0]), (2, 1, [0]), (2, 1, [1]), (0, 0, [0])]
)
def test_an_end_whose_counts_do_not_agree_ends_nothing(parts, count, sent):
    known, member = begun()
    for index in sent:
        known.sync_part(part(index, 2), 1.0)
    with pytest.raises(Denied) as denied:
        known.sync_end(end(parts, count, 2), 1.0)
    assert (denied.value.code, denied.value.retryable) == ("bad_sync", True)
    assert member.sync is None and not member.confirmed and member.synced_number == 1


def test_an_ended_sync_cannot_begin_again_and_its_end_may_be_repeated():
    known, member = begun()
    _, sync = known.sync_end(end(0, 0, 2), 1.0)
    assert known.sync_end(end(0, 0, 2), 1.0)[1] is None
    assert known.sync_done(member, sync, 1.0) and not known.sync_done(member, sync, 1.0)
    assert known.sync_end(end(0, 0, 2), 1.0)[1] is None
    with pytest.raises(Denied, match="greater"):
        known.sync_begin(wire.SyncBegin(1, "a", CURRENT, 2, 4), 1.0)


def test_no_sync_begins_while_another_comes_into_force():
    known, member = begun()
    _, sync = known.sync_end(end(0, 0, 2), 1.0)
    with pytest.raises(Denied) as denied:
        known.sync_begin(wire.SyncBegin(1, "a", CURRENT, 3, 4), 1.0)
    assert denied.value.retryable and member.sync is sync


def test_a_new_begin_ends_an_unfinished_sync():
    known, member = begun()
    known.sync_part(part(0, 2), 1.0)
    assert known.sync_begin(wire.SyncBegin(1, "a", CURRENT, 2, 4), 1.0)[1] is None  # repeated
    known.sync_begin(wire.SyncBegin(1, "a", CURRENT, 3, 4), 1.0)
    with pytest.raises(Denied):
        known.sync_part(part(1, 2), 1.0)
    assert member.sync is not None and member.sync.parts == 0


def test_a_sync_of_a_member_that_is_gone_is_not_done():
    known, member = begun()
    _, sync = known.sync_end(end(0, 0, 2), 1.0)
    known.register(register(NEXT), 2.0)
    assert not known.sync_done(member, sync, 2.0)


# --- commands -----------------------------------------------------------------------------------------------------


def test_a_command_is_repeated_until_its_one_result():
    known = in_state("confirmed")
    issued = known.issue(known.get("a"), wire.CommandKind.CLEAR, {"tier": "l1"}, 1.0)
    assert known.heartbeat(heartbeat(), 2.0) == known.heartbeat(heartbeat(), 3.0) == [issued.command]
    done = wire.CommandResult(issued.number, True, "", {"count": 1})
    assert known.heartbeat(heartbeat(results=[done]), 4.0) == []
    known.heartbeat(heartbeat(results=[wire.CommandResult(issued.number, False, "late")]), 5.0)
    assert issued.result is done and known.ended == [issued]


def test_results_of_nobodys_commands_are_ignored():
    known = in_state("confirmed")
    known.heartbeat(heartbeat(results=[wire.CommandResult(5, True, "")]), 1.0)
    assert known.ended == []


def test_commands_that_wait_are_bounded_expire_and_come_some_at_a_time():
    known = in_state("confirmed")
    member = known.get("a")
    for _ in range(MAX_WAITING):
        known.issue(member, wire.CommandKind.STATUS, {}, 1.0)
    with pytest.raises(Denied) as denied:
        known.issue(member, wire.CommandKind.STATUS, {}, 1.0)
    assert denied.value.code == "refused"
    assert len(known.heartbeat(heartbeat(), 1.0)) == wire.MAX_COMMANDS
    for now_s in range(1, round(COMMAND_TTL_S) + 5, 4):
        known.heartbeat(heartbeat(), float(now_s))
        known.tick(float(now_s))
    assert not member.waiting and len(known.ended) == MAX_WAITING
    assert not known.ended[0].result.ok


def test_an_answer_never_grows_beyond_a_message():
    known = in_state("confirmed")
    for _ in range(8):
        known.issue(known.get("a"), wire.CommandKind.EVICT, {"keys": bytes(2 << 20)}, 1.0)
    commands = known.heartbeat(heartbeat(), 1.0)
    assert commands and len(wire.encode(wire.Beat(1, 1, commands))) < wire.MAX_CLUSTER_MESSAGE_BYTES


@pytest.mark.parametrize("state", ["restored", "dead"])
def test_only_who_lives_can_be_asked(state):
    known = in_state(state)
    with pytest.raises(Denied) as denied:
        known.issue(known.get("a"), wire.CommandKind.STATUS, {}, 33.0)
    assert denied.value.code == "unavailable"


async def test_a_drain_and_an_undrain_reach_an_instance_that_was_cut_off_or_restarted():
    orders = Orders(SystemClock())
    known = members(orders=orders)
    known.register(register(), 0.0)

    def told(draining: bool, incarnation: int = CURRENT, now_s: float = 1.0) -> list[tuple[int, bool]]:
        """Commands of a heartbeat of an instance that says so of itself."""
        beat = msgspec.structs.replace(heartbeat(incarnation), draining=draining)
        commands = known.heartbeat(beat, now_s)
        return [(one.number, one.argument["on"]) for one in commands if one.kind is wire.CommandKind.DRAIN]

    def ended(number: int, draining: bool, incarnation: int = CURRENT) -> None:
        """Its result comes, and it has done so."""
        result = wire.CommandResult(number, True, "")
        beat = msgspec.structs.replace(heartbeat(incarnation, results=[result]), draining=draining)
        known.heartbeat(beat, 1.0)

    assert told(False) == []
    await orders.drain("a", True)
    [(number, on)] = told(False)
    assert on and told(False) == [(number, True)], "one command, until its result comes"
    ended(number, True)
    assert told(True) == []
    known.tick(1.0)
    known.tick(2.0)
    known._die(known.get("a"), 40.0)
    await orders.drain("a", False)
    known.register(register(), 41.0)
    [(number, on)] = told(True, now_s=42.0)
    assert not on
    ended(number, False)
    assert told(False, now_s=43.0) == []
    await orders.drain("a", True)
    member, _ = known.register(register(NEXT), 44.0)
    assert not member.readable
    [(_, on)] = told(False, NEXT, 45.0)
    assert on, "another process is told anew"


async def test_who_does_not_lead_tells_nobody_to_drain():
    orders = Orders(SystemClock())
    known = members(orders=orders)
    known.register(register(), 0.0)
    await orders.drain("a", True)
    assert known.heartbeat(heartbeat(), 1.0, leads=False) == []


async def test_who_was_removed_is_let_in_only_when_allowed():
    orders = Orders(SystemClock())
    known = members(orders=orders)
    known.register(register(), 0.0)
    await orders.remove("a", bar=True)
    known.remove(known.get("a"))
    with pytest.raises(Denied) as denied:
        known.register(register(NEXT), 1.0)
    assert denied.value.code == "not_permitted"
    assert await orders.allow("a") and not await orders.allow("a")
    known.register(register(NEXT), 1.0)
