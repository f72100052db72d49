"""Commands of a controller: what an admin's request becomes, when each is sent and given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvstrata.controller import prompts
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.commands import MAX_WAITING
from kvstrata.controller.member import MAX_SENT
from kvstrata.controller.operations import Operations
from kvstrata.controller.prompts import Named
from kvstrata.errors import BadRequest, ClusterFailure, KvstrataError, Unavailable
from kvstrata.process.operations import MAX_KEYS, Claiming
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc import cluster_wire as wire
from kvstrata.types import KEY_BYTES, LayoutIdentity, RequestIdentity
from tests.harness.cluster_instance import LOAD
from tests.harness.known_members import AskedLink, joined
from tests.unit.controller.member_messages import NEXT, register


async def test_a_command_is_sent_once_and_ends_by_its_answer(cluster):
    member = joined(cluster, register())
    issued = [cluster.issue(member, wire.Clear("l1")) for _ in range(MAX_SENT + 1)]
    link = link_of(member)
    await turns()
    assert len(link.asked) == MAX_SENT
    (asked, outcome), *_ = link.asked
    assert (asked.operation, asked.token) == (wire.Clear("l1"), 0)
    outcome.set_result(wire.Outcome(1, 1, {"count": 1}))
    assert await cluster.outcome(issued[:1], 10.0)
    assert issued[0].result == (True, "", {"count": 1})
    await turns()
    assert len(link.asked) == MAX_SENT + 1
    link.asked[1][1].set_exception(
        ClusterFailure("refused", "no", field="", retryable=False, retry_after_ms=0)
    )
    link.asked[2][1].set_exception(Unavailable("the connection ended"))
    await cluster.outcome(issued[1:3], 10.0)
    assert issued[1].result[:2] == (False, "no")
    assert issued[2].result[:2] == (False, "the connection ended; it may have been carried out")
    cluster.members.remove(member)
    cluster.settle()
    assert all(one.result is not None for one in issued) and not member.waiting
    await turns()
    assert all(future.done() for _, future in link.asked), "nobody waits for an answer any more"
    told = [one.facts["number"] for one in cluster.journal.after(0, 100)[0] if one.kind == "command"]
    assert sorted(told) == [one.number for one in issued], "events say how each has ended"


async def test_waiting_commands_are_bounded_and_only_living_members_get_some(cluster):
    member = joined(cluster, register())
    for _ in range(MAX_WAITING):
        cluster.issue(member, wire.AskStatus())
    with pytest.raises(KvstrataError) as denied:
        cluster.issue(member, wire.AskStatus())
    assert denied.value.code == "refused"
    cluster.members._die(member, 33.0)
    with pytest.raises(KvstrataError) as denied:
        cluster.issue(member, wire.AskStatus())
    assert denied.value.code == "unavailable"
    cluster.settle()
    assert not member.waiting


async def test_a_drain_and_an_undrain_reach_an_instance_that_was_cut_off_or_restarted(cluster):
    joined(cluster, register())

    def told(draining: bool) -> list[bool]:
        """What the instance, which reports `draining`, is commanded."""
        member = cluster.members.get("a")
        cluster.heard(member, wire.Condition("ready", LOAD, [], draining=draining))
        return [one.operation.on for one in member.waiting.values()]

    def ended() -> None:
        """The instance carries out its command."""
        cluster.commands.end_all(cluster.members.get("a"), "")

    assert told(False) == []
    await cluster.orders.drain("a", True)
    assert told(False) == told(False) == [True], "one command, until its result comes"
    ended()
    assert told(True) == []
    cluster.members._die(cluster.members.get("a"), 40.0)
    cluster.settle()
    await cluster.orders.drain("a", False)
    joined(cluster, register())
    assert told(True) == [False]
    ended()
    assert told(False) == []
    await cluster.orders.drain("a", True)
    assert not joined(cluster, register(NEXT)).readable
    assert told(False) == [True], "another process of the instance is told again"


MANY = 2 * wire.MAX_PEER_KEYS + 3
"""More keys than two commands may name."""


class Instances:
    """A cluster of instances whose answers the test gives."""

    def __init__(self, cluster: Cluster, operations: Operations) -> None:
        self.cluster = cluster
        self.operations = operations

    def join(self, name: str, keys: bytes = b"") -> None:
        """Make a member that holds these keys in L1."""
        told = register(1, name, tiers=["l1"], control_endpoint=f"tcp://{name}:1", host=name)
        member = joined(self.cluster, told)
        for at in range(0, len(keys), 1024 * KEY_BYTES):
            tags = wire.tags_of(keys[at : at + 1024 * KEY_BYTES])
            self.cluster.directory.apply(member.group, ["l1"], [wire.Run(wire.Change.ADMIT, "l1", tags)])

    async def commands(self, name: str) -> list[wire.Do]:
        """What the instance was asked."""
        await turns()
        return [asked for asked, _ in link_of(self.cluster.members.get(name)).asked]

    async def answer(self, name: str, outcome: Callable[[wire.Do], int]) -> list[wire.Do]:
        """Answer all waiting commands with a count."""
        carried_out = await self.commands(name)
        for asked, future in link_of(self.cluster.members.get(name)).asked:
            future.set_result(wire.Outcome(1, 1, {"count": outcome(asked)}))
        await turns()  # the operation that waits for the results goes on
        return carried_out


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def link_of(member: Any) -> AskedLink:
    found: AskedLink = member.follower.link
    return found


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


def n_keys(command: Any) -> int:
    return len(command.operation.keys) // KEY_BYTES


def keys_of(commands: list[Any]) -> bytes:
    return b"".join(one.operation.keys for one in commands)


async def test_many_keys_are_evicted_by_several_commands_to_the_instances_that_hold_them(instances):
    everything = named(MANY)
    instances.join("all", everything.keys)
    instances.join("end", everything.keys[-2 * KEY_BYTES :])
    await instances.cluster.directory.idle()
    issued = await instances.operations.evict_chunks(everything, None)
    sizes = [(one.member.id, n_keys(one)) for one in issued]
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
    assert [one.operation.kind for one in issued] == ["pull"] * 5 + ["evict"] * 5
    assert "move_incomplete" not in kinds(instances)


def kinds(instances: Instances) -> list[str]:
    return [event.kind for event in instances.cluster.journal.after(0, 100)[0]]


async def test_many_keys_are_claimed_by_one_command_and_released_wherever_they_are_kept(instances):
    instances.join("a", named(MANY).keys)
    instances.join("b")
    await instances.cluster.directory.idle()
    [issued] = await instances.operations.claim(named(MANY), None, Claiming(ttl_s=60, bytes=7))
    [asked] = await instances.commands("a")
    claim = asked.operation
    assert (claim.kind, n_keys(asked), claim.identity) == ("claim", MANY, b"r" * KEY_BYTES)
    assert (claim.ttl_s, claim.max_bytes, issued.member.id) == (60, 7, "a")
    assert len(wire.encode(asked)) < wire.MAX_CLUSTER_MESSAGE_BYTES
    with pytest.raises(BadRequest, match="at most 65536"):
        await instances.operations.claim(named(MAX_KEYS + 1), "a", Claiming())
    assert [one.member.id for one in instances.operations.at(None, wire.Release("c"))] == ["a", "b"]
    assert [one.member.id for one in instances.operations.at(None, wire.AskClaims())] == ["a", "b"]


async def test_a_request_for_more_commands_than_an_instance_may_have_is_refused_whole(instances):
    instances.join("a", named(1).keys)
    instances.join("b", named(1).keys)
    await instances.cluster.directory.idle()
    one = named(1)
    for _ in range(MAX_WAITING - 1):
        await instances.operations.evict_chunks(one, ["b"])
    with pytest.raises(KvstrataError, match=r"b, and 3 more would exceed"):
        await instances.operations.evict_chunks(named(MANY), ["a", "b"])
    assert await instances.commands("a") == []


@pytest.mark.parametrize("what", ["evict", "claim", "copy"])
async def test_an_order_that_names_no_whole_chunk_is_refused(instances, what):
    instances.join("a")
    instances.join("b")
    nothing = named(0)
    with pytest.raises(BadRequest, match="must fill at least one chunk"):
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
