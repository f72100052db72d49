"""Raw I/O on the medium of an adapter, for comparison.

Each record is a file, opened with O_DIRECT, written by one `pwritev` and synced by `fdatasync`, or read by one
`preadv`.  Raw I/O has as many threads as the adapter, and its caller waits for each batch as the adapter's caller does.
It does not make the files' names durable, and has neither checksums nor an index.  Python adds about 20 µs per file to
the system calls.
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
    """Files named by numbers, in an existing folder; the caller owns the folder and the files, and calls `close`."""

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

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove these files. Raises OSError."""
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
    """The numbers from 0 to count - 1, in runs of `batch`; the last run may be shorter."""
    return [range(at, min(at + batch, count)) for at in range(0, count, batch)]


def check_direct(folder: Path) -> None:
    """Raise StorageError if files cannot be made in this folder, or cannot be opened with O_DIRECT."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="kvstrata-bench-") as file:
            os.close(os.open(file.name, os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        raise StorageError(f"{folder}: raw I/O with O_DIRECT is not possible there ({error})") from None
