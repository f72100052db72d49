"""The attach handshake with real processes: who gets in, what a row lives as long as, and what frees it."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstrata.memory import linux
from kvstrata.rpc.wire import NO_SESSION, PROTOCOL_VERSION, AttachReply
from kvstrata.types import Role
from tests.harness.attach_server import AttachServerChild, Place
from tests.harness.attach_worker import FACTS, make_request
from tests.harness.child import HANG_S, Child, ChildEnded, ChildError

pytestmark = pytest.mark.integration

RECORD_BYTES = 8192


@pytest.fixture
def place() -> Iterator[Place]:
    """A socket directory with a space in its name, and a segment directory on /dev/shm."""
    root = Path(tempfile.mkdtemp(prefix="kv-"))
    segment = Path("/dev/shm") / root.name
    yield Place(root / "socket dir", segment)
    shutil.rmtree(root)
    shutil.rmtree(segment, ignore_errors=True)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "children.log"


@pytest.fixture
def server(place: Place, log: Path) -> Iterator[AttachServerChild]:
    with AttachServerChild(place, log=log) as server:
        yield server


@pytest.fixture
def worker(log: Path) -> Iterator[Child]:
    with new_worker(log) as worker:
        yield worker


def new_worker(log: Path, under: tuple[str, ...] = ()) -> Child:
    return Child("tests.harness.attach_worker", under=under, log=log)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def name(text: str) -> str:
    """A session name of 16 bytes."""
    return b64(text.encode().ljust(16, b"."))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def until(condition: Callable[[], bool]) -> None:
    """Asks again and again; a condition that never comes true fails the test."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, "the condition never came true"


def attach(worker: Child, place: Place, session: str, **request: Any) -> int:
    row: int = worker.ask("attach", socket_dir=str(place.socket_dir), session=session, **request)["row"]
    return row


def rows_of(server: Child) -> dict[int, bool]:
    """Row → whether it is from before a restart."""
    return {row["row"]: row["old"] for row in server.ask("rows")}


def pool_bytes(server: Child, state: str) -> int:
    found: int = server.ask("stats")["pool"][f"{state}_bytes"]
    return found


def reserve(server: Child, row: int, *numbers: int) -> dict[str, Any]:
    keys = b"".join(key(number) for number in numbers)
    found: dict[str, Any] = server.ask("reserve", row=row, keys=b64(keys), record_bytes=RECORD_BYTES)
    assert found["outcomes"] == [0] * len(numbers)
    return found


# --- getting in ----------------------------------------------------------------------------------------------


def test_an_attached_process_shares_the_pool_but_cannot_write_the_index(
    server: AttachServerChild, place: Place, worker: Child, log: Path
) -> None:
    row = attach(worker, place, name("one"))
    told = server.event("attached")
    assert (told["row"], told["pid"], told["resumed"]) == (row, worker.pid, False)
    assert worker.ask("try_write_index", session=name("one")) == os.strerror(13)
    worker.ask("map", session=name("one"))
    extent = reserve(server, row, 1)["extents"][0]
    worker.ask("write", session=name("one"), offset=extent[0], data=b64(b"hello"))
    with new_worker(log) as other:
        attach(other, place, name("two"))
        other.ask("map", session=name("two"))
        assert other.ask("read", session=name("two"), offset=extent[0], length=5) == b64(b"hello")


def test_socket_and_files_are_for_this_user_alone(server: AttachServerChild, place: Place) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(place.socket_dir) == mode(place.segment_dir) == 0o700
    assert mode(place.socket_dir / "attach.sock") == 0o600
    for file in place.segment_dir.iterdir():
        assert mode(file) == 0o600, file


def test_sessions_of_one_process_share_one_descriptor_of_the_lock_file(
    server: AttachServerChild, place: Place, worker: Child
) -> None:
    rows = {attach(worker, place, name(text)) for text in ("one", "two", "three")}
    assert len(rows) == 3
    worker.ask("close", session=name("one"))
    server.event("detached")
    assert attach(worker, place, name("one")) in rows  # its byte was locked all the time, or this is refused
    assert worker.ask("open_lock_files") == 1


