"""SIGKILL in the middle of puts, loads and deletes: what `disk` and `fs` acknowledged is there afterwards, or gone.

The child is a real process on a real file system, killed from outside while several batches are under way; deaths and
power cuts at each system call are in ext/core/tests/{disk,fs}/*_power_test.cpp.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.clock import SystemClock
from kvstrata.testing.strategies import (
    ask_for,
    key_of,
    load_item,
    loaded_payload,
    payload_of,
    put_item,
    record_length,
    settled,
    watched,
)
from kvstrata.tiers.base import AdapterContext, Outcome, Presence
from kvstrata.tiers.media.disk import disk_adapter
from kvstrata.tiers.media.fs import FsAdapter
from kvstrata.tiers.native_adapter import NativeAdapter
from tests.harness.amount import amount
from tests.oracles import disk_log

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[3]
SIZES = (3_000, 20_000, 70_000)
MIB = 1 << 20
NUMBERS = 2000
"""Records of a child at most, however late it is killed."""


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def context() -> AdapterContext:
    return AdapterContext("crash", SystemClock(), 0, 0, lambda key: None)


class Disk:
    """A log. `room` is its capacity; in the large one every record stays."""

    def __init__(self, base: Path, room: str) -> None:
        self.base, self.all_stay = base, room == "large"
        self.capacity_bytes = 256 * MIB if self.all_stay else 4 * MIB

    def adapter(self) -> NativeAdapter:
        return disk_adapter(base_path=str(self.base), capacity_bytes=self.capacity_bytes)

    async def check(self, adapter: NativeAdapter) -> None:
        assert disk_log.used_bytes(self.base) <= self.capacity_bytes


class Fs:
    """A folder of files, without a cap or with a small one."""

    def __init__(self, base: Path, room: str) -> None:
        self.base, self.all_stay = base, room == "large"
        self.capacity_bytes = 0 if self.all_stay else MIB

    def adapter(self) -> FsAdapter:
        return FsAdapter(base_path=str(self.base), capacity_bytes=self.capacity_bytes, min_free_bytes=0)

    async def check(self, adapter: NativeAdapter) -> None:
        """No unfinished file is left, and the folder holds as much as the adapter says, within its cap."""
        assert list((self.base / "tmp").iterdir()) == []
        files = [path for path in self.base.rglob("*") if path.is_file() and path.name != ".kvstrata.lock"]
        used = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
        assert used == (await adapter.usage()).used_bytes
        assert self.all_stay or used <= self.capacity_bytes


MEDIA: dict[str, type[Disk] | type[Fs]] = {"disk": Disk, "fs": Fs}


async def work_for_ever(medium: Disk | Fs, first: int) -> None:
    """Put numbered records in overlapping batches, load some, delete one of five; say what was acknowledged.

    `+n` once n is STORED, `?n` before n is deleted, `-n` once it is.
    """
    adapter = medium.adapter()
    await adapter.open(context())
    batches = asyncio.Semaphore(3)
    running: set[asyncio.Task[None]] = set()

    async def batch(numbers: list[int]) -> None:
        outcomes = await settled(adapter.put, [put_item(key_of(n), size_of(n)) for n in numbers])
        stored = [n for n, o in zip(numbers, outcomes, strict=True) if o.outcome is Outcome.STORED]
        os.write(1, "".join(f"+{n}\n" for n in stored).encode())
        await settled(adapter.load, [load_item(key_of(numbers[1]), size_of(numbers[1]))])
        os.write(1, f"?{numbers[2]}\n".encode())
        if await adapter.delete(key_of(numbers[2])):
            os.write(1, f"-{numbers[2]}\n".encode())
        batches.release()

    for start in range(first, first + NUMBERS, 5):
        await batches.acquire()
        task = asyncio.create_task(batch(list(range(start, start + 5))))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.Event().wait()


class Child:
    """A process that works on the medium until it is killed."""

    def __init__(self, name: str, base: Path, room: str, first: int) -> None:
        module = [sys.executable, "-m", "tests.integration.tiers.test_crash"]
        self.process = subprocess.Popen(
            [*module, name, str(base), room, str(first)], cwd=REPOSITORY, stdout=subprocess.PIPE
        )
        self.output = b""

    def until_said(self, lines: int) -> None:
        assert self.process.stdout is not None
        while self.output.count(b"\n") < lines:
            part = os.read(self.process.stdout.fileno(), 4096)
            assert part, "the child ended by itself"
            self.output += part

    def kill(self) -> bytes:
        """Kill the child; return everything that it said."""
        assert self.process.stdout is not None
        self.process.kill()
        self.output += self.process.stdout.read()
        self.process.stdout.close()
        assert self.process.wait() == -signal.SIGKILL
        return self.output


class Said:
    """Lines of the children in order, without a last line that was cut short."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.latest: list[int] = []
        """What the last child stored."""
        self.touched: set[int] = set()
        """Numbers whose deletion has begun."""
        self.deleted: set[int] = set()

    def hear(self, output: bytes) -> None:
        lines = [(line[:1], int(line[1:])) for line in output.split(b"\n")[:-1]]
        self.latest = [number for what, number in lines if what == b"+"]
        self.stored += self.latest
        self.touched |= {number for what, number in lines if what == b"?"}
        self.deleted |= {number for what, number in lines if what == b"-"}


