"""Servers that share a real Mooncake cluster, whose master and holders and whose own hosts are killed and stopped."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import mooncake
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess
from tests.integration.test_server_l2 import check_and_release, clear_l1, stored, until_stored

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
            flags=("--no-http", "--l2-adapter", json.dumps(entry), *flags),
            environment=mooncake_environment,
        )
        started.append(server)
        server.start()
        return server

    yield starter
    for server in started:
        server.close()


def outcomes_of(status: dict[str, Any]) -> dict[str, int]:
    return status["l2_store"]["adapters"][NAME]["outcomes"]


def test_what_one_server_stored_another_one_serves(
    master: mooncake.Master, holder: mooncake.Holder, start: Starter
) -> None:
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


def test_the_published_line_serves_hits_over_tcp(
    mooncake_environment: dict[str, str], master: mooncake.Master, tmp_path: Path
) -> None:
    words = shlex.split(mooncake.PUBLISHED)
    entry = json.loads(words.pop())
    entry |= {"local_hostname": "127.0.0.1", "protocol": "tcp", "global_segment_size": str(256 << 20)}
    entry |= {"metadata_server": master.metadata_server, "master_server_addr": master.address}
    words[words.index("100")] = "1"
    flags = (*words, json.dumps(entry), "--no-http")
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