def test_tenants_follow_from_the_token(place: Place, log: Path, worker: Child) -> None:
    with AttachServerChild(place, log=log, tenants={"secret": ["b", "a"]}) as server:
        with pytest.raises(ChildError) as caught:
            attach(worker, place, name("one"), token="guess")
        assert (caught.value.code, caught.value.field) == ("not_permitted", "token")
        attach(worker, place, name("one"), token="secret")
        assert server.event("attached")["tenants"] == ["a", "b"]


def refusal(worker: Child, place: Place, messages: list[bytes], fds: list[str]) -> AttachReply:
    """The reply to the last of some raw messages."""
    replies = worker.ask(
        "raw", socket_dir=str(place.socket_dir), messages=[b64(m) for m in messages], fds=fds
    )
    return msgspec.msgpack.decode(base64.b64decode(replies[-1]), type=AttachReply)


def encoded(**change: Any) -> bytes:
    arguments: dict[str, Any] = {"session": b"raw".ljust(16, b".")}
    fields = {k: v for k, v in change.items() if k in ("slice", "facts", "engine_slices")}
    arguments.update({k: v for k, v in change.items() if k not in fields})
    return msgspec.msgpack.encode(msgspec.structs.replace(make_request(**arguments), **fields))


GOOD = encoded()
NESTED = b"\x91" * 20_000 + b"\xc0"
NESTED_FACTS = b"\x82\xa8protocol" + msgspec.msgpack.encode(PROTOCOL_VERSION) + b"\xa5facts" + NESTED
NESTED_UNKNOWN = b"\x82\xa7unknown" + NESTED + b"\xa8protocol" + msgspec.msgpack.encode(PROTOCOL_VERSION)
PART = make_request(session=b"x" * 16).slice
assert PART is not None


@pytest.mark.parametrize(
    ("message", "fds", "code", "field"),
    [
        (b"\xc1", ["self"], "bad_request", "request"),
        (b"\x91" * 5000, ["self"], "bad_request", "request"),
        (NESTED_FACTS, ["self"], "bad_request", "request"),
        (NESTED_UNKNOWN, ["self"], "bad_request", "request"),
        (GOOD[:-7], ["self"], "bad_request", "request"),
        (GOOD + b"x", ["self"], "bad_request", "request"),
        (b"x" * 66_000, ["self"], "bad_request", "message"),
        (encoded(protocol=PROTOCOL_VERSION + 1), ["self"], "wrong_version", "protocol"),
        (msgspec.msgpack.encode({"protocol": 0}), ["self"], "wrong_version", "protocol"),
        (GOOD, [], "bad_request", "pidfd"),
        (GOOD, ["self", "self"], "bad_request", "pidfd"),
        (GOOD, ["self"] * 9, "bad_request", "pidfd"),
        (GOOD, ["null"], "bad_request", "pidfd"),
        (GOOD, ["thread"], "bad_request", "pidfd"),
        (GOOD, ["parent"], "not_permitted", "pidfd"),
        (encoded(session=NO_SESSION), ["self"], "bad_request", "session"),
        (encoded(group=NO_SESSION), ["self"], "bad_request", "group"),
        (encoded(slice=None), ["self"], "bad_request", "slice"),
        (encoded(slice=None, facts=None), ["self"], "bad_request", "slice"),
        (encoded(facts=None), ["self"], "bad_request", "facts"),
        (encoded(role=Role.SCHEDULER, slice=PART, facts=FACTS), ["self"], "bad_request", "slice"),
        (encoded(facts={"payload_bytes": 1}), ["self"], "bad_request", "slice.layout"),
        (encoded(layers=(2, 2)), ["self"], "bad_request", "slice.layers"),
        (encoded(engine_slices=0), ["self"], "bad_request", "request"),
        (encoded(model="refused"), ["self"], "refused", "layout.model"),
    ],
    ids=lambda value: value[:12].hex() if isinstance(value, bytes) else str(value),
)
def test_a_bad_request_is_answered_with_what_is_wrong_and_changes_nothing(
    place: Place, log: Path, worker: Child, message: bytes, fds: list[str], code: str, field: str
) -> None:
    with AttachServerChild(place, log=log, refused_model="refused") as server:
        before = server.ask("open_files")
        reply = refusal(worker, place, [message], fds)
        assert (reply.code, reply.field) == (code, field), reply.message
        assert reply.message
        until(lambda: server.ask("open_files") == before)
        assert rows_of(server) == {}
        assert server.ask("stats")["refused"] == {code: 1}
        attach(worker, place, name("good"))


