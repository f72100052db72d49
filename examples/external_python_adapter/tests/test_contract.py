"""The adapter keeps kvstrata's storage contract: `pytest tests`, with kvstrata's extra `test` installed."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from kvstrata_sqlite import GB, SqliteAdapter, from_fields

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.testing.adapter_contract import AdapterContract, HostedContract, Medium
from kvstrata.testing.strategies import key_of, load_item, put_item, settled
from kvstrata.tiers.base import AdapterContext, Outcome, StorageAdapter


class Database(Medium):
    """The adapter's table, reached through other connections than the adapter's."""

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
        return SqliteAdapter(str(medium.path), capacity_bytes / GB)


class TestSqliteInAHost(HostedContract):
    """The adapter in an adapter host, made from the type that the package adds."""

    def make_medium(self, folder: Path) -> Database:
        return Database(folder / "a base.sqlite")

    def entry(self, medium: Medium, capacity_bytes: int = 0) -> dict[str, Any]:
        assert isinstance(medium, Database)
        return {"type": "sqlite", "path": str(medium.path), "capacity_gb": capacity_bytes / GB}


CONTEXT = AdapterContext("test", SystemClock(), 0, 0, lambda key: None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, r"l2_adapters\[0\].path: must name the database file, found None"),
        ({"path": ""}, "path: must name"),
        ({"path": "x", "capacity": 3}, "capacity: unknown field; the fields are path, capacity_gb"),
        ({"path": "x", "capacity_gb": "3"}, "capacity_gb: must be a number from 0, found '3'"),
        ({"path": "x", "capacity_gb": -1}, "capacity_gb: must be a number from 0"),
    ],
)
def test_wrong_fields_are_named(fields, says):
    with pytest.raises(ConfigError, match=says):
        from_fields(fields, "l2_adapters[0]")
    assert isinstance(from_fields({"path": "x", "capacity_gb": 2}, "l2_adapters[0]"), StorageAdapter)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["no folder", "a folder", "no database"])
async def test_a_file_that_cannot_be_used_is_named(tmp_path, kind):
    path = {"no folder": tmp_path / "none" / "x", "a folder": tmp_path, "no database": tmp_path / "text"}[
        kind
    ]
    (tmp_path / "text").write_text("this is no database" * 100)
    adapter = SqliteAdapter(str(path))
    with pytest.raises(StorageError, match=rf"path: '{path}' cannot be used: .*may write"):
        await adapter.open(CONTEXT)
    await adapter.close()


@pytest.mark.asyncio
async def test_a_database_that_fails_is_an_outcome_of_each_item(tmp_path):
    database = Database(tmp_path / "kv.sqlite")
    adapter = SqliteAdapter(str(database.path))
    await adapter.open(CONTEXT)
    await settled(adapter.put, [put_item(key_of(1), 100)])
    database.ask("ALTER TABLE records RENAME TO elsewhere")
    [put] = await settled(adapter.put, [put_item(key_of(2), 100)])
    [load] = await settled(adapter.load, [load_item(key_of(1), 100)])
    assert (put.outcome, put.reason) == (Outcome.FAILED, "io")
    assert (load.outcome, load.reason) == (Outcome.FAILED, "io")
    assert await adapter.delete(key_of(1)) == 0
    await adapter.close()
