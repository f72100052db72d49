"""The bare medium that adapters on local files are compared with, and records to give to both.

Files of one size, each opened with O_DIRECT, written by one `pwritev` and synced by `fdatasync`, or read by one
`preadv`, by as many threads as the adapter has; every batch is waited for, as the adapter's caller waits.  No names to
make durable, no checksum, no index.  The system calls take the time: Python takes about 20 µs a file beside them.
"""

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
from kvstrata.native import copying
from kvstrata.storage.base import AdapterContext, LoadItem, LoadStatus, PutItem, PutStatus, StorageAdapter

MB = 1 << 20
HEADER_BYTES = 4096


class Extents:
    """Page-aligned memory for `count` records of `record_bytes` each, sealed under keys that no other call gives."""

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
            for n in itertools.islice(Extents._numbers, self.count)
        ]
        for i, key in enumerate(self.keys):
            spec = copying.RecordSpec(key, bytes(32), bytes(32), bytes(32), 256)
            copying.seal_record(self._address + i * self.record_bytes, self.record_bytes, spec, [payload])

    def bytes(self, i: int) -> memoryview:
        """One record's bytes."""
        return self._view[i * self.record_bytes : (i + 1) * self.record_bytes]

    def hold(self, i: int) -> Hold:
        """A hold on one record, as an adapter gets it."""
        return Hold(self._address + i * self.record_bytes, self.record_bytes, self.bytes(i))


class Hold:
    """Bytes that stay where they are."""

    def __init__(self, address: int, length: int, view: memoryview) -> None:
        self.address, self.length = address, length
        self._view = view

    def view(self) -> memoryview:
        """The bytes."""
        return self._view

    def drop(self) -> None:
        """Nothing: they belong to their Extents."""


def in_batches(count: int, batch: int) -> list[range]:
    """Numbers 0 to count - 1 in runs of `batch`."""
    return [range(at, min(at + batch, count)) for at in range(0, count, batch)]


def raw_write_s(folder: Path, extents: Extents, threads: int, batch: int) -> float:
    """Seconds to write each record to a file of its own; the files stay for `raw_read_s`."""

    def write(i: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        fd = os.open(folder / str(i), flags, 0o600)
        try:
            if os.pwritev(fd, [extents.bytes(i)], 0) != extents.record_bytes:
                raise OSError(f"a short write to {folder}")
            os.fdatasync(fd)
        finally:
            os.close(fd)

    return _timed(write, extents.count, threads, batch)


def raw_read_s(folder: Path, extents: Extents, threads: int, batch: int) -> float:
    """Seconds to read what `raw_write_s` wrote back to where it came from."""

    def read(i: int) -> None:
        fd = os.open(folder / str(i), os.O_RDONLY | os.O_DIRECT)
        try:
            if os.preadv(fd, [extents.bytes(i)], 0) != extents.record_bytes:
                raise OSError(f"a short read from {folder}")
        finally:
            os.close(fd)

    return _timed(read, extents.count, threads, batch)


def _timed(work: Callable[[int], None], count: int, threads: int, batch: int) -> float:
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.001), range(threads)))  # its threads are there
        started = time.perf_counter()
        for numbers in in_batches(count, batch):
            list(pool.map(work, numbers))
        return time.perf_counter() - started


async def opened(adapter: StorageAdapter) -> StorageAdapter:
    """The adapter, open as in a server without a pool."""
    await adapter.open(AdapterContext("bench", SystemClock(), 0, 0, lambda key: None))
    return adapter


async def put_s(adapter: StorageAdapter, extents: Extents, batch: int) -> float:
    """Seconds to put each record. Raises RuntimeError where one is not stored."""
    started = time.perf_counter()
    for numbers in in_batches(extents.count, batch):
        items = [PutItem(extents.keys[i], extents.hold(i)) for i in numbers]  # type: ignore[arg-type]
        _all(await adapter.put(items), PutStatus.STORED)
    return time.perf_counter() - started


async def load_s(adapter: StorageAdapter, extents: Extents, batch: int) -> float:
    """Seconds to load each record to where it came from, verified. Raises RuntimeError where one is not loaded."""
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
    """Seconds of each of so many `exists` of all these keys."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        await adapter.exists(keys)
        times.append(time.perf_counter() - started)
        await asyncio.sleep(0)
    return times
