"""The `fs` adapter keeps the storage contract, and the promises of its own: names, leftovers, locks, a full disk."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import StorageError
from kvstrata.storage import fs
from kvstrata.storage.base import AdapterContext, LoadStatus, Presence, PutStatus, StorageAdapter
from kvstrata.storage.fs import FsAdapter, FsSettings
from kvstrata.storage.lanes import Lane
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits
from kvstrata.storage.wrap.metrics import MeteredAdapter
from kvstrata.testing.adapter_contract import LOADED, SIZE, STORED, AdapterContract, Medium
from kvstrata.testing.strategies import key_of, load_item, put_item, record_length, watched


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
        files = [path for path in self.base.rglob("*") if path.is_file() and path.name != ".kvstrata.lock"]
        return sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


class TestFs(AdapterContract):
    use_odirect = False
    per_op_workers: Mapping[Lane, int] = MappingProxyType({})

    def make_medium(self, folder: Path) -> Folder:
        return Folder(folder / "a base with spaces")

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Folder)
        return FsAdapter(
            FsSettings(
                base_path=str(medium.base),
                capacity_bytes=capacity_bytes,
                min_free_bytes=0,
                use_odirect=self.use_odirect,
                per_op_workers=dict(self.per_op_workers),
            )
        )


class TestFsDirect(TestFs):
    """With O_DIRECT, or what it falls back to."""

    use_odirect = True


class TestFsOwnLanes(TestFs):
    """Every lane with a thread of its own."""

    per_op_workers = MappingProxyType(dict.fromkeys(Lane, 1))


class TestFsGuarded(TestFs):
    """Inside the wrappers that the server puts around every adapter."""

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        clock = SystemClock()
        limits = DeadlineLimits(max_stuck_bytes=1 << 30, deadline_ms=600_000)
        guarded = DeadlineAdapter(super().make_adapter(medium, capacity_bytes), limits, clock)
        return MeteredAdapter(guarded, lambda report: None, clock)


@pytest.fixture
async def open_fs(tmp_path: Path):
    """Opens adapters on one directory and closes them at the end."""
    opened: list[FsAdapter] = []

    async def open_one(**settings: object) -> FsAdapter:
        values = {"base_path": str(tmp_path / "kv"), "min_free_bytes": 0, **settings}
        adapter = FsAdapter(FsSettings(**values))
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
    assert await adapter.put([item]) == [STORED]
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


async def test_a_temporary_directory_on_another_file_system_is_refused(
    open_fs, tmp_path: Path, monkeypatch
) -> None:
    real = os.stat

    def elsewhere(path: str, *arguments: object, **keywords: object) -> os.stat_result:
        status = list(real(path, *arguments, **keywords))
        status[2] += str(path).endswith("/tmp")
        return os.stat_result(status)

    monkeypatch.setattr(os, "stat", elsewhere)
    with pytest.raises(StorageError, match=r"relative_tmp_dir: 'tmp' is on another file system"):
        await open_fs()
    monkeypatch.undo()
    await open_fs()


async def test_a_directory_can_be_opened_on_a_full_disk(open_fs, tmp_path: Path, monkeypatch) -> None:
    adapter = await open_fs()
    await adapter.put([put_item(key_of(1), SIZE)])
    await adapter.close()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    adapter = await open_fs()
    assert await adapter.load([load_item(key_of(1), SIZE)]) == [LOADED]


async def test_unfinished_files_of_a_dead_server_are_removed_and_foreign_ones_left(
    open_fs, tmp_path: Path
) -> None:
    adapter = await open_fs()
    await adapter.put([put_item(key_of(1), SIZE)])
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
    found = await adapter.exists([key_of(n) for n in (1, 2, 3, 4)])
    assert [f.presence for f in found] == [Presence.PRESENT, *[Presence.ABSENT] * 3]
    assert not part.exists()
    assert not stump.exists()
    assert all(path.exists() for path in (*foreign, misplaced))


async def test_directories_removed_behind_a_running_server_are_made_again(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs()
    await adapter.put([put_item(key_of(1), SIZE)])
    for path in (tmp_path / "kv").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert (await adapter.load([load_item(key_of(1), SIZE)]))[0].status is LoadStatus.ABSENT
    assert await adapter.put([put_item(key_of(1), SIZE), put_item(key_of(2), SIZE)]) == [STORED] * 2
    assert await adapter.load([load_item(key_of(1), SIZE)]) == [LOADED]


async def test_a_link_in_place_of_a_record_is_not_followed(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs()
    await adapter.put([put_item(key_of(1), SIZE)])
    path = Folder(tmp_path / "kv").path(key_of(1))
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)
    item = load_item(key_of(1), SIZE)
    [outcome] = await adapter.load([item])
    assert outcome.status is not LoadStatus.LOADED
    assert moved.exists()


async def test_a_directory_that_cannot_be_written_is_a_named_error(open_fs, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"base_path: .* cannot be used: Not a directory"):
        await open_fs(base_path=str(tmp_path / "file" / "kv"))


async def test_a_whole_record_of_another_length_is_not_thrown_away(open_fs) -> None:
    adapter = await open_fs()
    await adapter.put([put_item(key_of(1), SIZE)])
    item = load_item(key_of(1), SIZE + 1)
    [outcome] = await adapter.load([item])
    assert (outcome.status, outcome.reason) == (LoadStatus.FAILED, "length")
    watched(item).check()
    assert await adapter.load([load_item(key_of(1), SIZE)]) == [LOADED]


async def test_recency_survives_a_restart(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs()
    await adapter.put([put_item(key_of(n), SIZE) for n in range(4)])
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
    await adapter.put([put_item(key_of(1), SIZE)])
    await adapter.close()
    path = Folder(tmp_path / "kv").path(key_of(1))
    os.utime(path, (1_000_000_000, 1_000_000_000))
    adapter = await open_fs()
    await adapter.load([load_item(key_of(1), SIZE)])
    assert path.stat().st_atime > 1_700_000_000
    assert path.stat().st_mtime == 1_000_000_000


async def test_a_full_disk_evicts_what_can_leave_and_then_throttles(
    open_fs, tmp_path: Path, monkeypatch
) -> None:
    """The write itself says ENOSPC, as a file system with less room than the cap does."""
    room = 4
    folder = Folder(tmp_path / "kv")
    real_write = os.pwritev

    def small_disk(fd: int, buffers: list[memoryview], offset: int) -> int:
        if len(folder.keys()) >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", small_disk)
    adapter = await open_fs()
    for number in range(10):
        item = put_item(key_of(number), SIZE)
        assert await adapter.put([item]) == [STORED]
        watched(item).check()
    assert len(folder.keys()) <= room
    assert key_of(9) in folder.keys()  # noqa: SIM118
    room = 0
    item = put_item(key_of(99), SIZE)
    [outcome] = await adapter.put([item])
    assert (outcome.status, outcome.reason) == (PutStatus.THROTTLED, "disk_full")
    watched(item).check()
    assert list((tmp_path / "kv" / "tmp").iterdir()) == []
    assert (await adapter.usage()).used_bytes == folder.used_bytes()


async def test_free_space_that_must_stay_is_not_taken(open_fs) -> None:
    adapter = await open_fs(min_free_bytes=1 << 62)
    item = put_item(key_of(1), SIZE)
    [outcome] = await adapter.put([item])
    assert (outcome.status, outcome.reason) == (PutStatus.THROTTLED, "disk_full")
    watched(item).check()


@pytest.mark.parametrize("step", ["fdatasync", "rename", "fsync"])
async def test_nothing_is_stored_where_a_sync_or_rename_fails(
    open_fs, tmp_path: Path, monkeypatch, step
) -> None:
    adapter = await open_fs()
    await adapter.put([put_item(key_of(1), SIZE)])

    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, step, broken)
    item = put_item(key_of(2), SIZE)
    [outcome] = await adapter.put([item])
    assert (outcome.status, outcome.reason) == (PutStatus.FAILED, "io")
    watched(item).check()
    monkeypatch.undo()
    folder = Folder(tmp_path / "kv")
    assert folder.keys() == {key_of(1)}
    assert (await adapter.usage()).used_bytes == folder.used_bytes()
    assert await adapter.put([put_item(key_of(2), SIZE)]) == [STORED]


async def test_a_file_system_that_became_read_only_fails_each_item_by_its_reason(
    open_fs, monkeypatch, caplog
) -> None:
    """Neither the rename nor the removal of what was written works, in each of several groups of one batch."""
    one = -(-record_length(SIZE) // 4096) * 4096
    adapter = await open_fs(capacity_bytes=8 * one)

    def read_only(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rename", read_only)
    monkeypatch.setattr(os, "unlink", read_only)
    items = [put_item(key_of(n), SIZE) for n in range(6)]
    outcomes = await adapter.put(items)
    assert [(o.status, o.reason) for o in outcomes] == [(PutStatus.FAILED, "io")] * 6
    for item in items:
        watched(item).check()
    assert (await adapter.usage()).used_bytes == 0
    assert "mistake" not in caplog.text
    monkeypatch.undo()
    assert await adapter.put([put_item(key_of(n), SIZE) for n in range(6)]) == [STORED] * 6


async def test_a_mistake_in_one_group_of_a_batch_leaves_nobody_waiting(open_fs, monkeypatch) -> None:
    one = -(-record_length(SIZE) // 4096) * 4096
    adapter = await open_fs(capacity_bytes=8 * one)

    def mistaken(parts: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(adapter, "_publish", mistaken)
    items = [put_item(key_of(n), SIZE) for n in range(6)]
    with pytest.raises(ZeroDivisionError):
        await adapter.put(items)
    for item in items:
        watched(item).check()
    monkeypatch.undo()
    again = asyncio.wait_for(adapter.put([put_item(key_of(n), SIZE) for n in range(6)]), 60)
    assert await again == [STORED] * 6


async def test_a_clear_takes_what_is_there_when_it_runs(open_fs, tmp_path: Path) -> None:
    adapter = await open_fs()
    await adapter.put([put_item(key_of(n), SIZE) for n in range(4)])
    # Both are begun in the same turn of the loop; the delete is the first to reach the index.
    assert sorted(await asyncio.gather(adapter.delete([key_of(1)]), adapter.clear())) == [1, 3]
    assert Folder(tmp_path / "kv").keys() == set()


async def test_a_record_whose_access_time_cannot_be_set_is_loaded(
    open_fs, tmp_path: Path, monkeypatch
) -> None:
    adapter = await open_fs()
    await adapter.put([put_item(key_of(1), SIZE)])
    await adapter.close()
    os.utime(Folder(tmp_path / "kv").path(key_of(1)), (1_000_000_000, 1_000_000_000))
    adapter = await open_fs()

    def read_only(*arguments: object, **named: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    assert await adapter.load([load_item(key_of(1), SIZE)]) == [LOADED]


async def test_a_record_that_cannot_be_unlinked_stays_counted(open_fs, tmp_path: Path, monkeypatch) -> None:
    one = -(-record_length(SIZE) // 4096) * 4096
    adapter = await open_fs(capacity_bytes=2 * one)
    await adapter.put([put_item(key_of(n), SIZE) for n in (1,)])
    await adapter.put([put_item(key_of(n), SIZE) for n in (2,)])

    def broken(path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "unlink", broken)
    [outcome] = await adapter.put([put_item(key_of(3), SIZE)])
    assert (outcome.status, outcome.reason) == (PutStatus.THROTTLED, "capacity")
    monkeypatch.undo()
    assert (await adapter.usage()).used_bytes == Folder(tmp_path / "kv").used_bytes() == 2 * one
    assert await adapter.put([put_item(key_of(3), SIZE)]) == [STORED]


async def test_a_record_being_loaded_is_not_evicted(open_fs) -> None:
    one = -(-record_length(SIZE) // 4096) * 4096
    adapter = await open_fs(capacity_bytes=2 * one)
    await adapter.put([put_item(key_of(1), SIZE)])
    await adapter.put([put_item(key_of(2), SIZE)])
    gate = threading.Event()
    item = load_item(key_of(1), SIZE, gate=gate)
    wait = asyncio.create_task(adapter.load([item]))
    await watched(item).until_asked()
    assert await adapter.put([put_item(key_of(3), SIZE)]) == [STORED]
    found = await adapter.exists([key_of(n) for n in (1, 2, 3)])
    assert [f.presence for f in found] == [Presence.PRESENT, Presence.ABSENT, Presence.PRESENT]
    gate.set()
    assert await wait == [LOADED]


async def test_a_full_lane_throttles_and_drops_the_hold(open_fs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "QUEUE_LIMIT", 8)
    adapter = await open_fs(num_workers=2)
    gate = threading.Event()
    items = [put_item(key_of(n), 100, gate=gate) for n in range(40)]
    wait = asyncio.create_task(adapter.put(items))
    await watched(items[0]).until_asked()
    gate.set()
    outcomes = await wait
    throttled = [o for o in outcomes if o.status is PutStatus.THROTTLED]
    assert throttled
    assert {o.reason for o in throttled} == {"queue_full"}
    assert all(o.status in (PutStatus.STORED, PutStatus.THROTTLED) for o in outcomes)
    for item in items:
        watched(item).check()


async def test_fsyncs_of_a_batch_are_one_per_directory(open_fs, monkeypatch) -> None:
    adapter = await open_fs()
    items = [put_item(key_of(n), 100) for n in range(20)]
    await adapter.put(items)
    await adapter.delete([key_of(n) for n in range(20)])
    synced: list[str] = []
    real = os.fsync

    def counting(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", counting)
    await adapter.put([put_item(key_of(n), 100) for n in range(20)])
    folders = {os.path.dirname(adapter._path(key_of(n))) for n in range(20)}
    assert sorted(synced) == sorted(folders)
