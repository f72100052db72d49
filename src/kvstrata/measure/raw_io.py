"""The bare medium that adapters on local files are compared with.

A file for each record, opened with O_DIRECT, written by one `pwritev` and synced by `fdatasync`, or read by one
`preadv`, by as many threads as the adapter has; every batch is waited for, as the adapter's caller waits.  No names to
make durable, no checksum, no index.  The system calls take the time: Python takes about 20 µs a file beside them.
"""

from __future__ import annotations

import concurrent.futures
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.errors import StorageError


class RawFiles:
    """Files named by numbers in a folder that is there and stays the caller's, as the files do."""

    def __init__(self, folder: Path, write_threads: int, read_threads: int) -> None:
        self._folder = folder
        self._writers, self._readers = (
            concurrent.futures.ThreadPoolExecutor(threads) for threads in (write_threads, read_threads)
        )
        for executor, threads in ((self._writers, write_threads), (self._readers, read_threads)):
            list(executor.map(lambda _: time.sleep(0.001), range(threads)))  # its threads are there

    def write_s(self, numbers: Sequence[int], records: Sequence[memoryview]) -> float:
        """Seconds to write each record to a new file; page-aligned, whole pages. OSError names what fails."""

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
        """Seconds to read what `write_s` wrote; likewise."""

        def read(number: int, record: memoryview) -> None:
            path = self._folder / str(number)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                if os.preadv(fd, [record], 0) != len(record):
                    raise OSError(f"a short read from {path}")
            finally:
                os.close(fd)

        return _timed(self._readers, read, numbers, records)

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove these files."""
        for number in numbers:
            (self._folder / str(number)).unlink()

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


def in_batches(count: int, batch: int) -> list[range]:
    """Numbers 0 to count - 1 in runs of `batch`."""
    return [range(at, min(at + batch, count)) for at in range(0, count, batch)]


def check_direct(folder: Path) -> None:
    """Raises StorageError where files in this folder cannot be made, or not be opened with O_DIRECT."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="kvstrata-bench-") as file:
            os.close(os.open(file.name, os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        raise StorageError(f"{folder}: no raw I/O with O_DIRECT there ({error})") from None
