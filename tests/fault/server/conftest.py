"""Fixtures that make adapters and rigs and close them at the end of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstrata.policy.store import StorePolicy
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.media.fs.adapter import FsAdapter
from kvstrata.storage.wrap.deadline import DeadlineLimits
from kvstrata.testing.faults import FaultPlan
from tests.fault.server.fs_tiers import Tier, Watched
from tests.fault.server.tier_rig import Rig
from tests.harness.l1 import CLOCK, L1
from tests.harness.shelf import SHELVES


@pytest.fixture
async def tier(tmp_path: Path, l1: L1):
    """Opens tiers of type `fs`; see `fs_tiers.Tier`."""
    opened: list[Tier] = []

    async def open_tier(
        policy: StorePolicy = StorePolicy.THROUGH,
        *,
        deadline_ms: int = 600_000,
        plan: FaultPlan | None = None,
        max_stuck_bytes: int = 1 << 30,
        capacity_bytes: int = 0,
        failures: int = 1000,
    ) -> Tier:
        name = f"fs-{len(opened)}"
        medium = FsAdapter(
            base_path=str(tmp_path / name),
            min_free_bytes=0,
            capacity_bytes=capacity_bytes,
            num_workers=3,
            name=name,
        )
        faults = Watched(medium, plan or FaultPlan(0))
        limits = DeadlineLimits(
            deadline_ms=deadline_ms, max_stuck_bytes=max_stuck_bytes, failures=failures, open_s=0.0
        )
        made = Tier(name, faults, limits, policy)
        opened.append(made)
        await made.guard.open(AdapterContext("test", CLOCK, 0, 0, lambda key: None))
        return made

    yield open_tier
    for one in opened:
        await one.guard.close()


@pytest.fixture
async def start(l1: L1):
    """Makes rigs; see `tier_rig.Rig`."""
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
