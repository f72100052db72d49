"""A pool, both controllers and the control of tiers, over adapters on shelves (`tests/harness/shelf.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstrata.policy.store import RetryRule
from kvstrata.server.l2.fetch import FetchOutcome
from kvstrata.server.l2.gate import PrefetchLimits
from kvstrata.server.l2.prefetch import PrefetchController
from kvstrata.server.l2.puts import StoreLimits
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tier_control import TierControl
from kvstrata.server.l2.tiers import TierSet
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.entry import configure_tier
from kvstrata.storage.stack import Stack
from kvstrata.storage.wrap.codec import CodecAdapter
from kvstrata.storage.wrap.codec_chain import Chain
from kvstrata.storage.wrap.codec_fields import ChainSettings
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits
from kvstrata.testing.strategies import IDENTITY
from tests.harness.l1 import CLOCK, L1, L1_BYTES, LATER_S, RECORD
from tests.harness.shelf import SHELVES, entry


class Rig:
    """The parts of a server that handle tiers, on one pool."""

    def __init__(self, l1: L1, *, close_s: float = 0.05, open_s: float = 60.0) -> None:
        self.l1 = l1
        self.adapters = TierSet()
        self.skipped: list[tuple[bytes, str]] = []
        limits = DeadlineLimits(deadline_ms=600_000, max_stuck_bytes=1 << 30, close_s=close_s)

        def build(config: Any) -> Stack:
            medium = config.make()
            medium.name = config.name
            codec = CodecAdapter(medium, Chain(ChainSettings()))
            adapter = DeadlineAdapter(codec, limits, CLOCK, lambda report: None)
            return Stack(config.name, config.policy, codec, adapter)

        self.store = StoreController(
            l1.pool,
            self.adapters,
            StoreLimits(
                backlog_bytes=L1_BYTES // 4,
                batch_bytes=4 * RECORD,
                retry=RetryRule(retries=2, first_s=0.0, longest_s=0.0),
            ),
            lambda key, reason: self.skipped.append((key, reason)),
        )
        self.prefetch = PrefetchController(
            l1.pool,
            self.adapters,
            PrefetchLimits(in_flight_bytes=4 * RECORD, batch_bytes=2 * RECORD),
            CLOCK,
            lambda name, keys: None,
        )
        self.control = TierControl(
            self.adapters,
            l1.pool,
            self.store,
            self.prefetch,
            build=build,
            context=lambda name: AdapterContext("test", CLOCK, 0, 0, lambda key: None),
            open_s=open_s,
        )

    async def open(self, shelf: str, **common: Any) -> str:
        """Open a tier; return its name."""
        config = configure_tier(entry(shelf, **common), len(self.adapters))
        await self.control.open(config)
        return config.name

    async def put(self, keys: list[bytes]) -> None:
        """Store chunks in L1 and wait until the store controller has put them."""
        assert self.l1.store(keys) == keys
        self.store.committed(keys)
        await self.store.idle()

    async def fetch(self, keys: list[bytes], within_s: float = LATER_S) -> FetchOutcome:
        return await self.prefetch.fetch(
            b"".join(keys), 1, identity=IDENTITY, tenant=1, deadline_s=CLOCK.monotonic_s() + within_s
        )

    def states(self) -> dict[str, str]:
        return {name: row["state"] for name, row in self.control.status().items()}

    async def close(self) -> None:
        for shelf in SHELVES.values():
            shelf.let_go()
        await self.prefetch.stop(LATER_S)
        await self.store.stop(LATER_S)
        await self.control.close()


Start = Callable[..., Rig]
