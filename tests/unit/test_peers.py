"""policy/processes.py: groups, slices, identities, tenants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import BadRequest, NotPermitted, UnknownIdentity
from kvstrata.policy.processes import (
    MAX_IDENTITIES,
    MAX_NAME_CHARS,
    Member,
    Registry,
    TenantTokens,
    tenant_number,
)
from kvstrata.types import LayoutIdentity, RequestIdentity, Role, Slice, identity_root

LAYOUT = LayoutIdentity(model="m", kv_dtype="bf16", chunk_tokens=256)
GROUP = b"g" * 16


def name(number: int) -> bytes:
    return bytes([number]) * 16


def held(number: int) -> Slice:
    return Slice(layers=(0, 8), kv_heads=(number, number + 1), layout="f")


def attach(
    registry: Registry,
    number: int,
    *,
    role: Role = Role.WORKER,
    slices: int = 2,
    group: bytes = GROUP,
    part: Slice | None = None,
    tenants: frozenset[str] | None = None,
    layout: LayoutIdentity = LAYOUT,
) -> Member:
    return registry.attach(
        name(number),
        group=group,
        role=role,
        layout=layout,
        engine_slices=slices,
        part=None if role is Role.SCHEDULER else part or held(number),
        tenants=tenants,
        row=number,
        pid=1000 + number,
    )


def test_a_group_is_complete_when_all_its_slices_have_a_member() -> None:
    registry = Registry(1)
    scheduler = attach(registry, 1, role=Role.SCHEDULER)
    assert not scheduler.group.complete
    attach(registry, 2)
    attach(registry, 3, part=held(2))
    assert not scheduler.group.complete, "two members with the same slice"
    last = attach(registry, 4)
    assert scheduler.group.complete
    assert scheduler.group.slices == sorted([held(2).digest(), held(4).digest()])
    assert scheduler.group.packed_slices == b"".join(scheduler.group.slices)
    assert scheduler.group.rows == [1, 2, 3, 4]
    registry.gone(last.session)
    assert not scheduler.group.complete


def test_detached_members_stay() -> None:
    registry = Registry(1)
    member = attach(registry, 1, slices=1)
    registry.detached(member.session)
    assert member.detached and member.group.complete
    assert registry.member(member.session) is member


def test_attaching_again_is_the_same_member_with_its_identities() -> None:
    registry = Registry(1)
    member = attach(registry, 1)
    identity = registry.identify(member, RequestIdentity())
    registry.detached(member.session)
    again = attach(registry, 1, tenants=frozenset({"a"}))
    assert again is member and not again.detached
    assert again.tenants == frozenset({"a"})
    assert registry.identity(again, identity.number) == identity


def test_an_empty_group_is_forgotten_and_may_come_back_with_another_layout() -> None:
    registry = Registry(1)
    attach(registry, 1)
    registry.gone(name(1))
    assert registry.groups == [] and registry.members == []
    other = LayoutIdentity(model="other", kv_dtype="bf16", chunk_tokens=16)
    assert attach(registry, 2, layout=other).group.layout == other


def test_what_is_gone_or_never_was_changes_nothing() -> None:
    registry = Registry(1)
    assert registry.gone(name(9)) is None
    registry.detached(name(9))
    assert registry.member(name(9)) is None


def test_an_identity_has_one_number_in_the_whole_instance() -> None:
    registry = Registry(7)
    first, second = attach(registry, 1), attach(registry, 2)
    request = RequestIdentity(adapter="lora", tenant="t")
    a, b = registry.identify(first, request), registry.identify(second, request)
    assert a is b
    assert a.root == identity_root(LAYOUT, request)
    assert a.tenant == tenant_number("t")
    assert registry.identify(first, RequestIdentity()).number != a.number
    assert registry.by_root(a.root) is a


def test_numbers_of_another_session_epoch_or_time_are_unknown() -> None:
    registry = Registry(7)
    first, second = attach(registry, 1), attach(registry, 2)
    identity = registry.identify(first, RequestIdentity(salt="s"))
    with pytest.raises(UnknownIdentity):
        registry.identity(second, identity.number)
    later = Registry(8)
    with pytest.raises(UnknownIdentity):
        later.identity(attach(later, 1), identity.number)


def test_the_identity_not_declared_for_longest_is_dropped() -> None:
    registry = Registry(1)
    member = attach(registry, 1)
    first = registry.identify(member, RequestIdentity(salt="first"))
    second = registry.identify(member, RequestIdentity(salt="second"))
    for number in range(MAX_IDENTITIES - 2):
        registry.identify(member, RequestIdentity(salt=str(number)))
    registry.identify(member, RequestIdentity(salt="first"))
    registry.identify(member, RequestIdentity(salt="one more"))
    assert registry.identity(member, first.number) == first
    with pytest.raises(UnknownIdentity):
        registry.identity(member, second.number)
    assert registry.identify(member, RequestIdentity(salt="second")).number != second.number


def test_identities_nobody_uses_are_forgotten() -> None:
    registry = Registry(1)
    first, second = attach(registry, 1), attach(registry, 2)
    root = registry.identify(first, RequestIdentity()).root
    registry.identify(second, RequestIdentity())
    registry.gone(first.session)
    assert registry.by_root(root) is not None
    registry.gone(second.session)
    assert registry.by_root(root) is None


@pytest.mark.parametrize("field", ["adapter", "tenant", "salt"])
def test_overlong_names_are_refused_by_field(field: str) -> None:
    registry = Registry(1)
    member = attach(registry, 1)
    with pytest.raises(BadRequest) as caught:
        registry.identify(member, RequestIdentity(**{field: "x" * (MAX_NAME_CHARS + 1)}))
    assert caught.value.field == f"request.{field}"


def test_a_process_may_name_only_its_tenants() -> None:
    registry = Registry(1)
    member = attach(registry, 1, tenants=frozenset({"a", "b"}))
    registry.identify(member, RequestIdentity(tenant="b"))
    with pytest.raises(NotPermitted):
        registry.identify(member, RequestIdentity(tenant="c"))
    with pytest.raises(NotPermitted):
        registry.identify(member, RequestIdentity())


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
