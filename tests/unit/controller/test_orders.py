"""Commands of a controller: what an admin's request becomes, when each is sent, repeated and given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from kvstrata.controller import prompts
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.commands import COMMAND_TTL_S, MAX_WAITING
from kvstrata.controller.member import Issued
from kvstrata.controller.operations import Operations
from kvstrata.controller.orders import Orders
from kvstrata.controller.prompts import Named
from kvstrata.errors import BadRequest, KvstrataError
from kvstrata.process.operations import MAX_KEYS, Claiming
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc import cluster_wire as wire
from kvstrata.types import KEY_BYTES, LayoutIdentity, RequestIdentity
from tests.harness.cluster_instance import LOAD
from tests.harness.known_members import KEY, KnownMembers
from tests.unit.controller.member_messages import CURRENT, NEXT, heartbeat, in_state, register


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
    orders = Orders()
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


MANY = 2 * wire.MAX_PEER_KEYS + 3
"""More keys than two commands may name."""


class Instances:
    """A cluster of instances whose answers the test gives."""

    def __init__(self, cluster: Cluster, operations: Operations) -> None:
        self.cluster = cluster
        self.operations = operations

    def join(self, name: str, keys: bytes = b"") -> None:
        """Make a member that holds these keys in L1."""
        register = wire.Register(
            1, wire.CLUSTER_PROTOCOL_VERSION, name, 1, "", ["l1"], 1 << 30, 16, f"tcp://{name}:1", "", "", name, 1
        )  # fmt: skip
        self.cluster.register(register, KEY)
        for seq, at in enumerate(range(0, len(keys), 1024 * KEY_BYTES), 1):
            tags = wire.tags_of(keys[at : at + 1024 * KEY_BYTES])
            self.cluster.apply(wire.Events(name, 1, seq, [wire.Run(wire.Change.ADMIT, "l1", tags)]), KEY)

    def commands(self, name: str, *results: wire.CommandResult) -> list[wire.Command]:
        """The commands that answer the instance's heartbeat."""
        told: list[wire.Command] = self.cluster.heartbeat(
            wire.Heartbeat(1, name, 1, 0, "ready", LOAD, [], list(results)), KEY
        )
        return [one for one in told if one.kind is not wire.CommandKind.RESYNC]

    async def answer(self, name: str, outcome: Callable[[wire.Command], Any]) -> list[wire.Command]:
        """Send results for all waiting commands: `outcome` gives a count, or why the command failed."""
        carried_out = self.commands(name)
        results = []
        for one in carried_out:
            said = outcome(one)
            failed = isinstance(said, str)
            results.append(
                wire.CommandResult(
                    one.number, not failed, said if failed else "", {} if failed else {"count": said}
                )
            )
        self.commands(name, *results)
        for _ in range(20):
            await asyncio.sleep(0)  # the operation that waits for the results goes on
        return carried_out


@pytest.fixture
async def instances(cluster: Cluster) -> AsyncIterator[Instances]:
    supervisor = Supervisor(asyncio.get_running_loop())
    yield Instances(cluster, Operations(cluster, supervisor))
    await supervisor.stop()
    assert not supervisor.failure.done()