@pytest.mark.parametrize("after", [b"locked", b"lock", b"", GOOD])
def test_a_row_that_nobody_locked_is_never_announced(
    server: AttachServerChild, place: Place, worker: Child, after: bytes
) -> None:
    if after:
        assert refusal(worker, place, [GOOD, after], ["self"]).code == "bad_request"
    else:
        assert refusal(worker, place, [GOOD], ["self"]).code == ""  # it closes instead of locking
    until(lambda: rows_of(server) == {})
    assert server.events == []


def test_other_facts_for_the_same_part_are_refused_naming_the_fact_and_both_values(
    server: AttachServerChild, place: Place, worker: Child, log: Path
) -> None:
    attach(worker, place, name("one"))
    other_facts = {**FACTS, "section_bytes": [1024, 3072]}
    with new_worker(log) as other:
        with pytest.raises(ChildError) as caught:
            attach(other, place, name("two"), facts=other_facts)
        assert (caught.value.code, caught.value.field) == ("layout_refused", "facts.section_bytes")
        assert "[1024, 3072]" in caught.value.message and "[2048, 2048]" in caught.value.message
        # Another part of the KV, or another model, has facts of its own.
        attach(other, place, name("two"), facts=other_facts, layers=[2, 4])
        attach(other, place, name("three"), facts=other_facts, model="n", group=name("other engine"))
        # When the last process with the old facts has ended, new ones may come.
        assert worker.ask("goodbye", session=name("one"))
        attach(other, place, name("four"), facts=other_facts)


@pytest.mark.parametrize(
    ("change", "field"), [({"model": "n"}, "layout.model"), ({"engine_slices": 2}, "engine_slices")]
)
def test_processes_of_one_group_declare_one_engine(
    server: AttachServerChild, place: Place, worker: Child, change: dict[str, Any], field: str
) -> None:
    attach(worker, place, name("one"))
    with pytest.raises(ChildError) as caught:
        attach(worker, place, name("two"), **change)
    assert (caught.value.code, caught.value.field) == ("bad_request", field)


def test_a_session_of_a_living_process_is_no_other_process_to_have(
    server: AttachServerChild, place: Place, worker: Child, log: Path
) -> None:
    row = attach(worker, place, name("one"))
    worker.ask("close", session=name("one"))
    server.event("detached")
    with new_worker(log) as other:
        with pytest.raises(ChildError) as caught:
            attach(other, place, name("one"))
        assert (caught.value.code, caught.value.field) == ("not_permitted", "session")
        assert other.ask("open_lock_files") == 0
    assert attach(worker, place, name("one")) == row


def test_a_session_comes_back_as_what_it_was(server: AttachServerChild, place: Place, worker: Child) -> None:
    attach(worker, place, name("one"))
    with pytest.raises(ChildError) as caught:
        attach(worker, place, name("one"), layers=[0, 1])
    assert (caught.value.code, caught.value.field) == ("bad_request", "slice.layers")
    with pytest.raises(ChildError) as caught:
        attach(worker, place, name("one"), registers_memory=True)
    assert (caught.value.code, caught.value.field) == ("bad_request", "registers_memory")


@pytest.mark.fast
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_uid_is_refused(server: AttachServerChild, place: Place, worker: Child) -> None:
    place.socket_dir.parent.chmod(0o711)  # what file modes forbid is opened up: the check itself must refuse
    place.socket_dir.chmod(0o711)
    (place.socket_dir / "attach.sock").chmod(0o666)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(os.fspath(place.socket_dir / "attach.sock"))
                os.write(writer, sock.recv(1 << 16))
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    reply = msgspec.msgpack.decode(os.read(reader, 1 << 16), type=AttachReply)
    os.close(reader)
    assert (reply.code, reply.field) == ("not_permitted", "uid")
    assert "65534" in reply.message and str(os.geteuid()) in reply.message
    attach(worker, place, name("one"))


@pytest.mark.fast
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own a directory by another uid")
def test_a_client_trusts_no_socket_directory_of_another_uid(
    server: AttachServerChild, place: Place, worker: Child
) -> None:
    os.chown(place.socket_dir, 65534, -1)
    with pytest.raises(ChildError) as caught:
        attach(worker, place, name("one"))
    assert caught.value.code == "bad_config" and "65534" in caught.value.message


