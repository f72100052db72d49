"""SIGKILL in the middle of puts, loads and deletes: what `disk` acknowledged is there afterwards, or gone for good.

The child is a real process on a real file system, killed from outside while several batches are under way.  (A killed
process loses no page cache; what a power cut loses is in ext/core/tests/disk/disk_power_test.cpp.)
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import StorageError
from kvstrata.storage.base import AdapterContext, LoadStatus, Presence, PutStatus
from kvstrata.storage.media.disk.adapter import disk_adapter
from kvstrata.storage.native_adapter import NativeAdapter
from kvstrata.testing.strategies import key_of, load_item, loaded_payload, payload_of, put_item, record_length
from tests.harness.amount import amount
from tests.harness.signals import send
from tests.oracles import disk_log

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[3]
SIZES = (3_000, 20_000, 70_000)
LARGE_BYTES, SMALL_BYTES = 256 << 20, 4 << 20


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def disk(base: Path, capacity_bytes: int) -> NativeAdapter:
    return disk_adapter(base_path=str(base), capacity_bytes=capacity_bytes, scrub_bytes_per_s=8 << 20)


def context() -> AdapterContext:
    return AdapterContext("crash", SystemClock(), 0, 0, lambda key: None)


# -- the child: python -m tests.integration.storage.test_disk_crash BASE CAP FIRST -------------------------------------


async def work_for_ever(base: str, capacity_bytes: int, first: int) -> None:
    """Put numbered records in overlapping batches, load some, delete one of five; say what was acknowledged.

    `+n` once n is STORED, `?n` before n is deleted, `-n` once it is.
    """
    adapter = disk(Path(base), capacity_bytes)
    await adapter.open(context())
    batches = asyncio.Semaphore(3)
    running: set[asyncio.Task[None]] = set()

    async def batch(numbers: list[int]) -> None:
        outcomes = await adapter.put([put_item(key_of(n), size_of(n)) for n in numbers])
        stored = [n for n, o in zip(numbers, outcomes, strict=True) if o.status is PutStatus.STORED]
        os.write(1, "".join(f"+{n}\n" for n in stored).encode())
        await adapter.load([load_item(key_of(numbers[1]), size_of(numbers[1]))])
        os.write(1, f"?{numbers[2]}\n".encode())
        if await adapter.delete([key_of(numbers[2])]):
            os.write(1, f"-{numbers[2]}\n".encode())
        batches.release()

    for start in itertools.count(first, 5):
        await batches.acquire()
        task = asyncio.create_task(batch(list(range(start, start + 5))))
        running.add(task)
        task.add_done_callback(running.discard)


def start_child(base: Path, capacity_bytes: int, first: int) -> subprocess.Popen[bytes]:
    module = [sys.executable, "-m", "tests.integration.storage.test_disk_crash"]
    command = [*module, str(base), str(capacity_bytes), str(first)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)


# -- the parent ------------------------------------------------------------------------------------------------


class Said:
    """Lines of the children in order, without a last line that was cut short."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.touched: set[int] = set()
        """Numbers whose deletion has begun."""
        self.deleted: set[int] = set()

    def hear(self, output: bytes) -> None:
        for line in output.split(b"\n")[:-1]:
            number = int(line[1:])
            match line[:1]:
                case b"+":
                    self.stored.append(number)
                case b"?":
                    self.touched.add(number)
                case b"-":
                    self.deleted.add(number)


def newest_within(numbers: list[int], limit_bytes: int) -> list[int]:
    """The newest numbers whose frames fit together into `limit_bytes`."""
    newest: list[int] = []
    for number in reversed(numbers):
        limit_bytes -= disk_log.blocks(record_length(size_of(number))) + disk_log.BLOCK
        if limit_bytes < 0:
            break
        newest.append(number)
    return newest


async def examine(base: Path, capacity_bytes: int, said: Said) -> None:
    """Open the directory again and check every record."""
    adapter = disk(base, capacity_bytes)
    await adapter.open(context())
    try:
        numbers = range(10_000)
        found = await adapter.exists([key_of(n) for n in numbers])
        present = {n for n, f in zip(numbers, found, strict=True) if f.presence is Presence.PRESENT}
        assert not present & said.deleted
        # Of a small log some segments are empty, part of the others is what was loaded and written again, and batches
        # are not acknowledged in the order in which they lie in it.
        must = (
            said.stored if capacity_bytes == LARGE_BYTES else newest_within(said.stored, capacity_bytes // 4)
        )
        assert set(must) - said.touched <= present
        assert disk_log.used_bytes(base) <= capacity_bytes
        for number in sorted(present):
            item = load_item(key_of(number), size_of(number))
            [outcome] = await adapter.load([item])
            if capacity_bytes == LARGE_BYTES:
                assert outcome.status is LoadStatus.LOADED
            if outcome.status is LoadStatus.LOADED:
                assert loaded_payload(item, size_of(number)) == payload_of(key_of(number), size_of(number))
            else:  # the log made room meanwhile
                assert outcome.status is LoadStatus.ABSENT
    finally:
        await adapter.close()


@pytest.mark.parametrize("capacity_bytes", [LARGE_BYTES, SMALL_BYTES])
@pytest.mark.parametrize("seed", range(amount(1, 2)))
def test_acknowledged_work_survives_kills_from_outside(
    tmp_path: Path, seed: int, capacity_bytes: int
) -> None:
    draw = random.Random(seed)
    base = tmp_path / "kv"
    said = Said()
    for life in range(3):
        process = start_child(base, capacity_bytes, 2000 * life)
        assert process.stdout is not None
        output = b""
        wanted = draw.randrange(5, 400)
        while output.count(b"\n") < wanted:
            output += os.read(process.stdout.fileno(), 4096)
        process.kill()
        output += process.stdout.read()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        said.hear(output)
        asyncio.run(examine(base, capacity_bytes, said))


@pytest.mark.long
def test_a_stopped_server_keeps_its_directory_and_goes_on_where_it_was(tmp_path: Path) -> None:
    base = tmp_path / "kv"
    said = Said()
    process = start_child(base, LARGE_BYTES, 0)
    assert process.stdout is not None
    output = b""
    try:
        while output.count(b"\n") < 20:
            output += os.read(process.stdout.fileno(), 4096)
        send(process.pid, signal.SIGSTOP)
        with pytest.raises(StorageError, match=rf"belongs to another running server \(pid {process.pid}"):
            asyncio.run(examine(base, LARGE_BYTES, said))
        process.send_signal(signal.SIGCONT)
        while output.count(b"\n") < 200:
            output += os.read(process.stdout.fileno(), 4096)
    finally:
        process.kill()
        output += process.stdout.read()
        process.stdout.close()
        process.wait()
    said.hear(output)
    asyncio.run(examine(base, LARGE_BYTES, said))


if __name__ == "__main__":
    base_path, cap, first_number = sys.argv[1:]
    asyncio.run(work_for_ever(base_path, int(cap), int(first_number)))
