"""server/processes.py: rows, groups, slices, identities, tenants."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import NotPermitted, Refused, UnknownIdentity
from kvstrata.memory import linux
from kvstrata.rpc import wire
from kvstrata.rpc.wire import MAX_SLICES, PROTOCOL_VERSION, AttachRequest
from kvstrata.server import processes
from kvstrata.server.cluster.condition import _adapters
from kvstrata.server.processes import (
    ADAPTERS_REMEMBERED,
    MAX_IDENTITIES,
    Process,
    Processes,
    Readiness,
    RowEvent,
    RowState,
    TenantTokens,
    tenant_number,
)
from kvstrata.types import LayoutIdentity, RequestIdentity, Role, Slice, identity_root
from tests.harness.rpc_client import layout

LAYOUT = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=256)
GROUP = b"g" * 16


def name(number: int) -> bytes:
    return bytes([number]) * 16


def held(number: int) -> Slice:
    return Slice(layers=(0, 8), kv_heads=(number, number + 1), layout="f")


def a_table(epoch: int = 1) -> Processes:
    return Processes(Pool(), epoch, TenantTokens(), Readiness())  # type: ignore[arg-type]


def attach(
    table: Processes,
    number: int,
    *,
    role: Role = Role.WORKER,
    slices: int = 2,
    group: bytes = GROUP,
    part: Slice | None = None,
    tenants: frozenset[str] | None = None,
    layout: LayoutIdentity = LAYOUT,
    payload_bytes: int = 4096,
    kv_bytes: int = 0,
) -> Process:
    request = AttachRequest(
        protocol=PROTOCOL_VERSION,
        session=name(number),
        group=group,
        role=role,
        layout=layout,
        engine_slices=slices,
        slice=None if role is Role.SCHEDULER else part or held(number),
        facts={"payload_bytes": payload_bytes, "sections": 1},
        kv_bytes=kv_bytes,
    )
    process = table.get(name(number)) or Process(number, name(number), group, 1000 + number, request)
    process.tenants = tenants
    process.state = RowState.CLAIMED if process.state is RowState.FREE else process.state
    table.announce(process)
    return process


def test_an_engine_loads_as_fast_as_the_slowest_of_its_processes_lets_it() -> None:
    table = a_table()
    group = attach(table, 1, role=Role.SCHEDULER).group
    one, other = attach(table, 2), attach(table, 3)
    assert group.load_rate is None
    one.load_rate = 0.001, 1e9
    assert group.load_rate is None, "half of the engine is not known"
    other.load_rate = 0.003, 4e9
    assert group.load_rate == (0.003, 2e9)
    table.leave(other)
    assert group.load_rate is None


def test_the_caches_of_all_attached_engines_are_summed() -> None:
    table = a_table()
    attach(table, 1, role=Role.SCHEDULER, kv_bytes=100)
    other = attach(table, 2, role=Role.SCHEDULER, group=b"o" * 16, kv_bytes=30)
    attach(table, 3, part=held(1))
    assert table.kv_bytes == 130
    other.move(RowEvent.LOST)
    assert table.kv_bytes == 130, "it lives, and comes back"
    table.leave(other)
    assert table.kv_bytes == 100


def test_a_process_that_attaches_again_keeps_its_identities() -> None:
    table = a_table()
    member = attach(table, 1)
    identity = table.identify(member, RequestIdentity())
    member.move(RowEvent.LOST)
    again = attach(table, 1, tenants=frozenset({"a"}))
    assert again is member and not again.detached
    assert again.tenants == frozenset({"a"})
    assert table.identity(again, identity.number) == identity


def test_an_identity_has_one_number_in_the_whole_instance() -> None:
    table = a_table(7)
    first, second = attach(table, 1), attach(table, 2)
    request = RequestIdentity(adapter="lora", tenant="t")
    a, b = table.identify(first, request), table.identify(second, request)
    assert a is b
    assert a.root == identity_root(LAYOUT, request)
    assert a.tenant == tenant_number("t")
    assert table.identify(first, RequestIdentity()).number != a.number


def test_identity_numbers_of_another_session_or_epoch_are_unknown() -> None:
    table = a_table(7)
    first, second = attach(table, 1), attach(table, 2)
    identity = table.identify(first, RequestIdentity(salt="s"))
    with pytest.raises(UnknownIdentity):
        table.identity(second, identity.number)
    later = a_table(8)
    with pytest.raises(UnknownIdentity):
        later.identity(attach(later, 1), identity.number)


def test_the_identity_not_declared_for_longest_is_dropped() -> None:
    table = a_table()
    member = attach(table, 1)
    first = table.identify(member, RequestIdentity(salt="first"))
    second = table.identify(member, RequestIdentity(salt="second")).number
    for number in range(MAX_IDENTITIES - 2):
        table.identify(member, RequestIdentity(salt=str(number)))
    table.identify(member, RequestIdentity(salt="first"))
    table.identify(member, RequestIdentity(salt="one more"))
    assert table.identity(member, first.number) == first
    with pytest.raises(UnknownIdentity):
        table.identity(member, second)
    assert table.identify(member, RequestIdentity(salt="second")).number != second


def test_identities_nobody_uses_are_forgotten() -> None:
    table = a_table()
    first, second = attach(table, 1), attach(table, 2)
    number = table.identify(first, RequestIdentity()).number
    table.identify(second, RequestIdentity())
    table.leave(first)
    assert table.identify(second, RequestIdentity()).number == number
    table.leave(second)
    assert table.identify(attach(table, 3), RequestIdentity()).number != number


def test_an_engine_has_the_adapters_that_were_declared_last() -> None:
    table = a_table()
    first, second = attach(table, 1), attach(table, 2)
    for member, adapter in ((first, ""), (second, "a"), (first, "b"), (second, ""), (first, "b")):
        table.identify(member, RequestIdentity(adapter=adapter))
    assert first.group.adapters == ["b", "", "a"]
    for number in range(ADAPTERS_REMEMBERED - 1):
        table.identify(first, RequestIdentity(adapter=f"{number}"))
    assert first.group.adapters[-1] == "b" and len(first.group.adapters) == ADAPTERS_REMEMBERED


def test_the_newest_adapters_of_all_engines_are_told_once_and_none_of_engines_for_some_tenants() -> None:
    table = a_table()
    one, other = (attach(table, number, group=name(number)) for number in (1, 2))
    limited = attach(table, 3, group=name(3), tenants=frozenset({"t"}))
    for process, adapter in ((one, "a"), (one, "b"), (other, "c"), (other, "b"), (one, "x" * 1_025)):
        table.identify(process, RequestIdentity(adapter=adapter))
    table.identify(limited, RequestIdentity(adapter="theirs", tenant="t"))
    assert _adapters(process.group for process in (one, other, limited)) == ["b", "c", "a"]


@given(st.text(min_size=1), st.text(min_size=1))
def test_tenant_numbers_are_stable_and_only_the_unnamed_one_is_zero(one: str, other: str) -> None:
    assert tenant_number("") == 0
    assert 0 < tenant_number(one) < 1 << 32
    assert (tenant_number(one) == tenant_number(other)) == (one == other)


def test_a_process_and_a_token_get_only_so_many_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    table = a_table()
    monkeypatch.setattr(processes, "SESSIONS_OF_PROCESS", 2)
    monkeypatch.setattr(processes, "SESSIONS_OF_TOKEN", 3)
    green, blue = frozenset({"green"}), frozenset({"blue"})
    attached = []
    for number, pid, tenants in ((1, 7, green), (2, 7, green), (3, 8, green)):
        table._check_room(name(number), pid, tenants)
        attached.append(attach(table, number, tenants=tenants))
        attached[-1].pid = pid
    with pytest.raises(Refused, match=r"process 7 has 2 sessions .* close some"):
        table._check_room(name(4), 7, blue)
    with pytest.raises(Refused, match=r"3 sessions .* with this token.* another token"):
        table._check_room(name(4), 9, green)
    table._check_room(name(1), 7, green)  # attaches again
    table._check_room(name(4), 9, blue)
    table._check_room(name(4), 9, None)
    table.leave(attached[0])
    table._check_room(name(4), 7, green)


def test_element_sizes_are_remembered_up_to_a_bound_and_an_invalid_one_counts_as_two_bytes() -> None:
    table = a_table()
    for number in range(MAX_SLICES + 1):
        table._note_element_bytes(number.to_bytes(32), 1)
    assert table.element_bytes_of((0).to_bytes(32)) == 2
    assert table.element_bytes_of(MAX_SLICES.to_bytes(32)) == 1
    for fact in (None, "4", True, 0, -1, 17, 1 << 70):
        table._note_element_bytes(MAX_SLICES.to_bytes(32), fact)
        assert table.element_bytes_of(MAX_SLICES.to_bytes(32)) == 2


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

    def set_model(self, root: bytes, model: int) -> None: ...


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


async def started_table(requests: Requests, pool: Pool, tokens: TenantTokens | None = None) -> Processes:
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
    table = await started_table(requests, pool)
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
    table = await started_table(Requests(), Pool())
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


async def test_processes_of_an_engine_attach_again_one_by_one_after_their_token_opens_other_tenants(locks):
    pool, tokens = Pool(), TenantTokens({"token": frozenset({"blue", "azure"})})
    table = await started_table(Requests(), pool, tokens)
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
