"""The holder process: it keeps descriptors beyond the death of their giver, and ends when nobody can reach it."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.memory import holder_client, linux
from kvstrata.memory.holder import MAX_CONNECTIONS
from tests.harness import namespaces
from tests.harness.attach_scene import attach, b64, new_worker, reserve, rows_of, session_name
from tests.harness.attach_server import AttachServerChild, Place
from tests.harness.cases import case
from tests.harness.child import HANG_S, Child
from tests.harness.open_files import open_files
from tests.harness.signals import send

pytestmark = pytest.mark.integration

WORDS = ["index", "extents", "sessions.lock"]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Path of a holder's socket; whatever holder listens there at the end is ended."""
    path = tmp_path / "with space" / "holder.sock"
    path.parent.mkdir()
    yield path
    try:
        with ending(path):
            holder_client.dismiss(path)
    except holder_client.HolderUnreachable:
        pass


def holder_pid(path: Path) -> int:
    """The process whose command line names this socket. Raises HolderUnreachable where no process does."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if command.endswith(b"\0" + os.fsencode(path) + b"\0"):
            return int(entry.name)
    raise holder_client.HolderUnreachable(f"{path}: no process was started with it")


class ending:
    """A context at whose end the holder that answered at its start has ended."""

    def __init__(self, path: Path) -> None:
        self._pidfd = os.pidfd_open(holder_pid(path))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                assert select.select([self._pidfd], [], [], HANG_S)[0], "the holder did not end"
        finally:
            os.close(self._pidfd)


def held_words(path: Path) -> list[str]:
    fds = holder_client.fetch(path)
    try:
        return [os.pread(fd, 100, 0).decode() for fd in fds]
    finally:
        linux.close_all(fds)


def files_without_sockets(pid: int) -> list[str]:
    """Open files of a process without sockets, since a connection may close a moment after its answer."""
    return sorted(name for name in open_files(pid) if not name.startswith("socket:"))


def test_kept_descriptors_survive_sigkill_of_their_giver_and_its_process_group(
    path: Path, tmp_path: Path
) -> None:
    with Child("tests.integration.memory.holder_starter", log=tmp_path / "log") as starter:
        starter.ask("keep", path=str(path), words=WORDS, start=True)
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
    assert held_words(path) == WORDS
    assert held_words(path) == WORDS  # fetching removes nothing


def test_socket_is_private_from_its_first_moment(path: Path) -> None:
    holder_client.start(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_new_descriptors_replace_the_old(path: Path, tmp_path: Path) -> None:
    with Child("tests.integration.memory.holder_starter", log=tmp_path / "log") as starter:
        starter.ask("keep", path=str(path), words=["a", "b", "c"], start=True)
        starter.ask("keep", path=str(path), words=WORDS, start=False)
    assert held_words(path) == WORDS


def test_holder_ends_when_told(path: Path) -> None:
    holder_client.start(path)
    with ending(path):
        holder_client.dismiss(path)
    with pytest.raises(holder_client.HolderUnreachable):
        holder_client.fetch(path)


def test_holder_ends_when_its_directory_vanishes(path: Path) -> None:
    holder_client.start(path)
    with ending(path):
        path.unlink()
        path.parent.rmdir()


def test_holder_ends_when_another_takes_its_place(path: Path) -> None:
    holder_client.start(path)
    with ending(path):
        holder_client.start(path)
    assert holder_client.fetch(path) == []


def test_holder_is_no_child_of_the_starter_and_in_no_session_of_its(path: Path) -> None:
    holder_client.start(path)
    pid = holder_pid(path)
    assert os.getsid(pid) != os.getsid(0)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert str(pid) not in children


def test_the_holder_maps_no_heavy_library(path: Path) -> None:
    holder_client.start(path)
    pid = holder_pid(path)
    libraries = Path(f"/proc/{pid}/maps").read_text()
    for heavy in ("ctypes", "_asyncio", "msgspec", "zmq", "native"):
        assert heavy not in libraries


@pytest.mark.long
@pytest.mark.silence
def test_absent_and_stopped_holders_are_unreachable(path: Path) -> None:
    with pytest.raises(holder_client.HolderUnreachable):
        holder_client.fetch(path)
    holder_client.start(path)
    pid = holder_pid(path)
    send(pid, signal.SIGSTOP)
    try:
        with pytest.raises(holder_client.HolderUnreachable):
            holder_client.fetch(path)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert holder_client.fetch(path) == []


def test_the_holder_survives_bad_messages(path: Path, tmp_path: Path) -> None:
    with Child("tests.integration.memory.holder_starter", log=tmp_path / "log") as starter:
        starter.ask("keep", path=str(path), words=WORDS, start=True)
    pid = holder_pid(path)
    before = files_without_sockets(pid)
    bad = ((b"", 3), (b"put", 0), (b"put", 2), (b"put", 4), (b"get", 3), (b"nonsense", 1), (b"x" * 5000, 0))
    for message, fd_count in bad:
        with (
            case(message[:10], fd_count),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
            open(os.devnull) as null,
        ):
            sock.settimeout(HANG_S)
            sock.connect(os.fspath(path))
            linux.send(sock, message, [null.fileno()] * fd_count)
            received = linux.receive(sock, 100, 8)
            linux.close_all(received.fds)
            assert received.data != b"ok"
            assert held_words(path) == WORDS
            assert files_without_sockets(pid) == before


@pytest.mark.long
def test_silent_peers_do_not_keep_others_out(path: Path) -> None:
    holder_client.start(path)
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(MAX_CONNECTIONS)]
    try:
        for sock in silent:
            sock.connect(os.fspath(path))
        while True:  # they are dropped after some seconds
            try:
                assert holder_client.fetch(path) == []
                break
            except holder_client.HolderUnreachable:
                continue
    finally:
        for sock in silent:
            sock.close()


@pytest.mark.long
def test_holder_that_cannot_start_is_an_error_with_the_reason(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="did not start"):
        holder_client.start(path)


# --- a whole segment kept by a holder --------------------------------------------------------------------


SMALL_SHM = ("unshare", "-Urm", *namespaces.hidden_shm("1m"))
"""Runs a server with a /dev/shm of 1 MiB."""

needs_namespaces = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    root = Path(tempfile.mkdtemp(prefix="kv-"))
    place = Place(root / "sockets", Path("/dev/shm") / root.name)
    yield place
    socket_path = place.socket_dir / "holder.sock"
    try:
        with ending(socket_path):
            shutil.rmtree(root)  # a holder ends when its directory vanishes
    except holder_client.HolderUnreachable:
        shutil.rmtree(root)


@needs_namespaces
def test_warm_restart_where_shm_is_too_small(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with new_worker(log) as worker:
        with AttachServerChild(place, log=log, under=SMALL_SHM) as first:
            assert (first.start["backing"], first.start["adopted"]) == ("memfd", False)
            assert "bytes free" in first.start["reason"]
            row = attach(worker, place, session_name("one"))
            worker.ask("map", session=session_name("one"))
            [extent] = reserve(first, row, 1)["extents"]
            first.kill()
        holder = holder_pid(place.socket_dir / "holder.sock")
        with AttachServerChild(place, log=log, under=SMALL_SHM) as second:
            assert (second.start["backing"], second.start["adopted"]) == ("memfd", True)
            assert second.start["epoch"] > first.start["epoch"]
            assert rows_of(second) == {row: True}
            assert attach(worker, place, session_name("one")) == row
            worker.ask(
                "write", session=session_name("one"), offset=extent[0], data=b64(b"through both servers")
            )
            with new_worker(log) as other:
                attach(other, place, session_name("two"))
                other.ask("map", session=session_name("two"))
                assert other.ask("read", session=session_name("two"), offset=extent[0], length=20) == b64(
                    b"through both servers"
                )
            second.kill()
        with AttachServerChild(place, log=log, under=SMALL_SHM) as third:  # the dead one's lock is gone too
            assert third.start["adopted"]
            assert row in rows_of(third)
        assert holder_pid(place.socket_dir / "holder.sock") == holder


@needs_namespaces
@pytest.mark.parametrize("adopted", [pytest.param(False, marks=pytest.mark.long), True])
def test_descriptors_from_the_holder_do_not_carry_the_servers_lock(
    place: Place, tmp_path: Path, adopted: bool
) -> None:
    log = tmp_path / "log"
    if adopted:
        with AttachServerChild(place, log=log, under=SMALL_SHM) as first:
            first.kill()
    with AttachServerChild(place, log=log, under=SMALL_SHM) as server:
        assert server.start["adopted"] == adopted
        fds = holder_client.fetch(place.socket_dir / "holder.sock")
        assert not linux.lock_whole_file(fds[0])
        server.kill()
        assert linux.lock_whole_file(fds[0])
        linux.close_all(fds)


@pytest.mark.long
@needs_namespaces
def test_dead_holder_is_replaced_by_a_new_one_with_a_new_segment(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with AttachServerChild(place, log=log, under=SMALL_SHM) as first:
        with ending(place.socket_dir / "holder.sock"):
            os.kill(holder_pid(place.socket_dir / "holder.sock"), signal.SIGKILL)
        first.kill()
    with AttachServerChild(place, log=log, under=SMALL_SHM) as second:
        assert (second.start["backing"], second.start["adopted"]) == ("memfd", False)
        assert "no holder answers" in second.start["reason"]


@pytest.mark.long
@needs_namespaces
def test_held_segment_of_another_size_is_replaced(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with AttachServerChild(place, log=log, under=SMALL_SHM) as first:
        first.kill()
    with AttachServerChild(place, log=log, under=SMALL_SHM, extents_bytes=8 << 20) as second:
        assert (second.start["backing"], second.start["adopted"]) == ("memfd", False)
        assert hex(8 << 20) in second.start["reason"]
        second.kill()
    with AttachServerChild(place, log=log, under=SMALL_SHM, extents_bytes=8 << 20) as third:
        assert third.start["adopted"]


@pytest.mark.long
@needs_namespaces
def test_held_segment_is_adopted_even_where_files_would_fit_now(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with AttachServerChild(place, log=log, under=SMALL_SHM) as first:
        first.kill()
    with AttachServerChild(place, log=log, destroy=True) as second:
        assert (second.start["backing"], second.start["adopted"]) == ("memfd", True)
        with ending(place.socket_dir / "holder.sock"):
            second.finish()  # destroys the segment
    assert not place.segment_dir.exists()
    with pytest.raises(holder_client.HolderUnreachable):
        holder_client.fetch(place.socket_dir / "holder.sock")


@pytest.mark.long
@needs_namespaces
def test_a_held_segment_cannot_be_resized(place: Place, tmp_path: Path) -> None:
    with AttachServerChild(place, log=tmp_path / "log", under=SMALL_SHM):
        fds = holder_client.fetch(place.socket_dir / "holder.sock")
        for fd in fds[:2]:
            for size in (0, os.fstat(fd).st_size - 4096, os.fstat(fd).st_size + 4096):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
        linux.close_all(fds)


def test_the_holder_has_no_setting_in_its_environment_or_command_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTRATA_L2_ADAPTERS", "[{password: hunter2}]")
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    holder_client.start(path)
    for name in ("environ", "cmdline"):
        assert b"hunter2" not in Path(f"/proc/{holder_pid(path)}/{name}").read_bytes()
