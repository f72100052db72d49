"""The attach handshake with real processes: who gets in, what a refusal says, what ends a row, and what is kept of it.

A bad peer keeps nobody out.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstrata.errors import KvstrataError, Unavailable
from kvstrata.memory import linux
from kvstrata.rpc.wire import NO_SESSION, PROTOCOL_VERSION
from kvstrata.types import MAX_SPAN_CHUNKS, SPAN_FACT, Role
from tests.harness.cache_engine import eventually
from tests.harness.cases import case
from tests.harness.child import HANG_S, Child, ChildError
from tests.harness.raw_line import lock_files, raw_attach
from tests.harness.rpc_client import FACTS, RpcClient, layout, part
from tests.harness.server_process import ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture
def server(start) -> ServerProcess:
    made: ServerProcess = start()
    return made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[RpcClient]:
    with RpcClient(server.socket_dir) as client:
        yield client


@pytest.fixture
def other(server: ServerProcess, tmp_path: Path) -> Iterator[Child]:
    """Another process that can attach."""
    with Child("tests.harness.rpc_child", log=tmp_path / "other.log") as child:
        yield child


def attach(child: Child, server: ServerProcess, session: str = "", **more: Any) -> tuple[str, int]:
    name, row = child.ask("attach", socket_dir=str(server.socket_dir), session=session, **more)
    return name, row


def numbers(server: ServerProcess, **wanted: int) -> bool:
    """Whether these are the numbers of its rows and sessions."""
    status = server.get("/v1/status")
    return wanted.items() <= (status["attach"] | status["sessions"]).items()


def nobody(server: ServerProcess) -> bool:
    return numbers(server, attached=0, detached=0, old_rows=0, pending=0)


def quarantined(server: ServerProcess) -> int:
    return int(server.get("/v1/status")["pool"]["quarantined_bytes"])


def test_an_attached_process_cannot_write_the_index(client):
    with pytest.raises(PermissionError):
        mmap.mmap(client.attachment.index_fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_socket_and_files_are_for_this_user_alone(server: ServerProcess) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(server.socket_dir) == mode(server.segment_dir) == 0o700
    assert mode(server.socket_dir / "rpc.sock") == 0o600
    for file in server.segment_dir.iterdir():
        assert mode(file) == 0o600, file


def test_sessions_of_one_process_share_one_descriptor_of_the_lock_file(server):
    before = lock_files()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RpcClient(server.socket_dir)) for _ in range(3)]
        rows = {each.attachment.row for each in clients}
        assert len(rows) == 3
        clients[0].detach()
        eventually("it is detached", lambda: numbers(server, detached=1))
        assert clients[0].attach().row in rows, "its byte of the lock file stayed locked"
        assert lock_files() == before + 1


GOOD = RpcClient(Path(), role=Role.WORKER).attach_request()
PART = part()


def encoded(**change: Any) -> bytes:
    """A good request with some fields changed."""
    return msgspec.msgpack.encode(msgspec.structs.replace(GOOD, **change))


NESTED = b"\x91" * 20_000 + b"\xc0"
NESTED_FACTS = b"\x82\xa8protocol" + msgspec.msgpack.encode(PROTOCOL_VERSION) + b"\xa5facts" + NESTED
NESTED_UNKNOWN = b"\x82\xa7unknown" + NESTED + b"\xa8protocol" + msgspec.msgpack.encode(PROTOCOL_VERSION)
BAD_REQUESTS: list[tuple[bytes, list[str], str, str]] = [
    (b"\xc1", ["self"], "bad_request", "request"),
    (NESTED_FACTS, ["self"], "bad_request", "request"),
    (NESTED_UNKNOWN, ["self"], "bad_request", "request"),
    (encoded()[:-7], ["self"], "bad_request", "request"),
    (encoded() + b"x", ["self"], "bad_request", "request"),
    (encoded(protocol=PROTOCOL_VERSION + 1), ["self"], "wrong_version", "protocol"),
    (msgspec.msgpack.encode({"protocol": 0}), ["self"], "wrong_version", "protocol"),
    (encoded(), [], "bad_request", "pidfd"),
    (encoded(), ["self", "self"], "bad_request", "pidfd"),
    (encoded(), ["self"] * 9, "bad_request", "pidfd"),
    (encoded(), ["null"], "bad_request", "pidfd"),
    (encoded(), ["thread"], "bad_request", "pidfd"),
    (encoded(), ["parent"], "not_permitted", "pidfd"),
    (encoded(session=NO_SESSION), ["self"], "bad_request", "session"),
    (encoded(group=NO_SESSION), ["self"], "bad_request", "group"),
    (encoded(slice=None), ["self"], "bad_request", "slice"),
    (encoded(slice=None, facts=None), ["self"], "bad_request", "slice"),
    (encoded(facts=None), ["self"], "bad_request", "facts"),
    (encoded(role=Role.SCHEDULER), ["self"], "bad_request", "slice"),
    (encoded(facts={"payload_bytes": 1, "sections": 1}), ["self"], "bad_request", "slice.layout"),
    (encoded(facts={"payload_bytes": 1}), ["self"], "bad_request", "facts.payload_bytes"),
    (encoded(facts={"payload_bytes": 1, "sections": 2}), ["self"], "bad_request", "facts.payload_bytes"),
    *(
        (encoded(facts={**FACTS, SPAN_FACT: span}), ["self"], "bad_request", f"facts.{SPAN_FACT}")
        for span in (True, 0, -1, 2**40, MAX_SPAN_CHUNKS + 1, "x", None, 1.0, [1])
    ),
    (
        encoded(slice=msgspec.structs.replace(PART, layers=(2, 2))),
        ["self"],
        "bad_request",
        "slice.layers",
    ),
    (encoded(engine_slices=0), ["self"], "bad_request", "request"),
]
"""Message, descriptors beside it, and the code and field of the refusal."""


def test_a_bad_request_is_answered_with_what_is_wrong_and_changes_nothing(server):
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{server.pid}/fd"))

    eventually("the rows of the tests before are free", lambda: nobody(server))
    before = descriptors()
    for message, fds, code, field in BAD_REQUESTS:
        with case(message[:60], fds):
            told = server.get("/v1/status")["attach"]["refused"].get(code, 0)
            reply = raw_attach(server.socket_dir, [message], fds)
            assert (reply.code, reply.field) == (code, field), reply.message
            assert reply.message
            eventually("its descriptors are closed", lambda: descriptors() <= before)
            eventually("it has no row", lambda: nobody(server))
            assert server.get("/v1/status")["attach"]["refused"][code] == told + 1
    with RpcClient(server.socket_dir):
        pass


def test_a_row_whose_lock_nobody_holds_is_never_announced(server):
    with RpcClient(server.socket_dir) as good:
        row = good.attachment.row
    for after in (b"locked", b"lock", encoded(), b"\x92\xa4ping\x01"):
        assert raw_attach(server.socket_dir, [encoded(), after]).code == "bad_request"
        assert server.get("/v1/status")["peers"] == []
    assert raw_attach(server.socket_dir, [encoded()]).code == "", "it closes instead of taking the lock"
    eventually("the rows are free", lambda: nobody(server))
    assert good.attach().row == row
    good.goodbye()


def test_other_facts_for_the_same_slice_are_refused_with_the_fact_and_both_values(server, client):
    facts = {**FACTS, "sections": [10_000, 50_000]}

    def attached(**more: Any) -> None:
        with RpcClient(server.socket_dir, **{"group": client.group, "facts": facts, **more}):
            pass

    with pytest.raises(KvstrataError) as caught:
        attached()
    assert (caught.value.code, caught.value.field) == ("layout_refused", "facts.sections")
    assert "[10000, 50000]" in caught.value.message and "[20000, 40000]" in caught.value.message
    # Another slice of the KV, or another model, has facts of its own.
    attached(slice_held=part(8, 16, facts))
    attached(identity=layout("n"), group=b"other engine".ljust(16))
    # Once the last process with the old facts has ended, processes with new facts may attach.
    client.goodbye()
    attached()


def test_another_process_cannot_take_the_session_of_a_living_one(server, client, other):
    row = client.attachment.row
    for connected in (True, False):
        with pytest.raises(ChildError, match="belongs to another living process") as caught:
            attach(other, server, client.session.hex())
        assert (caught.value.code, caught.value.field) == ("not_permitted", "session")
        assert other.ask("lock_files") == 0
        if connected:
            client.detach()
            eventually("it is detached", lambda: numbers(server, detached=1))
    assert client.attach().row == row


@pytest.mark.long
def test_a_server_without_free_descriptors_serves_again_when_it_has_some(server):
    with RpcClient(server.socket_dir) as client:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (64, 64))
        with contextlib.ExitStack() as stack:
            for _ in range(90):  # connections that are not accepted wait in the socket's queue
                silent = stack.enter_context(socket.socket(socket.AF_UNIX))
                linux.connect(silent, os.fspath(server.socket_dir / "rpc.sock"), HANG_S)
            eventually("it has none left", lambda: len(os.listdir(f"/proc/{server.pid}/fd")) == 64)
        with RpcClient(server.socket_dir) as second:
            second.ping()
        client.ping()


def test_a_stopping_server_tells_its_processes(server):
    client = RpcClient(server.socket_dir)
    client.attach()
    assert server.stop() == 0
    with pytest.raises(ConnectionError):
        client.receive_bytes()
    assert not (server.socket_dir / "rpc.sock").exists()
    client.close()


def test_a_stopped_server_makes_attach_unavailable_within_its_time(server):
    client = RpcClient(server.socket_dir)
    with server.frozen(), pytest.raises(Unavailable):
        client.attach(timeout_s=0.2)
    with client:
        assert numbers(server, attached=1)


@pytest.mark.long
def test_only_extents_of_registered_memory_are_stranded(server, other):
    session, _ = attach(other, server)
    other.ask("reserve", session=session, n_chunks=1)
    server.kill()
    other.kill()
    server.start()
    eventually("the row ends", lambda: nobody(server))
    assert numbers(server, stranded=0) and not quarantined(server)


@pytest.mark.parametrize("end", ["kill", pytest.param("goodbye", marks=pytest.mark.long)])
def test_a_death_or_goodbye_that_the_server_sees_strands_nothing(server, other, end):
    session, row = attach(other, server, registers_memory=True)
    other.ask("reserve", session=session, n_chunks=1)
    server.kill()
    server.start()
    assert attach(other, server, session) == (session, row)
    assert quarantined(server)
    other.kill() if end == "kill" else other.ask("goodbye", session=session)
    eventually("the row ends", lambda: nobody(server))
    assert numbers(server, stranded=0) and not quarantined(server)


@pytest.mark.long
def test_another_process_cannot_take_a_session_from_before_the_restart(server, client, other):
    row = client.attachment.row
    server.kill()
    server.start()
    with pytest.raises(ChildError) as caught:
        attach(other, server, client.session.hex())
    assert (caught.value.code, caught.value.field) == ("not_permitted", "session")
    assert numbers(server, old_rows=1)
    assert client.attach().row == row


@pytest.mark.long
def test_a_session_that_fails_to_attach_again_loses_nothing(server, other):
    session, row = attach(other, server)
    other.ask("reserve", session=session, n_chunks=1)
    server.kill()
    server.start()
    # The process claims its row again and breaks off before it reports that it holds the lock.
    raw = other.ask("raw", socket_dir=str(server.socket_dir), session=session, fds=["self"])
    assert raw == ["", "", row]
    eventually("the claim is undone", lambda: numbers(server, pending=0, old_rows=1))
    assert quarantined(server)
    other.kill()
    eventually("the row ends", lambda: nobody(server))
    assert not quarantined(server)
