"""Rows of attached processes; the test controls the pool, the connection and the locks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Iterator

import pytest

from kvstrata.errors import NotPermitted
from kvstrata.memory import linux
from kvstrata.rpc import wire
from kvstrata.server import rows as attach_rows
from kvstrata.server.rows import Owner, Rows, RowState, SessionRow
from kvstrata.types import Role
from tests.harness.rpc_client import layout

PID = 4711


class Pool:
    """It gives out the row that the test names."""

    def __init__(self) -> None:
        self.freed = threading.Event()
        self.row = 1

    def rows(self) -> list:
        return []

    def claim_row(self, session: bytes, group: bytes, pid: int, registers_memory: bool) -> int:
        return self.row

    def row_gone(self, row: int) -> None:
        self.freed.set()


class Hooks:
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_attached(self, session: SessionRow) -> None:
        self.tenants = session.tenants
        self.said.append(f"attached {session.session[:1].decode()}")

    def on_detached(self, session: SessionRow) -> None:
        self.said.append(f"detached {session.session[:1].decode()}")

    async def on_gone(self, session: SessionRow) -> None:
        self.said.append(f"gone {session.session[:1].decode()}")


class Speaker:
    def __init__(self) -> None:
        self.credentials = linux.SocketCredentials(PID, os.geteuid())
        self.let_go_with: list[bool] = []

    def let_go(self, *, ok: bool) -> None:
        self.let_go_with.append(ok)


class Locks:
    """The process that locks the byte of row 1."""

    locker: int | None = None


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    locks = Locks()
    monkeypatch.setattr(attach_rows.linux, "byte_locker", lambda fd, byte: locks.locker)
    return locks


def claim(
    rows: Rows, name: bytes, speaker: Speaker, tenants: frozenset[str] | None = None, token: str = ""
) -> Owner:
    request = wire.AttachRequest(
        protocol=wire.PROTOCOL_VERSION,
        session=name * 16,
        group=b"g" * 16,
        role=Role.SCHEDULER,
        layout=layout(),
        engine_slices=1,
        token=token,
    )
    return rows.claim(request, tenants, os.eventfd(0, os.EFD_CLOEXEC), speaker)


@pytest.fixture
def lane() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(1) as lane:
        yield lane


async def test_a_row_that_the_pool_has_freed_is_claimed_again_before_its_end_is_noticed(
    locks: Locks, lane: concurrent.futures.ThreadPoolExecutor
) -> None:
    pool, hooks, old, new = Pool(), Hooks(), Speaker(), Speaker()
    rows = Rows(pool, -1, hooks, 1.0, lane)
    await rows.start()
    first = claim(rows, b"a", old)
    locks.locker = PID
    rows.locked(first)
    locks.locker = None
    rows.bye(first)
    await asyncio.sleep(0)  # the end begins, on the lane
    assert pool.freed.wait(10.0), "the lane frees the row while the loop stands still"
    second = claim(rows, b"b", new)
    await asyncio.gather(*rows._tasks)
    locks.locker = PID
    rows.locked(second)
    assert hooks.said == ["attached a", "gone a", "attached b"]
    assert old.let_go_with == [True] and new.let_go_with == []
    assert rows.count(RowState.ATTACHED) == 1
    rows.forget_owners()
    await rows.ended()


async def test_a_connection_that_no_longer_speaks_for_its_row_detaches_nothing(
    locks: Locks, lane: concurrent.futures.ThreadPoolExecutor
) -> None:
    hooks, earlier, later = Hooks(), Speaker(), Speaker()
    rows = Rows(Pool(), -1, hooks, 1.0, lane)
    await rows.start()
    owner = claim(rows, b"a", earlier)
    locks.locker = PID
    rows.locked(owner)
    assert claim(rows, b"a", later) is owner and earlier.let_go_with == [False]
    rows.lost(owner, earlier)
    assert hooks.said == ["attached a"]
    rows.lost(owner, later)
    assert hooks.said == ["attached a", "detached a"]
    rows.forget_owners()
    await rows.ended()


async def test_processes_of_an_engine_attach_again_one_by_one_after_their_token_opens_other_tenants(
    locks: Locks, lane: concurrent.futures.ThreadPoolExecutor
) -> None:
    pool, hooks = Pool(), Hooks()
    rows = Rows(pool, -1, hooks, 1.0, lane)
    await rows.start()
    locks.locker = PID
    for name in (b"a", b"b"):
        rows.locked(claim(rows, name, Speaker(), frozenset({"blue", "azure"}), "token"))
        pool.row += 1
    for name in (b"a", b"b"):
        rows.locked(claim(rows, name, Speaker(), frozenset({"blue"}), "token"))
        assert hooks.tenants == {"blue"}
    with pytest.raises(NotPermitted, match="group: its processes may use other tenants"):
        claim(rows, b"c", Speaker(), frozenset({"green"}), "another")
    rows.forget_owners()
    await rows.ended()
