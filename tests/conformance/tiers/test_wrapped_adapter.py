"""The SQLite example keeps the contract through a tier, as the server uses it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from kvstrata.clock import SystemClock
from kvstrata.testing.adapter_contract import Medium
from kvstrata.tiers.base import StorageAdapter
from kvstrata.tiers.config import TierConfig
from kvstrata.tiers.tier import Tier, TierLimits

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "external_python_adapter"


def load(name: str, path: Path) -> ModuleType:
    """Load a module of a package that is not installed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


load("kvstrata_sqlite", EXAMPLE / "src" / "kvstrata_sqlite" / "__init__.py")
suite = load("kvstrata_sqlite_contract", EXAMPLE / "tests" / "test_contract.py")


@pytest.mark.long
class TestSqliteGuarded(suite.TestSqlite):
    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        limits = TierLimits(max_stuck_bytes=1 << 30, deadline_ms=600_000)
        inner = super().make_adapter(medium, capacity_bytes)
        return cast("StorageAdapter", Tier(TierConfig(inner.name, lambda: inner), limits, SystemClock()))
