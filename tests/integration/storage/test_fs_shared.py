"""`fs` with `"shared": true`: servers that write folders of their own in one directory hit each other's chunks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.clock import SystemClock
from kvstrata.storage.base import AdapterContext, LoadStatus, PutStatus
from kvstrata.storage.media.fs.adapter import FsAdapter
from kvstrata.testing.strategies import key_of, load_item, loaded_payload, payload_of, put_item, watched
from tests.harness.l2_load import check_and_release, clear_l1, stored, until_stored
from tests.harness.rpc_client import RpcClient
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration

SIZES = (3_000, 20_000, 70_000)
CAP_BYTES = 200_000


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
                    [put] = await server.put([put_item(key_of(number), size_of(number))])
                    assert put.status in (PutStatus.STORED, PutStatus.EXISTS)
                elif chance < 0.5:
                    await server.delete([key_of(number)])
                else:
                    await server.exists([key_of(number)])
                    item = load_item(key_of(number), size_of(number))
                    [load] = await server.load([item])
                    assert load.status in (LoadStatus.LOADED, LoadStatus.ABSENT)
                    if load.status is LoadStatus.LOADED:
                        assert loaded_payload(item, size_of(number)) == payload_of(item.key, size_of(number))
                        loaded += 1
                    watched(item).check()

        await asyncio.gather(*(churn(server, seed) for seed, server in enumerate(servers * 2)))
        assert loaded
        for server in servers:
            assert (await server.usage()).used_bytes <= CAP_BYTES


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], ServerProcess]]:
    """Starts servers that share a directory."""
    started: list[ServerProcess] = []

    def starter() -> ServerProcess:
        adapter = {"type": "fs", "base_path": str(tmp_path / "l2"), "shared": True, "capacity_gb": 1}
        flags = ("--l2-adapter", json.dumps(adapter))
        server = ServerProcess(tmp_path / f"server{len(started)}", l1_mb=16, l2="embedded", flags=flags)
        started.append(server)
        server.start()
        return server

    yield starter
    for server in started:
        server.close()


def test_a_server_hits_the_chunks_of_another_one_that_lives_and_that_has_died(start):
    one, other = start(), start()
    with RpcClient(one.socket_dir) as client, RpcClient(other.socket_dir) as second:
        _, chain = stored(client, 6)
        until_stored(client)
        for lives in (True, False):
            if not lives:
                one.kill()
            identity = second.identify()
            reply = second.lookup(identity.identity_id, chain, deadline_ms=20_000)
            assert (reply.n_chunks, reply.l1_chunks, reply.l2_chunks, reply.reason) == (6, 0, 6, "")
            check_and_release(second, reply, chain)
            assert clear_l1(second) == 6
