"""`kvstrata ctl pool`: which pools it finds, whom it names as owners, and that it frees no pool that is owned."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError, SegmentError
from kvstrata.memory import linux
from kvstrata.memory.pools import FoundPool, find_pools, free
from kvstrata.memory.segment import Segment, SegmentSettings
from tests.harness.amount import amount


@pytest.fixture
def left(settings: SegmentSettings) -> Path:
    """The folder of a pool whose server has ended."""
    Segment.open(settings).close()
    return settings.directory


def found_below(root: Path) -> list[FoundPool]:
    return find_pools([root])


def test_pools_are_found_with_their_size_and_age(root: Path, left: Path) -> None:
    (root / "other").mkdir()
    (root / "other" / "index").write_text("of a book")
    (root / "link").symlink_to(left)
    [pool] = found_below(root)
    assert pool.place == left
    assert pool.memory_bytes >= (pool.place / "index").stat().st_blocks * 512 > 0
    assert 0 <= pool.age_s < 600
    assert pool.owners == []
    assert pool.idle_s is not None and 0 <= pool.idle_s < 600


def test_a_pool_of_another_version_is_found_and_freed(root: Path, left: Path) -> None:
    (left / "index").write_bytes(b"something else" * 1000)
    assert [(pool.place, pool.idle_s) for pool in found_below(root)] == [(left, None)]
    free(left)
    assert not left.exists()


def test_only_a_folder_of_ours_that_holds_a_pool_is_freed(root: Path, left: Path) -> None:
    (root / "book").mkdir()
    (root / "book" / "index").write_text("of a book")
    with pytest.raises(SegmentError, match="no pool is there"):
        free(root / "book")
    assert (root / "book" / "index").exists()
    (root / "link").symlink_to(left)
    with pytest.raises(ConfigError, match="not a directory"):
        free(root / "link")
    with pytest.raises(ConfigError, match="No such file"):
        free(root / "none")


def test_servers_that_start_while_their_pool_is_freed_get_a_pool(settings: SegmentSettings) -> None:
    """Each start ends with a pool at its place, adopted or new; each `free` removes a whole pool or refuses."""
    Segment.open(settings).close()
    ended = threading.Event()
    freed = []

    def keep_freeing() -> None:
        while not ended.wait(
            0.002
        ):  # without a pause, its lock could keep a start waiting until the start gives up
            with contextlib.suppress(SegmentError, ConfigError):
                freed.append(free(settings.directory))

    freeing = threading.Thread(target=keep_freeing)
    freeing.start()
    try:
        for _ in range(amount(20, 60)):
            found = Segment.open(settings)
            for name, fd in (
                ("index", found.descriptors.index_readonly),
                ("extents", found.descriptors.extents),
            ):
                there = (settings.directory / name).stat()
                assert (there.st_dev, there.st_ino) == linux.file_id(fd)
            found.close()
    finally:
        ended.set()
        freeing.join()
    assert freed
