"""Adapters of type `fs` that fail, hang, lie and fill up, and the controllers that put to them and load from them."""

from __future__ import annotations

import collections
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kvstrata.policy.store import RetryRule, StorePolicy
from kvstrata.server.l2.fetch import FetchOutcome
from kvstrata.server.l2.gate import PrefetchLimits
from kvstrata.server.l2.prefetch import PrefetchController
from kvstrata.server.l2.puts import StoreLimits
from kvstrata.server.l2.store import StoreController
from kvstrata.server.l2.tiers import TierSet
from kvstrata.storage.base import Found, LoadItem, LoadOutcome, PutItem, PutOutcome
from kvstrata.storage.media.fs.adapter import FsAdapter
from kvstrata.storage.stack import Stack
from kvstrata.storage.wrap.codec import CodecAdapter
from kvstrata.storage.wrap.codec_chain import Chain
from kvstrata.storage.wrap.codec_fields import ChainSettings
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits
from kvstrata.testing.faults import FaultPlan
from kvstrata.testing.faulty_adapter import FaultyAdapter
from kvstrata.testing.strategies import IDENTITY
from tests.harness.l1 import CLOCK, L1, L1_BYTES, LATER_S, RECORD


class Watched(FaultyAdapter):
    """A faulty adapter that counts its calls, and how often each key was loaded and stored."""

    def __init__(self, inner: FsAdapter, plan: FaultPlan) -> None:
        super().__init__(inner, plan)
        self.asked: collections.Counter[str] = collections.Counter()
        self.loaded: collections.Counter[bytes] = collections.Counter()
        self.stored: collections.Counter[bytes] = collections.Counter()

    async def exists(self, keys: Sequence[bytes]) -> list[Found]:
        self.asked["exists"] += 1
        return await super().exists(keys)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        self.asked["put"] += 1
        self.stored.update(item.key for item in items)
        return await super().put(items)

    async def load(self, items: Sequence[LoadItem]) -> list[LoadOutcome]:
        self.asked["load"] += 1
        self.loaded.update(item.key for item in items)
        return await super().load(items)


class Tier:
    """An `fs` adapter with a planned set of faults, inside the deadline wrapper, as the server has it."""

    def __init__(self, name: str, faults: Watched, limits: DeadlineLimits, policy: StorePolicy) -> None:
        self.faults = faults
        codec = CodecAdapter(faults, Chain(ChainSettings()))
        self.guard = DeadlineAdapter(codec, limits, CLOCK, lambda report: None)
        self.configured = Stack(name, policy, codec, self.guard)

    @property
    def records(self) -> set[bytes]:
        inner = self.faults.inner
        assert isinstance(inner, FsAdapter)
        return {bytes.fromhex(path.stem) for path in inner.base_path.glob("??/??/*.kvc")}

    def path(self, key: bytes) -> Path:
        inner = self.faults.inner
        assert isinstance(inner, FsAdapter)
        return inner.path(key)


OpenTier = Callable[..., Awaitable[Tier]]
"""Opens a tier; see the fixture `tier`."""


class Puts:
    """A store controller, and the puts that it skipped."""

    def __init__(self, l1: L1, *tiers: Tier, **limits: object) -> None:
        self.skipped: list[tuple[bytes, str]] = []
        values = {
            "backlog_bytes": L1_BYTES // 4,
            "batch_bytes": 4 * RECORD,
            "retry": RetryRule(retries=2, first_s=0.0, longest_s=0.0),
            **limits,
        }
        self.controller = StoreController(
            l1.pool,
            TierSet([one.configured for one in tiers]),
            StoreLimits(**values),
            lambda key, reason: self.skipped.append((key, reason)),
        )

    def counts(self, name: str = "fs-0") -> dict[str, int]:
        return self.controller.stats()["adapters"][name]["outcomes"]

    @property
    def backlog_bytes(self) -> int:
        return self.controller.stats()["backlog_bytes"]


class Loads:
    """A prefetch controller for one pool."""

    def __init__(self, l1: L1, *tiers: Tier, **limits: object) -> None:
        values = {"in_flight_bytes": L1_BYTES // 16, "batch_bytes": 2 * RECORD, **limits}
        self.lost: list[tuple[str, bytes]] = []
        self.controller = PrefetchController(
            l1.pool,
            TierSet([one.configured for one in tiers]),
            PrefetchLimits(**values),
            CLOCK,
            lambda name, keys: self.lost.extend((name, key) for key in keys),
        )

    async def fetch(
        self,
        keys: list[bytes],
        n_slices: int = 1,
        *,
        within_s: float = LATER_S,
        parent: list[bytes] | None = None,
        identity: bytes = IDENTITY,
        budget_bytes: int | None = None,
    ) -> FetchOutcome:
        return await self.controller.fetch(
            b"".join(keys),
            n_slices,
            identity=identity,
            tenant=1,
            deadline_s=CLOCK.monotonic_s() + within_s,
            parent=b"".join(parent or []),
            budget_bytes=budget_bytes,
        )


async def in_l2(
    l1: L1, one: Tier, keys: list[bytes], n_slices: int = 1, *, identity: bytes = IDENTITY
) -> None:
    """Store chunks in an adapter, and remove them from L1."""
    puts = Puts(l1, one, backlog_bytes=L1_BYTES)
    stored = l1.store(keys, n_slices, identity=identity)
    assert sorted(stored) == sorted(keys)
    puts.controller.committed(stored)
    await puts.controller.stop(LATER_S)
    assert one.records >= set(keys)
    l1.lose(keys)
    one.faults.asked.clear()
