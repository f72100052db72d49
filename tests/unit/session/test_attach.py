"""How a process attaches: whom it trusts, its lock bytes, and both sides' framing cut at any byte."""

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
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError, NotPermitted, Unavailable
from kvstrata.memory import linux
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.session.attach import LockHolder, attach, attach_in
from kvstrata.session.zmtp import (
    COMMAND,
    MAX_COMMAND_BYTES,
    MORE,
    Codec,
    Connection,
    NotZmtp,
    command,
    header,
    ready,
)
from tests.harness.rpc_client import RpcClient

REQUEST = RpcClient(Path()).attach_request()


@pytest.fixture
def root() -> Iterator[Path]:
    """Short enough for a socket's address."""
    root = Path(tempfile.mkdtemp(prefix="kv-"))
    yield root
    shutil.rmtree(root)


def test_a_socket_directory_that_cannot_be_looked_at_is_no_server(root):
    (root / "link").symlink_to("x" * 300)  # stat() fails, as below a directory that may not be searched
    with pytest.raises(Unavailable, match="File name too long"):
        attach(root / "link", REQUEST, LockHolder(), 0.1)


def test_a_socket_directory_that_is_missing_is_no_server(root):
    with pytest.raises(Unavailable, match="does not exist"):
        attach(root / "none", REQUEST, LockHolder(), 0.1)


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
            attach_in([root / "ours", theirs], REQUEST, LockHolder(), 0.1)
        with pytest.raises(ConfigError, match="choose"):
            attach_in([theirs, root / "ours"], REQUEST, LockHolder(), 0.1)
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
            attach_in([ours], REQUEST, LockHolder(), 0.1)
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


def test_a_lock_is_given_back_by_the_session_that_has_it_now(path, witness, holder):
    file = holder.adopt(os.open(path, os.O_RDWR))
    assert holder.lock(file, ROW, b"one")
    assert holder.lock(file, ROW, b"two")  # the server has given the row to another session of this process
    holder.unlock(file, ROW, b"one")
    assert linux.byte_locker(witness, ROW) == os.getpid()
    assert holder.is_owner(file, ROW, b"two")
    holder.unlock(file, ROW, b"two")
    assert linux.byte_locker(witness, ROW) is None
    holder.unlock(file, ROW, b"two")


def test_a_byte_locked_by_another_process_cannot_be_locked(path, witness, holder):
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


MAX_BYTES = 100_000
messages = st.lists(st.binary(max_size=600) | st.integers(0, 70_000).map(bytes), max_size=6)


def opened(kind: bytes = b"ROUTER") -> Codec:
    """A codec past the handshake."""
    codec = Codec(kind, MAX_BYTES)
    assert codec.receive(Codec(b"DEALER" if kind == b"ROUTER" else b"ROUTER", MAX_BYTES).opening) == []
    assert codec.is_open
    return codec


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    """The data in pieces that end at these places."""
    at = 0
    for place in sorted({*(place % (len(data) + 1) for place in places), len(data)}):
        if place > at:
            yield data[at:place]
        at = place


@given(messages, st.lists(st.integers(0, 1 << 20), max_size=20))
def test_messages_arrive_whole_and_in_order_wherever_the_stream_is_cut(sent, places):
    stream = Codec(b"DEALER", MAX_BYTES).opening + b"".join(header(len(one)) + one for one in sent)
    codec = Codec(b"ROUTER", MAX_BYTES)
    assert [one for part in cut(stream, places) for one in codec.receive(part)] == sent
    assert codec.partial_bytes == 0


@given(st.lists(st.binary(min_size=1, max_size=2_000), max_size=10), st.booleans())
def test_any_bytes_give_messages_or_an_error_and_are_bounded(parts: list[bytes], is_open: bool) -> None:
    codec = opened() if is_open else Codec(b"ROUTER", 500)
    codec.max_frame_bytes = 500
    try:
        for part in parts:
            assert all(len(message) <= 500 for message in codec.receive(part))
            assert codec.partial_bytes <= max(500, MAX_COMMAND_BYTES) + 2_000
    except NotZmtp:
        pass


@pytest.mark.parametrize(
    "data",
    [
        header(MAX_BYTES + 1),
        header(MAX_COMMAND_BYTES + 1, COMMAND),
        bytes((8, 0)),
        bytes((MORE | COMMAND, 0)),
    ],
    ids=["too long", "long command", "unknown flag", "command with more"],
)
def test_a_frame_that_is_not_allowed_is_an_error_at_its_header(data: bytes) -> None:
    with pytest.raises(NotZmtp):
        opened().receive(data)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1",
        b"\xff" + bytes(8) + b"\x7f" + bytes((2, 5)),
        Codec(b"DEALER", 1).opening[:12] + b"CURVE".ljust(52, b"\0"),
        Codec(b"DEALER", 1).opening[:64] + header(1) + b"x",
        Codec(b"DEALER", 1).opening[:64] + ready(b"PUB"),
        Codec(b"DEALER", 1).opening[:64] + command(b"ERROR", b"\x04nope"),
        Codec(b"DEALER", 1).opening[:64] + command(b"READY", b"\x0bSocket-Type\0\0\0\xff"),
    ],
    ids=["http", "zmtp 2", "curve", "message before ready", "pub", "error", "cut ready"],
)
def test_another_handshake_is_an_error(data: bytes) -> None:
    with pytest.raises(NotZmtp):
        Codec(b"ROUTER", MAX_BYTES).receive(data)


def test_a_message_of_several_frames_is_given_as_one_that_is_empty() -> None:
    codec = opened()
    data = header(1, MORE) + b"a" + header(2, MORE) + b"bb" + header(1) + b"c" + header(1) + b"d"
    assert codec.receive(data) == [b"", b"d"]


def test_a_ping_is_answered_with_its_context() -> None:
    codec = opened()
    assert codec.receive(command(b"PING", b"\0\x64context")) == []
    assert codec.answers == [command(b"PONG", b"context")]


def pair() -> tuple[Connection, Connection]:
    """Two connected sides that do not block."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    limits = {"max_frame_bytes": 8 << 20, "max_unsent_bytes": 1 << 20}
    return Connection(ours, b"DEALER", **limits), Connection(theirs, b"ROUTER", **limits)


def test_what_the_other_side_does_not_read_is_bounded_and_arrives_when_it_does() -> None:
    near, far = pair()
    message, accepted = bytes(100_000), 0
    while near.send(message):
        accepted += 1
    assert near.unsent_bytes <= (1 << 20) + len(message)
    arrived = 0
    while arrived < accepted:
        near.flush()
        arrived += len(far.receive())
    assert near.unsent_bytes == 0
    near.close()
    with pytest.raises(ConnectionResetError):
        far.receive()
    far.close()


def test_descriptors_travel_with_their_message_and_are_closed_where_none_are_awaited() -> None:
    near, far = pair()
    null = os.open(os.devnull, os.O_RDONLY)
    assert near.send(b"one", [null])
    received = far.receive_with_fds(4)
    assert received.messages == [b"one"] and len(received.fds) == 1 and not received.fds_lost
    assert not os.get_inheritable(received.fds[0])
    os.close(received.fds[0])
    os.close(null)
    reader, writer = os.pipe()
    assert near.send(b"two", [writer])
    os.close(writer)
    assert far.receive() == [b"two"]
    os.set_blocking(reader, False)
    assert os.read(reader, 1) == b"", "nobody has the other end any more"
    os.close(reader)
    near.close()
    far.close()
