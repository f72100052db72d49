"""The `object_store` adapter keeps the storage contract: in a directory, and in an S3-compatible server."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import obstore
import pytest
from obstore.store import LocalStore, S3Store

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.storage.base import AdapterContext, LoadStatus, Presence, PutStatus, StorageAdapter
from kvstrata.storage.entry import make_adapter
from kvstrata.storage.media.object_store import listing
from kvstrata.storage.media.object_store.names import NAME, path_of
from kvstrata.testing.adapter_contract import SIZE, STORED, AdapterContract, HostedContract, Medium
from kvstrata.testing.strategies import key_of, load_item, put_item
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


@pytest.mark.long
class TestDirectory(ObjectStoreContract):
    def make_medium(self, folder: Path) -> Objects:
        base = folder / "objects"
        base.mkdir()
        return Objects({"type": "object_store", "url": f"file://{base}"}, LocalStore(base))


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


@pytest.mark.long
@pytest.mark.integration
class TestS3Hosted(HostedContract):
    has_cap = False

    @pytest.fixture(autouse=True)
    def _running(self, server: S3Server) -> None:
        self.server = server

    def make_medium(self, folder: Path) -> Objects:
        return bucket(self.server)

    def entry(self, medium: Medium, capacity_bytes: int = 0) -> dict[str, Any]:
        return cast("Objects", medium).entry


# -- a directory to which others write ---------------------------------------------------------------------


@pytest.fixture
async def in_directory(tmp_path: Path) -> AsyncIterator[StorageAdapter]:
    """An open adapter in the directory `objects`."""
    adapter = make_adapter({"type": "object_store", "url": f"file://{tmp_path}/objects"}, 0)
    await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))
    yield adapter
    await adapter.close()


@pytest.mark.parametrize(
    "what",
    [
        "a link to the folder",
        *(pytest.param(w, marks=pytest.mark.long) for w in ("a link to the object", "a pipe")),
    ],
)
async def test_nothing_outside_the_directory_is_read_replaced_or_removed(
    in_directory: StorageAdapter, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "objects" / path_of(key_of(1))
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / path.name
    if what == "a pipe":
        path.parent.mkdir()
        os.mkfifo(path)
    else:
        assert await in_directory.put([put_item(key_of(1), SIZE)]) == [STORED]
        path.rename(victim)
        if what == "a link to the object":
            path.symlink_to(victim)
        else:
            path.parent.rmdir()
            path.parent.symlink_to(outside)
    before = victim.read_bytes() if victim.exists() else None
    async with asyncio.timeout(120):
        for size in (SIZE, SIZE + 7):  # a put replaces an object of another length
            [put] = await in_directory.put([put_item(key_of(1), size)])
            assert (put.status, put.reason) == (PutStatus.FAILED, "not_a_file")
            [load] = await in_directory.load([load_item(key_of(1), size)])
            assert (load.status, load.reason) == (LoadStatus.FAILED, "not_a_file")
        [found] = await in_directory.exists([key_of(1)])
        assert (found.presence, found.reason) == (Presence.UNKNOWN, "not_a_file")
        assert await in_directory.heads([key_of(1)]) == [b""]
        assert await in_directory.delete([key_of(1)]) == 0
        assert await in_directory.clear() == 0
        assert (await in_directory.usage()).records == 0
    assert (victim.read_bytes() if victim.exists() else None) == before
    assert len(list(outside.iterdir())) == (0 if before is None else 1)
    if what != "a link to the folder":
        assert await in_directory.put([put_item(key_of(2), SIZE)]) == [STORED]


async def test_a_marker_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret")
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "kvstrata-format").symlink_to(tmp_path / "secret")
    adapter = make_adapter({"type": "object_store", "url": f"file://{tmp_path}/objects"}, 0)
    with pytest.raises(ConfigError, match="kvstrata-format is not a file") as raised:
        await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))
    assert "secret" not in str(raised.value).replace("/secret", "")


async def test_a_listing_that_never_ends_ends_the_clear_as_incomplete(
    in_directory: StorageAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a listing is over after its first page."""
    monkeypatch.setattr(listing, "LIST_S", -1.0)
    assert await in_directory.put([put_item(key_of(1), SIZE)]) == [STORED]
    with pytest.raises(StorageError, match="cannot be cleared: incomplete: the listing did not end"):
        await in_directory.clear()
