"""A real controller: what its directory answers, lists, registrations, and bytes that are not of the protocol."""

from __future__ import annotations

import pytest
import zmq

from kvstrata.rpc import cluster_wire as wire
from kvstrata.rpc.zmq_curve import SharedKey
from tests.harness.cache_engine import eventually
from tests.harness.cluster_instance import ClusterInstance, Refused, holders, tags_of
from tests.harness.controller_process import ControllerProcess

pytestmark = pytest.mark.integration
QUICK = ("--heartbeat-s", "0.2", "--dead-after-s", "1")


def test_where_lists_the_holders_of_the_longest_prefix_and_never_the_asker(controller, instance):
    a = instance("a").join({"l1": tags_of(range(100))})
    b = instance("b").join({"l1": tags_of(range(60)), "disk-0": tags_of(range(100))})
    c = instance("c").join({})
    assert holders(c.where(tags_of(range(200)))) == {"a": 100, "b": 60}
    assert [owner.instance for owner in c.where(tags_of(range(200)))] == ["a", "b"]
    assert holders(a.where(tags_of(range(200)))) == {"b": 60}
    assert holders(b.where(tags_of(range(10)))) == {"a": 10}
    assert holders(c.where(tags_of(range(7)), n_slices=7)) == {"a": 7, "b": 7}
    assert c.where(tags_of([1000])) == []


def test_changes_change_the_directory_and_an_instance_that_leaves_is_forgotten_at_once(controller, instance):
    a, b = instance("a").join({}), instance("b").join({})
    a.admit(tags_of(range(10)))
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 10})
    a.evict(tags_of([5]))
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 5})
    a.change(wire.Run(wire.Change.CLEAR, "l1", b""), wire.Run(wire.Change.ADMIT, "l1", tags_of([0])))
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 1})
    a.goodbye()
    assert b.where(tags_of(range(10))) == []
    assert controller.ask("/v1/cluster")["instances"]["live"] == 1


def test_an_instance_that_cannot_tell_all_changes_is_listed_again(controller, instance):
    a, b = instance("a").join({"l1": tags_of(range(10))}), instance("b").join({})
    a.hold({"l1": tags_of(range(100, 80_000))})
    assert holders(b.where(tags_of(range(10)))) == {"a": 10}
    a.forget_changes()
    a.until_followed()
    assert b.where(tags_of(range(10))) == []
    (owner,) = b.where(tags_of(range(100, 400)))
    assert (owner.instance, owner.n_keys, owner.confirmed) == ("a", 300, True)
    row = controller.ask("/v1/instances/a")
    assert row["keys"]["l1"] == 79_900
    assert (row["following"]["state"], row["following"]["lists"]) == ("exact", 2)
    assert row["following"]["listed_because"] == "too_old"


def test_a_tier_that_cannot_be_listed_yet_is_listed_once_it_can_be(controller, instance):
    a = instance("a")
    a.holdings.unlistable = {"disk-0"}
    a.join({"l1": tags_of(range(3)), "disk-0": tags_of(range(7))})
    assert controller.ask("/v1/instances/a")["keys"] == {"l1": 3, "disk-0": 0}
    a.holdings.unlistable.clear()
    eventually("it is listed", lambda: controller.ask("/v1/instances/a")["keys"] == {"l1": 3, "disk-0": 7})


def test_an_admin_may_have_an_instance_listed_again(controller, instance):
    a, b = instance("a").join({"l1": tags_of(range(10))}), instance("b").join({})
    a.hold({"l1": tags_of(range(5))})
    controller.ask("/v1/instances/a/resync", {})
    b.until_where(tags_of(range(10)), lambda owners: holders(owners) == {"a": 5})


@pytest.mark.silence
def test_an_instance_whose_control_port_cannot_be_reached_is_told_so(controller, instance):
    a, b = instance("a"), instance("b")
    for endpoint in ("tcp://127.0.0.1:9", b.endpoint):  # nobody listens; another instance does
        with pytest.raises(Refused, match="cannot reach a at") as refused:
            a.register(control_endpoint=endpoint)
        assert (refused.value.code, refused.value.field) == ("unreachable_instance", "control_endpoint")
    assert controller.ask("/v1/instances")["instances"] == []
    a.join({})


@pytest.mark.silence
def test_a_silent_instance_is_dead_within_the_timeout_and_may_come_back(tmp_path):
    with ControllerProcess(tmp_path, flags=QUICK) as controller:
        port = controller.ports["reply"]
        with ClusterInstance(port, "a") as a, ClusterInstance(port, "b") as b:
            a.join({"l1": tags_of([1])})
            b.join({})
            assert b.where(tags_of([1]))
            a.be_silent()

            def is_late() -> bool:  # or already dead, if a busy machine has stopped this process meanwhile
                row = controller.ask("/v1/instances/a")
                return row["late"] or row["state"] == "dead"

            eventually("it is late", is_late)
            eventually("it is forgotten", lambda: not b.where(tags_of([1])))
            assert {row["id"]: row["state"] for row in controller.ask("/v1/instances")["instances"]} == {
                "a": "dead",
                "b": "live",
            }
            with pytest.raises(Refused, match="unreachable_instance"):
                a.register()
            a.be_silent(False)
            a.join({"l1": tags_of([1])})
            assert b.where(tags_of([1]))[0].confirmed
            kinds = [event["kind"] for event in controller.ask("/v1/events")["events"]]
            assert "died" in kinds


def test_garbage_on_the_port_is_answered_with_an_error_and_disturbs_nobody_else(controller, instance):
    a = instance("a").join({"l1": tags_of([1])})
    context = zmq.Context()
    try:
        bad = context.socket(zmq.DEALER)
        bad.setsockopt(zmq.LINGER, 0)
        bad.curve_serverkey = SharedKey("controller.curve_file").keys.server
        bad.curve_publickey, bad.curve_secretkey = zmq.curve_keypair()
        bad.connect(f"tcp://127.0.0.1:{controller.ports['reply']}")
        frames = [
            b"",
            b"\xc1",
            b"\x93\xa5where\x01",
            b"\x91" * 5_000,
            bytes(1_000),
            wire.encode(wire.Listed(1, 1, 0, b"")),
        ]
        for frame in frames:
            bad.send(frame)
        bad.send_multipart([b"one", b"two"])
        for _ in range(len(frames) + 1):
            assert bad.poll(30_000)
            answer = wire.ANSWERS.decode(bad.recv_multipart()[-1])
            assert isinstance(answer, wire.Failure) and answer.code == "bad_request"
        assert controller.ask("/v1/cluster")["refused_requests"]["bad_request"] == len(frames) + 1
        bad.send(bytes(wire.MAX_CLUSTER_MESSAGE_BYTES + 1))  # the controller closes this connection
        a.register()
        b = instance("b").join({})
        assert holders(b.where(tags_of([1]))) == {"a": 1}
    finally:
        context.destroy(linger=0)


def test_bytes_that_are_not_zmq_disturb_nobody(controller, instance):
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
        ({"control_endpoint": "http://x"}, "control_endpoint", "bad_request"),
    ):
        with pytest.raises(Refused) as refused:
            instance("a").register(**changes)
        assert (refused.value.field, refused.value.code) == (field, code)