def newest_within(numbers: list[int], limit_bytes: int) -> list[int]:
    """The newest numbers whose records and their frames fit together into `limit_bytes`."""
    newest: list[int] = []
    for number in reversed(numbers):
        limit_bytes -= disk_log.blocks(record_length(size_of(number))) + disk_log.BLOCK
        if limit_bytes < 0:
            break
        newest.append(number)
    return newest


async def examine(medium: Disk | Fs, said: Said) -> None:
    """Open the medium again and check every record."""
    adapter = medium.adapter()
    await adapter.open(context())
    try:
        numbers = range(3 * NUMBERS)
        found = await ask_for(adapter, [key_of(n) for n in numbers])
        present = {n for n, f in zip(numbers, found, strict=True) if f.presence is Presence.PRESENT}
        assert not present & said.deleted
        # In a small one up to three batches beyond what was said may have taken room already, records that were loaded
        # are written again, and batches are not acknowledged in the order in which they lie on the medium.
        must = said.stored if medium.all_stay else newest_within(said.latest, medium.capacity_bytes // 4)
        assert set(must) - said.touched <= present
        await medium.check(adapter)
        for number in sorted(present):  # acknowledged or not, what is there is whole
            item = load_item(key_of(number), size_of(number))
            [outcome] = await settled(adapter.load, [item])
            watched(item).check()
            if outcome.outcome is Outcome.LOADED:
                assert loaded_payload(item, size_of(number)) == payload_of(key_of(number), size_of(number))
            else:  # a small log made room meanwhile
                assert outcome.outcome is Outcome.ABSENT and not medium.all_stay
        # Another put of what is missing succeeds: nothing is left in the way.
        for number in sorted(set(said.stored) - present)[-3:]:
            [put] = await settled(adapter.put, [put_item(key_of(number), size_of(number))])
            assert put.outcome is Outcome.STORED
            said.touched.discard(number)
            said.deleted.discard(number)
    finally:
        await adapter.close()


@pytest.mark.parametrize("seed", range(amount(1, 3)))
@pytest.mark.parametrize("room", ["large", "small"])
@pytest.mark.parametrize("name", MEDIA)
def test_acknowledged_work_survives_kills_from_outside(tmp_path, name, room, seed):
    draw = random.Random(seed)
    base = tmp_path / "kv"
    said = Said()
    for life in range(3):
        child = Child(name, base, room, NUMBERS * life)
        child.until_said(draw.randrange(5, 400))
        said.hear(child.kill())
        asyncio.run(examine(MEDIA[name](base, room), said))


if __name__ == "__main__":
    name, base_path, room, first_number = sys.argv[1:]
    asyncio.run(work_for_ever(MEDIA[name](Path(base_path), room), int(first_number)))
