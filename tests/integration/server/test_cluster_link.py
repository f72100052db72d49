"""A real server against a controller whose answers the test chooses: syncs, freezes, commands, message by message."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from kvstrata.rpc import cluster_wire, wire
from kvstrata.rpc.cluster_wire import Command, CommandKind, Goodbye, Register, SyncBegin, SyncEnd, SyncPart
from tests.harness.controller_double import ControllerDouble
from tests.harness.rpc_client import CHUNK_TOKENS
from tests.harness.server_process import ServerProcess
from tests.integration.server.test_cluster_member import Prompt, cluster_of, joins, split

pytestmark = pytest.mark.integration

FROZEN, RESERVED = wire.ReserveOutcome.FROZEN, wire.ReserveOutcome.RESERVED


@pytest.fixture
def controller() -> Iterator[ControllerDouble]:
    with ControllerDouble() as double:
        yield double


@pytest.fixture
def server(start, controller) -> ServerProcess:
    return start(l1_mb=64, chunk_tokens=CHUNK_TOKENS, flags=joins(controller))


def synced(controller: ControllerDouble, times: int = 1) -> None:
    controller.until(lambda: len(controller.asked_for(SyncEnd)) >= times and controller.beats)
    controller.serve(0.05)


def freeze(controller: ControllerDouble, number: int = 1, freeze_ms: int = 5_000) -> None:
    """Ask for a full sync with a freeze of stores, and wait until the freeze has begun."""
    controller.silent.add("SyncEnd")
    begun = len(controller.asked_for(SyncEnd))
    controller.commands.append(Command(number, CommandKind.RESYNC, {"freeze_ms": freeze_ms}))
    controller.until(lambda: len(controller.asked_for(SyncEnd)) > begun)


def outcomes(prompt: Prompt) -> set[int]:
    return set(prompt.store())


def test_events_during_a_full_sync_are_sent_after_it(controller, server, client):
    first, second = Prompt(client, 1, 10), Prompt(client, 2, 10)
    outcomes(first)
    controller.slow.add("SyncPart")
    controller.until(lambda: controller.asked_for(SyncPart))
    outcomes(second)
    controller.serve(0.3)
    assert not controller.events
    controller.release()
    both = {key[:8] for key in split(first.keys + second.keys)}
    controller.until(lambda: controller.held.get("l1") == both)
    assert len(controller.asked_for(SyncBegin)) == 1
    events = [event.seq for event in controller.events]
    assert events == list(range(1, len(events) + 1))


def test_a_refused_full_sync_is_begun_again_with_a_new_number(controller, server, client):
    controller.failures["SyncEnd"] = ["bad_sync"]
    prompt = Prompt(client, 1, 10)
    outcomes(prompt)
    controller.until(lambda: controller.held.get("l1") == {key[:8] for key in split(prompt.keys)})
    begun = [begin.sync for begin in controller.asked_for(SyncBegin)]
    assert begun == sorted(set(begun)) and len(begun) >= 2
    controller.until(lambda: controller.beats and controller.beats[-1].last_event == len(controller.events))


@pytest.mark.silence
def test_a_frozen_sync_refuses_stores_until_it_ends(controller, server, client):
    synced(controller)
    freeze(controller)
    prompt = Prompt(client, 1, 10)
    assert outcomes(prompt) == {FROZEN}
    assert prompt.hits() == 0
    controller.silent.clear()
    controller.failures["SyncEnd"] = []
    controller.until(lambda: 1 in controller.results)
    assert outcomes(prompt) == {RESERVED}
    assert prompt.hits() == 10


@pytest.mark.long
def test_a_freeze_ends_after_its_time_even_if_the_sync_has_not_ended(controller, server, client):
    synced(controller)
    freeze(controller, freeze_ms=300)
    prompt = Prompt(client, 1, 10)
    controller.until(lambda: outcomes(prompt) == {RESERVED})
    assert cluster_of(server)["syncs_failed"] == 0


@pytest.mark.long
@pytest.mark.silence
def test_a_freeze_ends_when_heartbeats_are_no_longer_answered(controller, server, client):
    synced(controller)
    freeze(controller)
    prompt = Prompt(client, 1, 10)
    assert outcomes(prompt) == {FROZEN}
    controller.silent.add("Heartbeat")
    controller.until(lambda: outcomes(prompt) == {RESERVED})
    assert cluster_of(server)["freezes_cut"] == 1


def test_a_command_is_carried_out_once_however_often_it_is_sent(controller, server, client):
    synced(controller)
    prompt = Prompt(client, 1, 10)
    outcomes(prompt)
    evict = Command(7, CommandKind.EVICT, {"keys": prompt.keys})
    controller.commands.append(evict)
    controller.until(lambda: 7 in controller.results)
    assert controller.results.pop(7).body == {"count": 10}
    assert outcomes(prompt) == {RESERVED}
    controller.until(lambda: 7 in controller.results)  # the server repeats the result
    assert controller.results[7].body == {"count": 10}
    assert prompt.hits() == 10


def test_a_refused_registration_is_tried_again_and_serving_goes_on(controller, server, client):
    controller.failures["Register"] = ["instance_id_taken", "no_slots"]
    prompt = Prompt(client, 1, 10)
    assert outcomes(prompt) == {RESERVED}
    controller.until(lambda: controller.held.get("l1") == {key[:8] for key in split(prompt.keys)})


def test_a_server_that_stops_says_goodbye_first(controller, server):
    synced(controller)
    server.signal(signal.SIGTERM)
    controller.until(lambda: controller.asked_for(Goodbye))
    [told] = controller.asked_for(Goodbye)
    assert told.instance == "ours"
    assert controller.asked_for(Register)[0].protocol == cluster_wire.CLUSTER_PROTOCOL_VERSION


@pytest.mark.long
@pytest.mark.silence
def test_a_controller_that_ceases_to_answer_is_said_once_and_once_when_it_is_back(controller, server):
    def said(event: str) -> int:
        return server.log.read_text().count(f" {event} ")

    synced(controller)
    controller.silent.add("Heartbeat")
    controller.until(lambda: said("controller_lost"))
    lost_at = cluster_of(server)["unanswered"]
    controller.until(lambda: cluster_of(server)["unanswered"] >= lost_at + 2)
    controller.silent.clear()
    controller.until(lambda: said("controller_back"))
    assert (said("controller_lost"), said("controller_back")) == (1, 1)
