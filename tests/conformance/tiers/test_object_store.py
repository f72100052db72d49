"""The `object_store` adapter keeps the storage contract in an S3-compatible server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import obstore
import pytest
from obstore.store import S3Store

from kvstrata.testing.adapter_contract import AdapterContract, Medium
from kvstrata.tiers.base import StorageAdapter
from kvstrata.tiers.config import make_adapter
from kvstrata.tiers.media.object_store.adapter import NAME, path_of
from tests.harness.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server


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
