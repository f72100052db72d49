"""Servers that share a bucket of a real S3-compatible server, which is killed and stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.rpc import wire
from tests.harness.l2_load import check_and_release, clear_l1, stored, until_stored
from tests.harness.rpc_client import RpcClient, until
from tests.harness.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

NAME = "object_store-0"
WAIT_S = 120.0
Starter = Callable[..., ServerProcess]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[S3Server]:
    with S3Server(tmp_path) as running:
        yield running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    started: list[ServerProcess] = []

    def starter(entry: dict[str, Any], *flags: str) -> ServerProcess:
        folder = tmp_path / f"server{len(started)}"
        adapter = ("--l2-adapter", json.dumps(entry))
        server = ServerProcess(folder, l1_mb=16, l2="embedded", flags=(*adapter, *flags))
        started.append(server)
        server.start()
        return server

    yield starter
    for server in started:
        server.close()


def found(client: RpcClient, identity: wire.IdentifyReply, chain: bytes) -> int:
    """How many chunks a lookup with a short deadline serves; checks the bytes of each."""
    reply = client.lookup(identity.identity_id, chain, deadline_ms=2_000)
    check_and_release(client, reply, chain)
    return reply.n_chunks


def until_found(client: RpcClient, identity: wire.IdentifyReply, chain: bytes, n_chunks: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while found(client, identity, chain) < n_chunks:
        assert time.monotonic() < deadline_s, client.status()["l2_adapters"][NAME]


@pytest.mark.parametrize(
    "kind",
    ["s3 in a process of its own", pytest.param("s3 without conditional puts", marks=pytest.mark.long)],
)
def test_chunks_that_one_server_stored_are_served_by_another(bucket, start, kind):
    entry = bucket.entry(isolation="process" if kind.endswith("own") else "in_process")
    if "without" in kind:
        entry["conditional_put"] = "disabled"
    one, other = start(entry), start(entry)
    with RpcClient(one.socket_dir) as writer, RpcClient(other.socket_dir) as reader:
        _, chain = stored(writer, 6)
        until_stored(writer)
        identity = reader.identify()
        reply = reader.lookup(identity.identity_id, chain, deadline_ms=20_000)
        assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks) == (6, 0, 6)
        check_and_release(reader, reply, chain)
        clear_l1(writer)
        reply = writer.lookup(writer.identify().identity_id, chain, deadline_ms=20_000)
        assert (reply.n_chunks, reply.l2_chunks) == (6, 6)
        check_and_release(writer, reply, chain)
        shown = json.dumps(reader.status()) + json.dumps(other.get("/v1/status"))
        for secret in (ACCESS_KEY, SECRET_KEY):
            assert secret not in shown + one.log_tail() + other.log_tail()


def test_a_bucket_whose_server_was_killed_is_missed_and_used_again(bucket: S3Server, start: Starter) -> None:
    server = start(bucket.entry(deadline_ms=1_000))
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 6)
        until_stored(client)
        bucket.kill()
        clear_l1(client)
        for _ in range(5):
            assert found(client, identity, chain) == 0
        bucket.start()  # empty
        deadline_s = time.monotonic() + WAIT_S
        # A put that took longer than its deadline may have been stored: later ones are told EXISTS, not STORED.
        while found(client, identity, chain) < 6:
            client.store(identity, chain)
            until_stored(client)
            clear_l1(client)
            assert time.monotonic() < deadline_s, client.status()["l2_store"]["adapters"]


@pytest.mark.silence
def test_a_bucket_whose_server_is_stopped_is_missed_and_back_by_itself(bucket, start):
    server = start(bucket.entry(deadline_ms=500, timeout="1s"))
    with RpcClient(server.socket_dir) as client:
        identity, chain = stored(client, 6)
        until_stored(client)
        bucket.freeze()
        clear_l1(client)
        for _ in range(4):
            assert found(client, identity, chain) == 0
        other, kept = stored(client, 3)
        assert found(client, other, kept) == 3, "chunks in L1 are served"
        until(client, lambda status: status["l2_adapters"][NAME]["breakers"]["exists"] != "closed")
        bucket.thaw()
        until_found(client, identity, chain, 6)