def test_all_rows_taken_is_a_refusal_and_a_goodbye_makes_room(
    server: AttachServerChild, place: Place, worker: Child
) -> None:
    server.ask("claim", count=900)
    rows = {attach(worker, place, name(str(number))) for number in range(123)}
    assert rows == set(range(901, 1024))
    with pytest.raises(ChildError) as caught:
        attach(worker, place, name("one too many"))
    assert caught.value.code == "refused"
    assert worker.ask("goodbye", session=name("50"))
    attach(worker, place, name("one too many"))
    assert worker.ask("open_lock_files") == 1


# --- bad peers -----------------------------------------------------------------------------------------------


def test_silent_connections_keep_nobody_out(place: Place, log: Path, worker: Child) -> None:
    with AttachServerChild(place, log=log, limits={"pending": 8, "handshake_s": 3600.0}) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                linux.connect(silent, os.fspath(place.socket_dir / "attach.sock"), HANG_S)
            attach(worker, place, name("one"))
            assert server.ask("stats")["pending"] <= 8
        until(lambda: server.ask("stats")["pending"] == 0)


def test_a_server_without_free_descriptors_serves_again_when_it_has_some(
    place: Place, log: Path, worker: Child
) -> None:
    under = ("prlimit", "--nofile=48:48")
    with AttachServerChild(place, log=log, under=under, limits={"pending": 1000}) as server:
        attach(worker, place, name("one"))
        with contextlib.ExitStack() as stack:
            for _ in range(60):  # what is not accepted waits in the queue
                silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                linux.connect(silent, os.fspath(place.socket_dir / "attach.sock"), HANG_S)
            until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) == 48)
            assert rows_of(server).keys() == {1}
        attach(worker, place, name("two"), timeout_s=HANG_S)
        assert not worker.ask("server_closed", session=name("one"))


def test_an_unfinished_handshake_ends_after_its_time(place: Place, log: Path, worker: Child) -> None:
    with AttachServerChild(place, log=log, limits={"handshake_s": 0.1}) as server:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.settimeout(HANG_S)
            silent.connect(os.fspath(place.socket_dir / "attach.sock"))
            assert msgspec.msgpack.decode(silent.recv(1 << 16), type=AttachReply).code == "deadline"
            assert silent.recv(1) == b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as claiming:
            claiming.settimeout(HANG_S)
            claiming.connect(os.fspath(place.socket_dir / "attach.sock"))
            pidfd = os.pidfd_open(os.getpid())
            linux.send(claiming, GOOD, [pidfd])
            os.close(pidfd)
            received = linux.receive(claiming, 1 << 16, 8)
            linux.close_all(received.fds)
            assert len(received.fds) == 3
            assert msgspec.msgpack.decode(claiming.recv(1 << 16), type=AttachReply).code == "deadline"
        until(lambda: rows_of(server) == {})
        attach(worker, place, name("one"), timeout_s=HANG_S)
        assert server.event("attached")["pid"] == worker.pid


@pytest.mark.parametrize("lives", [True, False])
def test_a_process_that_gives_up_before_its_turn_is_counted_as_that(
    place: Place, log: Path, worker: Child, lives: bool
) -> None:
    with AttachServerChild(place, log=log) as server:
        os.kill(server.pid, signal.SIGSTOP)
        with new_worker(log) as loser, contextlib.ExitStack() as sockets:
            asked = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            asked.connect(os.fspath(place.socket_dir / "attach.sock"))
            pidfd = os.pidfd_open(os.getpid() if lives else loser.pid)
            linux.send(asked, GOOD, [pidfd])
            os.close(pidfd)
            asked.close()
        os.kill(server.pid, signal.SIGCONT)
        until(lambda: server.ask("stats")["refused"])
        assert server.ask("stats")["refused"] == {"gave_up": 1}
        assert rows_of(server) == {}
        attach(worker, place, name("good"))


# --- ends of a row -------------------------------------------------------------------------------------------


