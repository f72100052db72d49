"""Rows of attached processes; the test controls the pool, the connection and the locks."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from kvstrata.errors import NotPermitted
from kvstrata.memory import linux
from kvstrata.rpc import wire
from kvstrata.server import processes
from kvstrata.server.processes import Process, Processes, Readiness, RowState, TenantTokens
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


class Requests:
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_attached(self, process: Process) -> None:
        self.said.append(f"attached {process.session[:1].decode()}")

    async def on_gone(self, process: Process) -> None:
        self.said.append(f"gone {process.session[:1].decode()}")


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
    monkeypatch.setattr(processes.linux, "byte_locker", lambda fd, byte: locks.locker)
    return locks


async def a_table(requests: Requests, pool: Pool, tokens: TenantTokens | None = None) -> Processes:
    table = Processes(pool, 1, tokens or TenantTokens(), Readiness())  # type: ignore[arg-type]
    await table.start(requests, -1)  # type: ignore[arg-type]
    return table


def claim(table: Processes, name: bytes, speaker: Speaker, token: str = "") -> Process:
    request = wire.AttachRequest(
        protocol=wire.PROTOCOL_VERSION,
        session=name * 16,
        group=b"g" * 16,
        role=Role.SCHEDULER,
        layout=layout(),
        engine_slices=1,
        token=token,
    )
    return table.claim(request, os.eventfd(0, os.EFD_CLOEXEC), speaker)  # type: ignore[arg-type]


async def test_a_row_that_the_pool_has_freed_is_claimed_again_before_its_end_is_noticed(locks: Locks) -> None:
    pool, requests, old, new = Pool(), Requests(), Speaker(), Speaker()
    table = await a_table(requests, pool)
    first = claim(table, b"a", old)
    locks.locker = PID
    table.locked(first)
    locks.locker = None
    table.bye(first)
    await asyncio.sleep(0)  # the end begins, on a thread
    assert pool.freed.wait(10.0), "the thread frees the row while the loop stands still"
    second = claim(table, b"b", new)
    await asyncio.gather(*table._ending)
    locks.locker = PID
    table.locked(second)
    assert requests.said == ["attached a", "gone a", "attached b"]
    assert old.let_go_with == [True] and new.let_go_with == []
    assert table.count(RowState.ATTACHED) == 1
    await table.stop()
    await table.ended()


async def test_a_connection_that_no_longer_speaks_for_its_row_detaches_nothing(locks: Locks) -> None:
    earlier, later = Speaker(), Speaker()
    table = await a_table(Requests(), Pool())
    process = claim(table, b"a", earlier)
    locks.locker = PID
    table.locked(process)
    assert claim(table, b"a", later) is process and earlier.let_go_with == [False]
    table.lost(process, earlier)  # type: ignore[arg-type]
    assert not process.detached
    table.lost(process, later)  # type: ignore[arg-type]
    assert process.detached
    await table.stop()
    await table.ended()


async def test_processes_of_an_engine_attach_again_one_by_one_after_their_token_opens_other_tenants(
    locks: Locks,
) -> None:
    pool, tokens = Pool(), TenantTokens({"token": frozenset({"blue", "azure"})})
    table = await a_table(Requests(), pool, tokens)
    locks.locker = PID
    for name in (b"a", b"b"):
        table.locked(claim(table, name, Speaker(), "token"))
        pool.row += 1
    tokens.replace(TenantTokens({"token": frozenset({"blue"}), "another": frozenset({"green"})}))
    for name in (b"a", b"b"):
        process = claim(table, name, Speaker(), "token")
        table.locked(process)
        assert process.tenants == {"blue"}
    with pytest.raises(NotPermitted, match="group: its processes may use other tenants"):
        claim(table, b"c", Speaker(), "another")
    await table.stop()
    await table.ended()
