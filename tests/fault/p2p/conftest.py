"""Fixtures that open readers of peers and close them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from kvstrata.testing.strategies import lent_context
from tests.fault.p2p.net import KEYS, Net, TestOwner
from tests.harness.l1 import L1


@pytest.fixture
async def net(l1: L1) -> AsyncIterator[Callable[..., object]]:
    """Opens nets and closes them at the end of the test; leases that the owners still have are ended."""
    nets: list[Net] = []

    async def opened(**settings: object) -> Net:
        made = Net(l1, **settings)
        nets.append(made)
        await made.adapter.open(lent_context(lambda key: None, "reader"))
        return made

    yield opened
    for made in nets:
        made.engine.let_go()
        await made.adapter.close()
        for owner in (made.owner, *made.others):
            for lease in list(owner.leases):
                owner.expire(lease)
            owner.close()
        made.directory.close()


@pytest.fixture
async def second(l1: L1) -> AsyncIterator[tuple[L1, TestOwner, bytes]]:
    """Another owner of the same records: its pool, the owner, and the source that names it."""
    pool = L1()
    pool.store(KEYS)
    owner = TestOwner("second", pool.pool)
    yield pool, owner, msgspec.msgpack.encode(owner.entry)
    for lease in list(owner.leases):
        owner.expire(lease)
    owner.close()
    pool.pool.close()
