"""Servers that share a real Mooncake cluster, whose master and holders and whose own hosts are killed and stopped.

Deadlines are long where a busy machine must not come to them, and short where something is made to hang.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import mooncake
from tests.harness.l2_load import Load, check_and_release, clear_l1, stored, until_stored
from tests.harness.rpc_client import RpcClient, until
from tests.harness.server_process import ServerProcess
from tests.integration.storage.test_adapter_host import until_gone

pytestmark = pytest.mark.integration

NAME = "mooncake_store-0"
Starter = Callable[..., ServerProcess]


@pytest.fixture
def master(mooncake_environment: dict[str, str], tmp_path: Path) -> Iterator[mooncake.Master]:
    with mooncake.Master(tmp_path) as master:
        yield master


@pytest.fixture
def holder(master: mooncake.Master, tmp_path: Path) -> Iterator[mooncake.Holder]:
    with mooncake.Holder(tmp_path, master) as holder:
        yield holder


@pytest.fixture
def start(mooncake_environment: dict[str, str], tmp_path: Path) -> Iterator[Starter]:
    """Starts servers with that Mooncake setup; further fields are ours."""
    started: list[ServerProcess] = []

    def starter(setup: dict[str, Any], *, flags: tuple[str, ...] = (), **fields: Any) -> ServerProcess:
        entry = {"type": "mooncake_store", **setup, **fields}
        server = ServerProcess(
            tmp_path / f"server{len(started)}",
            l1_mb=16,
            l2="embedded",
            flags=("--l2-adapter", json.dumps(entry), *flags),
            environment=mooncake_environment,
        )
        started.append(server)
        server.start()
        return server

    yield starter
    for server in started:
        server.close()


def host_of(status: dict[str, Any]) -> dict[str, Any]:
    return status["l2_adapters"][NAME]["host"]


def outcomes_of(status: dict[str, Any]) -> dict[str, int]:
    return status["l2_store"]["adapters"][NAME]["outcomes"]


def test_chunks_that_one_server_stored_are_served_by_another(master, holder, start):
    one, other = start(master.setup()), start(master.setup())
    with RpcClient(one.socket_dir) as writer, RpcClient(other.socket_dir) as reader:
        _, chain = stored(writer, 6)
        until_stored(writer)
        assert outcomes_of(writer.status()) == {"stored": 6}
        assert len(master.names()) == 6
        reply = reader.lookup(reader.identify().identity_id, chain, deadline_ms=20_000)
        assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks) == (6, 0, 6)
        check_and_release(reader, reply, chain)
        clear_l1(writer)
        reply = writer.lookup(writer.identify().identity_id, chain, deadline_ms=20_000)
        assert (reply.n_chunks, reply.l2_chunks) == (6, 6)
        check_and_release(writer, reply, chain)


@pytest.mark.long
def test_the_published_line_serves_hits_over_tcp(mooncake_environment, master, tmp_path):
    words = shlex.split(mooncake.PUBLISHED)
    entry = json.loads(words.pop())
    entry |= {"local_hostname": "127.0.0.1", "protocol": "tcp", "global_segment_size": str(256 << 20)}
    entry |= {"metadata_server": master.metadata_server, "master_server_addr": master.address}
    words[words.index("100")] = "1"
    flags = (*words, json.dumps(entry))
    with ServerProcess(
        tmp_path / "server", l1_mb=16, l2="embedded", flags=flags, environment=mooncake_environment
    ) as server:
        server.start()
        with RpcClient(server.socket_dir) as client:
            identity, chain = stored(client, 6)
            until_stored(client)
            clear_l1(client)
            reply = client.lookup(identity.identity_id, chain, deadline_ms=20_000)
            assert (reply.n_chunks, reply.l2_chunks) == (6, 6)
            check_and_release(client, reply, chain)
        assert server.stop() == 0


# --- under load --------------------------------------------------------------------------------------------

QUICK = {"deadline_ms": 500, "host_kill_ms": 1_500}


def test_a_master_killed_and_restarted_costs_misses_and_comes_back(master, holder, start):
    server = start(master.setup(), **QUICK)
    with RpcClient(server.socket_dir) as client:
        load = Load(client)
        load.until_served()
        master.kill()
        for _ in range(5):
            assert load.step() == 0
        master.start()
        load.until_served()
        assert server.stop() == 0


@pytest.mark.silence
def test_a_frozen_master_costs_misses_and_comes_back(master, holder, start):
    server = start(master.setup(), **QUICK)
    with RpcClient(server.socket_dir) as client:
        load = Load(client)
        load.until_served()
        host = host_of(client.status())
        master.freeze()
        for _ in range(5):
            assert load.step() == 0
        until(client, lambda status: host_of(status)["restarts"] > host["restarts"])
        until_gone(host["pid"])
        master.thaw()
        load.until_served()


@pytest.mark.long
@pytest.mark.silence
def test_a_holder_that_is_killed_costs_misses_until_there_is_another_one(
    mooncake_environment: dict[str, str], tmp_path: Path, start: Starter
) -> None:
    with mooncake.Master(tmp_path, "--client_ttl=1") as master:
        with mooncake.Holder(tmp_path, master) as holder:
            server = start(master.setup(), **QUICK)
            with RpcClient(server.socket_dir) as client:
                load = Load(client)
                load.until_served()
                holder.child.kill()
                for _ in range(3):
                    assert load.step() == 0
        with mooncake.Holder(tmp_path, master), RpcClient(server.socket_dir) as client:
            Load(client).until_served()


# --- what is not ours, and no room -------------------------------------------------------------------------


@pytest.mark.long
def test_a_foreign_value_is_removed_and_replaced_by_the_next_put(master, holder, start):
    server = start(master.setup())
    with RpcClient(server.socket_dir) as client:
        _, chain = stored(client, 3)
        until_stored(client)
        for name in master.names():
            holder.put(name, b"not a record" * 1_000)
        server.stop()
    server.wipe_segment()
    server.start()
    with RpcClient(server.socket_dir) as client:
        load = Load(client)
        assert load.served(chain) == (0, 0)

        def healed(_: dict[str, Any]) -> bool:
            client.store(load.identity, chain)
            until_stored(client)
            clear_l1(client)
            return load.served(chain) == (0, 3)

        until(client, healed)


@pytest.mark.long
def test_a_full_store_is_asked_again_later_and_harms_nothing(mooncake_environment, tmp_path, start):
    with mooncake.cluster(tmp_path, segment_mb=16) as (master, _):
        server = start(master.setup())
        with RpcClient(server.socket_dir) as client:
            load = Load(client)
            until(client, lambda status: load.step() >= 0 and outcomes_of(status).get("throttled", 0) > 0)
            assert {"stored", "throttled"} <= set(outcomes_of(client.status()))
