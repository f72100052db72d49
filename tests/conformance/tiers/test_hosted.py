"""Adapters in adapter hosts keep the storage contract, and the example in SQLite does behind a tier."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from kvstrata.clock import SystemClock
from kvstrata.testing.adapter_contract import LOADED, SIZE, STORED, HostedContract, Medium
from kvstrata.testing.strategies import (
    Found,
    Settled,
    ask_for,
    key_of,
    lent_context,
    load_item,
    put_item,
    settled,
    watched,
)
from kvstrata.tiers.base import Outcome, Presence, StorageAdapter
from kvstrata.tiers.config import TierConfig, configure_tier
from kvstrata.tiers.host.parent import HostedAdapter
from kvstrata.tiers.tier import Tier, TierLimits
from tests.conformance.tiers.test_fs import Folder
from tests.harness.alone import alone
from tests.harness.bad_adapter import entry_of
from tests.harness.waiting import until

GB = 1 << 30


@pytest.mark.long
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


@pytest.fixture
async def bad(tmp_path: Path) -> AsyncIterator[tuple[HostedAdapter, Path]]:
    """An open BadAdapter in a host, and its folder of orders."""
    orders = tmp_path / "orders"
    orders.mkdir()
    adapter = HostedAdapter(configure_tier(entry_of(tmp_path / "kv", orders), 0), kill_ms=600_000)
    await adapter.open(lent_context(lambda key: None))
    yield adapter, orders
    for order in orders.iterdir():
        order.unlink()
    await adapter.close()


async def test_bytes_that_an_adapter_still_uses_after_its_answer_stay_held(bad) -> None:
    adapter, orders = bad
    (orders / "put.late").touch()
    item = put_item(key_of(1), SIZE)
    assert await settled(adapter.put, [item]) == [Settled(Outcome.FAILED, "late")]
    assert await ask_for(adapter, [key_of(1)]) == [Found(Presence.ABSENT)]
    assert not watched(item).dropped.is_set()
    (orders / "put.late").unlink()
    await ask_for(adapter, [key_of(1)])
    await watched(item).until_dropped()
    watched(item).check()


async def test_holds_of_a_batch_whose_adapter_raised_end_with_their_last_reference(bad) -> None:
    adapter, orders = bad
    (orders / "load.raise").touch()
    item = load_item(key_of(1), SIZE)
    with pytest.raises(Exception, match="RuntimeError: ordered to raise"):
        await settled(adapter.load, [item])
    await watched(item).until_dropped()
    (orders / "load.raise").unlink()
    assert await settled(adapter.put, [put_item(key_of(1), SIZE)]) == [STORED]
    assert await settled(adapter.load, [load_item(key_of(1), SIZE)]) == [LOADED]


@alone
async def test_a_host_that_crashed_and_was_closed_leaves_no_descriptor_thread_or_process(tmp_path):
    lent = lent_context(lambda key: None)
    await asyncio.to_thread(int)  # makes the loop's own threads and descriptors
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    entry = {"type": "fs", "base_path": f"{tmp_path}/kv"}
    adapter = HostedAdapter(configure_tier(entry, 0), kill_ms=600_000, max_pause_s=0.1)
    await adapter.open(lent)
    first = adapter.host_status()["pid"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: adapter.host_status()["restarts"] == 1 and adapter.host_status()["state"] == "up")
    second = adapter.host_status()["pid"]
    await adapter.close()
    assert adapter.host_status() == {"pid": 0, "state": "closed", "restarts": 1, "requests": 0}
    await until(lambda: set(threading.enumerate()) <= threads)
    assert set(os.listdir("/proc/self/fd")) == descriptors
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_invalid_numbers_of_an_adapter_cost_only_these_numbers(bad) -> None:
    adapter, orders = bad
    await until(lambda: adapter.numbers() == {"late": 0})
    (orders / "numbers.raise").touch()
    await until(lambda: adapter.numbers() == {})
    assert await settled(adapter.put, [put_item(key_of(1), SIZE)]) == [STORED]


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
