"""A segment is adopted or replaced, never changed under processes that map it; one server has it at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError, SegmentError
from kvstrata.memory import linux, segment, segment_files, segment_settings
from kvstrata.memory.paths import LESSONS
from kvstrata.memory.segment import Segment, SegmentSettings
from kvstrata.memory.segment_settings import MemoryLimit, nodes_of
from tests.harness.open_files import open_files
from tests.harness.validation import validate

MIB = 1 << 20


def reopen(settings: SegmentSettings, **change: object) -> Segment:
    return Segment.open(
        SegmentSettings(**{**{f: getattr(settings, f) for f in settings.__struct_fields__}, **change})
    )


@pytest.fixture
def host_of(settings: SegmentSettings) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes that hold an adapter host's lock on the segment until their stdin is closed."""
    started: list[subprocess.Popen[bytes]] = []
    program = (
        "import os, sys; from kvstrata.memory import linux; from kvstrata.memory.segment_files import HOSTS_BYTE; "
        "assert linux.share_byte(os.open(sys.argv[1], os.O_RDWR), HOSTS_BYTE); print(flush=True); sys.stdin.read()"
    )

    def starter() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program, str(settings.directory / "sessions.lock")]
        host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(host)
        assert host.stdout is not None
        assert host.stdout.readline()
        return host

    yield starter
    for host in started:
        host.communicate()


def test_a_segment_that_an_adapter_host_still_maps_is_not_adopted(settings, host_of, monkeypatch):
    monkeypatch.setattr(segment, "_HOSTS_END_S", 0.0)
    Segment.open(settings).close()
    host, other, before = host_of(), host_of(), inodes(settings)
    found = Segment.open(settings)
    assert not found.adopted
    assert "an adapter host of the previous server, process" in found.reason
    assert str(host.pid) in found.reason or str(other.pid) in found.reason
    assert not set(before.values()) & set(inodes(settings).values())
    found.close()


def test_a_segment_is_adopted_once_the_adapter_host_that_maps_it_has_ended(settings, host_of, monkeypatch):
    monkeypatch.setattr(segment, "_HOSTS_END_S", 60.0)
    Segment.open(settings).close()
    host = host_of()
    looked = threading.Event()
    real = linux.byte_locker

    def look(fd: int, byte: int) -> int | None:
        found = real(fd, byte)
        looked.set()
        return found

    monkeypatch.setattr(linux, "byte_locker", look)

    def end() -> None:
        looked.wait()
        host.kill()

    ender = threading.Thread(target=end)
    ender.start()
    found = Segment.open(settings)
    ender.join()
    assert found.adopted
    found.close()


def inodes(settings: SegmentSettings) -> dict[str, int]:
    return {name: (settings.directory / name).stat().st_ino for name in ("index", "extents", "sessions.lock")}


def damage_magic(directory: Path) -> None:
    with open(directory / "index", "r+b") as index:
        index.write(b"XXXXXXXX")


def damage_version(directory: Path) -> None:
    with open(directory / "index", "r+b") as index:
        index.seek(8)
        index.write(b"\xff\xff")


@pytest.mark.parametrize(
    "damage",
    [
        damage_magic,
        damage_version,
        lambda directory: os.truncate(directory / "index", 4096),
        lambda directory: os.truncate(directory / "extents", MIB),
        lambda directory: (directory / "extents").unlink(),
        lambda directory: (directory / "index").unlink(),
    ],
    ids=["magic", "version", "cut", "short-extents", "no-extents", "no-index"],
)
def test_a_segment_that_does_not_fit_is_replaced_as_a_whole_and_the_reason_told(settings, damage, caplog):
    Segment.open(settings).close()
    keep_inodes = [
        os.open(path, os.O_RDONLY) for path in settings.directory.iterdir()
    ]  # no epoch is used twice
    before = inodes(settings)
    assert callable(damage)
    damage(settings.directory)
    with caplog.at_level("INFO"):
        found = Segment.open(settings)
    assert not found.adopted
    assert not set(inodes(settings).values()) & set(before.values())
    assert found.reason in caplog.text
    validate(found.pool)
    found.close()
    linux.close_all(keep_inodes)
    assert not [path for path in open_files() if path.startswith(str(settings.directory))]


