"""Record locks of a process vanish when it closes any descriptor of the file: the holder closes none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.memory import linux
from kvstrata.session.attach import LockHolder

ROW = 7


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.lock"
    path.touch()
    return path


@pytest.fixture
def witness(path: Path) -> Iterator[int]:
    """A description of its own that sees this process's locks; closing it at the end drops them."""
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


@pytest.fixture
def holder() -> Iterator[LockHolder]:
    holder = LockHolder()
    yield holder
    holder.forget_in_child()


def test_a_lock_is_given_back_by_the_session_that_has_it_now(
    path: Path, witness: int, holder: LockHolder
) -> None:
    file = holder.adopt(os.open(path, os.O_RDWR))
    assert holder.lock(file, ROW, b"one")
    assert holder.lock(file, ROW, b"two")  # the server has given the row to another session of this process
    holder.unlock(file, ROW, b"one")
    assert linux.byte_locker(witness, ROW) == os.getpid()
    assert holder.is_owner(file, ROW, b"two")
    holder.unlock(file, ROW, b"two")
    assert linux.byte_locker(witness, ROW) is None
    holder.unlock(file, ROW, b"two")


def test_a_byte_locked_by_another_process_cannot_be_locked(
    path: Path, witness: int, holder: LockHolder
) -> None:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        fd = os.open(path, os.O_RDWR)
        linux.lock_byte(fd, ROW)
        os.write(writer, b"x")
        while True:
            signal.pause()
    os.read(reader, 1)
    try:
        file = holder.adopt(os.open(path, os.O_RDWR))
        assert not holder.lock(file, ROW, b"one")
        assert not holder.is_owner(file, ROW, b"one")
        assert linux.byte_locker(witness, ROW) == child
        assert holder.lock(file, ROW + 1, b"one")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        linux.close_all([reader, writer])
    assert holder.lock(file, ROW, b"one")  # it ended with its process
