"""Adapters in a process of their own keep the storage contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstrata.testing.adapter_contract import HostedContract, Medium
from tests.conformance.test_fs import Folder

GB = 1 << 30


class TestFsHosted(HostedContract):
    def make_medium(self, folder: Path) -> Folder:
        return Folder(folder / "a base with spaces")

    def entry(self, medium: Medium, capacity_bytes: int = 0) -> dict[str, Any]:
        assert isinstance(medium, Folder)
        return {
            "type": "fs",
            "base_path": str(medium.base),
            "capacity_gb": capacity_bytes / GB,
            "min_free_gb": 0,
        }