def test_a_closed_connection_only_detaches(server: AttachServerChild, place: Place, worker: Child) -> None:
    row = attach(worker, place, name("one"))
    worker.ask("map", session=name("one"))
    reserve(server, row, 1, 2)
    worker.ask("close", session=name("one"))
    assert server.event("detached")["row"] == row
    assert rows_of(server) == {row: False}
    assert pool_bytes(server, "reserved") == 2 * RECORD_BYTES
    assert attach(worker, place, name("one")) == row
    resumed = [server.event("attached")["resumed"] for _ in range(2)]
    assert resumed == [False, True]


def test_what_a_process_reserved_is_free_only_when_it_is_dead(
    server: AttachServerChild, place: Place, worker: Child, log: Path
) -> None:
    row = attach(worker, place, name("one"))
    reserve(server, row, 1, 2)
    worker.ask("close", session=name("one"))
    server.event("detached")
    with new_worker(log) as other:  # whatever happens to others meanwhile
        attach(other, place, name("two"))
        other.kill()
        assert server.event("gone")["row"] != row
    assert pool_bytes(server, "reserved") == 2 * RECORD_BYTES
    worker.kill()
    assert server.event("gone")["row"] == row
    until(lambda: rows_of(server) == {})
    assert pool_bytes(server, "reserved") == 0
    server.ask("validate")


def test_a_stopped_process_loses_nothing(place: Place, log: Path, worker: Child) -> None:
    with AttachServerChild(place, log=log, limits={"handshake_s": 0.1}) as server:
        row = attach(worker, place, name("one"))
        worker.ask("map", session=name("one"))
        [extent] = reserve(server, row, 1)["extents"]
        worker.signal(signal.SIGSTOP)
        with new_worker(log) as other:  # a whole life of another process, and a handshake that times out
            attach(other, place, name("two"))
            other.kill()
            server.event("gone")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
                silent.settimeout(HANG_S)
                silent.connect(os.fspath(place.socket_dir / "attach.sock"))
                assert silent.recv(1 << 16)
        assert row in rows_of(server)
        assert pool_bytes(server, "reserved") == RECORD_BYTES
        worker.signal(signal.SIGCONT)
        worker.ask("write", session=name("one"), offset=extent[0], data=b64(b"still mine"))
        assert not worker.ask("server_closed", session=name("one"))


def test_a_forked_child_keeps_nothing_alive(server: AttachServerChild, place: Place, worker: Child) -> None:
    row = attach(worker, place, name("one"))
    worker.ask("map", session=name("one"))
    reserve(server, row, 1)
    child = worker.ask("fork")
    assert not child["mapped"]
    assert child["fds"] == 0
    worker.kill()
    assert server.event("gone")["row"] == row
    until(lambda: rows_of(server) == {})
    assert pool_bytes(server, "reserved") == 0
    os.kill(child["pid"], 0)  # it lives all the while; it ends with its process group


def test_goodbye_frees_the_row_of_a_process_that_lives_on(
    server: AttachServerChild, place: Place, worker: Child
) -> None:
    row = attach(worker, place, name("one"))
    other = attach(worker, place, name("two"))
    reserve(server, row, 1)
    assert worker.ask("goodbye", session=name("one"))
    assert server.event("gone")["row"] == row
    assert rows_of(server) == {other: False}
    assert pool_bytes(server, "reserved") == 0


def test_a_stopping_server_tells_its_processes(
    server: AttachServerChild, place: Place, worker: Child
) -> None:
    attach(worker, place, name("one"))
    assert not worker.ask("server_closed", session=name("one"))
    server.finish()
    assert worker.ask("wait_server_closed", session=name("one"))
    assert not (place.socket_dir / "attach.sock").exists()


# --- the server's absence and return -------------------------------------------------------------------------


def test_without_a_server_attach_is_unavailable_and_leaves_nothing(place: Place, worker: Child) -> None:
    with pytest.raises(ChildError, match="unavailable"):
        attach(worker, place, name("one"))
    place.socket_dir.mkdir(mode=0o700)
    with pytest.raises(ChildError, match="unavailable"):
        attach(worker, place, name("one"))
    assert worker.ask("open_lock_files") == 0


