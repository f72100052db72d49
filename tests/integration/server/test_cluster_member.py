"""A real server with a real controller, which knows the server's chunks and whose faults cost the server nothing."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvstrata.native.core import chain_keys, storage_keys
from kvstrata.rpc import cluster_wire, wire
from tests.harness import own_commands
from tests.harness.cache_engine import eventually
from tests.harness.controller_process import ControllerProcess
from tests.harness.own_process import ServerFailed
from tests.harness.rpc_client import CHUNK_TOKENS, RpcClient
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

QUICK = ("--heartbeat-s", "0.2", "--dead-after-s", "5")


until = functools.partial(eventually, "it is known")


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path / "controller", flags=QUICK) as process:
        yield process


@pytest.fixture
def server(start, controller) -> ServerProcess:
    return start(l1_mb=64, l2="fs", chunk_tokens=CHUNK_TOKENS, flags=joins(controller))


def joins(controller: ControllerProcess, instance: str = "ours") -> tuple[str, ...]:
    """Flags of a server with this id in the controller's cluster."""
    return ("--controller-url", f"tcp://127.0.0.1:{controller.ports['reply']}", "--instance-id", instance)


class Prompt:
    """Chunks of one prompt, stored by one engine."""

    def __init__(self, client: RpcClient, number: int, n_chunks: int) -> None:
        self.client = client
        self.identity = client.identify()
        self.chain = chain_keys(self.identity.root, [number] * (n_chunks * CHUNK_TOKENS), CHUNK_TOKENS)
        assert client.slice is not None
        self.keys = storage_keys(self.identity.root, self.chain, client.slice.digest())
        self.tags = cluster_wire.tags_of(self.keys)

    def store(self) -> bytes:
        return self.client.store(self.identity, self.chain)

    def hits(self) -> int:
        reply = self.client.lookup(self.identity.identity_id, self.chain)
        self.client.release([(self.client.session, self.client.seq)], group=True)
        return reply.n_chunks


def cluster_of(server: ServerProcess) -> dict[str, Any]:
    with RpcClient(server.socket_dir) as client:
        return client.status()["cluster"]


def ours(controller: ControllerProcess) -> dict[str, Any]:
    """The controller's row of the server; empty while the controller does not know it."""
    rows = controller.ask("/v1/instances")["instances"]
    return next((row for row in rows if row["id"] == "ours"), {})


def confirmed(controller: ControllerProcess) -> bool:
    return bool(ours(controller).get("confirmed"))


def keys_in(controller: ControllerProcess, tier: str) -> int:
    """Chunks in a tier of the server that the controller knows of."""
    return int(ours(controller).get("keys", {}).get(tier, 0))


def test_the_controller_knows_which_chunks_are_stored_and_dropped(controller, server, client):
    until(lambda: confirmed(controller))
    prompt = Prompt(client, 1, 20)
    assert set(prompt.store()) == {wire.ReserveOutcome.RESERVED}
    until(lambda: keys_in(controller, "l1") == 20)
    until(lambda: keys_in(controller, "fs-0") == 20)
    assert ours(controller)["capacity_bytes"]["l1"] == 64 << 20
    answer = controller.ask("/v1/evict", {"keys": [key.hex() for key in split(prompt.keys[-32 * 5 :])]})
    assert answer["commands"][0]["result"]["count"] == 5
    until(lambda: keys_in(controller, "l1") == 15)
    controller.ask("/v1/clear", {"tier": "all"})
    until(lambda: keys_in(controller, "l1") == keys_in(controller, "fs-0") == 0)
    assert confirmed(controller)
    assert ours(controller)["following"]["lists"] == 1


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


def test_a_server_that_stops_is_forgotten_and_one_that_comes_back_is_known_again(controller, server, client):
    prompt = Prompt(client, 1, 20)
    prompt.store()
    until(lambda: keys_in(controller, "l1") == 20)
    client.goodbye()
    assert server.stop() == 0
    assert ours(controller) == {}
    server.start()
    until(lambda: keys_in(controller, "l1") == 20)
    until(lambda: confirmed(controller))


def test_what_needs_attention_in_a_cluster_comes_first(controller, server):
    def shown() -> list[str]:
        done = own_commands.run("kvstrata", "ctl", "--url", controller.url, "cluster", "status")
        return [line.strip() for line in done.stdout.splitlines()]

    until(lambda: confirmed(controller))
    assert shown()[0].split() == ["needs_attention", "nothing"]
    assert ours(controller)["peer_engine"] == "tcp, since this host has no RDMA card"
    assert any(line.split("  ")[0] == "tcp, since this host has no RDMA card" for line in shown())
    shutil.rmtree(server.folder / "l2")
    until(lambda: ours(controller)["tier_states"])
    assert shown()[:2] == ["needs_attention", "ours: fs-0 is gone"]
    server.kill()
    until(lambda: ours(controller)["state"] == "dead")
    assert shown()[1].startswith("ours: dead, last heard ")


