"""The indexes that benchmarks.index_study compares, and the process that measures one of them.

    python -m benchmarks.index_engines ENGINE FOLDER load|recover < visits.json

Each keeps placements (storage key of 32 bytes, instance) and answers how many leading chunks of a chain some
instance holds.  Rivals store a placement as their users would: RocksDB and SQLite as one key made of both, LMDB as a
key with sorted values.  All changes of one visit are one batch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import raw_io
from kvstrata.controller import snapshot
from kvstrata.native import record as native_record
from kvstrata.native.copying import crc32c
from kvstrata.native.registry import Registry
from kvstrata.storage.base import PutItem, PutStatus
from kvstrata.storage.media.disk.adapter import disk_adapter

INSTANCES = 8
SNAPSHOT_MS = 30_000
"""The controller's default."""
CACHE_BYTES = 64 << 20
"""For each rival's cache and write buffer; everything fits."""
RECORD_BYTES = 8192
BATCH_RECORDS = 256
LOG_BYTES = 8 << 30


class Visit(NamedTuple):
    """A request that came to an instance, and what its instance stored and evicted for it."""

    at_ms: float
    instance: int
    chain: list[int]
    """The prompt's blocks."""
    admitted: list[int]
    evicted: list[int]
    best: int
    """Leading blocks that one instance holds."""
    own: int
    """Leading blocks that this instance holds."""


