"""controller/instance_keys.py: which key an id belongs to, for how long, and what a controller's key file says."""

from __future__ import annotations

import pytest

from kvstrata.controller.instance_keys import KEPT_S, MAX_KEYS
from kvstrata.controller.orders import KeyOfId, Orders
from kvstrata.errors import KvstrataError
from kvstrata.rpc import cluster_wire as wire
from tests.harness.known_members import KnownMembers
from tests.unit.controller.member_messages import CURRENT, register

OURS, THEIRS = "o" * 40, "t" * 40


def refusal(known: KnownMembers, name: str, key: str) -> str:
    """Register; return the code of the refusal, empty without one."""
    try:
        known.register(register(name=name), 0.0, key)
    except KvstrataError as refused:
        return refused.code
    return ""


def test_a_listed_client_may_use_its_own_ids_and_of_several_lists_the_closest_counts():
    for name, key, code in (
        ("a", "1" * 40, ""),
        ("a-7", "1" * 40, ""),
        ("b", "1" * 40, "not_permitted"),
        ("a-b-7", "1" * 40, "not_permitted"),
        ("a-b-7", "2" * 40, ""),
        ("anything", "3" * 40, ""),
        ("anything", "4" * 40, "not_permitted"),
    ):
        listed = {"1" * 40: ("a", "a-*"), "2" * 40: ("a-b", "a-b-*"), "3" * 40: ()}
        assert refusal(KnownMembers(listed=listed), name, key) == code


def test_a_key_that_the_file_lists_no_more_holds_no_id():
    orders = Orders()
    assert refusal(KnownMembers(orders=orders, listed={OURS: ("a",)}), "a", OURS) == ""
    assert refusal(KnownMembers(orders=orders, listed={OURS: (), THEIRS: ()}), "a", THEIRS) == "wrong_key"
    assert refusal(KnownMembers(orders=orders, listed={THEIRS: ("a",)}), "a", THEIRS) == ""


def test_a_flood_of_new_ids_sets_no_absent_id_free_until_it_is_old():
    now = [0.0]
    orders = Orders()
    known = KnownMembers(orders=orders, unix_s=lambda: now[0])
    orders.keys |= {f"i{number}": KeyOfId(OURS, number) for number in range(MAX_KEYS)}
    assert refusal(known, "new", THEIRS) == "refused"
    assert refusal(known, "i0", THEIRS) == "wrong_key"
    now[0] = KEPT_S + 1
    assert refusal(known, "i0", OURS) == ""  # seen again, and a member now
    assert refusal(known, "new", THEIRS) == ""
    assert "i1" not in orders.keys and len(orders.keys) == MAX_KEYS
    assert refusal(known, "i0", THEIRS) == "wrong_key"


@pytest.mark.parametrize("leaves", [True, False])
def test_an_id_is_new_from_the_end_of_its_member_on(leaves):
    now = [0.0]
    orders = Orders()
    known = KnownMembers(orders=orders, unix_s=lambda: now[0])
    refusal(known, "a", OURS)
    orders.keys |= {f"i{number}": KeyOfId(OURS, KEPT_S) for number in range(MAX_KEYS - 1)}
    now[0] = KEPT_S + 1.0
    if leaves:
        known.goodbye(wire.Goodbye(1, "a", CURRENT), OURS)
    else:
        for now_s in range(0, 33, 3):
            known.tick(float(now_s))
    assert refusal(known, "new", THEIRS) == "refused"
    assert refusal(known, "a", THEIRS) == "wrong_key"


def test_what_etcd_has_counts_and_what_it_lacks_stays_until_it_is_written():
    orders = Orders()
    known = KnownMembers(orders=orders)
    refusal(known, "a", OURS)
    refusal(known, "b", OURS)
    there = Orders()
    there.learn_key("a", KeyOfId(THEIRS, 1))
    orders.load(there.entries())
    assert (orders.keys["a"].key, orders.keys["b"].key) == (THEIRS, OURS)
    assert not known.keys.fits("a", OURS) and known.keys.fits("b", OURS)
    orders.load({**orders.entries()})  # the leader has written b's key
    orders.load(there.entries())  # an admin has removed b
    assert "b" not in orders.keys


def test_a_member_of_the_snapshot_keeps_its_key():
    known = KnownMembers()
    assert known.members.restore(register(), OURS, now_s=0.0) is not None
    assert refusal(known, "a", THEIRS) == "wrong_key"
    assert KnownMembers(orders=known_orders("a", THEIRS)).members.restore(register(), OURS, now_s=0.0) is None


def known_orders(instance: str, key: str) -> Orders:
    orders = Orders()
    orders.learn_key(instance, KeyOfId(key, 0))
    return orders
