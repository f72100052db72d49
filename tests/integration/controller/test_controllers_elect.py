"""Two real controllers that share an etcd: one sends commands, both answer lookups."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvstrata.rpc import cluster_wire as wire
from tests.harness import etcd_server
from tests.harness.cache_engine import eventually
from tests.harness.cluster_instance import ClusterInstance, Refused, tags_of
from tests.harness.controller_process import ControllerProcess
from tests.harness.etcd_server import EtcdServer
from tests.harness.rpc_client import CHUNK_TOKENS, RpcClient, chain_of
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

ETCD = {"ttl_s": 6}


@contextlib.contextmanager
def etcd_in(folder: Path) -> Iterator[EtcdServer]:
    etcd_server.ensure()
    with EtcdServer(folder) as server:
        yield server


@contextlib.contextmanager
def two_controllers(etcd: EtcdServer, folder: Path) -> Iterator[dict[str, ControllerProcess]]:
    config = folder / "controller.yaml"
    config.write_text(etcd.controllers_settings(folder, ETCD["ttl_s"]))
    made = {
        name: ControllerProcess(
            folder / name, flags=("--name", name, "--heartbeat-s", "0.4", "--config", str(config))
        )
        for name in ("one", "two")
    }
    try:
        for controller in made.values():
            controller.start()
        yield made
    finally:
        for controller in made.values():
            controller.kill()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with etcd_in(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def controllers(etcd: EtcdServer, tmp_path: Path) -> Iterator[dict[str, ControllerProcess]]:
    """Two controllers of the test's own, which it may kill or freeze."""
    with two_controllers(etcd, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ControllerProcess]]:
    """Two controllers for all tests that leave them running."""
    folder = tmp_path_factory.mktemp("shared")
    with etcd_in(folder / "etcd") as server, two_controllers(server, folder) as made:
        yield made


def leader_of(controllers: dict[str, ControllerProcess]) -> str:
    """Wait until all controllers name the same leader; returns its name."""

    def agreed() -> str:
        told = {name: process.ask("/v1/cluster")["election"] for name, process in controllers.items()}
        leaders = {election["leader"] for election in told.values()}
        leading = [name for name, election in told.items() if election["leads"]]
        return leading[0] if leaders == set(leading) else ""

    return str(eventually("all agree who leads", agreed))


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def posted(controller: ControllerProcess, path: str) -> tuple[int, str]:
    """Status and Location of a POST that follows no redirect."""
    request = urllib.request.Request(
        controller.url + path, b'{"wait_s": 0}', {"Content-Type": "application/json", **controller.bearer()}
    )
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=30) as reply:
            return reply.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("Location", "")


def test_both_controllers_answer_lookups_and_only_the_leader_sends_commands(shared):
    leader = leader_of(shared)
    [follower] = set(shared) - {leader}
    held = {"l1": tags_of(range(10))}
    at = {name: ClusterInstance(process.ports["reply"], "a").join(held) for name, process in shared.items()}
    asker = {name: ClusterInstance(process.ports["reply"], "b").join({}) for name, process in shared.items()}
    try:
        for name in shared:
            assert [owner.n_keys for owner in asker[name].where(tags_of(range(20)))] == [10]
        status, where = posted(shared[follower], "/v1/instances/a/drain?x=1")
        assert (status, where) == (
            307,
            f"{shared[leader].url.replace('127.0.0.1', 'localhost')}/v1/instances/a/drain?x=1",
        )
        assert posted(shared[leader], "/v1/instances/a/drain")[0] == 202
        asked = at[leader].operation()
        assert asked.token > 0
        assert isinstance(asked.operation, wire.Drain)
        assert not at[follower].has_operation()
    finally:
        for one in (*at.values(), *asker.values()):
            one.close()


def test_an_id_belongs_to_its_key_at_every_controller_once_one_of_them_has_seen_it(shared):
    leader = leader_of(shared)
    [follower] = set(shared) - {leader}
    ports = {name: process.ports["reply"] for name, process in shared.items()}

    def refused(port: int, keys: tuple[bytes, bytes]) -> bool:
        with ClusterInstance(port, "keyed", keys=keys) as forged:
            try:
                forged.register()
            except Refused as why:
                return why.code == "wrong_key"
        return False

    forged = zmq.curve_keypair()
    with ClusterInstance(ports[follower], "keyed", keys=forged) as early:
        early.join({})  # the follower does not know the id yet
        with ClusterInstance(ports[leader], "keyed") as rightful:
            rightful.join({})
            eventually(
                "the follower refuses the other key", lambda: refused(ports[follower], zmq.curve_keypair())
            )
            eventually("the member with the other key is gone", lambda: not registered(early))
            assert refused(ports[follower], forged) and refused(ports[leader], forged)
            rightful.goodbye()


def registered(instance: ClusterInstance) -> bool:
    """Return whether a controller knows this instance with its key."""
    try:
        instance.register()
    except Refused:
        return False
    return True


