"""The `disk` adapter keeps the storage contract and its own promises: locks, versions, garbage, a full disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvstrata.clock import SystemClock
from kvstrata.errors import ConfigError, StorageError
from kvstrata.testing.adapter_contract import AdapterContract, Medium
from kvstrata.testing.strategies import key_of, load_item, put_item, record_length, settled
from kvstrata.tiers.base import AdapterContext, Outcome, StorageAdapter
from kvstrata.tiers.media.disk import disk_adapter
from tests.oracles import disk_log
from tests.oracles.crc32c import crc32c_fast as crc32c


class Segments(Medium):
    """The segments of a log, read by the oracle. A record is damaged in place, since its place has a fixed length."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def keys(self) -> set[bytes]:
        return set(disk_log.live(self.base))

    def read(self, key: bytes) -> bytes:
        frame = disk_log.live(self.base)[key]
        with open(frame.path, "rb") as file:
            return os.pread(file.fileno(), frame.record_bytes, frame.offset + disk_log.BLOCK)

    def write(self, key: bytes, stored: bytes) -> None:
        frame = disk_log.live(self.base)[key]
        room_bytes = disk_log.blocks(frame.record_bytes)
        with open(frame.path, "r+b") as file:
            os.pwrite(
                file.fileno(), stored[:room_bytes].ljust(room_bytes, b"\0"), frame.offset + disk_log.BLOCK
            )

    def remove(self, key: bytes) -> None:
        frame = disk_log.live(self.base)[key]
        with open(frame.path, "r+b") as file:
            os.pwrite(file.fileno(), bytes(disk_log.BLOCK), frame.offset)

    def used_bytes(self) -> int:
        return disk_log.used_bytes(self.base)


class TestDisk(AdapterContract):
    waits_in_threads = False
    cap_scale = 20
    damages = AdapterContract.damages[:-1]  # the rest of a record's last block is no part of the record

    def make_medium(self, folder: Path) -> Segments:
        return Segments(folder / "a log with spaces")

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, Segments)
        return disk_adapter(base_path=str(medium.base), capacity_bytes=capacity_bytes or 64 << 20)


async def opening_fails(base: Path, kind: type[Exception] = StorageError) -> str:
    """Open a log that cannot be opened; return the error's message. ConfigError stops the start of a server."""
    adapter = disk_adapter(base_path=str(base), capacity_bytes=64 << 20, name="disk-7")
    with pytest.raises(kind) as raised:
        await adapter.open(AdapterContext("second", SystemClock(), 0, 0, lambda key: None))
    await adapter.close()
    return raised.value.message


@pytest.mark.asyncio
class TestOpening:
    async def test_a_file_in_the_way_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        message = await opening_fails(tmp_path / "file" / "log", ConfigError)
        assert "disk-7: base_path" in message and "Not a directory" in message

    async def test_a_log_in_use_names_its_owner(self, tmp_path: Path) -> None:
        first = disk_adapter(base_path=str(tmp_path), capacity_bytes=64 << 20)
        await first.open(AdapterContext("first", SystemClock(), 0, 0, lambda key: None))
        try:
            message = await opening_fails(tmp_path)
        finally:
            await first.close()
        assert f"belongs to another running server (pid {os.getpid()}, instance first)" in message

    async def test_a_link_to_a_folder_may_be_the_base_path(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        adapter = disk_adapter(base_path=str(tmp_path / "link" / "log"), capacity_bytes=64 << 20)
        await adapter.open(AdapterContext("one", SystemClock(), 0, 0, lambda key: None))
        [outcome] = await settled(adapter.put, [put_item(key_of(1), 100)])
        assert outcome.outcome is Outcome.STORED
        await adapter.close()
        assert Segments(tmp_path / "real" / "log").used_bytes() > 0

    async def test_a_newer_log_is_refused_and_not_touched(self, tmp_path: Path) -> None:
        header = b"KVSEGMNT" + (9).to_bytes(2, "little").ljust(36, b"\0")
        header += crc32c(header).to_bytes(4, "little")
        (tmp_path / "00000000.seg").write_bytes(header.ljust(1 << 20, b"\0"))
        message = await opening_fails(tmp_path, ConfigError)
        assert "written by another version of kvstrata" in message
        assert (tmp_path / "00000000.seg").read_bytes() == header.ljust(1 << 20, b"\0")

    async def test_without_free_space_puts_are_throttled_and_nothing_is_lost(self, tmp_path: Path) -> None:
        free_bytes = shutil.disk_usage(tmp_path).free
        adapter = disk_adapter(
            base_path=str(tmp_path), capacity_bytes=64 << 20, min_free_bytes=2 * free_bytes
        )
        await adapter.open(AdapterContext("one", SystemClock(), 0, 0, lambda key: None))
        [outcome] = await settled(adapter.put, [put_item(key_of(1), 100)])
        assert outcome == (Outcome.THROTTLED, "disk_full")
        [loaded] = await settled(adapter.load, [load_item(key_of(1), 100)])
        assert loaded.outcome is Outcome.ABSENT
        await adapter.close()
        assert Segments(tmp_path).used_bytes() == 0


@pytest.mark.asyncio
async def test_numbers_count_the_bytes_put_and_the_bytes_written_for_them(tmp_path: Path) -> None:
    adapter = disk_adapter(base_path=str(tmp_path), capacity_bytes=64 << 20)
    await adapter.open(AdapterContext("one", SystemClock(), 0, 0, lambda key: None))
    await settled(adapter.put, [put_item(key_of(n), 50_000) for n in range(10)])
    await adapter.delete(key_of(3))
    numbers = adapter.numbers()
    await adapter.close()
    assert numbers["deleted_records"] == 1 and numbers["read_only"] == 0
    assert numbers["put_bytes"] == 10 * record_length(50_000)
    assert numbers["put_bytes"] < numbers["written_bytes"] < 1.2 * numbers["put_bytes"]
