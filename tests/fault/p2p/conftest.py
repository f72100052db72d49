"""Readers and owners in one process, closed at the end of a test; nothing may be held then."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.l1 import L1
from tests.harness.peers import KEYS, Opened, PeerNet, PeerOwner


@pytest.fixture
def l1() -> L1:
    return L1()


@pytest.fixture
async def net(l1: L1, tmp_path: Path) -> AsyncIterator[Opened]:
    """Opens nets; an `owner` may be given, and `seal` is that of both sides."""
    nets: list[PeerNet] = []

    async def opened(owner: Any = None, *, seal: bool = False, unix: bool = True, **settings: Any) -> PeerNet:
        path = tmp_path / f"peers-{len(nets)}.sock" if unix else None
        made = PeerNet(l1, owner or PeerOwner(l1, seal=seal, socket_path=path), seal=seal, **settings)
        nets.append(made)
        return await made.open()

    yield opened
    for made in nets:
        await made.close()


@pytest.fixture
async def second() -> AsyncIterator[PeerOwner]:
    """Another owner of the same records, with a pool of its own."""
    pool = L1()
    pool.store(KEYS)
    owner = PeerOwner(pool, "second")
    yield owner
    await owner.close()
    pool.pool.close()
