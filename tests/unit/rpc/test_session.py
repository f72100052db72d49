"""rpc/session.py: every state of a request × every event, and the bounds of the remembered outcomes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata.errors import BadRequest, KvstrataError, Refused, UnknownSession
from kvstrata.rpc.session import Call, Effect, Limits, Sessions, State, Verdict
from tests.harness.cases import case

NAME = b"s" * 16
SEQ = 10
LATER = 99
"""A seq above the one under test, for pings."""


def encode_error(seq: int, error: KvstrataError) -> bytes:
    return f"{error.code} {seq}".encode()


CANCELLED = b"cancelled 10"
OVERDUE = b"deadline 10"


class World:
    """A table with one session, and the events of the request under test."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.core = Sessions(encode_error, limits)
        self.core.open(NAME)
        self.call: Call | None = None

    def ask(self, seq: int = SEQ, address: str = "a", op: str = "lookup") -> tuple[Verdict, Call]:
        receipt = self.core.request(NAME, seq, op, address, wanted_by_ping=op == "lookup")
        self.core.validate()
        return receipt.verdict, receipt.call

    def state(self) -> State | str:
        session = self.core.get(NAME)
        assert session is not None
        call = session.calls.get(SEQ)
        if call is not None:
            return call.state
        return "FORGOTTEN" if session.floor >= SEQ else "ABSENT"


def make(state: str) -> World:
    """A world in which the request under test is in `state`."""
    forgetful = Limits(max_outcomes=1, kept_anyway=0) if state.startswith("FORGOTTEN") else None
    world = World(forgetful)
    if state == "ABSENT":
        return world
    if state == "TOMBSTONE":
        world.core.cancel(NAME, SEQ)
        return world
    _, world.call = world.ask()
    if state == "RUNNING":
        return world
    if state == "CANCELLING":
        world.core.cancel(NAME, SEQ)
        return world
    if state == "OVERDUE":
        world.core.expire(world.call, OVERDUE)
        return world
    effect = Effect(wanted_by_ping=True) if state.endswith("+LEASE") else None
    if state.endswith("+SHARED"):
        effect = Effect(wanted_by_ping=False)
    world.core.finish(world.call, b"reply", effect)
    if state.startswith("FORGOTTEN"):
        _, other = world.ask(SEQ + 1)
        world.core.finish(other, b"other")
    world.core.validate()
    return world


def request_again(world: World) -> str:
    try:
        verdict, call = world.ask(address="b")
    except BadRequest as error:
        return f"refused {error.field}"
    if verdict is Verdict.REPLAY:
        return f"replay {call.reply.decode()}"
    return verdict.name.lower()


def cancel(world: World) -> str:
    undoing = world.core.cancel(NAME, SEQ)
    return f"undo {len(undoing.effects)} stop {len(undoing.stopped)} send {len(undoing.replies)}"


def ping_without(world: World) -> str:
    undoing = world.core.ping(NAME, LATER, [])
    return f"undo {len(undoing.effects)} stop {len(undoing.stopped)} send {len(undoing.replies)}"


def ping_with(world: World) -> str:
    undoing = world.core.ping(NAME, LATER, [SEQ])
    return f"undo {len(undoing.effects)} stop {len(undoing.stopped)} send {len(undoing.replies)}"


def older_ping(world: World) -> str:
    undoing = world.core.ping(NAME, SEQ, [])
    return f"undo {len(undoing.effects)} stop {len(undoing.stopped)} send {len(undoing.replies)}"


def finish(world: World) -> str:
    assert world.call is not None
    waiters, undo = world.core.finish(world.call, b"reply", Effect(wanted_by_ping=True))
    return f"send {len(waiters)} undo {int(undo is not None)}"


def expire(world: World) -> str:
    assert world.call is not None
    return f"send {len(world.core.expire(world.call, OVERDUE))}"


def close(world: World) -> str:
    undoing = world.core.close(NAME)
    return f"left {len(undoing.effects)} stop {len(undoing.stopped)} send {len(undoing.replies)}"


NOTHING = "undo 0 stop 0 send 0"

# State, event, what it returns, state after it.
MOVES: list[tuple[str, Callable[[World], str], str, State | str]] = [
    ("ABSENT", request_again, "run", State.RUNNING),
    ("ABSENT", cancel, NOTHING, State.CANCELLED),
    ("TOMBSTONE", request_again, "replay cancelled 10", State.CANCELLED),
    ("RUNNING", request_again, "joined", State.RUNNING),
    ("RUNNING", finish, "send 1 undo 0", State.DONE),
    ("RUNNING", expire, "send 1", State.CANCELLING),
    ("RUNNING", cancel, "undo 0 stop 1 send 1", State.CANCELLING),
    ("RUNNING", ping_without, "undo 0 stop 1 send 1", State.CANCELLING),
    ("RUNNING", close, "left 0 stop 1 send 0", "closed"),
    ("CANCELLING", request_again, "replay cancelled 10", State.CANCELLING),
    ("CANCELLING", finish, "send 0 undo 1", State.CANCELLED),
    ("CANCELLING", expire, "send 0", State.CANCELLING),
    ("OVERDUE", request_again, "replay deadline 10", State.CANCELLING),
    ("OVERDUE", finish, "send 0 undo 1", State.CANCELLED),
    ("OVERDUE", expire, "send 0", State.CANCELLING),
    ("DONE", request_again, "replay reply", State.DONE),
    ("DONE+LEASE", request_again, "replay reply", State.DONE),
    ("DONE+LEASE", cancel, "undo 1 stop 0 send 0", State.CANCELLED),
    ("DONE+LEASE", ping_without, "undo 1 stop 0 send 0", State.CANCELLED),
    ("DONE+LEASE", close, "left 1 stop 0 send 0", "closed"),
    ("DONE+SHARED", request_again, "replay reply", State.DONE),
    ("DONE+SHARED", cancel, "undo 1 stop 0 send 0", State.CANCELLED),
    ("DONE+SHARED", close, "left 1 stop 0 send 0", "closed"),
    ("FORGOTTEN", request_again, "refused seq", "FORGOTTEN"),
    ("FORGOTTEN+LEASE", request_again, "refused seq", "FORGOTTEN"),
    ("FORGOTTEN+LEASE", cancel, "undo 1 stop 0 send 0", "FORGOTTEN"),
    ("FORGOTTEN+LEASE", ping_without, "undo 1 stop 0 send 0", "FORGOTTEN"),
    ("FORGOTTEN+LEASE", close, "left 1 stop 0 send 0", "closed"),
]


