"""A real controller and senders that use the id of somebody else's instance, or name an endpoint that is not theirs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from tests.harness.cache_engine import eventually
from tests.harness.cluster_instance import ClusterInstance, Refused, holders, tags_of
from tests.harness.controller_process import ControllerProcess

pytestmark = pytest.mark.integration

QUICK = ("--heartbeat-s", "0.2", "--dead-after-s", "1")


@pytest.fixture
def stranger(instance: Callable[..., ClusterInstance]) -> Callable[..., ClusterInstance]:
    """Makes senders with a key of their own, whatever id they use."""
    return lambda name, **more: instance(name, keys=zmq.curve_keypair(), **more)


def code(ask: Callable[[], Any]) -> str:
    """Return the code with which the controller refuses; empty if it does not."""
    try:
        ask()
    except Refused as refused:
        return refused.code
    return ""


def test_a_forged_registration_is_refused_counted_and_logged_and_the_rightful_instance_stays(
    controller, instance, stranger
):
    a, b = instance("a").join({"l1": tags_of(range(10))}), instance("b").join({})
    for incarnation in (a.incarnation + 1, (1 << 63) - 1, a.incarnation):
        forged = stranger("a", incarnation=incarnation)
        with pytest.raises(Refused, match="belongs to the key of another instance") as refused:
            forged.register()
        assert (refused.value.code, refused.value.field) == ("wrong_key", "instance")
    a.register()
    (owner,) = b.where(tags_of(range(10)))
    assert (owner.instance, owner.n_keys, owner.peer_endpoint) == ("a", 10, a.endpoint)
    assert owner.peer_key == a.public_key.decode()
    assert re.search(r'kvstrata_controller\w+\{code="wrong_key"\} 3', controller.text("/metrics"))
    controller.expect("registration_refused", "instance=a")


def test_no_message_in_the_name_of_an_instance_counts_without_its_key(controller, instance, stranger):
    a, b = instance("a").join({"l1": tags_of(range(10))}), instance("b").join({})
    forged = stranger("c").join({})
    (owner,) = b.where(tags_of(range(10)))
    forged.name, forged.incarnation = owner.instance, owner.incarnation  # anybody may learn these
    for ask in (forged.goodbye, forged.register):
        assert code(ask) == "wrong_key"
    a.register()
    assert holders(b.where(tags_of(range(10)))) == {"a": 10}


def test_an_id_stays_its_owners_after_goodbye_death_and_a_kill_of_the_controller(tmp_path):
    with ControllerProcess(tmp_path, flags=QUICK) as controller:
        port = controller.ports["reply"]
        with (
            ClusterInstance(port, "left") as left,
            ClusterInstance(port, "dead") as dead,
            ClusterInstance(port, "left", keys=zmq.curve_keypair()) as forged,
        ):
            left.join({}).goodbye()
            dead.join({})
            dead.be_silent()
            eventually(
                "the silent instance is dead", lambda: controller.ask("/v1/cluster")["instances"]["dead"]
            )
            orders = controller.snapshot.parent / "orders.json"
            eventually("the keys are written", lambda: orders.exists() and b'"dead"' in orders.read_bytes())
            for again in (False, True):
                if again:
                    controller.kill()
                    controller.start()
                for name in ("left", "dead"):
                    forged.name = name
                    assert code(forged.register) == "wrong_key"
            left.register()
            # An operator who has replaced the instance lets the controller forget it.
            controller.ask("/v1/instances/dead", method="DELETE")
            assert code(forged.register) == ""
            dead.be_silent(False)
            assert code(dead.register) == "wrong_key"


def test_an_instance_names_only_endpoints_at_the_address_that_it_comes_from(controller, instance):
    for host in ("192.0.2.7", "no-such-host.invalid", "[2001:db8::7]"):
        with pytest.raises(Refused) as refused:
            instance("a").register(control_endpoint=f"tcp://{host}:1")
        assert (refused.value.field, refused.value.code) != ("control_endpoint", "unreachable_instance")
    for host in ("127.0.0.1", "localhost"):
        a = instance(f"at-{host}")
        a.register(control_endpoint=a.endpoint.replace("127.0.0.1", host))


@pytest.mark.silence
def test_the_controllers_settings_may_allow_more_hosts(tmp_path):
    allowed = '["198.51.100.0/24", "nat.invalid"]'
    environment = {**os.environ, "KVSTRATA_CONTROLLER_PEER_HOSTS": allowed}
    reached = "unreachable_instance"
    with (
        ControllerProcess(tmp_path, environment=environment) as controller,
        ClusterInstance(controller.ports["reply"], "a") as a,
    ):
        for host, why in (
            ("198.51.100.9", reached),
            ("nat.invalid", reached),
            ("198.51.101.9", "not_permitted"),
        ):
            endpoint = f"tcp://{host}:1"
            assert code(lambda endpoint=endpoint: a.register(control_endpoint=endpoint)) == why