def test_a_controller_that_was_killed_learns_everything_again(controller, server, client):
    until(lambda: confirmed(controller))
    prompts = [Prompt(client, number, 10) for number in range(6)]
    for number, prompt in enumerate(prompts):
        assert set(prompt.store()) == {wire.ReserveOutcome.RESERVED}
        if number == 2:
            controller.kill()
        if number == 4:
            controller.start()
    until(lambda: keys_in(controller, "l1") == 60)
    until(lambda: keys_in(controller, "fs-0") == 60)
    until(lambda: confirmed(controller))
    assert [prompt.hits() for prompt in prompts] == [10] * 6


def test_commands_are_carried_out_and_answered(controller, server, client):
    prompt = Prompt(client, 1, 5)
    prompt.store()
    until(lambda: keys_in(controller, "l1") == 5)
    status = controller.ask("/v1/instances/ours/status")
    assert status["ok"] and status["document"]["instance"]["instance_id"] == "ours"
    runtime = status["document"]["runtime"]
    assert runtime["rss_bytes"] > 0 and runtime["threads"] > 1
    client.lookup(prompt.identity.identity_id, prompt.chain)
    keys = [key.hex() for key in split(prompt.keys)]
    until(lambda: controller.ask("/v1/models")["models"])
    tokens = {"tokens": [1] * (5 * CHUNK_TOKENS + 1), "instance": "ours", "ttl_s": 600}
    [refused] = controller.ask("/v1/claims", {**tokens, "salt": "other"})["commands"]
    assert (refused["state"], refused["message"].partition(":")[0]) == ("failed", "absent")
    [asked] = controller.ask("/v1/claims", tokens)["commands"]
    claim = asked["result"]["claim"]
    assert (asked["result"]["state"], asked["result"]["chunks"]) == ("kept", 5)
    client.release([(client.session, client.seq)], group=True)
    answer = controller.ask("/v1/evict", {"keys": keys})
    assert answer["commands"][0]["result"]["count"] == 0
    [released] = controller.ask(f"/v1/claims/{claim}/release", {})["commands"]
    assert released["result"]["count"] == 1
    answer = controller.ask("/v1/evict", {"keys": keys})
    assert answer["commands"][0]["result"]["count"] == 5
    until(lambda: keys_in(controller, "l1") == 0)
    assert controller.ask("/v1/instances/ours/drain", {})["commands"][0]["state"] == "done"
    until(lambda: ours(controller)["reported_state"] == "draining")
    controller.ask("/v1/instances/ours/undrain", {})
    until(lambda: ours(controller)["reported_state"] == "ready")
    lists = ours(controller)["following"]["lists"]
    controller.ask("/v1/instances/ours/resync", {})
    until(lambda: confirmed(controller) and ours(controller)["following"]["lists"] > lists)


def test_a_freeze_refuses_stores_until_its_time_is_over_or_it_is_ended(controller, server, client):
    until(lambda: confirmed(controller))
    kept, later = Prompt(client, 1, 5), Prompt(client, 2, 5)
    kept.store()
    assert controller.ask("/v1/instances/ours/freeze", {"seconds": 60})["done"]
    until(lambda: ours(controller)["reported_state"] == "frozen")
    assert set(later.store()) == {wire.ReserveOutcome.FROZEN} and kept.hits() == 5
    controller.ask("/v1/instances/ours/freeze", {"seconds": 0})
    assert set(later.store()) == {wire.ReserveOutcome.RESERVED}
    controller.ask("/v1/instances/ours/freeze", {"seconds": 0.2})
    until(lambda: set(Prompt(client, 3, 5).store()) == {wire.ReserveOutcome.RESERVED})


def test_off_loopback_only_members_with_the_clusters_key_are_let_in(start, tmp_path):
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys, ours_alone = tmp_path / "controller.keys", tmp_path / "member.keys"
    for path, text in ((keys, f"secret {secret}\nclient {public}\n"), (ours_alone, f"secret {secret}\n")):
        path.write_text(text)
        path.chmod(0o600)
    flags = (*QUICK, "--monitor-host", "0.0.0.0", "--curve-secret-file", str(keys))
    with ControllerProcess(tmp_path / "controller", flags=flags) as controller:
        for name, key in (("ours", ("--cluster-curve-file", str(ours_alone))), ("outside", ())):
            flags = (*joins(controller, name), *key, "--p2p-listen", "localhost:0")
            one = start(l1_mb=64, chunk_tokens=CHUNK_TOKENS, flags=flags)
        until(lambda: confirmed(controller))
        assert [row["id"] for row in controller.ask("/v1/instances")["instances"]] == ["ours"]
        assert not cluster_of(one)["member"]
        with RpcClient(one.socket_dir) as client:
            prompt = Prompt(client, 1, 5)
            prompt.store()
            assert prompt.hits() == 5


def test_a_member_that_other_hosts_can_reach_needs_keys(start):
    flags = ("--controller-url", "tcp://127.0.0.1:1", "--p2p-listen", "0.0.0.0:0")
    with pytest.raises(ServerFailed, match=r"controller\.curve_file"):
        start(flags=(*flags, "--p2p-advertise", "here"))