def test_each_event_does_what_the_table_says_and_nothing_where_it_says_nothing() -> None:
    moves = {(state, event): (returned, after) for state, event, returned, after in MOVES}
    for state in dict.fromkeys(row[0] for row in MOVES):
        always = (request_again, cancel, ping_without, ping_with, older_ping, close)
        for event in (*always, *((finish, expire) if (state, finish) in moves else ())):
            with case(state, event.__name__):
                world = make(state)
                stays = ("left 0 stop 0 send 0", "closed") if event is close else (NOTHING, world.state())
                returned, after = moves.get((state, event), stays)
                assert event(world) == returned
                if after == "closed":
                    assert world.core.get(NAME) is None
                else:
                    world.core.validate()
                    assert world.state() == after


def test_settled_effects_leave_the_reply_for_repeats() -> None:
    world = make("DONE+LEASE")
    world.core.settle(NAME, SEQ)
    assert cancel(world) == NOTHING
    assert request_again(world) == "replay reply"


def test_work_that_ends_after_its_session_is_undone() -> None:
    world = make("RUNNING")
    close(world)
    assert finish(world) == "send 0 undo 1"


def test_a_request_asked_on_two_connections_is_answered_on_both_once() -> None:
    world = make("RUNNING")
    assert world.ask(address="b")[0] is Verdict.JOINED
    assert world.ask(address="b")[0] is Verdict.JOINED
    assert world.call is not None
    waiters, _ = world.core.finish(world.call, b"reply")
    assert waiters == ["a", "b"]


def test_only_the_newest_connections_wait() -> None:
    world = make("RUNNING")
    for address in "bcdefg":
        world.ask(address=address)
    assert world.call is not None
    waiters, _ = world.core.finish(world.call, b"reply")
    assert waiters == ["d", "e", "f", "g"]


def test_a_seq_used_for_another_operation_is_refused() -> None:
    world = make("DONE")
    with pytest.raises(BadRequest, match="used before for lookup") as caught:
        world.ask(op="reserve")
    assert caught.value.field == "seq"


def test_unknown_sessions_get_an_error_and_change_nothing() -> None:
    core = Sessions(encode_error)
    for call in (
        lambda: core.request(NAME, 1, "lookup", "a"),
        lambda: core.cancel(NAME, 1),
        lambda: core.ping(NAME, 1, []),
    ):
        with pytest.raises(UnknownSession):
            call()
    assert len(core) == 0
    assert core.close(NAME).effects == []


def test_attaching_again_keeps_the_outcomes() -> None:
    world = make("DONE+LEASE")
    world.core.open(NAME)
    assert request_again(world) == "replay reply"
    assert cancel(world) == "undo 1 stop 0 send 0"


def test_the_last_outcomes_are_kept_and_older_ones_never_run_again() -> None:
    world = World(Limits(max_outcomes=5))
    for seq in range(1, 21):
        world.core.finish(world.ask(seq)[1], b"reply %d" % seq)
    for seq in range(16, 21):
        verdict, call = world.ask(seq)
        assert (verdict, call.reply) == (Verdict.REPLAY, b"reply %d" % seq)
    for seq in range(1, 16):
        with pytest.raises(BadRequest):
            world.ask(seq)


def test_large_replies_are_forgotten_sooner_but_the_newest_stay() -> None:
    world = World(Limits(max_outcomes=100, max_reply_bytes=1000, kept_anyway=2))
    for seq in range(1, 11):
        world.core.finish(world.ask(seq)[1], bytes(900))
        world.core.validate()
    session = world.core.get(NAME)
    assert session is not None
    assert list(session.calls) == [9, 10]


def test_a_running_request_outlives_any_number_of_others() -> None:
    world = World(Limits(max_outcomes=3))
    _, slow = world.ask(1)
    for seq in range(2, 30):
        world.core.finish(world.ask(seq)[1], b"x")
    assert world.ask(1)[0] is Verdict.JOINED
    assert world.core.finish(slow, b"done at last") == (["a"], None)


def test_too_many_running_requests_are_refused_and_the_refused_one_may_come_again() -> None:
    world = World(Limits(max_running=2))
    _, first = world.ask(1)
    world.ask(2)
    with pytest.raises(Refused):
        world.ask(3)
    world.core.finish(first, b"x")
    assert world.ask(3)[0] is Verdict.RUN


def test_too_many_held_effects_refuse_new_requests() -> None:
    world = World(Limits(max_effects=2))
    for seq in (1, 2):
        world.core.finish(world.ask(seq)[1], b"x", Effect(wanted_by_ping=True))
    with pytest.raises(Refused):
        world.ask(3)
    giving_back = world.core.request(NAME, 4, "release", "a", takes=False)
    assert giving_back.verdict is Verdict.RUN
    world.core.settle(NAME, 1)
    assert world.ask(5)[0] is Verdict.RUN
