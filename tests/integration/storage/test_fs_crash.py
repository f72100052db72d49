"""SIGKILL in the middle of puts: what `fs` acknowledged is there afterwards, whole, and the cap holds.

The child is a real process with a real directory, killed from outside while several batches are under way; deaths
at each system call are in ext/core/tests/fs/fs_crash_test.cpp. (A killed process loses no page cache; what a power
cut loses is another test's matter.)
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
from kvstrata.storage.media.fs.adapter import FsAdapter
from kvstrata.testing.strategies import (
    key_of,
    load_item,
    loaded_payload,
    payload_of,
    put_item,
    record_length,
    watched,
)
from tests.harness.amount import amount
from tests.harness.signals import send

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[3]
SIZES = (3_000, 20_000, 70_000)
CAP_BYTES = 1 << 20


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def fs(base: Path, capacity_bytes: int) -> FsAdapter:
    return FsAdapter(base_path=str(base), capacity_bytes=capacity_bytes, min_free_bytes=0)


def context() -> AdapterContext:
    return AdapterContext("crash", SystemClock(), 0, 0, lambda key: None)


# -- the child: python -m tests.integration.storage.test_fs_crash BASE CAP FIRST ---------------------------------------


async def put_for_ever(base: str, capacity_bytes: int, first: int) -> None:
    """Put numbered records in overlapping batches; write each number to stdout once it is acknowledged."""
    adapter = fs(Path(base), capacity_bytes)
    await adapter.open(context())
    batches = asyncio.Semaphore(3)
    running: set[asyncio.Task[None]] = set()

    async def put(numbers: list[int]) -> None:
        outcomes = await adapter.put([put_item(key_of(n), size_of(n)) for n in numbers])
        stored = [n for n, o in zip(numbers, outcomes, strict=True) if o.status is PutStatus.STORED]
        os.write(1, "".join(f"{n}\n" for n in stored).encode())
        batches.release()

    for start in itertools.count(first, 5):
        await batches.acquire()
        task = asyncio.create_task(put(list(range(start, start + 5))))
        running.add(task)
        task.add_done_callback(running.discard)


def child(base: Path, capacity_bytes: int, first: int) -> list[str]:
    """The command line of a child."""
    module = [sys.executable, "-m", "tests.integration.storage.test_fs_crash"]
    return [*module, str(base), str(capacity_bytes), str(first)]


# -- the parent ------------------------------------------------------------------------------------------------


def parse(output: bytes) -> list[int]:
    """Acknowledged numbers, without a last line that was cut short."""
    return [int(line) for line in output.split(b"\n")[:-1]]


def newest_within(acknowledged: list[int], limit_bytes: int) -> list[int]:
    """The newest acknowledged numbers whose records fit together into `limit_bytes`."""
    newest: list[int] = []
    for number in reversed(acknowledged):
        limit_bytes -= record_length(size_of(number)) + 4096
        if limit_bytes < 0:
            break
        newest.append(number)
    return newest


def unfinished(base: Path) -> list[Path]:
    return list((base / "tmp").iterdir())


def named_keys(base: Path) -> list[bytes]:
    return [bytes.fromhex(path.stem) for path in base.glob("??/??/*.kvc")]


def used_bytes(base: Path) -> int:
    files = [path for path in base.rglob("*") if path.is_file() and path.name != ".kvstrata.lock"]
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


async def examine(base: Path, capacity_bytes: int, acknowledged: list[int], latest: list[int]) -> None:
    """Open the directory again and check every record. `latest`: the numbers that the last child acknowledged."""
    adapter = fs(base, capacity_bytes)
    await adapter.open(context())
    try:
        found = await adapter.exists([key_of(n) for n in acknowledged])
        missing = [n for n, f in zip(acknowledged, found, strict=True) if f.presence is not Presence.PRESENT]
        assert unfinished(base) == []
        if capacity_bytes == 0:
            assert missing == []
        else:
            assert (await adapter.usage()).used_bytes <= capacity_bytes
            # Up to three batches beyond what was said may have taken their room already, and are said in any order.
            assert not set(missing) & set(newest_within(latest, capacity_bytes // 4))
        # Everything with a name is whole, acknowledged or not.
        by_key = {key_of(n): n for n in range(5_000)}
        for key in named_keys(base):
            item = load_item(key, size_of(by_key[key]))
            [outcome] = await adapter.load([item])
            assert outcome.status is LoadStatus.LOADED
            assert loaded_payload(item, size_of(by_key[key])) == payload_of(key, size_of(by_key[key]))
            watched(item).check()
        assert used_bytes(base) == (await adapter.usage()).used_bytes
        # Another put of what is missing succeeds: nothing is left in the way.
        for number in missing[-3:]:
            [put] = await adapter.put([put_item(key_of(number), size_of(number))])
            assert put.status is PutStatus.STORED
    finally:
        await adapter.close()


@pytest.mark.parametrize("seed", range(amount(1, 3)))
def test_acknowledged_records_survive_kills_from_outside(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    base = tmp_path / "kv"
    capacity_bytes = draw.choice([0, CAP_BYTES])
    acknowledged: list[int] = []
    for life in range(3):
        process = subprocess.Popen(
            child(base, capacity_bytes, 1000 * life), cwd=REPOSITORY, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        said = b""
        wanted = draw.randrange(5, 200)
        while said.count(b"\n") < wanted:
            said += os.read(process.stdout.fileno(), 4096)
        process.kill()
        said += process.stdout.read()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        latest = parse(said)
        acknowledged += latest
        asyncio.run(examine(base, capacity_bytes, acknowledged, latest))


@pytest.mark.long
def test_a_stopped_server_keeps_its_directory_and_goes_on_where_it_was(tmp_path: Path) -> None:
    base = tmp_path / "kv"
    process = subprocess.Popen(child(base, 0, 0), cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = b""
    try:
        while said.count(b"\n") < 20:
            said += os.read(process.stdout.fileno(), 4096)
        send(process.pid, signal.SIGSTOP)
        with pytest.raises(StorageError, match=rf"belongs to another running server \(pid {process.pid}"):
            asyncio.run(examine(base, 0, [], []))
        process.send_signal(signal.SIGCONT)
        while said.count(b"\n") < 200:
            said += os.read(process.stdout.fileno(), 4096)
    finally:
        process.kill()
        said += process.stdout.read()
        process.stdout.close()
        process.wait()
    acknowledged = parse(said)
    asyncio.run(examine(base, 0, acknowledged, acknowledged))


if __name__ == "__main__":
    base_path, cap, first_number = sys.argv[1:]
    asyncio.run(put_for_ever(base_path, int(cap), int(first_number)))
