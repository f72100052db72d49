"""Times puts and loads of records by an adapter and by the bare medium (kvstrata.measure.raw_io), without a pool."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import itertools
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

from kvstrata.clock import SystemClock
from kvstrata.measure.raw_io import RawFiles, in_batches
from kvstrata.native import record as native_record
from kvstrata.storage.base import AdapterContext, LoadItem, LoadStatus, PutItem, PutStatus, StorageAdapter

MB = 1 << 20
HEADER_BYTES = 4096


class Extents:
    """Page-aligned memory with `count` records of `record_bytes` each, sealed under keys that no other object uses."""

    _numbers = itertools.count()

    def __init__(self, record_bytes: int, count: int) -> None:
        self.record_bytes = record_bytes
        self.count = count
        self._memory = mmap.mmap(-1, record_bytes * count)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._view = memoryview(self._memory)
        noise = os.urandom(MB)
        for at in range(0, len(self._memory), MB):
            self._memory[at : at + MB] = noise[: min(MB, len(self._memory) - at)]
        self.keys: list[bytes] = []
        self.seal()

    def seal(self) -> None:
        """Give every record a fresh key."""
        payload = self.record_bytes - HEADER_BYTES
        self.keys = [
            hashlib.sha256(b"%d %d" % (os.getpid(), n)).digest()
            for n in itertools.islice(self._numbers, self.count)
        ]
        for i, key in enumerate(self.keys):
            spec = native_record.RecordSpec(key, bytes(32), bytes(32), bytes(32), 256)
            native_record.seal_record(
                self._address + i * self.record_bytes, self.record_bytes, spec, [payload]
            )

    def bytes(self, i: int) -> memoryview:
        """Return the bytes of record `i`."""
        return self._view[i * self.record_bytes : (i + 1) * self.record_bytes]

    def hold(self, i: int) -> Hold:
        """Return a hold on record `i`, as an adapter gets it."""
        return Hold(self._address + i * self.record_bytes, self.record_bytes, self.bytes(i))


class Hold:
    """A hold on bytes that nothing frees before their `Extents`."""

    def __init__(self, address: int, length: int, view: memoryview) -> None:
        self.address, self.length = address, length
        self._view = view

    def view(self) -> memoryview:
        """Return the bytes."""
        return self._view

    def drop(self) -> None:
        """Do nothing: the bytes belong to their `Extents`."""


def raw_write_s(folder: Path, extents: Extents, threads: int, batch: int) -> float:
    """Return the seconds of writing each record to a file of its own; the files stay for `raw_read_s`."""
    files = RawFiles(folder, threads, threads)
    try:
        return sum(files.write_s(n, [extents.bytes(i) for i in n]) for n in in_batches(extents.count, batch))
    finally:
        files.close()


def raw_read_s(folder: Path, extents: Extents, threads: int, batch: int) -> float:
    """Return the seconds of reading the files of `raw_write_s` back into the records."""
    files = RawFiles(folder, threads, threads)
    try:
        return sum(files.read_s(n, [extents.bytes(i) for i in n]) for n in in_batches(extents.count, batch))
    finally:
        files.close()


async def opened(adapter: StorageAdapter) -> StorageAdapter:
    """Open an adapter without a pool, and return it; the caller closes it."""
    await adapter.open(AdapterContext("bench", SystemClock(), 0, 0, lambda key: None))
    return adapter


async def put_s(adapter: StorageAdapter, extents: Extents, batch: int) -> float:
    """Return the seconds of putting all records. Raises RuntimeError when one is not stored."""
    started = time.perf_counter()
    for numbers in in_batches(extents.count, batch):
        items = [PutItem(extents.keys[i], extents.hold(i)) for i in numbers]  # type: ignore[arg-type]
        _all(await adapter.put(items), PutStatus.STORED)
    return time.perf_counter() - started


async def load_s(adapter: StorageAdapter, extents: Extents, batch: int) -> float:
    """Return the seconds of loading and verifying all records in place. Raises RuntimeError when one is not loaded."""
    started = time.perf_counter()
    for numbers in in_batches(extents.count, batch):
        items = [LoadItem(extents.keys[i], extents.hold(i)) for i in numbers]  # type: ignore[arg-type]
        _all(await adapter.load(items), LoadStatus.LOADED)
    return time.perf_counter() - started


def _all(outcomes: Sequence[tuple[object, str]], wanted: object) -> None:
    for status, reason in outcomes:
        if status is not wanted:
            raise RuntimeError(f"{status!r} ({reason}) instead of {wanted!r}")


async def exists_s(adapter: StorageAdapter, keys: Sequence[bytes], repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls of `exists` for all these keys."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        await adapter.exists(keys)
        times.append(time.perf_counter() - started)
        await asyncio.sleep(0)
    return times
