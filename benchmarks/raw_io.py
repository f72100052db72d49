"""Times puts and loads of records by an adapter and by the bare medium, without a pool."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from benchmarks.hosted import Extents, keys_of
from kvstrata.clock import SystemClock
from kvstrata.measure.l2 import in_batches
from kvstrata.tiers.base import AdapterContext, Ask, Item, Outcome, StorageAdapter

MB = 1 << 20
HEADER_BYTES = 4096


class Records(Extents):
    """`count` records of `record_bytes` each, whole pages, sealed under keys that no other object uses."""

    _numbers = itertools.count()

    def __init__(self, record_bytes: int, count: int) -> None:
        super().__init__(count, record_bytes - HEADER_BYTES)
        noise = os.urandom(MB)
        for i in range(count):
            record = self.bytes(i)
            for at in range(0, record_bytes, MB):
                record[at : at + MB] = noise[: min(MB, record_bytes - at)]
        self.keys: list[bytes] = []
        self.renew()

    def renew(self) -> None:
        """Give every record a fresh key."""
        self.keys = keys_of(os.getpid() << 32 | next(self._numbers), self.items)
        self.seal(self.keys)

    def bytes(self, i: int) -> memoryview:
        """Return the bytes of record `i`."""
        return self.map.view(self.address(i, for_put=True) - self.map.address, self.record_bytes)


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


def raw_write_s(folder: Path, records: Records, threads: int, batch: int) -> float:
    """Return the seconds of writing each record to a file of its own; the files stay for `raw_read_s`."""
    files = RawFiles(folder, threads, threads)
    try:
        return sum(files.write_s(n, [records.bytes(i) for i in n]) for n in in_batches(records.items, batch))
    finally:
        files.close()


def raw_read_s(folder: Path, records: Records, threads: int, batch: int) -> float:
    """Return the seconds of reading the files of `raw_write_s` back into the records."""
    files = RawFiles(folder, threads, threads)
    try:
        return sum(files.read_s(n, [records.bytes(i) for i in n]) for n in in_batches(records.items, batch))
    finally:
        files.close()


async def opened(adapter: StorageAdapter) -> StorageAdapter:
    """Open an adapter without a pool, and return it; the caller closes it."""
    await adapter.open(AdapterContext("bench", SystemClock(), 0, 0, lambda key: None))
    return adapter


async def put_s(adapter: StorageAdapter, records: Records, batch: int) -> float:
    """Return the seconds of putting all records. Raises RuntimeError when one is not stored."""
    return await _move_s(adapter.put, records, batch, Outcome.STORED)


async def load_s(adapter: StorageAdapter, records: Records, batch: int) -> float:
    """Return the seconds of loading and verifying all records in place. Raises RuntimeError when one is not loaded."""
    return await _move_s(adapter.load, records, batch, Outcome.LOADED)


async def _move_s(
    move: Callable[[Sequence[Item]], Awaitable[None]], records: Records, batch: int, wanted: Outcome
) -> float:
    for_put = wanted is Outcome.STORED
    started = time.perf_counter()
    for numbers in in_batches(records.items, batch):
        items = [Item(records.keys[i], records.hold(i, records.keys[i], for_put=for_put)) for i in numbers]
        await move(items)
        for item in items:
            if item.outcome is not wanted:
                raise RuntimeError(f"{item.outcome!r} ({item.reason}) instead of {wanted!r}")
    return time.perf_counter() - started


async def exists_s(adapter: StorageAdapter, keys: Sequence[bytes], repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls of `exists` for all these keys."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        await adapter.exists(b"".join(keys), Ask())
        times.append(time.perf_counter() - started)
        await asyncio.sleep(0)
    return times
