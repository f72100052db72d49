"""An adapter whose host process the test stands for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstrata.tiers.host import parent
from kvstrata.tiers.host.parent import HostedAdapter
from tests.unit.tiers.host_double import Child, opened_with


@pytest.fixture
def child_in_place_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    Child.made = []
    monkeypatch.setattr(parent, "HostProcess", Child)
    monkeypatch.setattr(parent, "CLOSE_S", 0.05)


@pytest.fixture
async def pair(child_in_place_of_a_process: None) -> AsyncIterator[tuple[HostedAdapter, Child]]:
    adapter, child = await opened_with()
    yield adapter, child
    for one in Child.made:
        one.reaps_at_once = True
        if one.killed.is_set():
            one.reap()
    await adapter.close()
