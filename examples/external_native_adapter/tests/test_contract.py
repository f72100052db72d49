"""The adapter keeps kvstrata's storage contract: `pytest tests`, with kvstrata's extra `test` installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvstrata_flat_files import GB, from_fields, make_adapter

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.testing.adapter_contract import AdapterContract, HostedContract, Medium
from kvstrata.tiers.base import AdapterContext, StorageAdapter


class Folder(Medium):
    """The adapter's files, reached without the adapter."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, key: bytes) -> Path:
        return self.path / key.hex()

    def keys(self) -> set[bytes]:
        return {bytes.fromhex(file.name) for file in self.path.iterdir()}

    def read(self, key: bytes) -> bytes:
        return self.file(key).read_bytes()

    def write(self, key: bytes, stored: bytes) -> None:
        self.file(key).write_bytes(stored)

    def remove(self, key: bytes) -> None:
        self.file(key).unlink()

    def used_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir())


class TestFlatFiles(AdapterContract):
    waits_in_threads = False  # the connector reads the bytes at their address, and asks no hold for them

    def make_medium(self, folder: Path) -> Folder:
        return Folder(folder / "records")

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Folder)
        return make_adapter(str(medium.path), capacity_bytes)


class TestFlatFilesInAHost(HostedContract):
    """The adapter in an adapter host, made from the type that the package adds."""

    def make_medium(self, folder: Path) -> Folder:
        return Folder(folder / "records")

    def entry(self, medium: Medium, capacity_bytes: int = 0) -> dict[str, Any]:
        assert isinstance(medium, Folder)
        return {"type": "flat_files", "base_path": str(medium.path), "capacity_gb": capacity_bytes / GB}


@pytest.mark.asyncio
async def test_a_directory_that_cannot_be_used_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    adapter = make_adapter(str(tmp_path / "file" / "below"))
    with pytest.raises(StorageError, match=r"base_path: .*below"):
        await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "base_path"),
        ({"base_path": 3}, "base_path"),
        ({"base_path": "x", "capacity_gb": "much"}, "capacity_gb"),
        ({"base_path": "x", "num_workers": 0}, "num_workers"),
        ({"base_path": "x", "base_pth": "y"}, "base_pth"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_fields(fields, "l2_adapters[0]")
    assert refused.value.field == f"l2_adapters[0].{name}"
