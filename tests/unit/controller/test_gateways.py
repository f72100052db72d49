"""What a controller knows of gateways, and what it answers them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.controller import gateways
from kvstrata.controller.cluster import Cluster
from kvstrata.errors import NotPermitted
from kvstrata.rpc.cluster_wire import ANSWERS, GatewayBeat, encode
from tests.harness.known_members import KEY, joined
from tests.unit.controller.member_messages import register


@pytest.fixture
def listed() -> dict[str, tuple[str, ...]]:
    return {KEY: ("gw-*", "a", "b"), "other": ("other",)}


async def join(cluster: Cluster, name: str) -> None:
    joined(cluster, register(1, name, tiers=["l1", "disk"]))


def beat(name: str = "gw-1") -> GatewayBeat:
    return GatewayBeat(1, 15, name, "1", 8090, "ttft", 2, 2, 0, 0)


async def test_gateways_are_told_what_followers_of_instances_need(cluster: Cluster) -> None:
    for name in ("a", "b"):
        await join(cluster, name)
    await cluster.orders.drain("b", True)
    answer = cluster.gateways.beat(beat(), KEY, "10.0.0.9", 7)
    assert [(one.told, one.key, one.readable) for one in answer.instances] == [
        (register(1, name, tiers=["l1", "disk"]), KEY, readable)
        for name, readable in (("a", True), ("b", False))
    ]
    assert ANSWERS.decode(encode(answer)) == answer


async def test_a_gateway_needs_a_name_that_is_listed_for_its_key(cluster: Cluster) -> None:
    for name, key in (("other", KEY), ("gw-1", "other"), ("gw-1", "unknown")):
        with pytest.raises(NotPermitted, match="gateway"):
            cluster.gateways.beat(beat(name), key, "h", 7)
    assert not list(cluster.gateways)
    cluster.gateways.beat(beat("gw-1"), KEY, "h", 7)
    assert [one.told.gateway for one in cluster.gateways] == ["gw-1"]


async def test_gateways_are_bounded_and_silent_ones_are_forgotten(cluster: Cluster, clock: Any) -> None:
    for n in range(gateways.MAX_GATEWAYS + 10):
        cluster.gateways.beat(beat(f"gw-{n:03}"), KEY, "h", 7)
        cluster.gateways.beat(beat("gw-000"), KEY, "h", 7)
    names = [one.told.gateway for one in cluster.gateways]
    assert len(names) == gateways.MAX_GATEWAYS and "gw-000" in names and "gw-001" not in names
    clock.ahead_s = gateways.KEPT_S + 1
    assert not list(cluster.gateways)