def test_a_stopped_server_makes_attach_unavailable_within_its_time(
    server: AttachServerChild, place: Place, worker: Child
) -> None:
    server.signal(signal.SIGSTOP)
    with pytest.raises(ChildError, match="unavailable"):
        attach(worker, place, name("one"), timeout_s=0.2)
    server.signal(signal.SIGCONT)
    attach(worker, place, name("one"))
    assert len(rows_of(server)) == 1


def test_next_server_keeps_what_living_processes_may_touch_until_they_are_quiet(
    place: Place, worker: Child, log: Path
) -> None:
    with AttachServerChild(place, log=log) as first:
        row = attach(worker, place, name("one"))
        worker.ask("map", session=name("one"))
        [extent] = reserve(first, row, 1)["extents"]
        first.kill()
    assert worker.ask("wait_server_closed", session=name("one"))
    with AttachServerChild(place, log=log) as second:
        assert second.start["adopted"] and second.start["epoch"] > first.start["epoch"]
        assert rows_of(second) == {row: True}
        assert pool_bytes(second, "quarantined") == RECORD_BYTES
        worker.ask("write", session=name("one"), offset=extent[0], data=b64(b"late write"))
        assert attach(worker, place, name("one")) == row
        assert second.event("attached")["resumed"]
        assert worker.ask("open_lock_files") == 1
        assert pool_bytes(second, "quarantined") == RECORD_BYTES
        second.ask("quiesced", row=row)
        assert pool_bytes(second, "quarantined") == 0
        second.ask("validate")
        assert second.events == []


def test_next_server_frees_what_the_dead_left_before_it_listens(
    place: Place, worker: Child, log: Path
) -> None:
    with AttachServerChild(place, log=log) as first:
        row = attach(worker, place, name("one"))
        reserve(first, row, 1)
        first.signal(signal.SIGSTOP)
        worker.kill()
        first.kill()
    with AttachServerChild(place, log=log) as second:
        gone = second.event("gone")
        assert (gone["row"], gone["known"]) == (row, False)
        assert rows_of(second) == {}
        assert pool_bytes(second, "quarantined") == 0


@pytest.mark.parametrize("attach_again", [False, True])
def test_an_old_process_that_dies_later_is_noticed(
    place: Place, worker: Child, log: Path, attach_again: bool
) -> None:
    with AttachServerChild(place, log=log) as first:
        row = attach(worker, place, name("one"))
        reserve(first, row, 1)
        first.kill()
    with AttachServerChild(place, log=log) as second:
        if attach_again:
            attach(worker, place, name("one"))
        assert rows_of(second).keys() == {row}
        assert pool_bytes(second, "quarantined") == RECORD_BYTES
        worker.kill()
        assert second.event("gone")["row"] == row
        until(lambda: rows_of(second) == {})
        assert pool_bytes(second, "quarantined") == 0


def restarted_while_it_dies(
    place: Place, log: Path, servers: contextlib.ExitStack, **request: Any
) -> tuple[AttachServerChild, int]:
    """A server, and the row of a process that reserved two extents and died between it and the server before."""
    with AttachServerChild(place, log=log) as first, new_worker(log) as worker:
        row = attach(worker, place, name("one"), **request)
        reserve(first, row, 1, 2)
        first.kill()
        worker.kill()
    second = servers.enter_context(AttachServerChild(place, log=log))
    assert second.event("gone")["row"] == row
    return second, row


def test_what_the_device_of_a_process_that_died_unseen_may_write_is_kept_until_somebody_clears_it(
    place: Place, log: Path
) -> None:
    with contextlib.ExitStack() as servers:
        second, row = restarted_while_it_dies(place, log, servers, registers_memory=True)
        kept = {"row": row, "session": name("one"), "kept_bytes": 2 * RECORD_BYTES}
        until(lambda: second.ask("stranded") == [kept])
        assert second.ask("stats")["stranded_bytes"] == 2 * RECORD_BYTES
        assert pool_bytes(second, "quarantined") == 2 * RECORD_BYTES
        second.kill()
        with AttachServerChild(place, log=log) as third, new_worker(log) as other:
            until(lambda: third.ask("stranded") == [kept])
            assert pool_bytes(third, "quarantined") == 2 * RECORD_BYTES
            with pytest.raises(ChildError, match="choose another") as caught:
                attach(other, place, name("one"))
            assert (caught.value.code, caught.value.field) == ("refused", "session")
            assert attach(other, place, name("two")) != row
            third.ask("clear_stranded", sessions=[name("one"), name("two")])
            assert third.event("cleared")["rows"] is None
            assert pool_bytes(third, "quarantined") == 2 * RECORD_BYTES
            third.ask("clear_stranded", sessions=[name("one")])
            assert third.event("cleared")["rows"] == [row]
            assert pool_bytes(third, "quarantined") == 0
            assert third.ask("stranded") == []
            assert row not in rows_of(third)
            third.ask("validate")


