"""The `fs` adapter keeps the storage contract and its own promises: names, leftovers, locks, a full disk."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.testing.adapter_contract import LOADED, SIZE, STORED, AdapterContract, Medium
from kvstrata.testing.strategies import ask_for, key_of, load_item, put_item, record_length, settled, watched
from kvstrata.tiers.base import AdapterContext, Outcome, Presence, StorageAdapter
from kvstrata.tiers.lanes import Lane
from kvstrata.tiers.media.fs import FsAdapter

HANG_S = 120.0


class Folder(Medium):
    """The files of an `fs` adapter."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def path(self, key: bytes) -> Path:
        name = key.hex()
        return self.base / name[:2] / name[2:4] / f"{name}.kvc"

    def keys(self) -> set[bytes]:
        return {bytes.fromhex(path.stem) for path in self.base.glob("??/??/*.kvc")}

    def read(self, key: bytes) -> bytes:
        return self.path(key).read_bytes()

    def write(self, key: bytes, stored: bytes) -> None:
        with open(self.path(key), "r+b") as file:
            file.write(stored)
            file.truncate()

    def remove(self, key: bytes) -> None:
        self.path(key).unlink()

    def used_bytes(self) -> int:
        """Return the bytes of records and parts."""
        found = [path for path in self.base.rglob("*") if path.suffix in (".kvc", ".part")]
        return sum(-(-path.stat().st_size // 4096) * 4096 for path in found)


class TestFs(AdapterContract):
    ends_first = True
    waits_in_threads = False  # the connector reads memory and calls no Python object for it
    per_op_workers: Mapping[Lane, int] = MappingProxyType({})

    def make_medium(self, folder: Path) -> Folder:
        return Folder(folder / "a base with spaces")

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Folder)
        return FsAdapter(
            base_path=str(medium.base),
            capacity_bytes=capacity_bytes,
            min_free_bytes=0,
            per_op_workers=dict(self.per_op_workers),
        )


class TestFsShared(TestFs):
    """Uses a directory that other servers may share; every lane has a thread of its own."""

    per_op_workers = MappingProxyType(dict.fromkeys(Lane, 1))

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Folder) and medium.base.name == "server-0"
        return FsAdapter(
            base_path=str(medium.base.parent),
            capacity_bytes=capacity_bytes,
            min_free_bytes=0,
            shared=True,
            per_op_workers=dict(self.per_op_workers),
        )

    def make_medium(self, folder: Path) -> Folder:
        return Folder(folder / "server-0")


@pytest.fixture
async def open_fs(tmp_path: Path):
    """Opens adapters on one directory and closes them at the end."""
    opened: list[FsAdapter] = []

    async def open_one(**settings: object) -> FsAdapter:
        values = {"base_path": str(tmp_path / "kv"), "min_free_bytes": 0, **settings}
        adapter = FsAdapter(**values)
        opened.append(adapter)
        await adapter.open(AdapterContext("test", SystemClock(), 0, 0, lambda key: None))
        return adapter

    yield open_one
    for adapter in opened:
        await adapter.close()


