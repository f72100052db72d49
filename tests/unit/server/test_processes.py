"""server/processes.py: groups, slices, identities, tenants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import BadRequest, NotPermitted, Refused, UnknownIdentity
from kvstrata.rpc.wire import PROTOCOL_VERSION, AttachRequest
from kvstrata.server.processes import (
    ADAPTERS_REMEMBERED,
    MAX_IDENTITIES,
    MAX_NAME_CHARS,
    AttachedProcess,
    ProcessTable,
    SessionLimits,
    TenantTokens,
    tenant_number,
)
from kvstrata.server.rows import SessionRow
from kvstrata.types import LayoutIdentity, RequestIdentity, Role, Slice, identity_root

LAYOUT = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=256)
GROUP = b"g" * 16


def name(number: int) -> bytes:
    return bytes([number]) * 16


def held(number: int) -> Slice:
    return Slice(layers=(0, 8), kv_heads=(number, number + 1), layout="f")


def attach(
    table: ProcessTable,
    number: int,
    *,
    role: Role = Role.WORKER,
    slices: int = 2,
    group: bytes = GROUP,
    part: Slice | None = None,
    tenants: frozenset[str] | None = None,
    layout: LayoutIdentity = LAYOUT,
    record_bytes: int = 0,
) -> AttachedProcess:
    request = AttachRequest(
        protocol=PROTOCOL_VERSION,
        session=name(number),
        group=group,
        role=role,
        layout=layout,
        engine_slices=slices,
        slice=None if role is Role.SCHEDULER else part or held(number),
    )
    seen = SessionRow(
        row=number, session=request.session, group=group, pid=1000 + number, request=request, tenants=tenants
    )
    process = table.attach(seen)
    process.has_records_of(record_bytes)
    return process


def test_a_group_is_complete_when_each_of_its_slices_has_a_process() -> None:
    table = ProcessTable(1)
    scheduler = attach(table, 1, role=Role.SCHEDULER)
    assert not scheduler.group.complete
    attach(table, 2)
    attach(table, 3, part=held(2))
    assert not scheduler.group.complete, "two members with the same slice"
    last = attach(table, 4)
    assert scheduler.group.complete
    assert scheduler.group.slices == sorted([held(2).digest(), held(4).digest()])
    assert scheduler.group.packed_slices == b"".join(scheduler.group.slices)
    assert scheduler.group.rows == [1, 2, 3, 4]
    table.gone(last.session)
    assert not scheduler.group.complete


def test_an_engine_loads_as_fast_as_the_slowest_of_its_processes_lets_it() -> None:
    table = ProcessTable(1)
    group = attach(table, 1, role=Role.SCHEDULER).group
    one, other = attach(table, 2), attach(table, 3)
    assert group.load_rate is None
    one.load_rate = 0.001, 1e9
    assert group.load_rate is None, "half of the engine is not known"
    other.load_rate = 0.003, 4e9
    assert group.load_rate == (0.003, 2e9)
    table.gone(other.session)
    assert group.load_rate is None


def test_the_limit_of_a_slices_records_is_the_longest_that_a_process_declared_or_reserved() -> None:
    table = ProcessTable(1)
    scheduler = attach(table, 1, role=Role.SCHEDULER)
    attach(table, 2, record_bytes=4096)
    group = scheduler.group
    assert (group.record_limits, group.chunk_bytes) == ([4096], 4096)
    other = attach(table, 3)
    assert (sorted(group.record_limits), group.chunk_bytes) == ([0, 4096], 0), (
        "the length of a slice is not known"
    )
    for length in (8192, 100):
        other.has_records_of(length)
    assert (sorted(group.record_limits), group.chunk_bytes) == ([4096, 8192], 12_288)


def test_a_process_that_attaches_again_keeps_its_identities() -> None:
    table = ProcessTable(1)
    member = attach(table, 1)
    identity = table.identify(member, RequestIdentity())
    table.detached(member.session)
    again = attach(table, 1, tenants=frozenset({"a"}))
    assert again is member and not again.detached
    assert again.tenants == frozenset({"a"})
    assert table.identity(again, identity.number) == identity


def test_an_identity_has_one_number_in_the_whole_instance() -> None:
    table = ProcessTable(7)
    first, second = attach(table, 1), attach(table, 2)
    request = RequestIdentity(adapter="lora", tenant="t")
    a, b = table.identify(first, request), table.identify(second, request)
    assert a is b
    assert a.root == identity_root(LAYOUT, request)
    assert a.tenant == tenant_number("t")
    assert table.identify(first, RequestIdentity()).number != a.number


def test_identity_numbers_of_another_session_or_epoch_are_unknown() -> None:
    table = ProcessTable(7)
    first, second = attach(table, 1), attach(table, 2)
    identity = table.identify(first, RequestIdentity(salt="s"))
    with pytest.raises(UnknownIdentity):
        table.identity(second, identity.number)
    later = ProcessTable(8)
    with pytest.raises(UnknownIdentity):
        later.identity(attach(later, 1), identity.number)


def test_the_identity_not_declared_for_longest_is_dropped() -> None:
    table = ProcessTable(1)
    member = attach(table, 1)
    first = table.identify(member, RequestIdentity(salt="first"))
    second = table.identify(member, RequestIdentity(salt="second"))
    for number in range(MAX_IDENTITIES - 2):
        table.identify(member, RequestIdentity(salt=str(number)))
    table.identify(member, RequestIdentity(salt="first"))
    table.identify(member, RequestIdentity(salt="one more"))
    assert table.identity(member, first.number) == first
    with pytest.raises(UnknownIdentity):
        table.identity(member, second.number)
    assert table.identify(member, RequestIdentity(salt="second")).number != second.number


def test_identities_nobody_uses_are_forgotten() -> None:
    table = ProcessTable(1)
    first, second = attach(table, 1), attach(table, 2)
    number = table.identify(first, RequestIdentity()).number
    table.identify(second, RequestIdentity())
    table.gone(first.session)
    assert table.identify(second, RequestIdentity()).number == number
    table.gone(second.session)
    assert table.identify(attach(table, 3), RequestIdentity()).number != number


def test_an_engine_has_the_adapters_that_were_declared_last() -> None:
    table = ProcessTable(1)
    first, second = attach(table, 1), attach(table, 2)
    for member, adapter in ((first, ""), (second, "a"), (first, "b"), (second, ""), (first, "b")):
        table.identify(member, RequestIdentity(adapter=adapter))
    assert first.group.adapters == ["b", "", "a"]
    for number in range(ADAPTERS_REMEMBERED - 1):
        table.identify(first, RequestIdentity(adapter=f"{number}"))
    assert first.group.adapters[-1] == "b" and len(first.group.adapters) == ADAPTERS_REMEMBERED


@pytest.mark.parametrize("field", ["adapter", "salt"])
def test_overlong_names_are_refused_by_field(field: str) -> None:
    table = ProcessTable(1)
    member = attach(table, 1)
    with pytest.raises(BadRequest) as caught:
        table.identify(member, RequestIdentity(**{field: "x" * (MAX_NAME_CHARS + 1)}))
    assert caught.value.field == f"request.{field}"


def test_a_process_may_name_only_its_tenants() -> None:
    table = ProcessTable(1)
    member = attach(table, 1, tenants=frozenset({"a", "b"}))
    table.identify(member, RequestIdentity(tenant="b"))
    with pytest.raises(NotPermitted):
        table.identify(member, RequestIdentity(tenant="c"))
    with pytest.raises(NotPermitted):
        table.identify(member, RequestIdentity())


def test_tokens_open_their_tenants_and_nothing_else() -> None:
    assert TenantTokens().allowed("") is None
    assert TenantTokens().allowed("whatever") is None
    tokens = TenantTokens({"first": frozenset({"a"}), "second": frozenset({"b", "c"})})
    assert tokens.allowed("second") == frozenset({"b", "c"})
    assert tokens.allowed("") == frozenset({""})
    with pytest.raises(NotPermitted):
        tokens.allowed("third")


@given(st.text(min_size=1), st.text(min_size=1))
def test_tenant_numbers_are_stable_and_only_the_unnamed_one_is_zero(one: str, other: str) -> None:
    assert tenant_number("") == 0
    assert 0 < tenant_number(one) < 1 << 32
    assert (tenant_number(one) == tenant_number(other)) == (one == other)


def test_a_process_and_a_token_get_only_so_many_sessions() -> None:
    table = ProcessTable(epoch=1)
    limits = SessionLimits(per_process=2, per_token=3)
    green, blue = frozenset({"green"}), frozenset({"blue"})
    for number, pid, tenants in ((1, 7, green), (2, 7, green), (3, 8, green)):
        table.check_room(name(number), pid, tenants, limits)
        attached = attach(table, number, tenants=tenants)
        attached.pid = pid
    with pytest.raises(Refused, match=r"process 7 has 2 sessions .* close some"):
        table.check_room(name(4), 7, blue, limits)
    with pytest.raises(Refused, match=r"3 sessions .* with this token.* another token"):
        table.check_room(name(4), 9, green, limits)
    table.check_room(name(1), 7, green, limits)  # attaches again
    table.check_room(name(4), 9, blue, limits)
    table.check_room(name(4), 9, None, limits)
    table.gone(name(1))
    table.check_room(name(4), 7, green, limits)
