"""The tiers of a server while it runs: added, listed, away, gone, and back."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import own_commands
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.cluster import Cluster
from tests.harness.http_read import read
from tests.harness.l2_load import clear_l1, served, stored, until_stored
from tests.harness.redis_server import RedisServer
from tests.harness.rpc_client import RpcClient, chain_of, new_prompt, until
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


def entry(kind: str, folder: Path) -> dict[str, Any]:
    return {"type": kind, "base_path": str(folder), "capacity_gb": 0.125 if kind == "disk" else 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "medium"


def said(server: ServerProcess, event: str) -> str:
    """The only line of an event, once it is there."""
    line = server.expect(event)
    assert server.log.read_text().count(f" {event} ") == 1
    return line


def more(client: RpcClient, n_chunks: int) -> None:
    identity = client.identify()
    client.store(identity, chain_of(identity.root, n_chunks, first_token=n_chunks * 10_000))


def tier(server: ServerProcess, name: str) -> dict[str, Any]:
    return json.loads(read(f"{server.url}/v1/status"))["l2_adapters"][name]


@pytest.mark.parametrize("kind", ["disk", pytest.param("fs", marks=pytest.mark.long)])
def test_a_deleted_directory_is_said_once_and_its_tier_is_not_used_any_more(start, folder, kind):
    server, name = start(entry(kind, folder)), f"{kind}-0"
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 4)
        until_stored(client)
        assert tier(server, name)["medium_well"]
        shutil.rmtree(folder)
        assert f"adapter={name} path={folder} what=" in said(server, "medium_gone")
        assert (tier(server, name)["medium"], tier(server, name)["medium_well"]) == ("gone", False)
        assert tier(server, name)["state"] == "gone"
        gauge = f'kvstrata_l2_medium_well{{adapter="{kind}-0"}} 0.0'
        assert gauge in read(f"{server.url}/metrics").decode()
        clear_l1(client)
        reply = client.lookup(identity.identity_id, chain)
        assert (reply.n_chunks, reply.reason) == (0, "breaker_open")
        more(client, 2)
        until(client, lambda status: status["counters"]["put_skipped"].get("medium_gone") == 2)
        folder.mkdir()
        assert "restart the server" in said(server, "medium_replaced")


def test_a_server_serves_l1_while_redis_is_away_and_uses_it_once_it_is_there(start, tmp_path):
    with RedisServer(tmp_path / "redis", password="right") as medium:
        entry = medium.entry()
        medium.kill()
        server = start(entry)
        [row] = server.get("/v1/l2/adapters")["adapters"]
        assert (row["state"], row["medium_well"], row["takes_loads"]) == ("unreachable", False, False)
        assert "cannot be reached: Connection refused" in row["reason"]
        assert "tier_unreachable adapter=resp-0" in server.log_tail()
        with RpcClient(server.socket_dir) as client:
            identity, chain = stored(client, 2)
            assert served(client, identity, chain) == (2, 0)
            medium.start()
            eventually("it is reached", lambda: "tier_reached adapter=resp-0" in server.log_tail())
            identity, chain = new_prompt(client, 3)
            client.store(identity, chain)
            until_stored(client)
            clear_l1(client)
            assert served(client, identity, chain) == (0, 3), "what was put since is found"


def test_an_adapter_paused_by_ctl_is_not_used_until_it_is_resumed(start):
    server = start(l2="fs", l1_mb=64, chunk_tokens=CHUNK_TOKENS)

    def ctl(*arguments: str) -> str:
        return own_commands.run("kvstrata", "ctl", "--url", server.url, *arguments).stdout

    def outcomes() -> dict[str, int]:
        [row] = server.get("/v1/l2/adapters")["adapters"]
        return row["puts"]["outcomes"]

    def emptied() -> bool:
        server.post("/v1/clear", {"tier": "l1"})
        return server.get("/v1/status")["pool"]["entries"]["ready"] == 0

    with CacheEngine(server.socket_dir) as engine:
        engine.connect()
        engine.stored(prompt(4, seed=1))
        eventually("they are put", lambda: outcomes() == {"stored": 4})
        shown = ctl("l2", "list").splitlines()
        assert shown[0].split() == [
            "name", "state", "policy", "asked", "waiting", "under_way", "stored", "records", "used_bytes",
            "stuck_bytes", "breakers",
        ]  # fmt: skip
        assert shown[1].split()[:8] == ["fs-0", "active", "through", "yes", "0", "0", "4", "4"]

        assert "paused" in ctl("l2", "pause", "fs-0")
        engine.stored(prompt(2, seed=2))
        eventually("they are skipped", lambda: outcomes().get("skipped:paused") == 2)
        eventually("L1 is empty; leases may be on their way back", emptied)
        assert not engine.client.has_l2, "clients know at once"
        assert engine.looked_up(prompt(4, seed=1)).n_chunks == 0

        assert "active" in ctl("l2", "resume", "fs-0")
        assert engine.hit(prompt(4, seed=1)) == 4


CHUNKS = 40
GB = 1 << 30


@contextlib.contextmanager
def cluster_with(folder: Path, entry: dict[str, Any]) -> Iterator[tuple[Cluster, CacheEngine]]:
    """One server with one L2 tier, and an engine at it."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(
                folder,
                l1_mb=64,
                n_servers=1,
                chunk_tokens=CHUNK_TOKENS,
                l2="embedded",
                flags=("--l2-adapter", json.dumps(entry)),
            )
        )
        yield cluster, stack.enter_context(CacheEngine(cluster.servers[0].socket_dir)).connect()