@pytest.mark.parametrize("size", [4 << 20, 8 << 20])
def test_an_adopted_or_new_segment_has_what_the_policy_of_the_last_one_learnt(settings, size):
    before = Segment.open(settings)
    for _ in range(512):
        before.pool.lease(bytes(32), 1, [0])
    assert before.pool.learn() and not before.pool.learn()
    lessons = before.pool.lessons()
    (settings.socket_dir / LESSONS).write_bytes(lessons)
    before.close()
    after = reopen(settings, extents_bytes=size)
    assert after.adopted == (size == settings.extents_bytes)
    assert len(after.pool.lessons()) == len(lessons) > 100
    after.close()


def test_another_size_makes_a_new_segment_and_leaves_the_old_bytes_to_processes_that_map_them(settings):
    Segment.open(settings).close()
    with open(settings.directory / "extents", "r+b") as old:
        old.write(b"old bytes")
        old.flush()
        found = reopen(settings, extents_bytes=8 * MIB)
        assert not found.adopted
        assert hex(4 * MIB) in found.reason and hex(8 * MIB) in found.reason
        assert found.pool.extents_bytes == 8 * MIB
        assert os.fstat(old.fileno()).st_size == 4 * MIB
        assert os.pread(old.fileno(), 9, 0) == b"old bytes"
        found.close()


def test_a_segment_being_made_is_never_seen_unlocked(settings: SegmentSettings) -> None:
    settings.directory.mkdir(0o700)
    index = segment_files.make_locked_index(settings.directory / "index")
    assert index is not None
    with pytest.raises(SegmentError, match=r"in use by server process \(unknown\)"):
        Segment.open(settings)
    assert segment_files.make_locked_index(settings.directory / "index") is None
    os.close(index)
    Segment.open(settings).close()  # the other server died before it made a pool


def test_an_index_replaced_between_open_and_lock_is_not_taken_for_the_one_at_its_path(settings, monkeypatch):
    Segment.open(settings).close()
    index = settings.directory / "index"
    lock = linux.lock_whole_file

    def replace_then_lock(fd: int) -> bool:
        if index.exists() and index.stat().st_ino == os.fstat(fd).st_ino:
            monkeypatch.undo()
            index.rename(settings.directory / "away")
        return lock(fd)

    monkeypatch.setattr(linux, "lock_whole_file", replace_then_lock)
    found = Segment.open(settings)
    assert index.stat().st_ino == os.fstat(found.descriptors.index_readonly).st_ino
    found.close()


@pytest.mark.parametrize("size", [0, -4096, 4096, MIB + 1])
def test_a_size_no_pool_has_is_refused(settings: SegmentSettings, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"^l1_size_gb: L1 of {size} bytes") as caught:
        reopen(settings, extents_bytes=size)
    assert caught.value.field == "l1_size_gb"
    assert not settings.directory.exists()


def test_a_pool_larger_than_the_cgroups_limit_is_refused_with_its_name(settings, monkeypatch):
    monkeypatch.setattr(
        segment_settings, "memory_limit", lambda: MemoryLimit(4 * MIB, "the memory limit of cgroup /x")
    )
    with pytest.raises(ConfigError, match=r"the memory limit of cgroup /x is 4194304 bytes"):
        Segment.open(settings)


def test_estimate_of_the_index_is_not_too_small(settings: SegmentSettings) -> None:
    for capacity in (1, 1000, 65_536, 100_000):
        found = reopen(settings, entry_capacity=capacity, extents_bytes=2 * MIB)
        index_bytes = (settings.directory / "index").stat().st_size
        wanted = SegmentSettings(
            socket_dir=settings.socket_dir,
            directory=settings.directory,
            extents_bytes=2 * MIB,
            entry_capacity=capacity,
        )
        assert index_bytes <= wanted.needed_bytes() - 2 * MIB <= 2 * index_bytes
        found.destroy()


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for name in ("node0", "node1", "node10", "possible"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_each_setting_means_nodes_of_this_machine(nodes: Path) -> None:
    assert nodes_of("interleave", nodes) == [0, 1, 10]
    assert nodes_of("10", nodes) == [10]