async def test_a_record_is_one_file_with_exactly_its_bytes(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs()
    item = put_item(key_of(1), SIZE)
    record = watched(item).bytes()
    assert await settled(adapter.put, [item]) == [STORED]
    name = key_of(1).hex()
    path = tmp_path / "kv" / name[:2] / name[2:4] / f"{name}.kvc"
    assert path.read_bytes() == record
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


async def test_a_second_server_is_refused_and_told_who_has_the_directory(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs()
    with pytest.raises(StorageError, match=rf"belongs to another running server \(pid {os.getpid()}"):
        await open_fs()
    await adapter.close()
    await open_fs()


async def test_unfinished_files_of_a_dead_server_are_removed_and_foreign_ones_left(open_fs, tmp_path):
    adapter = await open_fs()
    await settled(adapter.put, [put_item(key_of(1), SIZE)])
    await adapter.close()
    base = tmp_path / "kv"
    part = base / "tmp" / f"{key_of(2).hex()}.17.part"
    part.write_bytes(b"half of a rec")
    stump = Folder(base).path(key_of(3))
    stump.parent.mkdir(parents=True)
    stump.write_bytes(b"")
    foreign = [
        base / "README",
        base / "tmp" / "notes.txt",
        stump.parent / "other.kvc",
        stump.parent / "x.tmp",
    ]
    misplaced = stump.parent / f"{key_of(4).hex()}.kvc"
    for path in (*foreign, misplaced):
        path.write_bytes(b"not ours" * 1000)
    adapter = await open_fs()
    assert (await adapter.usage()).records == 1
    found = await ask_for(adapter, [key_of(n) for n in (1, 2, 3, 4)])
    assert [f.presence for f in found] == [Presence.PRESENT, *[Presence.ABSENT] * 3]
    assert not part.exists()
    assert not stump.exists()
    assert all(path.exists() for path in (*foreign, misplaced))


async def test_directories_removed_behind_a_running_server_are_made_again(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs()
    await settled(adapter.put, [put_item(key_of(1), SIZE)])
    for path in (tmp_path / "kv").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert (await settled(adapter.load, [load_item(key_of(1), SIZE)]))[0].outcome is Outcome.ABSENT
    assert await settled(adapter.put, [put_item(key_of(1), SIZE), put_item(key_of(2), SIZE)]) == [STORED] * 2
    assert await settled(adapter.load, [load_item(key_of(1), SIZE)]) == [LOADED]


@pytest.mark.parametrize("use_odirect", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("kind", ["pipe", "link to a device", "folder"])
async def test_nothing_but_a_file_in_place_of_a_record_is_read_or_waited_for(
    open_fs, tmp_path: Path, kind: str, use_odirect: bool
) -> None:
    """A pipe would hold the thread that loads it until somebody writes."""
    adapter = await open_fs(use_odirect=use_odirect)
    await settled(adapter.put, [put_item(key_of(n), SIZE) for n in (1, 2)])
    path = Folder(tmp_path / "kv").path(key_of(1))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    async with asyncio.timeout(HANG_S):
        items = [load_item(key_of(n), SIZE) for n in (1, 2)]
        bad, good = await settled(adapter.load, items)
        assert (bad.outcome, good) == (Outcome.CORRUPT, LOADED)
        if kind != "folder":
            assert not path.is_symlink() and not path.exists(), "it was removed"
            assert await settled(adapter.put, [put_item(key_of(1), SIZE)]) == [STORED]
            assert await settled(adapter.load, [load_item(key_of(1), SIZE)]) == [LOADED]


async def test_a_link_in_place_of_a_folder_of_records_is_not_followed(open_fs, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = Folder(tmp_path / "kv").path(key_of(1)).parent
    folder.parent.mkdir(parents=True)
    folder.symlink_to(outside)
    adapter = await open_fs()
    [outcome] = await settled(adapter.put, [put_item(key_of(1), SIZE)])
    assert outcome.outcome is Outcome.FAILED
    assert list(outside.iterdir()) == []


async def test_a_directory_that_cannot_be_written_is_a_named_error(open_fs, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"base_path: .* cannot be used: .*kv/tmp: Not a directory"):
        await open_fs(base_path=str(tmp_path / "file" / "kv"))


async def test_recency_survives_a_restart(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs()
    await settled(adapter.put, [put_item(key_of(n), SIZE) for n in range(4)])
    await adapter.close()
    folder = Folder(tmp_path / "kv")
    for age, number in enumerate((2, 0, 3, 1)):  # 2 was used last
        os.utime(folder.path(key_of(number)), (2_000_000_000 - 10_000 * age,) * 2)
    one = -(-record_length(SIZE) // 4096) * 4096
    adapter = await open_fs(capacity_bytes=2 * one)
    assert (await adapter.usage()).records == 2
    assert folder.keys() == {key_of(2), key_of(0)}


async def test_a_load_is_remembered_in_the_file_at_most_once_an_hour(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs()
    await settled(adapter.put, [put_item(key_of(1), SIZE)])
    await adapter.close()
    path = Folder(tmp_path / "kv").path(key_of(1))
    os.utime(path, (1_000_000_000, 1_000_000_000))
    adapter = await open_fs()
    await settled(adapter.load, [load_item(key_of(1), SIZE)])
    assert path.stat().st_atime > 1_700_000_000
    assert path.stat().st_mtime == 1_000_000_000


async def test_puts_leave_the_free_space_that_min_free_gb_demands(open_fs) -> None:
    adapter = await open_fs(min_free_bytes=1 << 62)
    item = put_item(key_of(1), SIZE)
    [outcome] = await settled(adapter.put, [item])
    assert (outcome.outcome, outcome.reason) == (Outcome.THROTTLED, "disk_full")
    watched(item).check()


async def test_a_clear_removes_the_records_that_exist_when_it_runs(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs(per_op_workers={Lane.DELETE: 1})
    await settled(adapter.put, [put_item(key_of(n), SIZE) for n in range(4)])
    # Both begin in the same turn of the loop; the one thread of their lane runs the delete first.
    assert await asyncio.gather(adapter.delete(key_of(1)), adapter.clear()) == [1, 3]
    assert Folder(tmp_path / "kv").keys() == set()