def told(cluster: Cluster, what: str, tier: str) -> int:
    """A number that the controller has about a tier of the instance."""
    row = cluster.member(0)
    return 0 if row is None else int(row[what].get(tier, 0))


def places(cluster: Cluster, tokens: list[int]) -> list[list[str]]:
    """For each chunk, the tiers that the controller's lookup names."""
    found = cluster.controller.ask("/v1/lookup", {"tokens": tokens})
    return [[place["tier"] for place in chunk["places"]] for chunk in found["chunks"]]


def start_anew(cluster: Cluster) -> None:
    """Kill the server, and start it with an empty L1."""
    server = cluster.servers[0]
    server.kill()
    server.wipe_segment()
    server.start()
    server.get("/v1/status")


@pytest.mark.parametrize("isolation", ["in_process", pytest.param("process", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["disk", pytest.param("fs", marks=pytest.mark.long)])
def test_chunks_on_disk_from_before_a_crash_are_known_to_the_controller_after_the_start(
    tmp_path: Path, kind: str, isolation: str
) -> None:
    tier = f"{kind}-0"
    entry = {"type": kind, "base_path": str(tmp_path / "l2"), "capacity_gb": 1, "isolation": isolation}
    with cluster_with(tmp_path, entry) as (cluster, engine):
        tokens = prompt(CHUNKS)
        assert set(engine.stored(tokens)) == {"stored"}
        eventually("all of it is on disk", lambda: told(cluster, "keys", tier) == CHUNKS)
        start_anew(cluster)
        eventually(
            "what is on disk is told, and no more",
            lambda: (told(cluster, "keys", "l1"), told(cluster, "keys", tier)) == (0, CHUNKS),
        )
        engine.connect()
        eventually("its kind of KV is known", lambda: cluster.controller.ask("/v1/models")["models"])
        assert places(cluster, tokens) == [[tier]] * CHUNKS
        eventually("its fill is told", lambda: told(cluster, "used_bytes", tier) > CHUNKS * 4096)
        assert told(cluster, "capacity_bytes", tier) == GB
        total = cluster.controller.ask("/v1/cluster")
        assert (total["keys"][tier], total["capacity_bytes"][tier]) == (CHUNKS, GB)
        assert total["used_bytes"][tier] == told(cluster, "used_bytes", tier)
        assert engine.hit(tokens) == CHUNKS
        assert set(engine.stored(prompt(3, seed=1))) == {"stored"}
        eventually("what came since is told too", lambda: told(cluster, "keys", tier) == CHUNKS + 3)
