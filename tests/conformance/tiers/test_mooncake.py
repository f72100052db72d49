"""The Mooncake adapter keeps the storage contract, with a real master and holder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.testing.adapter_contract import HostedContract, Medium
from kvstrata.tiers.media.mooncake.adapter import KEY_PREFIX
from tests.harness import mooncake

pytestmark = pytest.mark.integration


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
