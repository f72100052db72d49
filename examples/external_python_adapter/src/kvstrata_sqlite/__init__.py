"""An L2 adapter for kvstrata that keeps records in one SQLite database; kvstrata's contract suite tests it.

The package's entry point names `from_fields`, so a server accepts the type once the package is installed:

    lmcache-server --l2-adapter '{"type": "sqlite", "path": "/data/kv.sqlite", "capacity_gb": 20}'

Invariants
1. The index (key → length, least recently used first) belongs to the event loop.  Threads only run SQL.
2. One put, delete or clear at a time changes the table (`_changing`); the index follows when the change is committed.
3. The thread that touches the bytes of a hold drops it when it has finished; a hold that no thread gets is dropped at
   once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvstrata.errors import ConfigError, StorageError
from kvstrata.keys.batch import split
from kvstrata.native.core import CopyOutcome, verify_stored_record
from kvstrata.tiers.base import (
    AdapterContext,
    Ask,
    Capabilities,
    Item,
    KeyPage,
    Outcome,
    Presence,
    StorageAdapter,
    Usage,
)
from kvstrata.tiers.lanes import Lane, Lanes

T = TypeVar("T")

KEY_BYTES = 32
GB = 1 << 30


def from_fields(fields: Mapping[str, Any], path: str) -> SqliteAdapter:
    """The entry point: make the adapter of an `l2_adapters` entry at `path`. Raises ConfigError naming the field."""
    known = {"path": None, "capacity_gb": 0}
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"{path}.{name}: unknown field; the fields are {', '.join(known)}", field=f"{path}.{name}"
            )
    file, capacity_gb = fields.get("path"), fields.get("capacity_gb", 0)
    if not isinstance(file, str) or not file:
        raise ConfigError(f"{path}.path: must name the database file, found {file!r}", field=f"{path}.path")
    if isinstance(capacity_gb, bool) or not isinstance(capacity_gb, int | float) or capacity_gb < 0:
        field = f"{path}.capacity_gb"
        raise ConfigError(f"{field}: must be a number from 0, found {capacity_gb!r}", field=field)
    return SqliteAdapter(file, capacity_gb)


class SqliteAdapter(StorageAdapter):
    """The adapter, see the module. `capacity_gb` limits the bytes of records, not SQLite's own; 0: no cap."""

    def __init__(self, path: str, capacity_gb: float = 0) -> None:
        self.name = "sqlite"  # the server gives the adapter another name, such as sqlite-0
        self.capabilities = Capabilities(persistent=True, shared=False, max_batch=16, lists=True)
        self._path = path
        self._capacity_bytes = int(capacity_gb * GB)
        self._index: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._used_bytes = 0
        self._changing = asyncio.Lock()
        self._running: set[asyncio.Future[Any]] = set()
        self._lanes: Lanes | None = None
        self._context: AdapterContext | None = None
        self._connections: list[sqlite3.Connection] = []
        self._connections_lock = threading.Lock()

    # Life.

    async def open(self, context: AdapterContext) -> None:
        """Read keys and lengths, but no records. Raises StorageError naming the file."""
        self._context = context
        self._lanes = Lanes(self.name)
        try:
            self._index = await self._in_lane(Lane.LOOKUP, self._read_index)
        except (sqlite3.Error, OSError) as error:
            await self._lanes.close()
            raise StorageError(
                f"{self.name}: path: {self._path!r} cannot be used: {error}; give a file that this user may "
                "write, in a folder that exists",
                field="path",
            ) from None
        self._used_bytes = sum(self._index.values())
        async with self._changing:
            victims = self._victims(0)
            if victims:  # the cap is smaller than it was
                await self._in_lane(Lane.DELETE, lambda: self._delete_rows(victims))
                self._forget(victims, evicted=True)

    async def close(self) -> None:
        """Wait until all work has ended; all holds are then dropped."""
        while self._running:
            await asyncio.wait(set(self._running))
        if self._lanes is not None:
            await self._lanes.close()
        while self._connections:
            self._connections.pop().close()

    # The contract. Each batch is a task of the adapter: cancelling the call ends the wait, not the work.

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        """Answer from the index, without disk or queue."""
        return bytes([Presence.PRESENT if key in self._index else Presence.ABSENT for key in split(keys)])

    async def list_keys(self, cursor: int, most: int) -> KeyPage | None:
        """List keys by row number, which a record keeps as long as it exists."""
        return await self._own(self._in_lane(Lane.LOOKUP, lambda: self._read_keys(cursor, most)))

    async def put(self, items: Sequence[Item]) -> None:
        """Put each record in a transaction of its own; STORED means that it is on the disk."""
        await self._own(self._put_batch(items))

    async def load(self, items: Sequence[Item]) -> None:
        """Load all records at once, each in a thread."""
        await self._own(asyncio.gather(*map(self._load_one, items)))

    async def delete(self, keys: bytes) -> int:
        """Delete all keys in one transaction."""
        return await self._own(self._delete_batch(split(keys)))

    async def clear(self) -> int:
        """Delete every record."""
        return await self._own(self._delete_batch(None))

    async def usage(self) -> Usage:
        """The bytes and records that count against the cap."""
        return Usage(self._used_bytes, self._capacity_bytes, len(self._index))

    async def _own(self, work: Awaitable[T]) -> T:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    # On the event loop.

    async def _put_batch(self, items: Sequence[Item]) -> None:
        async with self._changing:
            for item in items:
                await self._put_one(item)

    async def _put_one(self, item: Item) -> None:
        key, length = item.key, item.hold.length
        if self._index.get(key) == length:
            item.settle(Outcome.EXISTS)
            return
        if 0 < self._capacity_bytes < length:
            item.settle(Outcome.FAILED, "larger_than_cap")
            return
        victims = self._victims(length - self._index.get(key, 0))
        await self._in_lane(Lane.PUT, lambda: self._write_row(item, victims))
        if item.outcome is not Outcome.STORED:
            return
        self._forget([key], evicted=False)  # the new record replaces a copy of another length
        self._forget(victims, evicted=True)
        self._index[key] = length
        self._used_bytes += length

    def _victims(self, more_bytes: int) -> list[bytes]:
        """Keys to remove, least recently used first, so that `more_bytes` fit below the cap."""
        too_many = self._used_bytes + more_bytes - self._capacity_bytes
        victims: list[bytes] = []
        if self._capacity_bytes == 0:
            return victims
        for key, length in self._index.items():
            if too_many <= 0:
                break
            victims.append(key)
            too_many -= length
        return victims

    def _forget(self, keys: Sequence[bytes], *, evicted: bool) -> int:
        """Remove keys from the index; returns how many were in it. Evicted keys are reported to the server."""
        known = [key for key in dict.fromkeys(keys) if key in self._index]
        for key in known:
            self._used_bytes -= self._index.pop(key)
            if evicted and self._context is not None:
                self._context.record_evicted(key)
        return len(known)

    async def _load_one(self, item: Item) -> None:
        row = await self._in_lane(Lane.LOAD, lambda: self._read_row(item))
        if item.outcome is Outcome.LOADED and item.key in self._index:
            self._index.move_to_end(item.key)
        elif item.outcome in (Outcome.ABSENT, Outcome.CORRUPT):
            # Delete the bad copy, so that the next put can store the record. A row that a faster put wrote stays.
            async with self._changing:
                if not await self._in_lane(Lane.DELETE, lambda: self._is_there_without(item.key, row)):
                    self._forget([item.key], evicted=False)

    async def _delete_batch(self, keys: list[bytes] | None) -> int:
        """Delete these keys (None: all); returns how many records were deleted."""
        async with self._changing:
            chosen = list(self._index) if keys is None else keys
            if not await self._in_lane(Lane.DELETE, lambda: self._delete_rows(chosen)):
                return 0
            return self._forget(chosen, evicted=False)

    async def _in_lane(self, lane: Lane, work: Callable[[], T]) -> T:
        """Run blocking work in a thread of a lane; a burst of puts leaves one thread for lookups and loads."""
        assert self._lanes is not None
        return await self._lanes.run(lane, work)

    # In threads.

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection to this thread alone; its work is committed unless the block raises."""
        with self._connections_lock:
            connection = self._connections.pop() if self._connections else None
        if connection is None:
            connection = sqlite3.connect(self._path, check_same_thread=False, timeout=5.0)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        try:
            with connection:
                yield connection
        finally:
            with self._connections_lock:
                self._connections.append(connection)

    def _read_index(self) -> collections.OrderedDict[bytes, int]:
        if not Path(self._path).parent.is_dir():
            raise FileNotFoundError("its folder does not exist")
        with self._connection() as sql:
            sql.execute(
                "CREATE TABLE IF NOT EXISTS records"
                " (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE NOT NULL, record BLOB NOT NULL)"
            )
            rows = sql.execute("SELECT key, length(record) FROM records ORDER BY id")
            return collections.OrderedDict((key, length) for key, length in rows if len(key) == KEY_BYTES)

    def _read_keys(self, cursor: int, most: int) -> KeyPage | None:
        question = "SELECT id, key FROM records WHERE id > ? ORDER BY id LIMIT ?"
        try:
            with self._connection() as sql:
                rows = sql.execute(question, (cursor, most)).fetchall()
        except sqlite3.Error:
            return None
        return KeyPage([key for _, key in rows], rows[-1][0] if len(rows) == most else 0)

    def _write_row(self, item: Item, victims: list[bytes]) -> None:
        """Write one record; STORED if it is committed."""
        try:
            with self._connection() as sql:
                sql.executemany("DELETE FROM records WHERE key = ?", [(key,) for key in victims])
                sql.execute(
                    "INSERT OR REPLACE INTO records (key, record) VALUES (?, ?)", (item.key, item.hold.view())
                )
            item.settle(Outcome.STORED)  # SQLite has copied or written the bytes
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
            item.settle(Outcome.THROTTLED if full else Outcome.FAILED, "full" if full else "io")

    def _read_row(self, item: Item) -> int:
        """Read one record; returns the row's id (0 without a row)."""
        try:
            with self._connection() as sql:
                found = sql.execute("SELECT id, record FROM records WHERE key = ?", (item.key,)).fetchone()
        except sqlite3.Error:
            item.settle(Outcome.FAILED, "io")
            return 0
        if found is None:
            item.settle(Outcome.ABSENT)
            return 0
        row, record = found
        is_sound = len(record) <= item.hold.length
        if is_sound:
            item.hold.view()[: len(record)] = record
            is_sound = verify_stored_record(item.hold.address, len(record), item.key) == CopyOutcome.OK
        item.settle(Outcome.LOADED if is_sound else Outcome.CORRUPT)
        return int(row)

    def _is_there_without(self, key: bytes, row: int) -> bool:
        """Delete this row; returns whether the key has another."""
        try:
            with self._connection() as sql:
                sql.execute("DELETE FROM records WHERE id = ?", (row,))
                return sql.execute("SELECT 1 FROM records WHERE key = ?", (key,)).fetchone() is not None
        except sqlite3.Error:
            return True

    def _delete_rows(self, keys: Sequence[bytes]) -> bool:
        try:
            with self._connection() as sql:
                sql.executemany("DELETE FROM records WHERE key = ?", [(key,) for key in keys])
        except sqlite3.Error:
            return False
        return True
