"""storage/media/object_store/local.py: what appears in place of an object after it was checked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstrata.storage.media.object_store.local import Inside, NotAFile

NAME = "ab/object"
CONTENT = b"outside the directory"


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inside:
    """A directory whose check finds nothing wrong, as if what the test puts there had come right after it."""
    (tmp_path / "store/ab").mkdir(parents=True)
    monkeypatch.setattr(Inside, "head", lambda self, name: (len(CONTENT), ""))
    return Inside(f"file://{tmp_path}/store")


def test_a_load_follows_no_link_that_was_put_there_after_the_check(tmp_path: Path, inside: Inside) -> None:
    (tmp_path / "secret").write_bytes(CONTENT)
    (tmp_path / "store" / NAME).symlink_to(tmp_path / "secret")
    target = bytearray(len(CONTENT))
    with pytest.raises(OSError, match="symbolic links"):
        inside.read(NAME, 0, memoryview(target), len(CONTENT))
    assert target == bytes(len(CONTENT))


def test_a_load_does_not_wait_for_the_writer_of_a_pipe(tmp_path: Path, inside: Inside) -> None:
    os.mkfifo(tmp_path / "store" / NAME)
    with pytest.raises(NotAFile):
        inside.read(NAME, 0, memoryview(bytearray(len(CONTENT))), len(CONTENT))


def test_a_part_of_an_object_is_read_from_where_it_begins(tmp_path: Path, inside: Inside) -> None:
    (tmp_path / "store" / NAME).write_bytes(CONTENT)
    target = bytearray(3)
    inside.read(NAME, 8, memoryview(target), len(CONTENT))
    assert target == CONTENT[8:11]
