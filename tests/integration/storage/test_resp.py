"""Servers that share a real Redis, which is killed, stopped, filled and fails over under load."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.l2_load import N_CHUNKS, Load, check_and_release, clear_l1, stored, until_stored
from tests.harness.redis_server import RedisServer, Sentinel, cluster
from tests.harness.rpc_client import RpcClient, until
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

Starter = Callable[..., ServerProcess]
QUICK = {"deadline_ms": 500, "connection_timeout": 0.3}


@pytest.fixture
def server(redis_folder: Path, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts lmcache-servers with that adapter."""
    started: list[ServerProcess] = []

    def starter(entry: dict[str, Any]) -> ServerProcess:
        flags = ("--l2-adapter", json.dumps(entry))
        process = ServerProcess(tmp_path / f"server{len(started)}", l1_mb=16, l2="embedded", flags=flags)
        started.append(process)
        process.start()
        return process

    yield starter
    for process in started:
        process.close()


def outcomes(client: RpcClient) -> dict[str, int]:
    [adapter] = client.status()["l2_store"]["adapters"].values()
    return dict(adapter["outcomes"])


def numbers(client: RpcClient) -> dict[str, int]:
    [adapter] = client.status()["l2_adapters"].values()
    return dict(adapter["numbers"])


def test_chunks_that_one_server_stored_are_served_by_another(server: RedisServer, start: Starter) -> None:
    entry = server.entry()
    one, other = start(entry), start(entry)
    with RpcClient(one.socket_dir) as writer, RpcClient(other.socket_dir) as reader:
        _, chain = stored(writer, 6)
        until_stored(writer)
        assert outcomes(writer) == {"stored": 6}
        reply = reader.lookup(reader.identify().identity_id, chain, deadline_ms=20_000)
        assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks) == (6, 0, 6)
        check_and_release(reader, reply, chain)
        stored(reader, 6)
        until_stored(reader)
        assert set(outcomes(reader)) <= {"exists"}, "no payload is sent twice"


def test_a_redis_killed_under_load_costs_misses_and_comes_back(server: RedisServer, start: Starter) -> None:
    with RpcClient(start(server.entry(**QUICK)).socket_dir) as client:
        load = Load(client)
        load.until_served()
        load.prompt()
        server.kill()
        for _ in range(4):
            assert load.step() == 0
        server.start()
        load.until_served()
        assert numbers(client)["connections_lost"] > 0


@pytest.mark.silence
def test_a_frozen_redis_costs_misses_and_comes_back(server: RedisServer, start: Starter) -> None:
    with RpcClient(start(server.entry(**QUICK)).socket_dir) as client:
        load = Load(client)
        load.until_served()
        load.prompt()
        server.freeze()
        try:
            for _ in range(4):
                assert load.step() == 0
        finally:
            server.thaw()
        load.until_served()


@pytest.mark.long
def test_a_full_redis_throttles_puts_and_serves_what_it_has(server: RedisServer, start: Starter) -> None:
    with server.client() as redis, RpcClient(start(server.entry()).socket_dir) as client:
        load = Load(client)
        first = load.prompt()
        until_stored(client)
        redis.config_set("maxmemory", int(redis.info("memory")["used_memory"]) + 10_000)
        load.prompt()
        until(client, lambda status: numbers(client)["full"] > 0)
        clear_l1(client)
        assert load.served(first) == (0, N_CHUNKS)
        redis.config_set("maxmemory", 0)
        load.until_served()


@pytest.mark.long
def test_a_redis_with_another_password_costs_misses_until_the_password_fits(redis_folder, tmp_path, start):
    with RedisServer(tmp_path / "locked", password="the-first-one") as server:
        process = start(server.entry(**QUICK))
        with RpcClient(process.socket_dir) as client:
            load = Load(client)
            load.until_served()
            server.kill()
            assert load.step() == 0
            server.password = "another-one"
            server.start()
            until(client, lambda status: load.step() or "skipped:denied" in outcomes(client))
            assert load.step() == 0
            with server.client() as redis:
                redis.config_set("requirepass", "the-first-one")
            load.until_served()
        log = process.log.read_text()
        assert log.count("password: refused by the server (WRONGPASS)") == 1
        assert "the-first-one" not in log and "another-one" not in log


@pytest.mark.long
@pytest.mark.silence
def test_a_dead_master_is_replaced_by_the_one_that_the_sentinel_names(
    redis_folder: Path, tmp_path: Path, start: Starter
) -> None:
    own = tmp_path / "password"
    own.write_text("of-the-sentinel\n")
    own.chmod(0o600)
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(RedisServer(tmp_path / "master", password="secret"))
        of_master = ("--replicaof", "127.0.0.1", str(master.port))
        replica = stack.enter_context(RedisServer(tmp_path / "replica", *of_master, password="secret"))
        sentinel = stack.enter_context(Sentinel(tmp_path / "sentinel", master, "of-the-sentinel"))
        client = stack.enter_context(sentinel.client())
        entry = {"type": "resp", "sentinels": sentinel.address, "sentinel_master": "mymaster", **QUICK}
        entry |= {"password": "secret", "sentinel_password_file": str(own)}
        load_client = stack.enter_context(RpcClient(start(entry).socket_dir))
        load = Load(load_client)
        load.until_served()
        with replica.client() as of_replica:
            until(load_client, lambda status: of_replica.info("replication")["master_link_status"] == "up")
        until(load_client, lambda status: len(client.sentinel_slaves("mymaster")) == 1)
        master.kill()
        load.until_served()
        assert client.sentinel_get_master_addr_by_name("mymaster")[1] == replica.port


@pytest.mark.long
@pytest.mark.silence
def test_a_dead_node_of_a_cluster_costs_only_its_own_chunks(redis_folder, tmp_path, start):
    with cluster(tmp_path / "cluster") as nodes:
        entry = {"type": "resp", "startup_nodes": nodes[0].address, "cluster_mode": True, **QUICK}
        for node in nodes:
            with node.client() as redis:
                redis.config_set("cluster-require-full-coverage", "no")
        with RpcClient(start(entry).socket_dir) as client:
            load = Load(client)
            load.until_served()
            nodes[2].kill()
            for _ in range(4):
                load.step()  # checks the bytes of whatever is served
            until(client, lambda status: load.step() > 0)
            nodes[2].start()
            load.until_served()
