"""The leader's plan: loads from the totals of gateways, and what gateways are told."""

from __future__ import annotations

from typing import Any

import msgspec

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.planning import HOLD_S, STEP_S, Loads, Planning
from kvstrata.rpc.cluster_wire import ANSWERS, GatewayBeat, RatedEngine, ShapeCount, encode
from tests.harness.known_members import KEY

URLS = [f"http://10.0.0.{number}:8000" for number in range(2)]


def count(requests: int, met: int, group: str = "m") -> ShapeCount:
    return ShapeCount(group, 82, 2_000.0, 15.0, requests, met, 430 * requests, 2_500 * requests)


def beat(
    cluster: Cluster, requests: int, met: int, name: str = "gw", groups: str = "m"
) -> dict[str, int] | None:
    rated = [
        RatedEngine(f"{url}{group}", group, "both", 22_000, 0.0055, 0.0001)
        for url in URLS
        for group in groups
    ]
    shapes = [count(requests, met, group) for group in groups]
    told = GatewayBeat(1, name, "1", 1, "auto", 2, 2, 0, 0, splits=True, rated=rated, shapes=shapes)
    answer = cluster.gateways.beat(told, KEY, "10.0.0.9", 1)
    answer = msgspec.structs.replace(answer, plan=cluster.planning.told())
    decoded: Any = ANSWERS.decode(encode(answer))
    return dict(decoded.plan) if decoded.plan is not None else None


async def crowded(cluster: Cluster, steps: int, groups: str = "m") -> None:
    """Twelve requests a second, of which every tenth is in time."""
    for number in range(steps):
        beat(cluster, 120 * number, 12 * number, groups=groups)
        await cluster.planning.tick()


def test_loads_are_what_totals_grow_by_at_all_gateways_also_after_one_has_restarted() -> None:
    loads = Loads()
    for number in range(30):
        other = number if number < 20 else number - 20
        told = [("a", count(100 * number, 90 * number)), ("b", count(50 * other, 50 * other))]
        loads.add(told, STEP_S)
    [shape] = loads.shapes("m")
    assert abs(shape.requests_s - 15) < 1 and abs(shape.prompt_tokens - 430) < 1e-6
    assert (shape.ttft_s, shape.tpot_s) == (2.0, 0.015)
    assert abs((loads.met_share("m") or 0) - 140 / 150) < 1e-9
    assert loads.shapes("n") == [] and loads.met_share("n") is None
    for _ in range(60):
        loads.add([], STEP_S)
    assert loads.shapes("m") == []


async def test_a_plan_is_shown_and_told_to_nobody_unless_it_is_to_act(cluster: Cluster) -> None:
    await crowded(cluster, 4)
    [row] = cluster.planning.page()["groups"]
    assert row["plan"]["in_flight"] > 0 and row["plan"]["buys"]
    assert len(cluster.planning.audit) == 1
    assert beat(cluster, 500, 50) == {}


async def test_a_plan_that_acts_is_told_to_gateways_by_the_leader_alone(cluster: Cluster) -> None:
    cluster.planning = Planning(cluster, "act")
    assert beat(cluster, 0, 0) is None
    await crowded(cluster, 4)
    told = beat(cluster, 500, 50)
    assert told is not None and set(told) == {f"{url}m" for url in URLS} and 60 < min(told.values()) < 100
    cluster.leadership.election = NOBODY
    assert beat(cluster, 500, 50) is None
    await cluster.planning.tick()
    assert cluster.planning.groups == {}


async def test_one_group_changes_a_step(cluster: Cluster) -> None:
    cluster.planning = Planning(cluster, "act")
    await crowded(cluster, 2, groups="mn")
    assert sorted(plan.in_flight > 0 for _, plan in cluster.planning.groups.values()) == [False, True]
    beat(cluster, 240, 24, groups="mn")
    await cluster.planning.tick()
    assert all(plan.in_flight > 0 for _, plan in cluster.planning.groups.values())
    assert [one["group"] for one in cluster.planning.audit] == ["m", "n"]


async def test_what_a_change_has_brought_is_in_the_audit(cluster: Cluster) -> None:
    cluster.planning = Planning(cluster, "act")
    await crowded(cluster, 4)
    now_s = cluster.clock.monotonic_s()
    cluster.clock.monotonic_s = lambda: now_s + HOLD_S  # type: ignore[method-assign]
    beat(cluster, 480, 36 + 100)
    await cluster.planning.tick()
    [row] = cluster.planning.audit
    assert abs(row["measured_share"] - (100 / 120 - 0.1)) < 1e-9


class _Nobody:
    token = None
    leader = None


NOBODY: Any = _Nobody()
