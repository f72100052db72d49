"""Workers in containers: other user, PID, IPC, network and mount namespaces, and one shared socket directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.memory import linux
from tests.harness import namespaces
from tests.harness.attach_scene import (
    GOOD_REQUEST,
    attach,
    b64,
    new_worker,
    pool_bytes,
    raw_reply,
    reserve,
    rows_of,
    session_name,
    until,
)
from tests.harness.attach_server import AttachServerChild, Place
from tests.harness.child import Child, ChildError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-"),
]

CONTAINER = (*namespaces.CONTAINER, *namespaces.hidden_shm())


@pytest.fixture
def contained(log: Path) -> Iterator[Child]:
    """A worker in namespaces of its own; /dev/shm is another one there."""
    with new_worker(log, under=CONTAINER) as worker:
        yield worker


def test_worker_in_other_namespaces_attaches_maps_and_is_seen_to_die(place, log, contained):
    with AttachServerChild(place, log=log) as server:
        assert contained.pid != contained.outer_pid()
        row = attach(contained, place, session_name("one"))
        assert server.event("attached")["pid"] == contained.outer_pid()
        contained.ask("map", session=session_name("one"))
        [extent] = reserve(server, row, 1)["extents"]
        contained.ask("write", session=session_name("one"), offset=extent[0], data=b64(b"from a container"))
        with new_worker(log) as outside:
            attach(outside, place, session_name("two"))
            outside.ask("map", session=session_name("two"))
            assert outside.ask("read", session=session_name("two"), offset=extent[0], length=16) == b64(
                b"from a container"
            )
        server.event("gone")
        contained.kill()
        assert server.event("gone")["row"] == row
        until(lambda: rows_of(server) == {})
        assert pool_bytes(server, "reserved") == 0


@pytest.mark.long
def test_server_restart_finds_the_lock_of_a_worker_in_other_namespaces(place, log, contained):
    with AttachServerChild(place, log=log) as first:
        row = attach(contained, place, session_name("one"))
        reserve(first, row, 1)
        first.kill()
    with AttachServerChild(place, log=log) as second:
        assert rows_of(second) == {row: True}
        assert attach(contained, place, session_name("one")) == row
        second.ask("quiesced", row=row)
        assert pool_bytes(second, "quarantined") == 0


def test_server_and_worker_in_sibling_containers(place: Place, log: Path, contained: Child) -> None:
    """Neither sees the other's process number: pidfd and lock must do without."""
    # The server keeps the host's /dev/shm: only workers have another one.
    with AttachServerChild(place, log=log, under=namespaces.CONTAINER) as first:
        row = attach(contained, place, session_name("one"))
        assert first.event("attached")["pid"] == 0
        contained.ask("map", session=session_name("one"))
        reserve(first, row, 1)
        with new_worker(log, under=CONTAINER) as thief:
            with pytest.raises(ChildError, match="not_permitted"):
                attach(thief, place, session_name("one"))
            attach(thief, place, session_name("two"))
        until(lambda: rows_of(first).keys() == {row})
        first.kill()
    with AttachServerChild(place, log=log, under=namespaces.CONTAINER) as second:
        assert rows_of(second) == {row: True}
        assert attach(contained, place, session_name("one")) == row
        second.event("attached")
        contained.kill()
        assert second.event("gone")["row"] == row
        until(lambda: rows_of(second) == {})
        assert pool_bytes(second, "quarantined") == 0


@pytest.mark.long
def test_pidfd_of_another_invisible_process_is_told_from_the_peers(place, log, contained):
    own = os.pidfd_open(os.getpid())
    parent = os.pidfd_open(os.getppid())
    try:
        if linux.same_process(own, parent) is None:
            pytest.skip("before Linux 6.9 pidfds of different processes cannot be told apart")
    finally:
        linux.close_all([own, parent])
    child = contained.ask("fork")
    with AttachServerChild(place, log=log, under=namespaces.CONTAINER) as server:
        reply = raw_reply(contained, place, [GOOD_REQUEST], [f"pid:{child}"])
        assert (reply.code, reply.field) == ("not_permitted", "pidfd")
        assert raw_reply(contained, place, [GOOD_REQUEST], ["self"]).code == ""
        until(lambda: rows_of(server) == {})
