"""Adapters of remote media keep the storage contract: a real Redis and cluster, S3, Mooncake's master and holder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import obstore
import pytest
import redis
from obstore.store import S3Store

from kvstrata.testing.adapter_contract import SIZE, AdapterContract, HostedContract, Medium
from kvstrata.testing.strategies import record_length
from kvstrata.tiers.base import StorageAdapter
from kvstrata.tiers.config import make_adapter
from kvstrata.tiers.media.mooncake.adapter import KEY_PREFIX
from kvstrata.tiers.media.object_store.adapter import NAME, path_of
from tests.harness import mooncake, redis_server
from tests.harness.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

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


class Objects(Medium):
    """The objects below one prefix, reached by the library without the adapter."""

    def __init__(self, entry: dict[str, Any], store: Any) -> None:
        self.entry = entry
        self._store = store

    def keys(self) -> set[bytes]:
        pages = obstore.list(self._store)
        names = [NAME.fullmatch(meta["path"]) for page in pages for meta in page]
        return {bytes.fromhex(name[2]) for name in names if name is not None}

    def read(self, key: bytes) -> bytes:
        return bytes(obstore.get(self._store, path_of(key)).bytes())

    def write(self, key: bytes, stored: bytes) -> None:
        obstore.put(self._store, path_of(key), stored)

    def remove(self, key: bytes) -> None:
        obstore.delete(self._store, path_of(key))

    def used_bytes(self) -> int:
        return sum(meta["size"] for page in obstore.list(self._store) for meta in page)


class ObjectStoreContract(AdapterContract):
    has_cap = False

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        return make_adapter(cast("Objects", medium).entry, 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


_prefixes = itertools.count()


def bucket(server: S3Server) -> Objects:
    """The objects below a new prefix."""
    prefix = f"kv{next(_prefixes)}/shared"
    entry = server.entry(prefix)
    store = S3Store(
        BUCKET, prefix=prefix, endpoint=server.endpoint, region="us-east-1",
        access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY,
        client_options={"allow_http": True},
    )  # fmt: skip
    return Objects(entry, store)


@pytest.mark.integration
class TestS3(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def _running(self, server: S3Server) -> None:
        self.server = server

    def make_medium(self, folder: Path) -> Objects:
        return bucket(self.server)


class Cluster(Medium):
    """The values in a cluster under the adapter's names."""

    def __init__(self, master: mooncake.Master, holder: mooncake.Holder) -> None:
        self.master = master
        self.holder = holder

    def keys(self) -> set[bytes]:
        return {bytes.fromhex(name.removeprefix(KEY_PREFIX)) for name in self.master.names()}

    def read(self, key: bytes) -> bytes:
        return self.holder.get(KEY_PREFIX + key.hex())

    def write(self, key: bytes, stored: bytes) -> None:
        self.holder.put(KEY_PREFIX + key.hex(), stored)

    def remove(self, key: bytes) -> None:
        self.holder.remove(KEY_PREFIX + key.hex())

    def used_bytes(self) -> int:
        return sum(len(self.read(key)) for key in self.keys())


@pytest.fixture(scope="module")
def running_cluster(mooncake_variables: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with mooncake.cluster(tmp_path_factory.mktemp("mooncake")) as (master, holder):
        yield Cluster(master, holder)


class TestMooncake(HostedContract):
    has_cap = False

    @pytest.fixture
    def medium(self, running_cluster: Cluster) -> Cluster:
        running_cluster.holder.remove_all()
        return running_cluster

    def make_medium(self, folder: Path) -> Cluster:
        raise NotImplementedError("one cluster serves all tests, see `medium`")

    def entry(self, medium: Medium, capacity_bytes: int = 0) -> dict[str, Any]:
        assert isinstance(medium, Cluster)
        return {"type": "mooncake_store", **medium.master.setup()}
