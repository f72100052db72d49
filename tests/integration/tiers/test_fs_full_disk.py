"""`fs` on a full disk: a real file system of 16 MiB, or of 300 inodes, mounted in a namespace of the child's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.clock import SystemClock
from kvstrata.testing.strategies import ask_for, key_of, load_item, put_item, settled, watched
from kvstrata.tiers.base import AdapterContext, Outcome, Presence
from kvstrata.tiers.media.fs import FsAdapter
from tests.harness.namespaces import CONTAINER, hidden_shm, why_not

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[3]
SIZE = 300_000
BASE = "/dev/shm/kv"
COUNT = 100


async def open_fs(min_free_bytes: int) -> FsAdapter:
    adapter = FsAdapter(base_path=BASE, min_free_bytes=min_free_bytes)
    await adapter.open(AdapterContext("full", SystemClock(), 0, 0, lambda key: None))
    return adapter


async def put(adapter: FsAdapter, number: int, size: int = SIZE, folder: bytes = b"") -> tuple[Outcome, str]:
    item = put_item(folder + key_of(number)[len(folder) :], size)
    [outcome] = await settled(adapter.put, [item])
    watched(item).check()
    return outcome


def used_bytes() -> int:
    files = [path for path in Path(BASE).rglob("*") if path.is_file() and not path.name.startswith(".")]
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


def take_the_rest() -> None:
    with open("/dev/shm/other", "wb", buffering=0) as other, contextlib.suppress(OSError):
        while other.write(bytes(4096)) == 4096:
            pass


async def examine() -> None:
    """In the child, where nothing but 16 MiB of tmpfs is at /dev/shm."""
    adapter = await open_fs(0)
    for number in range(COUNT):  # about twice what fits: the oldest leave
        assert await put(adapter, number) == (Outcome.STORED, "")
    usage = await adapter.usage()
    assert 30 < usage.records < COUNT
    assert usage.used_bytes == used_bytes()
    found = await ask_for(adapter, [key_of(n) for n in range(COUNT)])
    there = [n for n, f in enumerate(found) if f.presence is Presence.PRESENT]
    assert there == list(range(COUNT - usage.records, COUNT))
    await adapter.close()

    # Somebody else takes the rest: what is there is served, what is put waits for better times.
    take_the_rest()
    assert os.statvfs(BASE).f_bavail == 0
    adapter = await open_fs(0)
    item = load_item(key_of(there[-1]), SIZE)
    assert [o.outcome for o in await settled(adapter.load, [item])] == [Outcome.LOADED]
    assert await put(adapter, 1000) == (Outcome.STORED, "")  # in the place of the oldest
    await adapter.close()
    adapter = await open_fs(1 << 30)
    assert await put(adapter, 1001) == (Outcome.THROTTLED, "disk_full")
    await adapter.clear()
    assert await put(adapter, 1001) == (Outcome.THROTTLED, "disk_full")
    assert (await adapter.usage()).used_bytes == used_bytes() == 0
    await adapter.close()


async def examine_names() -> None:
    """In the child, where the file system has 300 inodes: each record takes one, and the directories stay."""
    adapter = await open_fs(0)
    for turn in range(2):
        for number in range(400):
            stored = await put(adapter, number, 1000, bytes([number % 16, number % 3]))
            assert stored == (Outcome.STORED, ""), number
        assert (await adapter.usage()).records > 50
        if turn == 0:
            await adapter.clear()
    await adapter.close()


@pytest.mark.parametrize(
    ("function", "size"), [(examine, "16m"), (examine_names, "16m,nr_inodes=300")], ids=["bytes", "inodes"]
)
def test_a_full_disk_evicts_then_throttles_and_can_be_opened(function, size):
    if reason := why_not():
        pytest.skip(reason)
    command = [
        *CONTAINER,
        *hidden_shm(size),
        sys.executable,
        "-m",
        "tests.integration.tiers.test_fs_full_disk",
        function.__name__,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]]())
