"""A cluster's question about storage keys: answered from what L1 holds at that moment."""

from __future__ import annotations

from typing import Any, cast

from kvstrata.observability.metrics import ServerCounters
from kvstrata.policy.misses import Explainer
from kvstrata.server.admin.explain import Explaining
from kvstrata.server.chunk_history import ChunkHistory
from kvstrata.server.l2.news import News
from kvstrata.server.pool_events import PoolEvents
from kvstrata.server.requests.leases import InFlight
from kvstrata.types import MissReason
from tests.harness.l1 import CLOCK, L1, chain


class Store:
    """Stands for the store controller, which hears of evicted chunks."""

    def evicted(self, keys: list[bytes]) -> None:
        pass


async def test_chunks_that_left_l1_a_moment_ago_are_evicted_and_those_that_came_back_are_there() -> None:
    """No heartbeat reads the pool's events here, as in the tenth of a second between two of them."""
    explainer, l1 = Explainer(), L1()
    history = ChunkHistory(explainer, ServerCounters(), CLOCK, "lru")
    events = PoolEvents([l1.pool], history, cast(Any, Store()), News(), CLOCK)
    explaining = Explaining(explainer, [l1.pool], InFlight(), events, "lru")
    keys = chain("a", 3)

    def reasons() -> list[str]:
        return [row["tier"] or row["reason"] for row in explaining.keys(b"".join(keys))]

    assert reasons() == [MissReason.UNKNOWN_KEY] * 3
    l1.store(keys)
    assert reasons() == ["l1"] * 3
    l1.lose(keys[1:])
    assert reasons() == ["l1", MissReason.EVICTED, MissReason.EVICTED]
    l1.store(keys, first=1)
    assert l1.pool.clear() == (3, 0)
    assert reasons() == [MissReason.EVICTED] * 3
    assert explaining.keys(keys[0])[0]["detail"].startswith("by clear at ")
    l1.pool.close()
