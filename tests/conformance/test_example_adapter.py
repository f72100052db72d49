"""The example adapter of docs/adapters.md keeps the contract, and serves a real server as a plugin."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.storage.base import AdapterContext, LoadStatus, PutStatus, StorageAdapter
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits
from kvstrata.storage.wrap.metrics import MeteredAdapter
from kvstrata.testing.adapter_contract import AdapterContract, Medium
from kvstrata.testing.strategies import key_of, load_item, put_item
from tests.harness.cache_engine import CHUNK_TOKENS, CacheEngine, eventually, prompt
from tests.harness.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "adapter" / "sqlite_adapter.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sqlite_adapter", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


class Database(Medium):
    """The table, through connections of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(self.path, timeout=30)
        try:
            with connection:
                return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    def keys(self) -> set[bytes]:
        return {key for (key,) in self.ask("SELECT key FROM records")}

    def read(self, key: bytes) -> bytes:
        [(record,)] = self.ask("SELECT record FROM records WHERE key = ?", key)
        return record

    def write(self, key: bytes, stored: bytes) -> None:
        self.ask("UPDATE records SET record = ? WHERE key = ?", stored, key)

    def remove(self, key: bytes) -> None:
        self.ask("DELETE FROM records WHERE key = ?", key)

    def used_bytes(self) -> int:
        return self.ask("SELECT coalesce(sum(length(record)), 0) FROM records")[0][0]


class TestSqlite(AdapterContract):
    def make_medium(self, folder: Path) -> Database:
        return Database(folder / "a base.sqlite")

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Database)
        return example.SqliteAdapter(str(medium.path), capacity_bytes / example.GB)


class TestSqliteGuarded(TestSqlite):
    """Inside the wrappers that the server puts around every adapter."""

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        clock = SystemClock()
        limits = DeadlineLimits(max_stuck_bytes=1 << 30, deadline_ms=600_000)
        guarded = DeadlineAdapter(super().make_adapter(medium, capacity_bytes), limits, clock)
        return MeteredAdapter(guarded, lambda report: None, clock)


CONTEXT = AdapterContext("test", SystemClock(), 0, 0, lambda key: None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, r"l2_adapters\[0\].path: must name the database file, found None"),
        ({"path": ""}, "path: must name"),
        ({"path": "x", "capacity": 3}, "capacity: unknown field; there are path, capacity_gb"),
        ({"path": "x", "capacity_gb": "3"}, "capacity_gb: must be a number from 0, found '3'"),
        ({"path": "x", "capacity_gb": -1}, "capacity_gb: must be a number from 0"),
    ],
)
def test_wrong_fields_are_named(fields, says):
    with pytest.raises(ConfigError, match=says):
        example.from_fields(fields, "l2_adapters[0]")
    assert isinstance(example.from_fields({"path": "x", "capacity_gb": 2}, "l2_adapters[0]"), StorageAdapter)


@pytest.mark.parametrize("kind", ["no folder", "a folder", "no database"])
async def test_a_file_that_cannot_be_used_is_named(tmp_path, kind):
    path = {"no folder": tmp_path / "none" / "x", "a folder": tmp_path, "no database": tmp_path / "text"}[
        kind
    ]
    (tmp_path / "text").write_text("this is no database" * 100)
    adapter = example.SqliteAdapter(str(path))
    with pytest.raises(StorageError, match=rf"path: '{path}' cannot be used: .*may write"):
        await adapter.open(CONTEXT)
    await adapter.close()


async def test_a_database_that_fails_is_an_outcome_of_each_item(tmp_path):
    database = Database(tmp_path / "kv.sqlite")
    adapter = example.SqliteAdapter(str(database.path))
    await adapter.open(CONTEXT)
    await adapter.put([put_item(key_of(1), 100)])
    database.ask("ALTER TABLE records RENAME TO elsewhere")
    [put] = await adapter.put([put_item(key_of(2), 100)])
    [load] = await adapter.load([load_item(key_of(1), 100)])
    assert (put.status, put.reason) == (PutStatus.FAILED, "io")
    assert (load.status, load.reason) == (LoadStatus.FAILED, "io")
    assert await adapter.delete([key_of(1)]) == 0
    await adapter.close()


@pytest.mark.integration
def test_a_server_uses_it_as_a_plugin(tmp_path):
    adapter = {
        "type": "plugin",
        "module_path": "sqlite_adapter",
        "class_name": "SqliteAdapter",
        "adapter_params": {"path": str(tmp_path / "kv.sqlite"), "capacity_gb": 1},
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parent), *sys.path])}
    flags = ("--l2-adapter", json.dumps(adapter))
    with ServerProcess(
        tmp_path, l1_mb=16, l2="embedded", chunk_tokens=CHUNK_TOKENS, flags=flags, environment=environment
    ) as server:
        server.start()
        with CacheEngine(server.socket_dir) as engine:
            engine.connect()
            engine.stored(prompt(5))
            eventually("all is in L2", lambda: puts(server).get("stored") == 5)
            server.stop()
            server.wipe_segment()
            server.start()
            engine.connect()
            assert engine.hit(prompt(6)) == 5


def puts(server: ServerProcess) -> dict[str, int]:
    return server.get("/v1/status")["l2_store"]["adapters"]["plugin-0"]["outcomes"]


def test_the_page_shows_the_example_and_every_method():
    page = (ROOT / "docs" / "adapters.md").read_text()
    assert "examples/adapter/sqlite_adapter.py" in page
    for name in StorageAdapter.__abstractmethods__ | {"clear"}:
        assert f"`{name}" in page, name
    for words in (PutStatus, LoadStatus):
        for word in words:
            assert f"`{word.name}`" in page, word
