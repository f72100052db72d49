"""What a controller knows of gateways, and what it answers them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.controller import gateways
from kvstrata.controller.cluster import Cluster
from kvstrata.errors import NotPermitted
from kvstrata.rpc.cluster_wire import (
    ANSWERS,
    MAX_HOLDERS,
    MAX_TOLD_ADAPTERS,
    Change,
    GatewayBeat,
    Holding,
    Holdings,
    KvKind,
    Run,
    encode,
)
from kvstrata.types import LayoutIdentity
from tests.harness.cluster_instance import tags_of
from tests.harness.known_members import KEY, joined, tell
from tests.unit.controller.member_messages import register

CHUNKS = tags_of(range(8))


@pytest.fixture
def listed() -> dict[str, tuple[str, ...]]:
    return {KEY: ("gw-*", "a", "b", "c"), "other": ("other",)}


async def join(cluster: Cluster, name: str, l1: int, disk: tuple[int, int], **more: str) -> None:
    """Make a member with the first `l1` chunks in L1, and those of a range in its disk tier."""
    member = joined(cluster, register(1, name, tiers=["l1", "disk"], **more))
    runs = [
        Run(Change.ADMIT, "l1", CHUNKS[: 8 * l1]),
        Run(Change.ADMIT, "disk", CHUNKS[8 * disk[0] : 8 * disk[1]]),
    ]
    await tell(cluster, member, *runs)


def beat(name: str = "gw-1") -> GatewayBeat:
    return GatewayBeat(1, name, "1", 8090, "ttft", 2, 2, 0, 0)


async def test_l1_and_what_l2_adds_are_told_apart(cluster: Cluster) -> None:
    await join(cluster, "a", 3, (2, 6))
    await join(cluster, "b", 0, (0, 5))
    asked = Holdings(1, CHUNKS, 1)
    for found in (cluster.gateways.holdings_now(asked), await cluster.gateways.holdings(asked)):
        assert [(row.instance, row.l1_chunks, row.own_chunks) for row in found] == [("a", 3, 6), ("b", 0, 5)]
        assert all(row.unconfirmed_ms for row in found), "no list has ended"
    assert not cluster.gateways.holdings_now(Holdings(1, tags_of(range(50, 58)), 1))
    cluster.directory.forget(next(one for one in cluster.members if one.id == "a").group)
    assert [row.instance for row in cluster.gateways.holdings_now(asked)] == ["b"]


async def test_what_the_directory_has_followed_is_certain(cluster: Cluster) -> None:
    await join(cluster, "a", 3, (0, 3))
    for member in cluster.members:
        assert member.follower is not None
        member.follower.confirmed = True
    assert cluster.gateways.holdings_now(Holdings(1, CHUNKS, 1)) == [Holding("a", 3, 3)]


async def test_only_whole_chunks_of_all_slices_count(cluster: Cluster) -> None:
    await join(cluster, "a", 5, (0, 0))
    assert [row.l1_chunks for row in cluster.gateways.holdings_now(Holdings(1, CHUNKS, 2))] == [2]


async def test_gateways_are_told_which_adapters_each_instance_has(cluster: Cluster) -> None:
    layout = LayoutIdentity(model="m", kv_dtype="bfloat16", chunk_tokens=16)
    other = LayoutIdentity(model="n", kv_dtype="bfloat16", chunk_tokens=16)
    for name, adapters in (("a", ["x", "y"]), ("b", ["y"]), ("c", [])):
        await join(cluster, name, 1, (0, 0))
        (member,) = (one for one in cluster.members if one.id == name)
        member.models = [KvKind(layout, [b"s" * 32], [], [], adapters)]
        if name == "b":
            member.models.append(KvKind(other, [b"s" * 32], [], [], ["z"]))
    answer = cluster.gateways.beat(beat(), KEY, "10.0.0.9", 7)
    found = {
        one.instance: [[answer.adapters[at] for at in of_kind] for of_kind in one.adapters]
        for one in answer.instances
    }
    assert found == {"a": [["x", "y"]], "b": [["y"], ["z"]], "c": [[]]}
    assert sorted(answer.adapters) == ["x", "y", "z"] and not any(kind.adapters for kind in answer.kinds)
    assert ANSWERS.decode(encode(answer)) == answer
    member.models = [KvKind(layout, [b"s" * 32], [], [], [f"{n}" for n in range(5_000)])]
    answer = cluster.gateways.beat(beat(), KEY, "10.0.0.9", 7)
    assert len(answer.adapters) == MAX_TOLD_ADAPTERS
    assert (
        max(at for one in answer.instances for of_kind in one.adapters for at in of_kind) < MAX_TOLD_ADAPTERS
    )


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


async def test_an_answer_names_those_that_hold_most(cluster: Cluster) -> None:
    assert MAX_HOLDERS < 100
    for n in range(100):
        member = joined(cluster, register(1, "a" if not n else f"gw-{n}"))
        await tell(cluster, member, Run(Change.ADMIT, "l1", CHUNKS[: 8 * (1 + n % 8)]))
    found = cluster.gateways.holdings_now(Holdings(1, CHUNKS, 1))
    assert len(found) == MAX_HOLDERS and [row.l1_chunks for row in found[:12]] == [8] * 12
