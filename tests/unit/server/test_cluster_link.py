"""An instance against controllers whose answers the test chooses: syncs, freezes, commands, message by message."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvstrata.rpc import cluster_wire, wire
from kvstrata.rpc.cluster_wire import Command, CommandKind, Goodbye, Register, SyncBegin, SyncEnd, SyncPart
from kvstrata.server.cluster.events import MAX_QUEUED_TAGS
from tests.unit.server.controller_double import ControllerDouble, Member, split

pytestmark = pytest.mark.usefixtures("patience_of_production")

FROZEN, RESERVED = wire.ReserveOutcome.FROZEN, wire.ReserveOutcome.RESERVED


@pytest.fixture
def controller() -> ControllerDouble:
    return ControllerDouble()


@pytest.fixture
def member(controller: ControllerDouble, monkeypatch: pytest.MonkeyPatch) -> Iterator[Member]:
    made = Member(monkeypatch, controller)
    yield made
    made.close()


def synced(controller, member):
    """Wait until a full sync has ended."""
    member.until(lambda: controller.asked_for(SyncEnd) and controller.beats)


def tags(*keys: bytes) -> set[bytes]:
    return set(split(cluster_wire.tags_of(b"".join(keys))))


def freeze(controller: ControllerDouble, member: Member, freeze_ms: int = 5_000) -> None:
    """Ask for a full sync with a freeze of stores, and wait until the freeze has begun."""
    controller.silent.add("SyncEnd")
    begun = len(controller.asked_for(SyncEnd))
    controller.commands.append(Command(1, CommandKind.RESYNC, {"freeze_ms": freeze_ms}))
    member.until(lambda: len(controller.asked_for(SyncEnd)) > begun)


def test_events_during_a_full_sync_are_sent_after_it(controller, member):
    member.store(1)
    controller.slow.add("SyncPart")
    member.until(lambda: controller.asked_for(SyncPart))
    member.store(2)
    member.passes(3)
    assert not controller.events
    controller.release()
    member.until(lambda: controller.held.get("l1") == tags(member.keys(1), member.keys(2)))
    assert len(controller.asked_for(SyncBegin)) == 1
    events = [event.seq for event in controller.events]
    assert events == list(range(1, len(events) + 1))


def test_a_refused_full_sync_is_begun_again_with_a_new_number(controller, member):
    controller.failures["SyncEnd"] = ["bad_sync"]
    member.store(1)
    member.until(lambda: controller.held.get("l1") == tags(member.keys(1)))
    begun = [begin.sync for begin in controller.asked_for(SyncBegin)]
    assert begun == sorted(set(begun)) and len(begun) >= 2
    member.until(lambda: controller.beats and controller.beats[-1].last_event == len(controller.events))


def test_a_frozen_sync_refuses_stores_until_it_ends(controller, member):
    synced(controller, member)
    freeze(controller, member)
    assert member.reserves(1) == {FROZEN}
    controller.silent.clear()
    controller.failures["SyncEnd"] = []
    member.until(lambda: 1 in controller.results)
    member.store(1)
    assert member.hits(1) == 10


def test_a_freeze_ends_after_its_time_even_if_the_sync_has_not_ended(controller, member):
    synced(controller, member)
    freeze(controller, member, freeze_ms=300)
    begun_s = member.loop.time()
    member.until(lambda: member.reserves(1) == {RESERVED})
    assert member.loop.time() - begun_s < 0.4
    assert member.membership.document()["syncs_failed"] == 0


def test_a_freeze_ends_when_heartbeats_are_no_longer_answered(controller, member):
    synced(controller, member)
    freeze(controller, member)
    assert member.reserves(1) == {FROZEN}
    controller.silent.add("Heartbeat")
    member.until(lambda: member.reserves(1) == {RESERVED})
    assert member.membership.document()["freezes_cut"] == 1


def test_a_command_is_carried_out_once_however_often_it_is_sent(controller, member):
    synced(controller, member)
    member.store(1)
    controller.commands.append(Command(7, CommandKind.EVICT, {"keys": member.keys(1)}))
    member.until(lambda: 7 in controller.results)
    assert controller.results.pop(7).body == {"count": 10}
    member.store(1)
    member.until(lambda: 7 in controller.results)  # the instance repeats the result
    assert controller.results[7].body == {"count": 10}
    assert member.hits(1) == 10


def test_a_refused_registration_is_tried_again_and_serving_goes_on(controller, member):
    controller.failures["Register"] = ["instance_id_taken", "no_slots"]
    member.store(1)
    member.until(lambda: controller.held.get("l1") == tags(member.keys(1)))


def test_a_member_that_stops_says_goodbye_first(controller, member):
    synced(controller, member)
    member.run(member.membership.stop())
    [told] = controller.asked_for(Goodbye)
    assert told.instance == controller.asked_for(Register)[0].instance
    assert controller.asked_for(Register)[0].protocol == cluster_wire.CLUSTER_PROTOCOL_VERSION


def test_a_controller_that_ceases_to_answer_is_said_once_and_once_when_it_is_back(
    controller, member, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)
    caplog.set_level(logging.INFO, logger="kvstrata")

    def said(event: str) -> int:
        return sum(text.split()[0] == event for text in caplog.messages)

    synced(controller, member)
    controller.silent.add("Heartbeat")
    member.passes(60)
    controller.silent.clear()
    member.passes(60)
    assert (said("controller_lost"), said("controller_back")) == (1, 1)


def test_a_frozen_controller_costs_the_instance_nothing(controller, member):
    synced(controller, member)
    controller.frozen = True
    for prompt in range(30):  # more than L1 holds
        member.store(prompt)
        assert member.hits(prompt) == 10
        member.passes(1)
    told = member.membership.document()
    assert told["queued_tags"] <= MAX_QUEUED_TAGS and not told["frozen"] and told["unanswered"] > 5
    controller.frozen = False
    in_l1, _ = member.instance.pool.ready_tags(0, 8_192)
    member.until(lambda: controller.held.get("l1") == set(split(in_l1)))


def test_an_instance_refuses_commands_of_an_earlier_leader(monkeypatch):
    drain = CommandKind.DRAIN
    old, new = ControllerDouble("old", token=7), ControllerDouble("new")
    member = Member(monkeypatch, old, new)
    member.until(lambda: old.beats and new.beats)
    old.commands = [Command(1, drain, {"on": True})]
    member.until(lambda: old.results)
    assert old.results[1].ok
    new.token, heard = 9, len(new.beats)
    member.until(lambda: len(new.beats) > heard + 2)
    old.commands = [Command(2, drain, {"on": False}), Command(3, CommandKind.RESYNC, {})]
    member.until(lambda: {2, 3} <= set(old.results))
    assert not old.results[2].ok and "token: 7" in old.results[2].message
    assert old.results[3].ok, "a full sync is allowed: it concerns its controller alone"
    new.commands = [Command(2, drain, {"on": False})]
    member.until(lambda: new.results)
    assert new.results[2].ok
    assert new.beats[-1].obeys == (0, 9)
    # etcd has lost its data: tokens start at 1 again, under a greater cluster id.
    new.token, new.cluster_id, heard = 2, 5, len(new.beats)
    member.until(lambda: len(new.beats) > heard + 2)
    new.commands = [Command(4, drain, {"on": True})]
    member.until(lambda: 4 in new.results)
    assert new.results[4].ok
    old.token, old.commands = 9, [Command(4, drain, {"on": False})]
    member.until(lambda: 4 in old.results)
    assert not old.results[4].ok and "seen: 2 of cluster 5" in old.results[4].message
    member.close()
