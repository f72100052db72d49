"""A pool and its store and prefetch controllers over tiers that fail, hang and lie as a test has planned."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import pytest

from kvstrata.testing.strategies import IDENTITY
from kvstrata.tiers import tier as tiers
from kvstrata.tiers.base import AdapterContext
from kvstrata.tiers.config import CommonFields, StorePolicy, TierConfig, configure_tier
from kvstrata.tiers.fetch import FetchOutcome, PrefetchLimits
from kvstrata.tiers.loads import PrefetchController
from kvstrata.tiers.puts import RetryRule, StoreController, StoreLimits
from kvstrata.tiers.set import TierSet
from kvstrata.tiers.tier import TierLimits
from tests.harness.l1 import CLOCK, L1, L1_BYTES, LATER_S, RECORD
from tests.harness.shelf import SHELVES, Shelf, ShelfAdapter, entry

CONTEXT = AdapterContext("test", CLOCK, 0, 0, lambda key: None)


class Tier(tiers.Tier):
    """A tier whose medium is a shelf."""

    def __init__(self, name: str, limits: TierLimits, policy: StorePolicy) -> None:
        self.shelf = Shelf()
        medium = ShelfAdapter(self.shelf)
        super().__init__(
            TierConfig(name, lambda: medium, common=CommonFields(type="plugin", policy=policy)), limits, CLOCK
        )

    @property
    def records(self) -> set[bytes]:
        return set(self.shelf.records)


OpenTier = Callable[..., Awaitable[Tier]]
"""Opens a tier; see the fixture `tier`."""


def set_of(given: tuple[Tier | TierSet, ...]) -> TierSet:
    return given[0] if isinstance(given[0], TierSet) else TierSet(opened=given)  # type: ignore[arg-type]


class Puts:
    """A store controller, which the fixture `tier` stops, and the puts that it skipped."""

    made: ClassVar[list[Puts]] = []

    def __init__(self, l1: L1, *tiers: Tier | TierSet, **limits: object) -> None:
        self.skipped: list[tuple[bytes, str]] = []
        values = {
            "backlog_bytes": L1_BYTES // 4,
            "batch_bytes": 4 * RECORD,
            "retry": RetryRule(retries=2, first_s=0.0, longest_s=0.0),
            **limits,
        }
        self.controller = StoreController(
            l1.pool,
            set_of(tiers),
            StoreLimits(**values),
            lambda key, reason: self.skipped.append((key, reason)),
        )
        self.made.append(self)

    async def put(self, keys: Sequence[bytes]) -> None:
        """Put chunks that were committed, and wait until each has an outcome."""
        self.controller.committed(keys)
        await self.controller.idle()

    def counts(self, name: str = "shelf-0") -> dict[str, int]:
        return self.controller.document()["adapters"][name]["outcomes"]

    @property
    def backlog_bytes(self) -> int:
        return self.controller.document()["backlog_bytes"]


class Loads:
    """A prefetch controller for one pool."""

    def __init__(self, l1: L1, *tiers: Tier | TierSet, **limits: object) -> None:
        values = {"in_flight_bytes": L1_BYTES // 16, "batch_bytes": 2 * RECORD, **limits}
        self.lost: list[tuple[str, bytes]] = []
        self.controller = PrefetchController(
            l1.pool,
            set_of(tiers),
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
        **more: Any,
    ) -> FetchOutcome:
        return await self.controller.fetch(
            b"".join(keys),
            n_slices,
            identity=identity,
            tenant=1,
            limits=[RECORD] * n_slices,
            deadline_s=CLOCK.monotonic_s() + within_s,
            parent=b"".join(parent or []),
            **more,
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
    one.shelf.asked.clear()


class Rig:
    """The parts of a server that handle tiers, on one pool."""

    def __init__(self, l1: L1, *, close_s: float = 0.05, opening_s: float = 60.0) -> None:
        self.l1 = l1
        self.adapters = TierSet(l1.pool)
        self.limits = TierLimits(
            deadline_ms=600_000, max_stuck_bytes=1 << 30, close_s=close_s, opening_s=opening_s
        )
        puts = Puts(l1, self.adapters)
        self.store, self.skipped = puts.controller, puts.skipped
        loads = Loads(l1, self.adapters, in_flight_bytes=4 * RECORD)
        self.prefetch, self.fetch = loads.controller, loads.fetch

    async def open(self, shelf: str, *, must: bool = False, **common: Any) -> str:
        config = configure_tier(entry(shelf, **common), len(self.adapters))
        await self.adapters.open(tiers.Tier(config, self.limits, CLOCK), CONTEXT, must=must)
        return config.name

    async def put(self, keys: list[bytes]) -> None:
        """Store chunks in L1 and wait until the store controller has put them."""
        assert self.l1.store(keys) == keys
        self.store.committed(keys)
        await self.store.idle()

    def states(self) -> dict[str, str]:
        return {name: row["state"] for name, row in self.adapters.document().items()}

    async def close(self) -> None:
        for shelf in SHELVES.values():
            shelf.let_go()
        await self.prefetch.stop(LATER_S)
        await self.store.stop(LATER_S)
        await self.adapters.close()


Start = Callable[..., Rig]


@pytest.fixture
async def tier():
    """Opens tiers; see `Tier`."""
    opened: list[Tier] = []

    async def open_tier(
        policy: StorePolicy = StorePolicy.THROUGH,
        deadline_ms: int = 600_000,
    ) -> Tier:
        limits = TierLimits(deadline_ms=deadline_ms, max_stuck_bytes=1 << 30, failures=1000, open_s=0.0)
        made = Tier(f"shelf-{len(opened)}", limits, policy)
        opened.append(made)
        await made.open(CONTEXT)
        return made

    yield open_tier
    while Puts.made:
        await Puts.made.pop().controller.stop(0)
    for one in opened:
        await one.close()


@pytest.fixture
async def start(l1: L1):
    SHELVES.clear()
    made: list[Rig] = []

    def starter(**limits: Any) -> Rig:
        made.append(Rig(l1, **limits))
        return made[-1]

    yield starter
    for rig in made:
        await rig.close()
    assert all(shelf.opened == shelf.closed for shelf in SHELVES.values()), (
        "an adapter was opened and not closed"
    )
