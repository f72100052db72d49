"""Orders of a cluster, and commands, which are repeated until their results come or they expire."""

from __future__ import annotations

import msgspec
import pytest

from kvstrata.clock import SystemClock
from kvstrata.controller.commands import COMMAND_TTL_S, MAX_WAITING
from kvstrata.controller.orders import PINS, Orders, Pin
from kvstrata.errors import KvstrataError
from kvstrata.rpc import cluster_wire as wire
from tests.harness.known_members import KnownMembers
from tests.unit.controller.member_messages import CURRENT, NEXT, heartbeat, in_state, register

HOUR_MS = 3_600_000


class SetClock:
    """A clock whose two readings the test sets."""

    def __init__(self) -> None:
        self.now_s, self.wall_ms = 1_000.0, 1_700_000_000_000

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return self.wall_ms


async def test_a_pin_lasts_as_long_as_it_was_given_wherever_the_clock_is_set() -> None:
    clock = SetClock()
    orders = Orders(clock)
    pin = Pin("claim", "a", 3, clock.unix_ms() + HOUR_MS, 7, 1, kept=True)
    await orders.put_pin(pin)
    clock.wall_ms += 2 * HOUR_MS
    assert orders.pins() == [pin] and orders.pin("claim") == pin
    orders.load({f"{PINS}/claim": msgspec.json.encode(pin)})
    assert orders.pins() == [pin], "also when etcd tells of it again"
    clock.wall_ms -= 4 * HOUR_MS
    clock.now_s += HOUR_MS / 1000 - 1
    assert orders.pins() == [pin]
    clock.now_s += 1
    assert orders.pins() == [] and orders.all_pins() == [pin]
    await orders.end_pins("claim")
    assert not orders._ends_s


def test_a_command_is_repeated_until_its_result_arrives():
    known = in_state("confirmed")
    issued = known.issue(known.get("a"), wire.CommandKind.CLEAR, {"tier": "l1"}, 1.0)
    assert known.heartbeat(heartbeat(), 2.0) == known.heartbeat(heartbeat(), 3.0) == [issued.command]
    done = wire.CommandResult(issued.number, True, "", {"count": 1})
    assert known.heartbeat(heartbeat(results=[done]), 4.0) == []
    known.heartbeat(heartbeat(results=[wire.CommandResult(issued.number, False, "late")]), 5.0)
    assert issued.result is done and known.outbox.ended == [issued]


def test_waiting_commands_are_bounded_expire_and_are_sent_a_few_at_a_time():
    known = in_state("confirmed")
    member = known.get("a")
    for _ in range(MAX_WAITING):
        known.issue(member, wire.CommandKind.STATUS, {}, 1.0)
    with pytest.raises(KvstrataError) as denied:
        known.issue(member, wire.CommandKind.STATUS, {}, 1.0)
    assert denied.value.code == "refused"
    assert len(known.heartbeat(heartbeat(), 1.0)) == wire.MAX_COMMANDS
    for now_s in range(1, round(COMMAND_TTL_S) + 5, 4):
        known.heartbeat(heartbeat(), float(now_s))
        known.tick(float(now_s))
    assert not member.waiting and len(known.outbox.ended) == MAX_WAITING
    assert not known.outbox.ended[0].result.ok


def test_an_answer_with_commands_never_exceeds_one_message():
    known = in_state("confirmed")
    for _ in range(8):
        known.issue(known.get("a"), wire.CommandKind.EVICT, {"keys": bytes(2 << 20)}, 1.0)
    commands = known.heartbeat(heartbeat(), 1.0)
    assert commands and len(wire.encode(wire.Beat(1, 1, commands))) < wire.MAX_CLUSTER_MESSAGE_BYTES


@pytest.mark.parametrize("state", ["restored", "dead"])
def test_only_living_members_can_be_sent_commands(state):
    known = in_state(state)
    with pytest.raises(KvstrataError) as denied:
        known.issue(known.get("a"), wire.CommandKind.STATUS, {}, 33.0)
    assert denied.value.code == "unavailable"


async def test_a_drain_and_an_undrain_reach_an_instance_that_was_cut_off_or_restarted():
    orders = Orders(SystemClock())
    known = KnownMembers(orders=orders)
    known.register(register(), 0.0)

    def told(draining: bool, incarnation: int = CURRENT, now_s: float = 1.0) -> list[tuple[int, bool]]:
        """(Number, on) of the commands that answer a heartbeat of an instance that reports `draining`."""
        beat = msgspec.structs.replace(heartbeat(incarnation), draining=draining)
        commands = known.heartbeat(beat, now_s)
        return [(one.number, one.argument["on"]) for one in commands if one.kind is wire.CommandKind.DRAIN]

    def ended(number: int, draining: bool, incarnation: int = CURRENT) -> None:
        """The instance carries out a command and sends the result."""
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
    known.members._die(known.get("a"), 40.0)
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
    assert on, "another process of the instance is told again"
