"""Quotas of tenants, and what is lent beyond them."""

from __future__ import annotations

from types import SimpleNamespace

from kvstrata.observability.explain import TenantNumbers
from kvstrata.rpc import cluster_wire as wire
from kvstrata.server.cluster.commands import Actions
from kvstrata.server.processes import tenant_number
from kvstrata.server.quotas import NO_QUOTA, Quotas
from tests.harness.instance_in_process import InstanceInProcess


def in_force(server: InstanceInProcess, tenant: str) -> int:
    return int(server.pool.stats()["tenants"].get(tenant_number(tenant), {"quota_bytes": -1})["quota_bytes"])


def test_what_is_lent_is_a_part_of_what_l1_has_beyond_each_quota_and_ends(server):
    quotas, l1 = Quotas(server.pool), server.pool.extents_bytes
    quotas.set("red", 1_000_000)
    quotas.lend(0.5)
    quotas.set("blue", 2_000_000)
    assert in_force(server, "red") == 1_000_000 + (l1 - 1_000_000) // 2
    assert in_force(server, "blue") == 2_000_000 + (l1 - 2_000_000) // 2
    quotas.set("blue", NO_QUOTA)
    quotas.lend(0.0)
    assert in_force(server, "red") == 1_000_000 and in_force(server, "blue") <= 0
    quotas.set("huge", 2 * l1)
    quotas.lend(1.0)
    assert in_force(server, "huge") == 2 * l1 and in_force(server, "red") == l1


def test_followers_are_told_of_tenants_with_a_quota_that_are_counted(server):
    quotas = Quotas(server.pool)
    quotas.set("red", 1_000_000)
    quotas.lend(0.5)
    number, numbers = tenant_number("red"), TenantNumbers("red")
    numbers.asked += 10
    numbers.found["l1"] += 4
    numbers.found["l2"] += 2
    forecasts = [(number, 500, 0.25, [(0.5, 0.1, 0.2), (1.0, 0.3, 1.2)]), (None, 1, 0.5, [])]
    assert quotas.shares(forecasts, {}) is None and quotas.shares([], {number: numbers}) is None
    told = quotas.shares(forecasts, {number: numbers})
    assert told is not None and told.lent == 0.5
    [row] = told.tenants
    assert (row.tenant, row.used_bytes, row.quota_bytes, row.part) == ("red", 500, 1_000_000, 0.25)
    assert (row.saved, row.asked_total, row.found_total) == ({"0.5": 0.2, "1": 1.0}, 10, 6)
    load = wire.Load({}, {}, {}, {}, 0, 0, 0, 0, shares=told)
    answer = wire.Changed(1, 1, 1, [], wire.Condition("ready", load, []))
    assert wire.ANSWERS.decode(wire.encode(answer)) == answer


def test_a_leader_may_have_tenants_lend_each_other_what_their_quotas_leave(server):
    quotas = server.parts.quotas
    quotas.set("red", 1_000_000)
    actions = Actions(server.parts, SimpleNamespace(leases=None))  # type: ignore[arg-type]
    outcome = actions.carry_out(wire.Do(1, wire.Lend(1.0), 60_000))
    assert server.loop.run_until_complete(outcome).body == {}
    assert in_force(server, "red") == server.pool.extents_bytes