def test_only_registered_memory_strands(place: Place, log: Path) -> None:
    with contextlib.ExitStack() as servers:
        second, _ = restarted_while_it_dies(place, log, servers)
        until(lambda: rows_of(second) == {})
        assert (second.ask("stranded"), pool_bytes(second, "quarantined")) == ([], 0)


@pytest.mark.parametrize("end", ["kill", "goodbye"])
def test_an_end_that_the_server_sees_strands_nothing(place: Place, log: Path, end: str) -> None:
    with AttachServerChild(place, log=log) as first, new_worker(log) as worker:
        row = attach(worker, place, name("one"), registers_memory=True)
        reserve(first, row, 1)
        first.kill()
        with AttachServerChild(place, log=log) as second:
            attach(worker, place, name("one"), registers_memory=True)
            assert pool_bytes(second, "quarantined") == RECORD_BYTES
            worker.kill() if end == "kill" else worker.ask("goodbye", session=name("one"))
            assert second.event("gone")["row"] == row
            until(lambda: rows_of(second) == {})
            assert (second.ask("stranded"), pool_bytes(second, "quarantined")) == ([], 0)


def test_an_old_session_is_no_other_process_to_have(place: Place, worker: Child, log: Path) -> None:
    with AttachServerChild(place, log=log) as first:
        row = attach(worker, place, name("one"))
        first.kill()
    with AttachServerChild(place, log=log) as second, new_worker(log) as thief:
        with pytest.raises(ChildError) as caught:
            attach(thief, place, name("one"))
        assert (caught.value.code, caught.value.field) == ("not_permitted", "session")
        assert rows_of(second) == {row: True}
        assert attach(worker, place, name("one")) == row


def test_a_failed_return_of_an_old_session_frees_nothing(place: Place, log: Path) -> None:
    with AttachServerChild(place, log=log) as first, new_worker(log) as worker:
        row = attach(worker, place, b64(b"raw".ljust(16, b".")))
        reserve(first, row, 1)
        first.kill()
        with AttachServerChild(place, log=log) as second:
            # It claims its row again and breaks off before it says that it has the lock.
            assert refusal(worker, place, [GOOD], ["self"]).row == row
            until(lambda: second.ask("stats")["pending"] == 0)
            assert rows_of(second).keys() == {row}
            assert pool_bytes(second, "quarantined") == RECORD_BYTES
            worker.kill()
            assert second.event("gone")["row"] == row
            until(lambda: rows_of(second) == {})


def test_processes_of_a_replaced_segment_come_over_to_the_new_one(
    place: Place, worker: Child, log: Path
) -> None:
    with AttachServerChild(place, log=log) as first:
        attach(worker, place, name("one"))
        worker.ask("map", session=name("one"))
        worker.ask("write", session=name("one"), offset=0, data=b64(b"old bytes"))
        first.kill()
    with AttachServerChild(place, log=log, extents_bytes=32 << 20) as second:
        assert not second.start["adopted"]
        assert rows_of(second) == {}
        attach(worker, place, name("one"))
        assert worker.ask("open_lock_files") == 2
        assert len(worker.ask("locks")) == 2
        # What it had mapped is neither truncated nor changed.
        assert worker.ask("read", session=name("one"), offset=0, length=9) == b64(b"old bytes")


def test_second_server_on_one_place_is_refused_naming_who_holds_it(
    server: AttachServerChild, place: Place, worker: Child, log: Path
) -> None:
    attach(worker, place, name("one"))
    for other in (place, place._replace(socket_dir=place.socket_dir.with_name("other"))):
        with pytest.raises(ChildEnded, match=rf"SegmentError: .* in use by server process {server.pid};"):
            AttachServerChild(other, log=log)
    assert not worker.ask("server_closed", session=name("one"))
    server.ask("validate")