@pytest.mark.silence
def test_a_leader_that_was_frozen_sends_no_command_when_it_wakes(controllers):
    old = leader_of(controllers)
    [new] = set(controllers) - {old}
    with ClusterInstance(controllers[old].ports["reply"], "a") as instance:
        instance.join({})
        assert posted(controllers[old], "/v1/instances/a/drain")[0] == 202
        asked = instance.operation()
        stale = asked.token
        assert isinstance(asked.operation, wire.Drain)
        with controllers[old].frozen():
            greater = eventually(
                "the other leads",
                lambda: (e := controllers[new].ask("/v1/cluster")["election"])["leads"] and e["token"],
            )
            assert greater > stale
        assert leader_of(controllers) == new
        instance.tell(state="draining")  # a leader would repeat its order now
        assert not instance.has_operation(), "a controller that does not lead commands nothing"
        assert posted(controllers[old], "/v1/instances/a/drain")[0] == 307


@pytest.mark.silence
def test_orders_of_admins_survive_the_leader_that_took_them(controllers):
    old = leader_of(controllers)
    [new] = set(controllers) - {old}
    ports = {name: process.ports["reply"] for name, process in controllers.items()}
    with (
        ClusterInstance(ports[old], "a") as a,
        ClusterInstance(ports[new], "a", incarnation=a.incarnation) as a_there,
        ClusterInstance(ports[new], "b") as b,
        ClusterInstance(ports[new], "c") as c,
    ):
        a.join({"l1": tags_of([1])})
        for one in (a_there, b, c):
            one.join({"l1": tags_of([1])} if one is a_there else {})
        assert [owner.instance for owner in c.where(tags_of([1]))] == ["a"]
        with ClusterInstance(ports[old], "b", incarnation=b.incarnation) as b_here:
            b_here.join({})
            controllers[old].ask("/v1/instances/a/drain", {"wait_s": 0})
            controllers[old].ask("/v1/instances/b", method="DELETE")
        a.answer(a.operation(), {"leases": 0})
        a.tell(draining=True)
        eventually("the other knows", lambda: not c.where(tags_of([1])))
        controllers.pop(old).kill()
        assert leader_of(controllers) == new
        told = controllers[new].ask("/v1/instances")
        assert (told["drained"], told["removed"]) == (["a"], ["b"])
        with pytest.raises(Refused) as refused:
            b.register()
        assert refused.value.code == "not_permitted"
        while a_there.has_operation():
            a_there.operation()
        a_there.tell(draining=True)
        controllers[new].ask("/v1/instances/a/undrain", {"wait_s": 0})
        assert [owner.instance for owner in c.where(tags_of([1]))] == ["a"]


def test_an_instance_that_has_seen_a_greater_token_is_led_again_by_a_greater_cluster_id(shared):
    leader = shared[leader_of(shared)]
    seen = leader.ask("/v1/cluster")["election"]
    with ClusterInstance(leader.ports["reply"], "c") as instance:
        instance.join({})
        instance.tell(obeys=(seen["cluster_id"], seen["token"] + 1_000_000))

        def greater() -> bool:
            now = leader.ask("/v1/cluster")["election"]
            return bool(now["leads"] and now["cluster_id"] > seen["cluster_id"])

        eventually("it has a greater cluster id", greater)


@pytest.mark.silence
@pytest.mark.long
def test_without_etcd_lookups_go_on_and_writes_are_refused_with_the_reason(controllers, etcd):
    leader_of(controllers)
    etcd.kill()
    one = controllers["one"]
    eventually("nobody leads", lambda: not one.ask("/v1/cluster")["election"]["leads"])
    with ClusterInstance(one.ports["reply"], "a") as a, ClusterInstance(one.ports["reply"], "b") as b:
        a.join({"l1": tags_of(range(3))})
        b.join({})
        assert [owner.instance for owner in b.where(tags_of(range(3)))] == ["a"]
        eventually("nobody is said to lead", lambda: posted(one, "/v1/instances/a/drain")[0] == 503)
    election = one.ask("/v1/cluster")["election"]
    assert election["no_leader_s"] > 0 and "failed to connect" in election["problem"]
    values = dict(line.split() for line in one.text("/metrics").splitlines() if line.count(" ") == 1)
    assert float(values["kvstrata_controller_leads"]) == 0
    assert float(values["kvstrata_controller_no_leader_seconds"]) > 0
    assert float(values["kvstrata_controller_election_failures_total"]) > 0
    etcd.start()
    leader_of(controllers)


@pytest.mark.silence
def test_an_instance_tells_each_of_several_controllers(controllers, tmp_path):
    leader = leader_of(controllers)
    url = ",".join(f"tcp://127.0.0.1:{process.ports['reply']}" for process in controllers.values())
    flags = ("--controller-url", url, "--instance-id", "ours")
    with ServerProcess(tmp_path / "server", l1_mb=64, chunk_tokens=CHUNK_TOKENS, flags=flags) as server:
        server.start()
        with RpcClient(server.socket_dir) as client:
            identity = client.identify()
            client.store(identity, chain_of(identity.root, 12))

            def keys_at(name: str) -> int:
                rows = controllers[name].ask("/v1/instances")["instances"]
                return sum(row["keys"].get("l1", 0) for row in rows)

            eventually("both know", lambda: {keys_at(name) for name in controllers} == {12})
            controllers.pop(leader).kill()
            [left] = controllers
            leader_of(controllers)
            assert posted(controllers[left], "/v1/instances/ours/drain")[0] in (200, 202)
            eventually("it obeys", lambda: controllers[left].ask("/v1/instances")["instances"][0]["state"])
            assert keys_at(left) == 12
