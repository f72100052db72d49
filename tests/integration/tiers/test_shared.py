"""Two servers share one L2, whatever it is: a folder, an object store, RESP servers, Mooncake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.clock import SystemClock
from kvstrata.testing.strategies import (
    ask_for,
    key_of,
    load_item,
    loaded_payload,
    payload_of,
    put_item,
    settled,
    watched,
)
from kvstrata.tiers.base import AdapterContext, Outcome
from kvstrata.tiers.media.fs import FsAdapter
from tests.harness import mooncake
from tests.harness.l2_load import N_CHUNKS, Load, assert_shared, clear_l1, served, stored, until_stored
from tests.harness.redis_server import RedisServer, Sentinel, cluster
from tests.harness.rpc_client import RpcClient, until
from tests.harness.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.harness.server_process import ServerProcess
from tests.integration.tiers.test_adapter_host import until_gone

pytestmark = pytest.mark.integration

SIZES = (3_000, 20_000, 70_000)
CAP_BYTES = 200_000
QUICK = {"deadline_ms": 500, "connection_timeout": 0.3}
Starter = Callable[..., ServerProcess]


def tier(status: dict[str, Any]) -> dict[str, Any]:
    [found] = status["l2_adapters"].values()
    return found


def outcomes(status: dict[str, Any]) -> dict[str, int]:
    [adapter] = status["l2_store"]["adapters"].values()
    return adapter["outcomes"]


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


async def test_a_record_that_its_server_evicts_or_deletes_is_loaded_whole_or_not_at_all(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for _ in range(2):
            server = FsAdapter(
                base_path=str(tmp_path), shared=True, capacity_bytes=CAP_BYTES, min_free_bytes=0
            )
            await server.open(AdapterContext("shared", SystemClock(), 0, 0, lambda key: None))
            stack.push_async_callback(server.close)
            servers.append(server)
        loaded = 0

        async def churn(server: FsAdapter, seed: int) -> None:
            nonlocal loaded
            draw = random.Random(seed)
            for _ in range(100):
                number, chance = draw.randrange(12), draw.random()
                if chance < 0.4:
                    [put] = await settled(server.put, [put_item(key_of(number), size_of(number))])
                    assert put.outcome in (Outcome.STORED, Outcome.EXISTS)
                elif chance < 0.5:
                    await server.delete(key_of(number))
                else:
                    await ask_for(server, [key_of(number)])
                    item = load_item(key_of(number), size_of(number))
                    [load] = await settled(server.load, [item])
                    assert load.outcome in (Outcome.LOADED, Outcome.ABSENT)
                    if load.outcome is Outcome.LOADED:
                        assert loaded_payload(item, size_of(number)) == payload_of(item.key, size_of(number))
                        loaded += 1
                    watched(item).check()

        await asyncio.gather(*(churn(server, seed) for seed, server in enumerate(servers * 2)))
        assert loaded
        for server in servers:
            assert (await server.usage()).used_bytes <= CAP_BYTES


def test_a_server_hits_the_chunks_of_another_one_that_lives_and_that_has_died(start, tmp_path):
    adapter = {"type": "fs", "base_path": str(tmp_path / "l2"), "shared": True, "capacity_gb": 1}
    one, other = start(adapter), start(adapter)
    with RpcClient(one.socket_dir) as client, RpcClient(other.socket_dir) as second:
        _, chain = stored(client, 6)
        until_stored(client)
        assert served(second, second.identify(), chain) == (0, 6)
        one.kill()
        assert clear_l1(second) == 6
        assert served(second, second.identify(), chain) == (0, 6)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[S3Server]:
    with S3Server(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    "kind",
    ["s3 in a process of its own", pytest.param("s3 without conditional puts", marks=pytest.mark.long)],
)
def test_chunks_in_a_bucket_are_served_by_another_server(bucket, start, kind):
    entry = bucket.entry(isolation="process" if kind.endswith("own") else "in_process")
    if "without" in kind:
        entry["conditional_put"] = "disabled"
    one, other = start(entry), start(entry)
    assert_shared(one, other)
    shown = json.dumps([one.get("/v1/status"), other.get("/v1/status")])
    for secret in (ACCESS_KEY, SECRET_KEY):
        assert secret not in shown + one.log_tail() + other.log_tail()


def test_a_bucket_whose_server_was_killed_is_missed_and_used_again(bucket, start):
    with RpcClient(start(bucket.entry(deadline_ms=1_000)).socket_dir) as client:
        Load(client).outlives(bucket.kill, bucket.start)


@pytest.mark.silence
def test_a_bucket_whose_server_is_stopped_is_missed_and_back_by_itself(bucket, start):
    with RpcClient(start(bucket.entry(deadline_ms=500, timeout="1s")).socket_dir) as client:

        def opened() -> None:
            until(client, lambda status: tier(status)["breakers"]["exists"] != "closed")
            bucket.thaw()

        Load(client).outlives(bucket.freeze, opened)


@pytest.fixture
def server(redis_folder: Path, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def test_chunks_in_redis_are_served_by_another_server(server, start):
    one, other = start(server.entry()), start(server.entry())
    assert_shared(one, other)
    with RpcClient(other.socket_dir) as reader:
        stored(reader, 6)
        until_stored(reader)
        assert set(outcomes(reader.status())) <= {"exists"}, "no payload is sent twice"


def test_a_redis_killed_under_load_costs_misses_and_comes_back(server, start):
    with RpcClient(start(server.entry(**QUICK)).socket_dir) as client:
        Load(client).outlives(server.kill, server.start)
        assert tier(client.status())["numbers"]["connections_lost"] > 0


@pytest.mark.silence
def test_a_frozen_redis_costs_misses_and_comes_back(server, start):
    with RpcClient(start(server.entry(**QUICK)).socket_dir) as client:
        Load(client).outlives(server.freeze, server.thaw)


@pytest.mark.long
def test_a_full_redis_throttles_puts_and_serves_what_it_has(server, start):
    with server.client() as redis, RpcClient(start(server.entry()).socket_dir) as client:
        load = Load(client)
        first = load.prompt()
        until_stored(client)
        redis.config_set("maxmemory", int(redis.info("memory")["used_memory"]) + 10_000)
        load.prompt()
        until(client, lambda status: tier(status)["numbers"]["full"] > 0)
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
            until(client, lambda status: load.step() or "skipped:denied" in outcomes(status))
            assert load.step() == 0
            with server.client() as redis:
                redis.config_set("requirepass", "the-first-one")
            load.until_served()
        log = process.log.read_text()
        assert log.count("password: refused by the server (WRONGPASS)") == 1
        assert "the-first-one" not in log and "another-one" not in log


@pytest.mark.long
@pytest.mark.silence
def test_a_dead_master_is_replaced_by_the_one_that_the_sentinel_names(redis_folder, tmp_path, start):
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


@pytest.fixture
def master(mooncake_environment: dict[str, str], tmp_path: Path) -> Iterator[mooncake.Master]:
    with mooncake.Master(tmp_path) as master:
        yield master


@pytest.fixture
def holder(master: mooncake.Master, tmp_path: Path) -> Iterator[mooncake.Holder]:
    with mooncake.Holder(tmp_path, master) as holder:
        yield holder


@pytest.fixture
def serve(start: Starter, mooncake_environment: dict[str, str]) -> Starter:
    """Starts servers with a Mooncake setup; further fields are ours."""
    return lambda setup, **fields: start(
        {"type": "mooncake_store", **setup, **fields}, environment=mooncake_environment
    )


def test_chunks_in_mooncake_are_served_by_another_server(master, holder, serve):
    assert_shared(serve(master.setup()), serve(master.setup()))
    assert len(master.names()) == 6


@pytest.mark.long
def test_the_published_line_serves_hits_over_tcp(mooncake_environment, master, start):
    words = shlex.split(mooncake.PUBLISHED)
    entry = json.loads(words.pop())
    entry |= {"local_hostname": "127.0.0.1", "protocol": "tcp", "global_segment_size": str(256 << 20)}
    entry |= {"metadata_server": master.metadata_server, "master_server_addr": master.address}
    words[words.index("100")] = "1"
    flags = (*words, json.dumps(entry))
    server = start(flags=flags, l2="embedded", environment=mooncake_environment)
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 6)
        until_stored(client)
        clear_l1(client)
        assert served(client, identity, chain) == (0, 6)
    assert server.stop() == 0


QUICK_HOST = {"deadline_ms": 500, "host_kill_ms": 1_500}


def test_a_master_killed_and_restarted_costs_misses_and_comes_back(master, holder, serve):
    server = serve(master.setup(), **QUICK_HOST)
    with RpcClient(server.socket_dir) as client:
        Load(client).outlives(master.kill, master.start)
        assert server.stop() == 0


@pytest.mark.silence
def test_a_frozen_master_costs_misses_and_comes_back(master, holder, serve):
    server = serve(master.setup(), **QUICK_HOST)
    with RpcClient(server.socket_dir) as client:
        load = Load(client)
        load.until_served()
        host = tier(client.status())["host"]
        with master.frozen():
            for _ in range(5):
                assert load.step() == 0
            until(client, lambda status: tier(status)["host"]["restarts"] > host["restarts"])
            until_gone(host["pid"])
        load.until_served()


@pytest.mark.long
@pytest.mark.silence
def test_a_holder_that_is_killed_costs_misses_until_there_is_another_one(tmp_path, serve):
    with mooncake.Master(tmp_path, "--client_ttl=1") as master:
        with mooncake.Holder(tmp_path, master) as holder:
            server = serve(master.setup(), **QUICK_HOST)
            with RpcClient(server.socket_dir) as client:
                load = Load(client)
                load.until_served()
                holder.child.kill()
                for _ in range(3):
                    assert load.step() == 0
        with mooncake.Holder(tmp_path, master), RpcClient(server.socket_dir) as client:
            Load(client).until_served()


@pytest.mark.long
def test_a_full_store_is_asked_again_later_and_harms_nothing(mooncake_environment, tmp_path, serve):
    # It evicts when a put finds no room, and not ahead of slow puts.
    with mooncake.cluster(tmp_path, "--eviction_high_watermark_ratio=1", segment_mb=16) as (master, _):
        server = serve(master.setup())
        with RpcClient(server.socket_dir) as client:
            load = Load(client)
            until(client, lambda status: load.step() >= 0 and outcomes(status).get("throttled", 0) > 0)
            assert {"stored", "throttled"} <= set(outcomes(client.status()))
