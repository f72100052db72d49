"""A real controller process and instances that speak its protocol without KV bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvstrata.cli import ctl
from kvstrata.native.hashing import chain_keys, storage_keys
from kvstrata.rpc import cluster_wire as wire
from kvstrata.types import LayoutIdentity, RequestIdentity, Slice, identity_root
from tests.harness.cluster_instance import ClusterInstance, Refused, tags_of
from tests.harness.controller_process import ControllerProcess

pytestmark = pytest.mark.integration

QUICK = ("--heartbeat-s", "0.2", "--dead-after-s", "1")
WAIT_S = 30.0


SNAPSHOTS = {**os.environ, "KVSTRATA_CONTROLLER_DIRECTORY_SNAPSHOT_S": "1"}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path) as process:
        yield process


@pytest.fixture
def instance(controller: ControllerProcess) -> Iterator[Callable[..., ClusterInstance]]:
    """Makes instances, closed in the end."""
    made: list[ClusterInstance] = []

    def make(name: str, **more: Any) -> ClusterInstance:
        made.append(ClusterInstance(controller.ports["reply"], name, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition: Callable[[], Any], what: str) -> Any:
    """Look until it holds."""
    end_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end_s, f"{what}: not within {WAIT_S} s"
        time.sleep(0.01)
    return found


def holders(owners: list[wire.Owner]) -> dict[str, int]:
    return {owner.instance: owner.n_keys for owner in owners}


def written(controller: ControllerProcess) -> None:
    """A snapshot was written that began after this call."""
    writes = controller.ask("/v1/cluster")["snapshot"]["writes"]
    until(
        lambda: controller.ask("/v1/cluster")["snapshot"]["writes"] >= writes + 2, "two snapshots are written"
    )


def test_who_holds_the_longest_beginning_is_told_and_never_the_asker(controller, instance):
    a = instance("a").join({"l1": tags_of(range(100))})
    b = instance("b").join({"l1": tags_of(range(60)), "disk-0": tags_of(range(100))})
    c = instance("c").join({})
    assert holders(c.where(tags_of(range(200)))) == {"a": 100, "b": 60}
    assert [owner.instance for owner in c.where(tags_of(range(200)))] == ["a", "b"]
    assert holders(a.where(tags_of(range(200)))) == {"b": 60}
    assert holders(b.where(tags_of(range(10)))) == {"a": 10}
    assert holders(c.where(tags_of(range(7)), n_slices=7)) == {"a": 7, "b": 7}
    assert c.where(tags_of([1000])) == []


def test_events_are_seen_and_a_goodbye_is_forgotten_at_once(controller, instance):
    a, b = instance("a").join({}), instance("b").join({})
    a.admit(tags_of(range(10)))
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 10})
    a.evict(tags_of([5]))
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 5})
    a.tell(wire.Run(wire.Change.CLEAR, "l1", b""), wire.Run(wire.Change.ADMIT, "l1", tags_of([0])))
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 1})
    a.goodbye()
    assert b.where(tags_of(range(10))) == []
    assert controller.ask("/v1/cluster")["instances"]["live"] == 1


def test_a_gap_or_a_lost_batch_calls_for_a_full_sync(controller, instance):
    a, b = instance("a").join({}), instance("b").join({})
    a.admit(tags_of([0]))
    a.event_seq += 1  # one is lost on its way
    a.admit(tags_of([2]))
    owners = b.until_where(tags_of([2]), bool)
    assert not owners[0].confirmed
    asked = until(a.heartbeat, "the full sync is asked for")
    assert [command.kind for command in asked] == [wire.CommandKind.RESYNC]
    a.sync({"l1": tags_of(range(3))})
    assert b.where(tags_of(range(3)))[0].confirmed
    assert a.heartbeat() == []


def test_the_last_batch_lost_is_noticed_by_a_heartbeat(controller, instance):
    a = instance("a").join({})
    a.admit(tags_of([0]))
    a.event_seq += 1  # lost, and nothing comes after it
    asked = until(a.heartbeat, "the full sync is asked for")
    assert [command.kind for command in asked] == [wire.CommandKind.RESYNC]


def test_repeated_and_late_batches_do_nothing_twice(controller, instance):
    a, b = instance("a").join({}), instance("b").join({})
    a.admit(tags_of([0, 1]))
    a.evict(tags_of([1]))
    a.tell(wire.Run(wire.Change.ADMIT, "l1", tags_of([0, 1])), seq=1)
    a.admit(tags_of([7]))
    b.until_where(tags_of([7]), bool)
    assert holders(b.where(tags_of([0, 1]))) == {"a": 1}
    assert b.where(tags_of([7]))[0].confirmed
    assert controller.ask("/v1/cluster")["dropped_event_batches"] == {"repeated": 1}


def test_a_sync_replaces_what_was_known_only_in_its_end(controller, instance):
    a, b = instance("a").join({"l1": tags_of(range(10))}), instance("b").join({})
    held = {"l1": tags_of(range(100, 400))}
    parts = a.sync_parts(held, part_bytes=800)
    a.begin()
    for part in reversed(parts):
        a.ask(part, wire.Done)
        a.ask(part, wire.Done)  # a repeated one changes nothing
    assert holders(b.where(tags_of(range(10)))) == {"a": 10}
    assert b.where(tags_of([100])) == []
    a.end(len(parts), held)
    a.end(len(parts), held)
    assert b.where(tags_of(range(10))) == []
    assert holders(b.where(tags_of(range(100, 400)))) == {"a": 300}


def test_counts_that_do_not_add_up_keep_what_was_known(controller, instance):
    a, b = instance("a").join({"l1": tags_of(range(10))}), instance("b").join({})
    held = {"l1": tags_of(range(100, 200))}
    for n_parts, told in ((2, held), (1, {"l1": tags_of(range(5))}), (1, {**held, "disk-0": tags_of([1])})):
        parts = a.sync_parts(held)
        a.begin()
        a.ask(parts[0], wire.Done)
        with pytest.raises(Refused) as refused:
            a.end(n_parts, told)
        assert (refused.value.code, refused.value.retryable) == ("bad_sync", True)
        assert holders(b.where(tags_of(range(10)))) == {"a": 10}
    a.sync(held)
    assert holders(b.where(tags_of(range(100, 200)))) == {"a": 100}


def test_a_part_whose_checksum_is_wrong_is_refused_and_may_come_again(controller, instance):
    a = instance("a").join({})
    (part,) = a.sync_parts({"l1": tags_of([1])})
    a.begin()
    with pytest.raises(Refused, match="crc") as refused:
        a.ask(
            wire.SyncPart(*[getattr(part, name) for name in part.__struct_fields__[:-1]], part.crc ^ 1),
            wire.Done,
        )
    assert refused.value.field == "crc"
    a.ask(part, wire.Done)
    a.end(1, {"l1": tags_of([1])})


def test_parts_of_another_sync_and_ends_without_a_begin_are_refused(controller, instance):
    a = instance("a").join({})
    parts = a.sync_parts({"l1": tags_of([1])})
    for request in (parts[0],):
        with pytest.raises(Refused, match="begin one"):
            a.ask(request, wire.Done)
    with pytest.raises(Refused, match="begin one"):
        a.end(1, {"l1": tags_of([1])})


def test_only_who_registered_is_heard(controller, instance):
    stranger = instance("stranger")
    stranger.register()
    stranger.name = "other"
    for ask in (lambda: stranger.heartbeat(), stranger.goodbye, stranger.begin):
        if ask == stranger.goodbye:
            ask()  # leaving twice is no error
            continue
        with pytest.raises(Refused) as refused:
            ask()
        assert (refused.value.code, refused.value.retryable) == ("unknown_instance", True)
    stranger.admit(tags_of([1]))
    until(
        lambda: controller.ask("/v1/cluster")["dropped_event_batches"].get("unknown_instance"),
        "it is counted",
    )


def test_a_restarted_process_takes_its_id_over_and_the_old_one_never_comes_back(controller, instance):
    b = instance("b").join({})
    old = instance("a").join({"l1": tags_of(range(5))})
    new = instance("a").join({"l1": tags_of(range(3))})
    assert [(owner.incarnation, owner.n_keys) for owner in b.where(tags_of(range(5)))] == [
        (new.incarnation, 3)
    ]
    for ask in (old.heartbeat, old.register, lambda: old.sync({})):
        with pytest.raises(Refused) as refused:
            ask()
        assert (refused.value.code, refused.value.retryable) == ("superseded", False)
    old.admit(tags_of(range(5)))
    until(
        lambda: controller.ask("/v1/cluster")["dropped_event_batches"].get("superseded"),
        "its events are dropped",
    )
    assert holders(b.where(tags_of(range(5)))) == {"a": 3}


def test_an_id_that_lives_on_another_host_is_taken_until_it_is_dead(tmp_path):
    with ControllerProcess(tmp_path, flags=QUICK) as controller:
        first = ClusterInstance(controller.ports["reply"], "a", host="one").join({})
        with first, ClusterInstance(controller.ports["reply"], "a", host="two") as second:
            with pytest.raises(Refused) as refused:
                second.register()
            assert (refused.value.code, refused.value.retryable) == ("instance_id_taken", True)
            assert 0 < refused.value.retry_after_ms <= 1_000

            def registered() -> bool:
                try:
                    return bool(second.register())
                except Refused:
                    return False

            until(registered, "the silent one is dead")


def test_a_silent_instance_is_dead_within_the_timeout_and_may_come_back(tmp_path):
    with ControllerProcess(tmp_path, flags=QUICK) as controller:
        port = controller.ports["reply"]
        with ClusterInstance(port, "a") as a, ClusterInstance(port, "b") as b:
            a.join({"l1": tags_of([1])})
            b.join({})
            assert b.where(tags_of([1]))

            def forgotten() -> bool:
                b.heartbeat()
                return not b.where(tags_of([1]))

            until(forgotten, "it is forgotten")
            assert {row["id"]: row["state"] for row in controller.ask("/v1/instances")["instances"]} == {
                "a": "dead",
                "b": "live",
            }
            with pytest.raises(Refused, match="unknown_instance"):
                a.heartbeat()
            a.admit(tags_of([1]))
            a.join({"l1": tags_of([1])})
            assert b.where(tags_of([1]))[0].confirmed
            kinds = [event["kind"] for event in controller.ask("/v1/events")["events"]]
            assert "died" in kinds


@pytest.mark.parametrize("socket", ["reply", "pull", "heartbeat"])
def test_garbage_on_a_port_costs_its_sender_an_answer_and_nobody_else_anything(controller, instance, socket):
    a = instance("a").join({"l1": tags_of([1])})
    context = zmq.Context()
    try:
        bad = context.socket(zmq.PUSH if socket == "pull" else zmq.DEALER)
        bad.setsockopt(zmq.LINGER, 0)
        bad.connect(f"tcp://127.0.0.1:{controller.ports[socket]}")
        frames = [
            b"",
            b"\xc1",
            b"\x93\xa5where\x01",
            b"\x91" * 5_000,
            bytes(1_000),
            wire.encode(wire.Nudge(1)),
        ]
        for frame in frames:
            bad.send(frame)
        bad.send_multipart([b"one", b"two"])
        if socket != "pull":
            for _ in range(len(frames) + 1):
                assert bad.poll(30_000)
                answer = wire.ANSWERS.decode(bad.recv_multipart()[-1])
                assert isinstance(answer, wire.Failure) and answer.code == "bad_request"
        until(
            lambda: controller.ask("/v1/cluster")["sockets"][socket]["bad_frames"] == len(frames) + 1,
            "all are counted",
        )
        bad.send(bytes(wire.MAX_CLUSTER_MESSAGE_BYTES + 1))  # costs this connection
        a.heartbeat()
        b = instance("b").join({})
        assert holders(b.where(tags_of([1]))) == {"a": 1}
    finally:
        context.destroy(linger=0)


def test_bytes_that_are_not_zmq_cost_nobody_anything(controller, instance):
    import socket as plain

    for port in controller.ports.values():
        with plain.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    instance("a").join({})


def test_wrong_registrations_name_their_field(controller, instance):
    for changes, field, code in (
        ({"protocol": 99}, "protocol", "wrong_version"),
        ({"tiers": ["disk-0"]}, "tiers", "bad_request"),
        ({"tiers": ["l1", "l1"]}, "tiers", "bad_request"),
        ({"peer_endpoint": "http://x"}, "peer_endpoint", "bad_request"),
    ):
        with pytest.raises(Refused) as refused:
            instance("a").register(**changes)
        assert (refused.value.field, refused.value.code) == (field, code)


def test_slots_exhausted_says_when_to_come_again(tmp_path):
    """An instance of 16 tiers takes 16 slots, and 16 more while it syncs; 65,534 are for 2,047 of them."""
    environment = {
        **os.environ,
        "KVSTRATA_CONTROLLER_MAX_INSTANCES": "3000",
        "KVSTRATA_CONTROLLER_DEAD_AFTER_S": "3600",  # none of them sends heartbeats
    }
    tiers = ("l1", *(f"disk-{number}" for number in range(15)))
    with (
        ControllerProcess(tmp_path, environment=environment) as controller,
        ClusterInstance(controller.ports["reply"], "i0", tiers=tiers) as one,
    ):
        refused: Refused | None = None
        for number in range(2_100):
            one.name, one.event_seq, one.sync_number = f"i{number}", 0, 0
            one.register()
            one.sync({})
            one.sync_parts({})
            try:
                one.begin()
            except Refused as error:
                refused = error
                break
        assert refused is not None
        assert (refused.code, refused.retryable) == ("no_slots", True)
        assert refused.retry_after_ms > 0
        last, one.name = one.name, "i0"
        one.goodbye()
        one.name = last

        def begun() -> bool:
            try:
                one.begin()
            except Refused:
                return False
            return True

        until(begun, "the slots of one that left are free")


# --- restarts ---------------------------------------------------------------------------------------------------


def test_a_killed_controller_serves_its_snapshot_as_unconfirmed_until_each_sync(tmp_path):
    with ControllerProcess(tmp_path, environment=SNAPSHOTS) as controller:
        port = controller.ports["reply"]
        with (
            ClusterInstance(port, "a") as a,
            ClusterInstance(port, "b") as b,
            ClusterInstance(port, "c") as c,
        ):
            a.join({"l1": tags_of(range(1000)), "disk-0": tags_of(range(50))})
            b.join({"l1": tags_of(range(500))})
            c.join({})
            written(controller)
            epoch = a.epoch
            controller.kill()
            controller.start()
            c.register()
            owners = c.until_where(
                tags_of(range(1000)), lambda owners: holders(owners) == {"a": 1000, "b": 500}
            )
            assert not any(owner.confirmed for owner in owners)
            assert c.epoch != epoch
            with pytest.raises(Refused, match="unknown_instance"):
                a.heartbeat()
            assert a.register().sync
            assert not c.where(tags_of(range(1000)))[0].confirmed
            a.sync({"l1": tags_of(range(900))})
            assert [(owner.n_keys, owner.confirmed) for owner in c.where(tags_of(range(1000)))] == [
                (900, True),
                (500, False),
            ]
            # Another incarnation: what the old one had is forgotten at once.
            with ClusterInstance(port, "b") as later:
                later.register()
                assert holders(c.where(tags_of(range(1000)))) == {"a": 900}


def test_what_does_not_come_back_after_a_restart_is_forgotten(tmp_path):
    with ControllerProcess(tmp_path, flags=QUICK, environment=SNAPSHOTS) as controller:
        port = controller.ports["reply"]
        with ClusterInstance(port, "a") as a, ClusterInstance(port, "b") as b:
            a.join({"l1": tags_of(range(10))})
            written(controller)
            controller.kill()
            controller.start()
            b.register()

            def forgotten() -> bool:
                b.heartbeat()
                return not b.where(tags_of([1]))

            until(forgotten, "it is forgotten")


@pytest.mark.parametrize("damage", ["cut", "bit", "foreign", "version", "old", "empty", "unreadable"])
def test_a_snapshot_that_cannot_be_served_is_ignored_counted_and_said(tmp_path, damage):
    with ControllerProcess(tmp_path, environment=SNAPSHOTS) as controller:
        with ClusterInstance(controller.ports["reply"], "a") as a:
            a.join({"l1": tags_of(range(10))})
            written(controller)
        controller.kill()
        good = controller.snapshot.read_bytes()
        bad = {
            "cut": good[:-1],
            "bit": bytes([*good[:20], good[20] ^ 1, *good[21:]]),
            "foreign": b"#!/bin/sh\necho hello to the world\n",
            "version": good[:7] + b"\x63" + good[8:],
            "old": good,
            "empty": b"",
            "unreadable": good,
        }[damage]
        controller.snapshot.write_bytes(bad)
        if damage == "old":
            controller._environment["KVSTRATA_CONTROLLER_DIRECTORY_SNAPSHOT_MAX_AGE_S"] = "1"
            time.sleep(1.1)  # the snapshot's own age, by the wall clock
        if damage == "unreadable":
            controller.snapshot.unlink()
            controller.snapshot.mkdir()
        controller.start()
        told = controller.ask("/v1/cluster")
        assert told["snapshot"]["ignored"] == 1 and told["snapshot"]["ignored_reason"]
        assert told["instances"]["restored"] == 0 and told["directory"]["placements"] == 0
        assert "snapshot_ignored" in controller.log.read_text()
        metric = "kvstrata_controller_snapshots_ignored_total 1.0"
        assert metric in controller.text("/metrics")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"version": 1, "pins": [', "cannot be read"),
        (b'{"version": 1, "pins": [{"claim": 1}]}', "claim"),
        (b'{"version": 2, "pins": []}', "format version 2"),
    ],
)
def test_orders_that_cannot_be_read_are_ignored_counted_and_said(tmp_path, content, says):
    with ControllerProcess(tmp_path / "controller") as controller:
        controller.kill()
        orders = controller.snapshot.with_name("orders.json")
        orders.write_bytes(content)
        controller.start()
        assert controller.ask("/v1/pins")["pins"] == []
        (said,) = [row for row in controller.ask("/v1/events")["events"] if row["kind"] == "snapshot_ignored"]
        assert says in said["facts"]["reason"] and said["facts"]["path"] == str(orders)
        assert controller.ask("/v1/cluster")["snapshot"]["ignored"] == 1
        with ClusterInstance(controller.ports["reply"], "a") as a:
            a.join({})
            claim = controller.ask(
                "/v1/pin", {"keys": [key_of(1)], "instance": "a", "ttl_s": 60, "wait_s": 0}
            )["claim"]
        controller.kill()
        controller.start()
        assert [row["claim"] for row in controller.ask("/v1/pins")["pins"]] == [claim]


def test_a_pin_whose_time_is_over_is_not_listed_after_a_restart(tmp_path):
    with ControllerProcess(tmp_path / "controller") as controller:
        controller.kill()
        pins = controller.snapshot.with_name("pins.json")
        rows = [("over", 1), ("left", 1 << 50)]
        told = [{"claim": claim, "instance": "a", "n_keys": 1, "expires_unix_ms": end} for claim, end in rows]
        pins.write_text(json.dumps({"version": 1, "pins": told}))
        controller.start()
        (row,) = controller.ask("/v1/pins")["pins"]
        assert (row["claim"], row["state"]) == ("left", "unknown"), "also from a file of pins alone"


def test_orders_outlive_a_controller_that_is_killed_right_behind_its_answer(tmp_path):
    with ControllerProcess(tmp_path / "controller") as controller:
        port = controller.ports["reply"]
        with (
            ClusterInstance(port, "a") as a,
            ClusterInstance(port, "b") as b,
            ClusterInstance(port, "c") as c,
        ):
            for one in (a, b, c):
                one.join({"l1": tags_of([1])})
            controller.ask("/v1/instances/a/drain", {"wait_s": 0})
            controller.ask("/v1/instances/b", method="DELETE")
            controller.kill()
            controller.start()
            told = controller.ask("/v1/instances")
            assert (told["drained"], told["removed"]) == (["a"], ["b"])
            a.join({"l1": tags_of([1])})
            c.join({})
            assert c.where(tags_of([1])) == []
            (drain,) = a.heartbeat()
            assert (drain.kind, drain.argument) == (wire.CommandKind.DRAIN, {"on": True})
            with pytest.raises(Refused) as refused:
                b.register()
            assert refused.value.code == "not_permitted"
            controller.ask("/v1/instances/a/undrain", {"wait_s": 0})
            controller.ask("/v1/instances/b/allow", {})
            controller.kill()
            controller.start()
            told = controller.ask("/v1/instances")
            assert (told["drained"], told["removed"]) == ([], [])


def test_a_drained_instance_that_left_can_be_undrained(controller, instance):
    a = instance("a").join({})
    controller.ask("/v1/instances/a/drain", {"wait_s": 0})
    a.goodbye()
    assert controller.ask("/v1/instances")["drained"] == ["a"]
    assert controller.ask("/v1/instances/a/undrain", {})["commands"] == []
    assert controller.ask("/v1/instances")["drained"] == []


def test_only_what_an_instance_keeps_is_listed_as_a_pin(controller, instance):
    a = instance("a").join({"l1": tags_of(range(4))})

    def pin(**result: Any) -> None:
        """One that the instance has answered so."""
        made = controller.ask("/v1/pin", {"keys": [key_of(1)], "instance": "a", "ttl_s": 600, "wait_s": 0})
        assert (listed(made["claim"]) or {})["state"] == "asked"
        (asked,) = a.heartbeat()
        a.heartbeat([wire.CommandResult(asked.number, **result)])
        until(lambda: (listed(made["claim"]) or {"state": "gone"})["state"] != "asked", "it is settled")

    def listed(claim: str) -> dict[str, Any] | None:
        return next((row for row in controller.ask("/v1/pins")["pins"] if row["claim"] == claim), None)

    def claims() -> list[str]:
        return [row["claim"] for row in controller.ask("/v1/pins")["pins"]]

    pin(ok=False, message="no room")
    pin(ok=True, message="", body={"count": 0})
    assert claims() == []
    pin(ok=True, message="", body={"count": 1})
    assert len(claims()) == 1
    with ClusterInstance(controller.ports["reply"], "a") as later:
        later.join({})
        until(lambda: claims() == [], "the next process of the instance keeps nothing")
        later.heartbeat()
        controller.ask("/v1/pin", {"keys": [key_of(1)], "instance": "a", "ttl_s": 600, "wait_s": 0})
        assert len(claims()) == 1
        later.goodbye()
        until(lambda: claims() == [], "an instance that left keeps nothing")


def test_a_stopped_controller_blames_nobody_for_its_own_absence(tmp_path):
    flags = ("--heartbeat-s", "2", "--dead-after-s", "5.5")
    with (
        ControllerProcess(tmp_path, flags=flags) as controller,
        ClusterInstance(controller.ports["reply"], "a") as a,
    ):
        a.join({"l1": tags_of([1])})
        controller.freeze()
        time.sleep(6.5)  # longer than it takes to be dead, on the controller's clock
        controller.thaw()
        until(lambda: controller.ask("/v1/events")["events"][-1]["kind"] == "clock", "it noticed")
        a.heartbeat()
        assert controller.ask("/v1/instances/a")["state"] == "live"


def test_sigterm_writes_a_last_snapshot(tmp_path):
    with ControllerProcess(tmp_path) as controller, ClusterInstance(controller.ports["reply"], "a") as a:
        a.join({"l1": tags_of(range(10))})
        assert controller.stop() == 0
        controller.start()
        assert controller.ask("/v1/instances/a")["state"] == "restored"
        assert a.register().sync


# --- HTTP -------------------------------------------------------------------------------------------------------


def test_commands_ride_on_heartbeats_until_their_result_has_come(controller, instance):
    a = instance("a").join({})
    pending = controller.ask("/v1/clear", {"tier": "l1", "wait_s": 0})
    assert not pending["done"] and pending["commands"][0]["state"] == "waiting"
    assert a.nudged()
    (command,) = a.heartbeat()
    assert (command.kind, command.argument) == (wire.CommandKind.CLEAR, {"tier": "l1", "tenant": None})
    assert a.heartbeat() == [command]
    number = pending["commands"][0]["number"]
    assert controller.ask(f"/v1/commands/{number}")["state"] == "sent"
    assert a.heartbeat([wire.CommandResult(command.number, True, "", {"count": 3})]) == []
    a.heartbeat([wire.CommandResult(command.number, False, "again", {})])
    done = controller.ask(f"/v1/commands/{number}")
    assert (done["state"], done["result"]) == ("done", {"count": 3})


def test_documents_come_through_commands_while_http_waits(controller, instance):
    a = instance("a").join({})
    answered: dict[str, Any] = {}

    def ask() -> None:
        answered.update(controller.ask("/v1/instances/a/status?wait_s=30"))

    thread = threading.Thread(target=ask)
    thread.start()
    commands = a.answer_commands(lambda command: {"pool": {"entries": 3}})
    thread.join()
    assert commands[0].kind is wire.CommandKind.STATUS
    assert answered["done"] and answered["ok"] and answered["document"] == {"pool": {"entries": 3}}


def test_chunks_are_explained_by_all_instances_and_who_does_not_answer_is_named(controller, instance):
    held, gone, never = key_of(1), key_of(2), key_of(3)
    a = instance("a").join({"l1": wire.tags_of(bytes.fromhex(held))})
    b, c, d = instance("b").join({}), instance("c").join({}), instance("d").join({})
    answered: dict[str, Any] = {}

    def ask() -> None:
        answered.update(controller.ask("/v1/explain", {"keys": [held, gone, never], "wait_s": 3}))

    def row(reason: str, tier: str = "") -> dict[str, str]:
        return {"tier": tier, "reason": reason, "detail": f"{reason or tier} it says"}

    says = {
        "a": {"keys": [row("unknown_key"), row("never_stored")]},
        "b": {"keys": [row("evicted"), row("", "l1")]},
        "d": {"keys": [row("evicted")]},
    }
    thread = threading.Thread(target=ask)
    thread.start()
    for one in (a, b, d):
        (command,) = one.answer_commands(lambda command, name=one.name: says[name])
        assert command.kind is wire.CommandKind.EXPLAIN
        assert command.argument == {"keys": bytes.fromhex(gone + never)}, "what is there needs no reason"
    assert c.nudged()
    thread.join()
    assert answered["placement"]["held_chunks"] == 1
    assert answered["answered"] == ["a", "b"]
    assert [row["instance"] for row in answered["unanswered"]] == ["c", "d"]
    silent, strange = [row["why"] for row in answered["unanswered"]]
    assert (
        silent in ("no answer within 3 s", "no answer before it expired") and "1 keys instead of 2" in strange
    )
    evicted, there = answered["misses"]
    assert (evicted["chunk"], evicted["key"], evicted["reason"]) == (1, gone, "evicted")
    assert [(row["instance"], row["detail"]) for row in evicted["told"]] == [
        ("b", "evicted it says"),
        ("a", "unknown_key it says"),
    ]
    assert (there["chunk"], there["reason"], there["told"][0]["tier"]) == (2, "", "l1")


def test_chunks_that_are_all_there_are_explained_without_asking_anybody(controller, instance):
    key = key_of(1)
    instance("a").join({"l1": wire.tags_of(bytes.fromhex(key))})
    told = controller.ask("/v1/explain", {"keys": [key], "wait_s": 30})
    assert told["placement"]["held_chunks"] == 1
    assert not told["misses"] and not told["answered"] and not told["unanswered"]
    assert controller.ask("/v1/commands")["commands"] == []


def test_a_request_is_explained_with_who_has_the_missed_chunk_now(tmp_path):
    key = key_of(7)
    with ControllerProcess(tmp_path / "controller") as controller:
        ports = controller.ports["reply"]
        miss = {"chunk": 0, "reason": "evicted", "detail": "by lru", "storage_key": key}
        document = {"request_id": "r/1", "unix_ms": 5, "first_miss": miss, "hits": {}}
        earlier = {**document, "unix_ms": 4, "first_miss": None}
        with ClusterInstance(ports, "a") as a, ClusterInstance(ports, "b") as b:
            a.join({})
            b.join({"l1": wire.tags_of(bytes.fromhex(key))})
            answered: dict[str, Any] = {}

            def ask() -> None:
                answered.update(controller.ask("/v1/explain", {"request_id": "r/1", "wait_s": 30}))

            thread = threading.Thread(target=ask)
            thread.start()
            a.answer_commands(lambda command: {"known": True, "lookups": [document]})
            b.answer_commands(lambda command: {"known": True, "lookups": [earlier]})
            thread.join()
    assert [row["instance"] for row in answered["lookups"]] == ["b", "a"], "oldest first"
    (place,) = answered["lookups"][1]["missing_now"]
    assert (place["instance"], place["tier"]) == ("b", "l1")
    assert answered["placement"] is None and answered["unanswered"] == []


def test_draining_and_removing_an_instance(controller, instance):
    a, b = instance("a").join({"l1": tags_of([1])}), instance("b").join({})
    assert controller.ask("/v1/instances/a/drain", {"wait_s": 0})["commands"][0]["kind"] == "drain"
    assert b.where(tags_of([1])) == []
    assert controller.ask("/v1/lookup", {"keys": [key_of(1)]})["chunks"][0]["places"]
    controller.ask("/v1/instances/a/undrain", {"wait_s": 0})
    assert b.where(tags_of([1]))
    assert controller.ask("/v1/instances/a", method="DELETE") == {"id": "a", "was": "live", "barred": True}
    assert b.where(tags_of([1])) == []
    with pytest.raises(Refused, match="unknown_instance"):
        a.heartbeat()
    with pytest.raises(Refused) as refused:
        a.register()
    assert refused.value.code == "not_permitted"
    controller.ask("/v1/instances/a/allow", {})
    a.join({"l1": tags_of([1])})
    assert b.where(tags_of([1]))


def test_a_prompt_is_found_by_its_tokens(controller, instance):
    layout = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=16)
    slices = sorted(Slice(layers=(0, 2), kv_heads=(n, n + 1), layout="x").digest() for n in range(2))
    root = identity_root(layout, RequestIdentity(tenant="t"))
    keys = storage_keys(chain_keys(root, list(range(64)), 16), b"".join(slices))
    a = instance("a").join({"l1": wire.tags_of(keys[: 3 * 64 + 32]), "disk-0": wire.tags_of(keys)})
    asked = {"tokens": list(range(70)), "tenant": "t"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        controller.ask("/v1/lookup", asked)
    assert refused.value.code == 400 and "no engine has" in json.load(refused.value)["message"]
    a.heartbeat(models=[wire.ModelInfo(layout, slices)])
    found = controller.ask("/v1/lookup", asked)
    assert (found["n_chunks"], found["n_slices"], found["held_chunks"]) == (4, 2, 4)
    assert found["longest"] == [{"instance": "a", "chunks": 3, "tokens": 48, "confirmed": True}]
    assert [[place["tier"] for place in chunk["places"]] for chunk in found["chunks"]] == [
        *[["l1", "disk-0"]] * 3,
        ["disk-0"],
    ]
    assert controller.ask("/v1/lookup", {**asked, "tenant": "other"})["held_chunks"] == 0
    assert controller.ask("/v1/models")["models"][0]["instances"] == ["a"]


def test_pin_replicate_move_and_evict_ask_the_right_instances(controller, instance):
    a, b = instance("a").join({"l1": tags_of(range(4))}), instance("b").join({})
    keys = [key_of(number) for number in range(4)]
    pinned = controller.ask("/v1/pin", {"keys": keys[:2], "instance": "a", "ttl_s": 60, "wait_s": 0})
    assert a.nudged()
    (pin,) = a.heartbeat()
    assert pin.argument == {
        "keys": bytes.fromhex("".join(keys[:2])),
        "ttl_ms": 60_000,
        "claim": pinned["claim"],
    }
    a.heartbeat([wire.CommandResult(pin.number, True, "", {"count": 1})])

    def pins() -> list[tuple[int, str]]:
        return [(row["keys"], row["state"]) for row in controller.ask("/v1/pins")["pins"]]

    until(lambda: pins() == [(1, "kept")], "it is listed with what is kept")
    controller.ask("/v1/unpin", {"claim": pinned["claim"], "wait_s": 0})
    (unpin,) = a.heartbeat()
    a.heartbeat([wire.CommandResult(unpin.number, False, "not now", {})])
    assert pins() == [(1, "kept")], "what was not ended is listed"
    controller.ask("/v1/unpin", {"claim": pinned["claim"], "wait_s": 0})
    (unpin,) = a.heartbeat()
    a.heartbeat([wire.CommandResult(unpin.number, True, "", {"count": 1})])
    until(lambda: pins() == [], "it is listed no more")

    moved = controller.ask("/v1/move", {"keys": [keys[0]], "to": "b", "wait_s": 0})
    assert not moved["done"]
    (pull,) = b.heartbeat()
    assert pull.kind is wire.CommandKind.PULL and pull.argument["owner"]["instance"] == "a"
    assert a.heartbeat() == []
    b.heartbeat([wire.CommandResult(pull.number, True, "", {"count": 1})])
    (drop,) = until(a.heartbeat, "the owner is told to drop it")
    assert (drop.kind, drop.argument) == (wire.CommandKind.EVICT, {"keys": bytes.fromhex(keys[0])})
    a.heartbeat([wire.CommandResult(drop.number, True, "", {"count": 1})])

    controller.ask("/v1/move", {"keys": keys[:2], "to": "b", "source": "a", "wait_s": 0})
    (pull,) = b.heartbeat()
    b.heartbeat([wire.CommandResult(pull.number, True, "", {"count": 1, "reason": "evicted"})])
    until(
        lambda: "move_incomplete" in {row["kind"] for row in controller.ask("/v1/events")["events"]},
        "it is said",
    )
    assert a.heartbeat() == [], "what did not arrive stays where it was"

    controller.ask("/v1/replicate", {"keys": [keys[1]], "to": "b", "source": "a", "wait_s": 0})
    (pull,) = b.heartbeat()
    b.heartbeat([wire.CommandResult(pull.number, False, "absent", {})])
    assert a.heartbeat() == []

    told = controller.ask("/v1/evict", {"keys": [keys[3]], "wait_s": 0})
    assert [row["instance"] for row in told["commands"]] == ["a"]
    told = controller.ask("/v1/evict", {"whole_tenant": True, "tenant": "t", "wait_s": 0})
    assert [row["instance"] for row in told["commands"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/lookup", {}, 400, "either tokens or keys"),
        ("/v1/lookup", {"keys": ["xyz"]}, 400, "keys[0]"),
        ("/v1/lookup", {"tokens": [-1]}, 400, "tokens"),
        ("/v1/lookup", {"keyz": []}, 400, "keyz"),
        ("/v1/evict", {"keys": [], "identity": "00"}, 400, "exactly one"),
        ("/v1/evict", {"identity": "00"}, 400, "must have 32"),
        ("/v1/unpin", {"claim": "x"}, 404, "no pin"),
        ("/v1/replicate", {"keys": [], "to": "nobody"}, 404, "nobody"),
        ("/v1/instances/nobody/drain", {}, 404, "nobody"),
        ("/v1/clear", {"tier": "l3"}, 400, "tier"),
        ("/v1/clear", {"tier": "l1", "wait_s": 1e9}, 400, "wait_s"),
    ],
)
def test_wrong_requests_say_what_to_change(controller, path, body, status, says):
    with pytest.raises(urllib.error.HTTPError) as refused:
        controller.ask(path, body)
    answer = json.load(refused.value)
    assert refused.value.code == status and says in answer["message"], answer


def test_ctl_shows_what_the_api_tells(controller, instance, capsys, tmp_path):
    instance("a").join({"l1": tags_of([1])})
    prompt = tmp_path / "keys"
    prompt.write_text(json.dumps([key_of(1)]))
    for arguments, says in (
        (["status"], "placements"),
        (["ready"], "ready"),
        (["instances"], "exact"),
        (["instance", "a"], "peer_endpoint"),
        (["tiers"], "l1"),
        (["models"], "models"),
        (["events"], "joined"),
        (["lookup", str(prompt)], "held_chunks"),
        (["evict", str(prompt), "--wait-s", "0"], "waiting"),
        (["commands"], "evict"),
        (["pins"], "pins"),
        (["drain", "a", "--wait-s", "0"], "waiting"),
        (["remove", "a"], "barred"),
        (["allow", "a"], "allowed"),
    ):
        assert ctl.main(["--url", controller.url, "cluster", *arguments]) == 0
        assert says in capsys.readouterr().out, arguments
    assert ctl.main(["--url", controller.url, "cluster", "instance", "b"]) == 1
    assert "there is no 'b'" in capsys.readouterr().err


def test_events_come_by_cursor_by_waiting_and_as_a_stream(controller, instance):
    cursor = controller.ask("/v1/events")["next_after"]
    told: list[dict[str, Any]] = []
    thread = threading.Thread(
        target=lambda: told.append(controller.ask(f"/v1/events?after={cursor}&wait_s=30"))
    )
    thread.start()
    instance("a").register()
    thread.join()
    assert [event["kind"] for event in told[0]["events"]] == ["joined"]
    assert controller.ask(f"/v1/events?after={cursor}&limit=1")["events"] == told[0]["events"]
    with urllib.request.urlopen(f"{controller.url}/v1/events/stream?after={cursor}", timeout=30) as stream:
        lines = [stream.readline().decode().strip() for _ in range(4)]
    assert lines[0] == ": connected"
    assert lines[2] == f"id: {told[0]['events'][0]['number']}"
    assert json.loads(lines[3].removeprefix("data: "))["kind"] == "joined"
    assert controller.ask("/v1/events?after=0")["lost"]


def test_off_loopback_needs_a_token_and_checks_it(tmp_path):
    token = tmp_path / "token"
    token.write_text("t" * 32)
    with ControllerProcess(tmp_path, flags=("--token-file", str(token))) as controller:
        for given in ("", "u" * 32):
            with pytest.raises(urllib.error.HTTPError) as refused:
                controller.ask("/v1/instances", token=given)
            assert refused.value.code == 401
        assert controller.ask("/v1/instances", token="t" * 32)["instances"] == []
        assert controller.ask("/healthz") == {"ok": True}
    refused_start = subprocess.run(
        [sys.executable, "-m", "kvstrata", "controller", "--host", "0.0.0.0", "--snapshot-dir", "none"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused_start.returncode == 2 and "token_file" in refused_start.stderr


def key_of(number: int) -> str:
    """A storage key whose tag is that of `tags_of`."""
    return (tags_of([number]) + bytes(24)).hex()
