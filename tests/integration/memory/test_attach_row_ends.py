"""What ends the row of an attached process, what is free then, and what the next server keeps of it."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.attach_scene import (
    GOOD_REQUEST,
    RECORD_BYTES,
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
from tests.harness.child import ChildError

pytestmark = pytest.mark.integration


def test_a_stopping_server_tells_its_processes(server, place, worker):
    attach(worker, place, session_name("one"))
    assert not worker.ask("server_closed", session=session_name("one"))
    server.finish()
    assert worker.ask("wait_server_closed", session=session_name("one"))
    assert not (place.socket_dir / "rpc.sock").exists()


def test_a_stopped_server_makes_attach_unavailable_within_its_time(server, place, worker):
    server.signal(signal.SIGSTOP)
    with pytest.raises(ChildError, match="unavailable"):
        attach(worker, place, session_name("one"), timeout_s=0.2)
    server.signal(signal.SIGCONT)
    attach(worker, place, session_name("one"))
    assert len(rows_of(server)) == 1


def server_restarted_after_unseen_death(
    place: Place, log: Path, servers: contextlib.ExitStack, **request: Any
) -> tuple[AttachServerChild, int]:
    """(A server, the row of a process that had reserved two extents and died before this server started)."""
    with AttachServerChild(place, log=log) as first, new_worker(log) as worker:
        row = attach(worker, place, session_name("one"), **request)
        reserve(first, row, 1, 2)
        first.kill()
        worker.kill()
    second = servers.enter_context(AttachServerChild(place, log=log))
    assert second.event("gone")["row"] == row
    return second, row


def test_extents_that_a_dead_processs_device_may_write_are_kept_until_an_admin_clears_them(place, log):
    with contextlib.ExitStack() as servers:
        second, row = server_restarted_after_unseen_death(place, log, servers, registers_memory=True)
        kept = {"row": row, "session": session_name("one"), "kept_bytes": 2 * RECORD_BYTES}
        until(lambda: second.ask("stranded") == [kept])
        assert second.ask("stats")["stranded_bytes"] == 2 * RECORD_BYTES
        assert pool_bytes(second, "quarantined") == 2 * RECORD_BYTES
        second.kill()
        with AttachServerChild(place, log=log) as third, new_worker(log) as other:
            until(lambda: third.ask("stranded") == [kept])
            assert pool_bytes(third, "quarantined") == 2 * RECORD_BYTES
            with pytest.raises(ChildError, match="choose another") as caught:
                attach(other, place, session_name("one"))
            assert (caught.value.code, caught.value.field) == ("refused", "session")
            assert attach(other, place, session_name("two")) != row
            third.ask("clear_stranded", sessions=[session_name("one"), session_name("two")])
            assert third.event("cleared")["rows"] is None
            assert pool_bytes(third, "quarantined") == 2 * RECORD_BYTES
            third.ask("clear_stranded", sessions=[session_name("one")])
            assert third.event("cleared")["rows"] == [row]
            assert pool_bytes(third, "quarantined") == 0
            assert third.ask("stranded") == []
            assert row not in rows_of(third)
            third.ask("validate")


@pytest.mark.long
def test_only_extents_of_registered_memory_are_stranded(place: Place, log: Path) -> None:
    with contextlib.ExitStack() as servers:
        second, _ = server_restarted_after_unseen_death(place, log, servers)
        until(lambda: rows_of(second) == {})
        assert (second.ask("stranded"), pool_bytes(second, "quarantined")) == ([], 0)


@pytest.mark.parametrize("end", ["kill", pytest.param("goodbye", marks=pytest.mark.long)])
def test_a_death_or_goodbye_that_the_server_sees_strands_nothing(place: Place, log: Path, end: str) -> None:
    with AttachServerChild(place, log=log) as first, new_worker(log) as worker:
        row = attach(worker, place, session_name("one"), registers_memory=True)
        reserve(first, row, 1)
        first.kill()
        with AttachServerChild(place, log=log) as second:
            attach(worker, place, session_name("one"), registers_memory=True)
            assert pool_bytes(second, "quarantined") == RECORD_BYTES
            worker.kill() if end == "kill" else worker.ask("goodbye", session=session_name("one"))
            assert second.event("gone")["row"] == row
            until(lambda: rows_of(second) == {})
            assert (second.ask("stranded"), pool_bytes(second, "quarantined")) == ([], 0)


@pytest.mark.long
def test_another_process_cannot_take_a_session_from_before_the_restart(place, worker, log):
    with AttachServerChild(place, log=log) as first:
        row = attach(worker, place, session_name("one"))
        first.kill()
    with AttachServerChild(place, log=log) as second, new_worker(log) as thief:
        with pytest.raises(ChildError) as caught:
            attach(thief, place, session_name("one"))
        assert (caught.value.code, caught.value.field) == ("not_permitted", "session")
        assert rows_of(second) == {row: True}
        assert attach(worker, place, session_name("one")) == row


@pytest.mark.long
def test_a_session_that_fails_to_attach_again_loses_nothing(place: Place, log: Path) -> None:
    with AttachServerChild(place, log=log) as first, new_worker(log) as worker:
        row = attach(worker, place, b64(b"raw".ljust(16, b".")))
        reserve(first, row, 1)
        first.kill()
        with AttachServerChild(place, log=log) as second:
            # The worker claims its row again and breaks off before it reports that it holds the lock.
            assert raw_reply(worker, place, [GOOD_REQUEST], ["self"]).row == row
            until(lambda: second.ask("stats")["pending"] == 0)
            assert rows_of(second).keys() == {row}
            assert pool_bytes(second, "quarantined") == RECORD_BYTES
            worker.kill()
            assert second.event("gone")["row"] == row
            until(lambda: rows_of(second) == {})
