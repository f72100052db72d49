"""The `resp` adapter keeps the storage contract on a real Redis, alone and in a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstrata.testing.adapter_contract import SIZE, AdapterContract, Medium
from kvstrata.testing.strategies import record_length
from kvstrata.tiers.base import StorageAdapter
from kvstrata.tiers.config import make_adapter
from tests.harness import redis_server

pytestmark = pytest.mark.integration

PREFIX = "kvstrata:"


class Values(Medium):
    """The values under the adapter's prefix, reached by another client."""

    def __init__(self, client: Any, entry: dict[str, Any]) -> None:
        self.client = client
        self.entry = entry

    def keys(self) -> set[bytes]:
        names = self.client.scan_iter(match=f"{PREFIX}*", count=1000)
        return {bytes.fromhex(name.decode().removeprefix(PREFIX)) for name in names}

    def read(self, key: bytes) -> bytes:
        value: bytes = self.client.get(PREFIX + key.hex())
        return value

    def write(self, key: bytes, stored: bytes) -> None:
        self.client.set(PREFIX + key.hex(), stored)

    def remove(self, key: bytes) -> None:
        self.client.delete(PREFIX + key.hex())

    def used_bytes(self) -> int:
        return sum(self.client.strlen(PREFIX + key.hex()) for key in self.keys())


class RespContract(AdapterContract):
    """Uses the server of the class's fixture `values`."""

    has_cap = False

    @pytest.fixture
    def medium(self, values: Values) -> Values:
        values.client.flushall()
        return values

    def make_medium(self, folder: Path) -> Values:
        raise NotImplementedError("one server serves all tests, see `medium`")

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Values)
        return make_adapter(medium.entry, 0)

    async def test_usage_counts_records_and_bytes(self, medium: Medium) -> None:
        """Usage is that of the whole server: its memory is never 0, and it may hold keys of others."""
        async with self.opened(medium) as adapter:
            before = await adapter.usage()
            await self.put(adapter, 1, 2)
            usage = await adapter.usage()
            assert (before.records, usage.records) == (0, 2)
            assert usage.used_bytes >= 2 * record_length(SIZE)


@pytest.fixture(scope="module")
def single(redis_folder: Path) -> Iterator[Values]:
    with redis_server.RedisServer(redis_folder / "single") as server, server.client() as client:
        yield Values(client, server.entry())


@pytest.fixture(scope="module")
def clustered(redis_folder: Path) -> Iterator[Values]:
    with (
        redis_server.cluster(redis_folder / "cluster") as nodes,
        redis.RedisCluster("127.0.0.1", nodes[0].port) as client,
    ):
        yield Values(client, {"type": "valkey", "startup_nodes": nodes[1].address, "cluster_mode": True})


class TestResp(RespContract):
    @pytest.fixture
    def values(self, single: Values) -> Values:
        return single


@pytest.mark.long
class TestRespCluster(RespContract):
    @pytest.fixture
    def values(self, clustered: Values) -> Values:
        return clustered
