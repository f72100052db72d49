"""controller/members.py: every state of a member × every message, and the clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.controller.member import MemberState
from kvstrata.controller.members import MAX_DEAD
from kvstrata.errors import KvstrataError
from kvstrata.rpc import cluster_wire as wire
from tests.harness.cluster_instance import LOAD
from tests.harness.known_members import KEY, KnownMembers
from tests.unit.controller.member_messages import CURRENT, NEXT, OLD, in_state, register

REQUESTS: dict[str, Callable[..., Any]] = {
    "register": lambda known, who, **key: known.register(register(who), 33.0, **key),
    "goodbye": lambda known, who, **key: known.goodbye(wire.Goodbye(1, "a", who), **key),
}
OK = ""
TABLE = {
    # state: (answer to the member's own incarnation, to the superseded one, to another one), by request
    "unknown": {"register": (OK, OK, OK), "goodbye": (OK, OK, OK)},
    "restored": {"register": (OK, OK, OK), "goodbye": ("unknown_instance",) * 3},
    "live": {"register": (OK, "superseded", OK), "goodbye": (OK, OK, "unknown_instance")},
    "dead": {"register": (OK, OK, OK), "goodbye": ("unknown_instance", OK, "unknown_instance")},
    "gone": {"register": (OK, OK, OK), "goodbye": (OK, OK, OK)},
}  # fmt: skip


EVERY_REQUEST = list(itertools.product(REQUESTS, (CURRENT, OLD, NEXT)))


@pytest.mark.parametrize("state", TABLE)
def test_each_request_in_each_state(state):
    for request_name, who in EVERY_REQUEST:
        known = in_state(state)
        before = known.get("a")
        expected = TABLE[state][request_name][(CURRENT, OLD, NEXT).index(who)]
        try:
            REQUESTS[request_name](known, who)
            code = OK
        except KvstrataError as denied:
            code = denied.code
            assert known.get("a") is before
        assert code == expected, (request_name, who)
        after = known.get("a")
        if request_name == "register" and not expected:
            assert after is not None and (after.state, after.incarnation) == (MemberState.LIVE, who)


def test_a_superseded_incarnation_comes_back_once_its_successor_is_dead_and_the_successor_then_does_not():
    known = in_state("live")
    known.register(register(NEXT), 0.0)
    with pytest.raises(KvstrataError, match="another process has since registered"):
        known.register(register(CURRENT), 0.0)
    for now_s in range(0, 33, 3):
        known.tick(float(now_s))
    assert known.register(register(CURRENT), 34.0).superseded.count(NEXT) == 1
    for late in (NEXT, OLD):
        with pytest.raises(KvstrataError) as denied:
            known.register(register(late), 35.0)
        assert (denied.value.code, denied.value.retryable) == ("superseded", True)
    assert CURRENT not in known.get("a").superseded


def test_an_id_in_use_on_another_host_is_free_once_that_member_is_dead():
    known = in_state("live")
    with pytest.raises(KvstrataError) as denied:
        known.register(register(NEXT, host="two"), 12.0)
    assert denied.value.code == "instance_id_taken" and denied.value.retry_after_ms == 18_000
    with pytest.raises(KvstrataError):
        known.register(register(NEXT, host=""), 12.0)
    for now_s in range(0, 33, 3):
        known.tick(float(now_s))
    assert known.register(register(NEXT, host="two"), 31.0).incarnation == NEXT


def test_a_registration_that_is_repeated_is_no_answer_so_a_silent_member_still_dies():
    known = in_state("live")
    for now_s in range(0, 33, 3):
        if now_s < 30:
            known.register(register(), float(now_s))
        known.tick(float(now_s))
    assert known.get("a").state is MemberState.DEAD


def test_an_answer_keeps_a_member_alive_and_only_a_live_one():
    known = in_state("live")
    member = known.get("a")
    for now_s in range(0, 60, 3):
        known.members.heard(member, None, float(now_s))
        known.tick(float(now_s))
    assert member.state is MemberState.LIVE
    for now_s in range(60, 95, 3):
        known.tick(float(now_s))
    known.members.heard(member, wire.Condition("ready", LOAD, []), 95.0)
    assert member.state is MemberState.DEAD and member.heard_s < 60


def test_a_member_of_the_snapshot_that_does_not_come_back_is_forgotten_after_the_same_silence():
    known = in_state("restored")
    for now_s in (4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 29.9):
        known.tick(now_s)
    member = known.get("a")
    assert member.state is MemberState.RESTORED
    known.tick(30.0)
    assert known.get("a") is None and known.outbox.forgotten == [member]
    assert known.outbox.news[-1].kind == "did_not_come_back"


@pytest.mark.parametrize("incarnation", [CURRENT, NEXT])
def test_a_dead_member_that_comes_back_is_refused_if_others_have_taken_its_place(incarnation):
    known = KnownMembers(max_instances=1)
    known.register(register(), 0.0)
    for now_s in range(0, 33, 3):
        known.tick(now_s)
    assert known.get("a").state is MemberState.DEAD
    known.register(register(name="b"), 33.0)
    with pytest.raises(KvstrataError, match="1 instances are registered, the maximum"):
        known.register(register(incarnation), 34.0)
    assert known.get("a").state is MemberState.DEAD


def test_dead_members_are_bounded():
    known = KnownMembers(max_instances=1)
    for number in range(MAX_DEAD + 10):
        begin_s = 40.0 * number
        known.tick(begin_s)
        known.register(register(name=f"i{number}"), begin_s)
        for now_s in range(0, 33, 3):
            known.tick(begin_s + now_s)
    assert (
        len(known.members) == MAX_DEAD
        and known.get("i0") is None
        and known.get(f"i{MAX_DEAD + 9}") is not None
    )


def test_a_member_whose_key_is_listed_no_more_is_forgotten_when_it_registers_again():
    listed = {KEY: ("a",)}
    known = KnownMembers(listed=listed)
    known.register(register(), 0.0)
    listed[KEY] = ("b",)
    with pytest.raises(KvstrataError, match="does not list a"):
        known.register(register(), 1.0)
    assert known.get("a") is None
