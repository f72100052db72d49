"""What one instance no longer finds in a medium, the directory no longer has of any instance that shares it."""

from __future__ import annotations

import pytest

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.views import keys_of, tier_totals
from kvstrata.errors import BadRequest
from kvstrata.rpc.cluster_wire import TAG_BYTES, Change, Run
from tests.harness import known_members
from tests.harness.cluster_instance import tags_of
from tests.harness.known_members import joined
from tests.unit.controller.member_messages import register

WORD = "0123456789abcdef"


def join(cluster: Cluster, name: str, tier: str, media: dict[str, str]) -> None:
    """Make a member with L1 and one more tier."""
    joined(cluster, register(1, name, tiers=["l1", tier], media=media))


async def tell(cluster: Cluster, name: str, *runs: Run) -> None:
    member = cluster.members.get(name)
    assert member is not None
    await known_members.tell(cluster, member, *runs)


def held(cluster: Cluster) -> dict[str, int]:
    """How many chunks of L2 the directory has, by instance."""
    keys = keys_of(cluster)
    return {
        member.id: sum(count for tier, count in keys.get(member.group, {}).items() if tier != "l1")
        for member in cluster.members
    }


async def test_losses_count_for_all_who_share_the_medium(cluster: Cluster) -> None:
    join(cluster, "a", "redis", {"redis": WORD})
    join(cluster, "b", "store", {"store": WORD})
    join(cluster, "other", "redis", {"redis": "another"})
    join(cluster, "own", "redis", {})
    tags = tags_of(range(5))
    for name, tier in (("a", "redis"), ("b", "store"), ("other", "redis"), ("own", "redis")):
        await tell(cluster, name, Run(Change.ADMIT, "l1", tags), Run(Change.ADMIT, tier, tags))
    assert held(cluster) == {"a": 5, "b": 5, "other": 5, "own": 5}
    totals = tier_totals(cluster, keys_of(cluster))
    assert (totals["store"]["keys"], totals["l1"]["keys"]) == (5, 20)

    await tell(cluster, "a", Run(Change.EVICT, "redis", tags[: 2 * TAG_BYTES]), Run(Change.EVICT, "l1", tags))
    assert held(cluster) == {"a": 3, "b": 3, "other": 5, "own": 5}
    await tell(cluster, "own", Run(Change.EVICT, "redis", tags))
    assert held(cluster) == {"a": 3, "b": 3, "other": 5, "own": 0}
    await tell(cluster, "b", Run(Change.CLEAR, "store", b""))
    assert held(cluster) == {"a": 0, "b": 0, "other": 5, "own": 0}
    await tell(cluster, "b", Run(Change.ADMIT, "store", tags))
    assert held(cluster) == {"a": 0, "b": 5, "other": 5, "own": 0}, "what one puts, only it is known to find"
    assert tier_totals(cluster, keys_of(cluster))["l1"]["keys"] == 15


async def test_a_total_of_a_shared_tier_counts_no_chunk_twice(cluster: Cluster) -> None:
    for name, count in (("a", 3), ("b", 5)):
        join(cluster, name, "redis", {"redis": WORD})
        await tell(cluster, name, Run(Change.ADMIT, "redis", tags_of(range(count))))
    assert tier_totals(cluster, keys_of(cluster))["redis"]["keys"] == 5


async def test_media_of_tiers_that_are_not_registered_are_refused(cluster: Cluster) -> None:
    for media in ({"l1": WORD}, {"gone": WORD}):
        with pytest.raises(BadRequest, match="media: ") as refused:
            join(cluster, "a", "redis", media)
        assert refused.value.field == "media"