class Index(ABC):
    """One index in one folder. Keys have 32 bytes."""

    own = False
    """Whether it knows one instance's chunks only: it is asked for those of the visited instance."""

    @abstractmethod
    def open(self, folder: Path) -> None:
        """Open what is in the folder, or begin anew."""

    def prepare(self, instance: int, admitted: Sequence[bytes]) -> None:  # noqa: B027  # most have nothing to do
        """Make ready what is not the index's own work; not timed."""

    @abstractmethod
    def apply(self, instance: int, admitted: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """Change placements as one batch."""

    def pass_time(self, at_ms: float) -> None:  # noqa: B027
        """Do what happens beside the changes at times; not timed."""

    @abstractmethod
    def scan(self, chain: Sequence[bytes], instance: int) -> int:
        """How many leading keys one instance holds."""

    @abstractmethod
    def count(self) -> int:
        """Placements."""

    def disk_bytes(self, folder: Path) -> int:
        """What it takes of the disk."""
        return sum(each.stat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())


class NativeRegistry(Index):
    """The registry of the controller's directory, with a snapshot of the controller's format every 30 s."""

    def open(self, folder: Path) -> None:
        self._path = folder / snapshot.FILE
        self._registry = Registry()
        self._slots = []
        for instance in range(INSTANCES):
            slot = self._registry.open_slot(instance)
            assert slot is not None
            self._registry.publish(slot)
            self._slots.append(slot)
        self._next_ms = float(SNAPSHOT_MS)
        if self._path.exists():
            slot_of = array("H", bytes(2 * 65_536))
            for slot in self._slots:  # the same numbers as in the process that wrote the snapshot
                slot_of[slot] = slot
            snapshot.read_document(self._path)
            for tags, slots in snapshot.read_blocks(self._path):
                self._registry.restore(tags, slots, slot_of)

    def apply(self, instance: int, admitted: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        slot = self._slots[instance]
        self._registry.evict(slot, b"".join([key[:8] for key in evicted]))
        self._registry.admit(slot, b"".join([key[:8] for key in admitted]))

    def pass_time(self, at_ms: float) -> None:
        if at_ms >= self._next_ms:
            self._next_ms += SNAPSHOT_MS
            self._write()

    def scan(self, chain: Sequence[bytes], instance: int) -> int:
        found = self._registry.lookup_prefix(b"".join([key[:8] for key in chain]))
        return found[0].chunks if found else 0

    def count(self) -> int:
        return self._registry.usage().placements

    def _write(self) -> None:
        parts, cursor = [snapshot.MAGIC], 0
        while True:
            tags, slots, cursor = self._registry.dump(cursor, snapshot.DUMP_CELLS)
            parts += [len(tags).to_bytes(4, "little"), tags.tobytes(), slots.tobytes()] if tags else []
            if not cursor:
                break
        parts.append(bytes(4))
        at = sum(map(len, parts))
        parts.append(json.dumps({"controller": "bench", "unix_ms": 0, "members": []}).encode())
        body = b"".join(parts)
        footer = at.to_bytes(8, "little") + crc32c(body).to_bytes(4, "little") + b"KVSE"
        fresh = self._path.with_suffix(".new")
        with open(fresh, "wb") as file:
            file.write(body + footer)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)


class DiskLog(Index):
    """The index of the `disk` tier: a log with records of 8 KiB, each behind a header of 4 KiB."""

    own = True

    def open(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._adapter = disk_adapter(base_path=str(folder), capacity_bytes=LOG_BYTES)
        self._loop.run_until_complete(raw_io.opened(self._adapter))
        self._extents = raw_io.Extents(RECORD_BYTES, BATCH_RECORDS)
        self._address = self._extents.hold(0).address

    def prepare(self, instance: int, admitted: Sequence[bytes]) -> None:
        for at, key in enumerate(admitted):
            spec = native_record.RecordSpec(self._key(key, instance), bytes(32), bytes(32), bytes(32), 256)
            address = self._address + at * RECORD_BYTES
            native_record.seal_record(address, RECORD_BYTES, spec, [RECORD_BYTES - raw_io.HEADER_BYTES])

    def apply(self, instance: int, admitted: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        async def change() -> None:
            if evicted:
                await self._adapter.delete([self._key(key, instance) for key in evicted])
            items = [
                PutItem(self._key(key, instance), self._extents.hold(at))  # type: ignore[arg-type]
                for at, key in enumerate(admitted)
            ]
            for status, reason in await self._adapter.put(items) if items else []:
                if status is not PutStatus.STORED:
                    raise RuntimeError(f"a record was not stored: {reason}")

        self._loop.run_until_complete(change())

    def scan(self, chain: Sequence[bytes], instance: int) -> int:
        keys = [self._key(key, instance) for key in chain]
        answers = self._loop.run_until_complete(self._adapter.exists(keys))
        return sum(1 for _ in itertools.takewhile(lambda answer: answer.record_bytes, answers))

    def count(self) -> int:
        return self._loop.run_until_complete(self._adapter.usage()).records

    def disk_bytes(self, folder: Path) -> int:
        return self._loop.run_until_complete(self._adapter.usage()).used_bytes  # files are longer at once

    @staticmethod
    def _key(key: bytes, instance: int) -> bytes:
        return key[:24] + bytes([key[24] ^ instance]) + key[25:]


class RocksDb(Index):
    """WAL, one WriteBatch a visit, Bloom filters of 10 bits for key prefixes, no compression of random keys."""

    def __init__(self, *, sync: bool) -> None:
        self._sync = sync

    def open(self, folder: Path) -> None:
        import rocksdict  # type: ignore[import-not-found]  # fetched for the measured process

        options = rocksdict.Options(raw_mode=True)
        options.set_write_buffer_size(CACHE_BYTES)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_prefix_extractor(rocksdict.SliceTransform.create_fixed_prefix(32))
        options.set_memtable_prefix_bloom_ratio(0.1)
        table = rocksdict.BlockBasedOptions()
        table.set_bloom_filter(10, False)
        table.set_block_cache(rocksdict.Cache(CACHE_BYTES))
        options.set_block_based_table_factory(table)
        self._batch = rocksdict.WriteBatch
        self._write = rocksdict.WriteOptions()
        self._write.sync = self._sync
        self._db = rocksdict.Rdict(str(folder / "rocksdb"), options)

    def apply(self, instance: int, admitted: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        batch, suffix = self._batch(raw_mode=True), instance.to_bytes(2, "big")
        for key in evicted:
            batch.delete(key + suffix)
        for key in admitted:
            batch.put(key + suffix, b"")
        self._db.write(batch, self._write)

    def scan(self, chain: Sequence[bytes], instance: int) -> int:
        found = self._db.iter()
        alive: set[bytes] | None = None
        for length, key in enumerate(chain):
            holders = set()
            found.seek(key)
            while found.valid() and found.key()[:32] == key:
                holders.add(found.key()[32:])
                found.next()
            alive = holders if alive is None else alive & holders
            if not alive:
                return length
        return len(chain)

    def count(self) -> int:
        return sum(1 for _ in self._db.keys())  # noqa: SIM118  # it cannot be iterated itself


class Lmdb(Index):
    """Sorted duplicates of fixed size, one write transaction a visit."""

    def __init__(self, *, sync: bool) -> None:
        self._sync = sync

    def open(self, folder: Path) -> None:
        import lmdb  # type: ignore[import-not-found]

        self._db = lmdb.open(str(folder / "lmdb"), map_size=4 << 30, max_dbs=1, sync=self._sync)
        self._places = self._db.open_db(b"placements", dupsort=True, dupfixed=True)

    def apply(self, instance: int, admitted: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        suffix = instance.to_bytes(2, "big")
        with self._db.begin(db=self._places, write=True) as change:
            for key in evicted:
                change.delete(key, suffix)
            change.cursor().putmulti([(key, suffix) for key in sorted(admitted)])

    def scan(self, chain: Sequence[bytes], instance: int) -> int:
        alive: set[bytes] | None = None
        with self._db.begin(db=self._places) as view:
            cursor = view.cursor()
            for length, key in enumerate(chain):
                holders = set(cursor.iternext_dup()) if cursor.set_key(key) else set()
                alive = holders if alive is None else alive & holders
                if not alive:
                    return length
        return len(chain)

    def count(self) -> int:
        with self._db.begin() as view:
            return int(view.stat(self._places)["entries"])


class Sqlite(Index):
    """One table without rowids, WAL, one transaction a visit, one statement for a scan."""

    def __init__(self, *, sync: bool) -> None:
        self._sync = sync

    def open(self, folder: Path) -> None:
        import sqlite3

        self._db = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
        for line in (
            "PRAGMA journal_mode=WAL",
            f"PRAGMA synchronous={'FULL' if self._sync else 'NORMAL'}",
            f"PRAGMA cache_size=-{CACHE_BYTES >> 10}",
            "CREATE TABLE IF NOT EXISTS place (key BLOB, slot INTEGER, PRIMARY KEY (key, slot)) WITHOUT ROWID",
        ):
            self._db.execute(line)

    def apply(self, instance: int, admitted: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("DELETE FROM place WHERE key = ? AND slot = ?", [(k, instance) for k in evicted])
        self._db.executemany("INSERT OR IGNORE INTO place VALUES (?, ?)", [(k, instance) for k in admitted])
        self._db.execute("COMMIT")

    def scan(self, chain: Sequence[bytes], instance: int) -> int:
        alive: set[int] | None = None
        for first in range(0, len(chain), 500):
            part = chain[first : first + 500]
            marks = ",".join("?" * len(part))
            holders: dict[bytes, set[int]] = {}
            for key, slot in self._db.execute(f"SELECT key, slot FROM place WHERE key IN ({marks})", part):
                holders.setdefault(key, set()).add(slot)
            for length, key in enumerate(part, first):
                alive = holders.get(key, set()) if alive is None else alive & holders.get(key, set())
                if not alive:
                    return length
        return len(chain)

    def count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM place").fetchone()[0])


ENGINES: dict[str, Callable[[], Index]] = {
    "registry": NativeRegistry,
    "disk": DiskLog,
    "rocksdb_sync": lambda: RocksDb(sync=True),
    "lmdb_sync": lambda: Lmdb(sync=True),
    "sqlite_sync": lambda: Sqlite(sync=True),
    "rocksdb": lambda: RocksDb(sync=False),
    "lmdb": lambda: Lmdb(sync=False),
    "sqlite": lambda: Sqlite(sync=False),
}


def key_of(block: int) -> bytes:
    """The storage key of a trace's block."""
    return blake2b(block.to_bytes(8, "big"), digest_size=32).digest()


def written_bytes() -> int:
    """Bytes that this process has given to write calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def keys_of(blocks: Sequence[int], known: dict[int, bytes]) -> list[bytes]:
    """The keys of blocks, each computed once."""
    for block in blocks:
        if block not in known:
            known[block] = key_of(block)
    return [known[block] for block in blocks]


def load(index: Index, folder: Path, visits: list[Visit]) -> dict[str, Any]:
    """Ask and change the index for each visit. Raises RuntimeError when it answers something wrong."""
    index.open(folder)
    known: dict[int, bytes] = {}
    ingest_s, scans_us = 0.0, []
    before = written_bytes()
    for visit in visits:
        chain, admitted, evicted = (
            keys_of(blocks, known) for blocks in (visit.chain, visit.admitted, visit.evicted)
        )
        index.pass_time(visit.at_ms)
        started = time.perf_counter()
        found = index.scan(chain, visit.instance)
        scans_us.append((time.perf_counter() - started) * 1e6)
        if found != (visit.own if index.own else visit.best):
            raise RuntimeError(f"a scan at {visit.at_ms} ms found {found} chunks: {visit}")
        index.prepare(visit.instance, admitted)
        started = time.perf_counter()
        index.apply(visit.instance, admitted, evicted)
        ingest_s += time.perf_counter() - started
    return {"ingest_s": ingest_s, "scans_us": scans_us, "written_bytes": written_bytes() - before}


def recover(index: Index, folder: Path, visits: list[Visit]) -> dict[str, Any]:
    """Open what a killed process has left."""
    chain = [key_of(block) for block in visits[-1].chain]
    started = time.perf_counter()
    index.open(folder)
    index.scan(chain, visits[-1].instance)
    recovery_s = time.perf_counter() - started
    return {"recovery_s": recovery_s, "disk_bytes": index.disk_bytes(folder), "placements": index.count()}


def main() -> None:
    """Measure one engine; print a line of JSON, and leave without closing anything, as if killed."""
    name, folder, phase = sys.argv[1:]
    visits = [Visit(*each) for each in json.load(sys.stdin)]
    told = (load if phase == "load" else recover)(ENGINES[name](), Path(folder), visits)
    print(json.dumps(told), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
