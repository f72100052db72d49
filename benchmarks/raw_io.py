"""Times puts and loads of records by an adapter and by the bare medium, without a pool."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import hashlib
import itertools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.clock import SystemClock
from kvstrata.measure.l2 import in_batches
from kvstrata.native import core
from kvstrata.tiers.base import AdapterContext, Ask, Item, Outcome, StorageAdapter

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
            spec = core.RecordSpec(key, bytes(32), bytes(32), bytes(32), 256)
            core.seal_record(self._address + i * self.record_bytes, self.record_bytes, spec, [payload])

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


class RawFiles:
    """Files named by numbers, in an existing folder; the caller owns the folder and the files, and calls `close`.

    Each record is a file, opened with O_DIRECT, written by one `pwritev` and synced by `fdatasync`, or read by one
    `preadv`.  The caller waits for each batch as an adapter's caller does.  The files' names are not made durable, and
    have neither checksums nor an index.  Python adds about 20 µs per file to the system calls.
    """

    def __init__(self, folder: Path, write_threads: int, read_threads: int) -> None:
        self._folder = folder
        self._writers, self._readers = (
            concurrent.futures.ThreadPoolExecutor(threads) for threads in (write_threads, read_threads)
        )
        for executor, threads in ((self._writers, write_threads), (self._readers, read_threads)):
            list(executor.map(lambda _: time.sleep(0.001), range(threads)))  # starts all threads

    def write_s(self, numbers: Sequence[int], records: Sequence[memoryview]) -> float:
        """Write each record, page-aligned and of whole pages, to a new file; returns the seconds. Raises OSError."""

        def write(number: int, record: memoryview) -> None:
            path = self._folder / str(number)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
            try:
                if os.pwritev(fd, [record], 0) != len(record):
                    raise OSError(f"a short write to {path}")
                os.fdatasync(fd)
            finally:
                os.close(fd)

        return _timed(self._writers, write, numbers, records)

    def read_s(self, numbers: Sequence[int], records: Sequence[memoryview]) -> float:
        """Read files, written by `write_s`, into these buffers; returns the seconds. Raises OSError."""

        def read(number: int, record: memoryview) -> None:
            path = self._folder / str(number)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                if os.preadv(fd, [record], 0) != len(record):
                    raise OSError(f"a short read from {path}")
            finally:
                os.close(fd)

        return _timed(self._readers, read, numbers, records)

    def close(self) -> None:
        """End the threads."""
        self._writers.shutdown()
        self._readers.shutdown()


def _timed(
    executor: concurrent.futures.ThreadPoolExecutor,
    work: Callable[[int, memoryview], None],
    numbers: Sequence[int],
    records: Sequence[memoryview],
) -> float:
    begun_s = time.perf_counter()
    list(executor.map(work, numbers, records))
    return time.perf_counter() - begun_s


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
        items = [Item(extents.keys[i], extents.hold(i)) for i in numbers]  # type: ignore[arg-type]
        await adapter.put(items)
        _all(items, Outcome.STORED)
    return time.perf_counter() - started


async def load_s(adapter: StorageAdapter, extents: Extents, batch: int) -> float:
    """Return the seconds of loading and verifying all records in place. Raises RuntimeError when one is not loaded."""
    started = time.perf_counter()
    for numbers in in_batches(extents.count, batch):
        items = [Item(extents.keys[i], extents.hold(i)) for i in numbers]  # type: ignore[arg-type]
        await adapter.load(items)
        _all(items, Outcome.LOADED)
    return time.perf_counter() - started


def _all(items: Sequence[Item], wanted: Outcome) -> None:
    for item in items:
        if item.outcome is not wanted:
            raise RuntimeError(f"{item.outcome!r} ({item.reason}) instead of {wanted!r}")


async def exists_s(adapter: StorageAdapter, keys: Sequence[bytes], repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls of `exists` for all these keys."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        await adapter.exists(b"".join(keys), Ask())
        times.append(time.perf_counter() - started)
        await asyncio.sleep(0)
    return times