def named(n_keys: int, n_slices: int = 1) -> Named:
    keys = b"".join(
        (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(KEY_BYTES, "little") for number in range(n_keys)
    )
    return Named(keys, n_slices, b"r" * KEY_BYTES, "", 16)


def n_keys(command: wire.Command | Issued) -> int:
    argument = command.argument if isinstance(command, wire.Command) else command.command.argument
    return len(argument["keys"]) // KEY_BYTES


def keys_of(commands: list[wire.Command]) -> bytes:
    return b"".join(one.argument["keys"] for one in commands)


async def test_many_keys_are_evicted_by_several_commands_to_the_instances_that_hold_them(instances):
    everything = named(MANY)
    instances.join("all", everything.keys)
    instances.join("end", everything.keys[-2 * KEY_BYTES :])
    await instances.cluster.directory.idle()
    issued = await instances.operations.evict_chunks(everything, None)
    sizes = [(one.instance, n_keys(one)) for one in issued]
    assert sizes == [("all", wire.MAX_PEER_KEYS), ("all", wire.MAX_PEER_KEYS), ("all", 3), ("end", 3)]
    done = await instances.answer("all", n_keys)
    assert keys_of(done) == everything.keys
    assert sum(one.result.body["count"] for one in issued if one.result is not None) == MANY


async def test_many_keys_are_moved_by_several_commands_and_dropped_when_all_have_arrived(instances):
    everything = named(2 * MANY, 2)
    instances.join("from", everything.keys)
    instances.join("to")
    await instances.cluster.directory.idle()
    issued, task = await instances.operations.copy(everything, "to", None, move=True)
    pulls = await instances.answer("to", lambda one: n_keys(one) // 2)
    assert [n_keys(one) for one in pulls] == [wire.MAX_PEER_KEYS] * 4 + [6]
    drops = await instances.answer("from", n_keys)
    assert keys_of(drops) == keys_of(pulls) == everything.keys
    assert all(n_keys(one) <= wire.MAX_PEER_KEYS for one in drops)
    await task
    assert [one.kind.value for one in issued] == ["pull"] * 5 + ["evict"] * 5
    assert "move_incomplete" not in kinds(instances)


def kinds(instances: Instances) -> list[str]:
    return [event.kind for event in instances.cluster.journal.tail.after(0, 100)[0]]


async def test_many_keys_are_claimed_by_one_command_and_released_wherever_they_are_kept(instances):
    instances.join("a", named(MANY).keys)
    instances.join("b")
    await instances.cluster.directory.idle()
    [issued] = await instances.operations.claim(named(MANY), None, Claiming(ttl_s=60, bytes=7))
    [asked] = instances.commands("a")
    assert (asked.kind, n_keys(asked), asked.argument["identity"]) == ("claim", MANY, b"r" * KEY_BYTES)
    assert (asked.argument["ttl_s"], asked.argument["max_bytes"], issued.instance) == (60, 7, "a")
    assert len(wire.encode(wire.Beat(1, 1, [asked]))) < wire.MAX_CLUSTER_MESSAGE_BYTES
    with pytest.raises(BadRequest, match="at most 65536"):
        await instances.operations.claim(named(MAX_KEYS + 1), "a", Claiming())
    assert [one.instance for one in instances.operations.release("c", None)] == ["a", "b"]
    assert [one.instance for one in instances.operations.claims()] == ["a", "b"]


async def test_a_request_for_more_commands_than_an_instance_may_have_is_refused_whole(instances):
    instances.join("a", named(1).keys)
    instances.join("b", named(1).keys)
    await instances.cluster.directory.idle()
    one = named(1)
    for _ in range(MAX_WAITING - 1):
        await instances.operations.evict_chunks(one, ["b"])
    with pytest.raises(KvstrataError, match=r"b, and 3 more would exceed"):
        await instances.operations.evict_chunks(named(MANY), ["a", "b"])
    assert instances.commands("a") == []


@pytest.mark.parametrize("what", ["evict", "claim", "copy"])
async def test_an_order_that_names_no_whole_chunk_is_refused(instances, what):
    instances.join("a")
    instances.join("b")
    nothing = named(0)
    with pytest.raises(BadRequest, match="make no whole chunk"):
        if what == "evict":
            await instances.operations.evict_chunks(nothing, ["a"])
        elif what == "claim":
            await instances.operations.claim(nothing, "a", Claiming())
        else:
            await instances.operations.copy(nothing, "b", "a", move=True)


@pytest.mark.parametrize("lora", ["", "poet"])
def test_a_prompt_is_looked_up_under_the_weights_that_the_newest_requests_name(lora: str) -> None:
    within = '["poet","content"]' if lora else ""
    newest, older = (json.dumps(["weights", mark, within]) for mark in ("new", "old"))
    layout = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16)
    kind = prompts.Kind(layout, (b"s" * 32,), ("a", "b"), adapters=(['["other","x"]'], [newest, older]))

    def keys(adapter: str) -> bytes:
        return prompts.from_tokens(kind, RequestIdentity(adapter=adapter), list(range(32))).keys

    assert keys(lora) == keys(newest) != keys(older)
    assert keys("unknown") not in (keys(lora), keys("nobody's"))
