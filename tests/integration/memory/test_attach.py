"""The attach handshake with real processes: who gets in, what a refusal says, and that bad peers keep nobody out."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from kvstrata.memory import linux
from kvstrata.rpc.wire import NO_SESSION, PROTOCOL_VERSION
from kvstrata.types import MAX_SPAN_CHUNKS, SPAN_FACT, Role
from tests.harness.attach_scene import (
    GOOD_REQUEST,
    attach,
    b64,
    encoded_request,
    new_worker,
    raw_reply,
    reserve,
    rows_of,
    session_name,
    until,
)
from tests.harness.attach_server import AttachServerChild, Place
from tests.harness.attach_worker import FACTS, make_request
from tests.harness.cases import case
from tests.harness.child import HANG_S, ChildError

pytestmark = pytest.mark.integration


def test_an_attached_process_shares_the_pool_but_cannot_write_the_index(server, place, worker, log):
    row = attach(worker, place, session_name("one"))
    told = server.event("attached")
    assert (told["row"], told["pid"], told["resumed"]) == (row, worker.pid, False)
    assert worker.ask("try_write_index", session=session_name("one")) == os.strerror(13)
    worker.ask("map", session=session_name("one"))
    extent = reserve(server, row, 1)["extents"][0]
    worker.ask("write", session=session_name("one"), offset=extent[0], data=b64(b"hello"))
    with new_worker(log) as other:
        attach(other, place, session_name("two"))
        other.ask("map", session=session_name("two"))
        assert other.ask("read", session=session_name("two"), offset=extent[0], length=5) == b64(b"hello")


def test_socket_and_files_are_for_this_user_alone(server: AttachServerChild, place: Place) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(place.socket_dir) == mode(place.segment_dir) == 0o700
    assert mode(place.socket_dir / "rpc.sock") == 0o600
    for file in place.segment_dir.iterdir():
        assert mode(file) == 0o600, file


def test_sessions_of_one_process_share_one_descriptor_of_the_lock_file(server, place, worker):
    rows = {attach(worker, place, session_name(text)) for text in ("one", "two", "three")}
    assert len(rows) == 3
    worker.ask("close", session=session_name("one"))
    server.event("detached")
    assert (
        attach(worker, place, session_name("one")) in rows
    )  # refused unless its byte of the lock file stayed locked
    assert worker.ask("open_lock_files") == 1


NESTED = b"\x91" * 20_000 + b"\xc0"
NESTED_FACTS = b"\x82\xa8protocol" + msgspec.msgpack.encode(PROTOCOL_VERSION) + b"\xa5facts" + NESTED
NESTED_UNKNOWN = b"\x82\xa7unknown" + NESTED + b"\xa8protocol" + msgspec.msgpack.encode(PROTOCOL_VERSION)
PART = make_request(session=b"x" * 16).slice
assert PART is not None


BAD_REQUESTS: list[tuple[bytes, list[str], str, str]] = [
    (b"\xc1", ["self"], "bad_request", "request"),
    (NESTED_FACTS, ["self"], "bad_request", "request"),
    (NESTED_UNKNOWN, ["self"], "bad_request", "request"),
    (GOOD_REQUEST[:-7], ["self"], "bad_request", "request"),
    (GOOD_REQUEST + b"x", ["self"], "bad_request", "request"),
    (encoded_request(protocol=PROTOCOL_VERSION + 1), ["self"], "wrong_version", "protocol"),
    (msgspec.msgpack.encode({"protocol": 0}), ["self"], "wrong_version", "protocol"),
    (GOOD_REQUEST, [], "bad_request", "pidfd"),
    (GOOD_REQUEST, ["self", "self"], "bad_request", "pidfd"),
    (GOOD_REQUEST, ["self"] * 9, "bad_request", "pidfd"),
    (GOOD_REQUEST, ["null"], "bad_request", "pidfd"),
    (GOOD_REQUEST, ["thread"], "bad_request", "pidfd"),
    (GOOD_REQUEST, ["parent"], "not_permitted", "pidfd"),
    (encoded_request(session=NO_SESSION), ["self"], "bad_request", "session"),
    (encoded_request(group=NO_SESSION), ["self"], "bad_request", "group"),
    (encoded_request(slice=None), ["self"], "bad_request", "slice"),
    (encoded_request(slice=None, facts=None), ["self"], "bad_request", "slice"),
    (encoded_request(facts=None), ["self"], "bad_request", "facts"),
    (encoded_request(role=Role.SCHEDULER, slice=PART, facts=FACTS), ["self"], "bad_request", "slice"),
    (encoded_request(facts={"payload_bytes": 1, "sections": 1}), ["self"], "bad_request", "slice.layout"),
    (encoded_request(facts={"payload_bytes": 1}), ["self"], "bad_request", "facts.payload_bytes"),
    (
        encoded_request(facts={"payload_bytes": 1, "sections": 2}),
        ["self"],
        "bad_request",
        "facts.payload_bytes",
    ),
    *(
        (encoded_request(facts={**FACTS, SPAN_FACT: span}), ["self"], "bad_request", f"facts.{SPAN_FACT}")
        for span in (True, 0, -1, 2**40, MAX_SPAN_CHUNKS + 1, "x", None, 1.0, [1])
    ),
    (encoded_request(layers=(2, 2)), ["self"], "bad_request", "slice.layers"),
    (encoded_request(engine_slices=0), ["self"], "bad_request", "request"),
]
"""Message, descriptors beside it, and the code and field of the refusal."""


def test_a_bad_request_is_answered_with_what_is_wrong_and_changes_nothing(place, log, worker):
    with AttachServerChild(place, log=log) as server:
        before = server.ask("open_files")
        for message, fds, code, field in BAD_REQUESTS:
            with case(message[:60], fds):
                told = server.ask("stats")["refused"].get(code, 0)
                reply = raw_reply(worker, place, [message], fds)
                assert (reply.code, reply.field) == (code, field), reply.message
                assert reply.message
                until(lambda: server.ask("open_files") == before)
                assert rows_of(server) == {}
                assert server.ask("stats")["refused"][code] == told + 1
        attach(worker, place, session_name("good"))


def test_a_row_whose_lock_nobody_holds_is_never_announced(server, place, worker):
    for after in (b"locked", b"lock", GOOD_REQUEST, b"\x92\xa4ping\x01"):
        assert raw_reply(worker, place, [GOOD_REQUEST, after], ["self"]).code == "bad_request"
    assert raw_reply(worker, place, [GOOD_REQUEST], ["self"]).code == "", (
        "it closes instead of taking the lock"
    )
    until(lambda: rows_of(server) == {})
    assert server.events == []


def test_other_facts_for_the_same_slice_are_refused_with_the_fact_and_both_values(server, place, worker, log):
    attach(worker, place, session_name("one"))
    other_facts = {**FACTS, "sections": [1024, 3072]}
    with new_worker(log) as other:
        with pytest.raises(ChildError) as caught:
            attach(other, place, session_name("two"), facts=other_facts)
        assert (caught.value.code, caught.value.field) == ("layout_refused", "facts.sections")
        assert "[1024, 3072]" in caught.value.message and "[2048, 2048]" in caught.value.message
        # Another slice of the KV, or another model, has facts of its own.
        attach(other, place, session_name("two"), facts=other_facts, layers=[2, 4])
        attach(
            other,
            place,
            session_name("three"),
            facts=other_facts,
            model="n",
            group=session_name("other engine"),
        )
        # Once the last process with the old facts has ended, processes with new facts may attach.
        assert worker.ask("goodbye", session=session_name("one"))
        attach(other, place, session_name("four"), facts=other_facts)


def test_another_process_cannot_take_the_session_of_a_living_one(server, place, worker, log):
    row = attach(worker, place, session_name("one"))
    with new_worker(log) as other:
        for connected in (True, False):
            with pytest.raises(ChildError, match="belongs to another living process") as caught:
                attach(other, place, session_name("one"))
            assert (caught.value.code, caught.value.field) == ("not_permitted", "session")
            assert other.ask("open_lock_files") == 0
            if connected:
                worker.ask("close", session=session_name("one"))
                server.event("detached")
    assert attach(worker, place, session_name("one")) == row


@pytest.mark.long
def test_a_server_without_free_descriptors_serves_again_when_it_has_some(place, log, worker):
    under = ("prlimit", "--nofile=48:48")
    with AttachServerChild(place, log=log, under=under, limits={"pending": 1000}) as server:
        attach(worker, place, session_name("one"))
        with contextlib.ExitStack() as stack:
            for _ in range(60):  # connections that are not accepted wait in the socket's queue
                silent = stack.enter_context(socket.socket(socket.AF_UNIX))
                linux.connect(silent, os.fspath(place.socket_dir / "rpc.sock"), HANG_S)
            until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) == 48)
            assert rows_of(server).keys() == {1}
        attach(worker, place, session_name("two"), timeout_s=HANG_S)
        assert not worker.ask("server_closed", session=session_name("one"))
