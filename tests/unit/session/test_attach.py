"""session/attach.py: whom a process trusts, and its lock bytes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError, NotPermitted, Unavailable
from kvstrata.memory import linux
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.session.attach import LockHolder, attach, attach_in
from tests.harness.attach_worker import make_request


@pytest.fixture
def root() -> Iterator[Path]:
    """Short enough for a socket's address."""
    root = Path(tempfile.mkdtemp(prefix="kv-"))
    yield root
    shutil.rmtree(root)


def test_a_socket_directory_that_cannot_be_looked_at_is_no_server(root):
    (root / "link").symlink_to("x" * 300)  # stat() fails, as below a directory that may not be searched
    with pytest.raises(Unavailable, match="File name too long"):
        attach(root / "link", make_request(session=b"s" * 16), LockHolder(), 0.1)


def test_a_socket_directory_that_is_missing_is_no_server(root):
    with pytest.raises(Unavailable, match="does not exist"):
        attach(root / "none", make_request(session=b"s" * 16), LockHolder(), 0.1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own a directory by another uid")
@pytest.mark.parametrize("whose", ["another user's", "writable by others"])
def test_nobody_connects_to_a_socket_in_a_folder_that_others_control(root, whose):
    """The folder of another user is passed over, also where our own place comes first and has no server."""
    theirs = root / "theirs"
    theirs.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(theirs / RPC_SOCKET))
        listener.listen()
        listener.setblocking(False)
        if whose == "another user's":
            os.chown(theirs, 12345, -1)
        else:
            theirs.chmod(0o770)
        with pytest.raises(Unavailable, match="does not exist"):
            attach_in([root / "ours", theirs], make_request(session=b"s" * 16), LockHolder(), 0.1)
        with pytest.raises(ConfigError, match="choose"):
            attach_in([theirs, root / "ours"], make_request(session=b"s" * 16), LockHolder(), 0.1)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_nobody_speaks_to_a_socket_at_which_another_user_listens(root):
    """It was bound while the folder stood open."""
    ours = root / "ours"
    ours.mkdir()
    ours.chmod(0o777)
    listen = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1])"
    listen += "; s.listen(); print('bound', flush=True); print(s.accept()[0].recv(65_536))"
    thief = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "/usr/bin/env",
        "python3",
        "-c",
        listen,
    ]
    with subprocess.Popen([*thief, RPC_SOCKET], cwd=ours, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None and listener.stdout.readline() == "bound\n"
        ours.chmod(0o700)
        with pytest.raises(NotPermitted, match="is served by uid 65534, not by us"):
            attach_in([ours], make_request(session=b"s" * 16), LockHolder(), 0.1)
        assert listener.stdout.read() == "b''\n"


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
