"""When the transfer engine of a tier is opened."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstrata.errors import TransferError
from kvstrata.p2p import peer_engine
from kvstrata.p2p.engines.base import Region
from kvstrata.p2p.peer_engine import PeerEngine
from tests.harness.waiting import until


class StubEngine:
    """Cannot be opened while `errors` has an error."""

    errors: list[Exception]

    async def open(self, regions: Sequence[Region]) -> bytes:
        if self.errors:
            raise self.errors.pop(0)
        return b"metadata"

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    monkeypatch.setattr(peer_engine, "RETRY_S", 0.0)
    made = StubEngine()
    made.errors, made.closed = [], False
    return made


async def test_without_a_usable_device_the_engine_is_opened_as_soon_as_there_is_one(engine) -> None:
    engine.errors = [TransferError(f"stub: no device {at}", field="network") for at in range(3)]
    opened = PeerEngine("peer", lambda: engine)
    await opened.open([Region(4096, 4096)])
    assert (opened.metadata, opened.remarks()) == (b"", {"engine": "stub: no device 0"})
    with pytest.raises(TransferError, match="no network device"):
        _ = opened.current
    await until(lambda: opened.metadata == b"metadata")
    assert opened.current is engine and opened.remarks() == {}
    await opened.close()
    assert engine.closed


async def test_another_error_stops_the_start(engine) -> None:
    engine.errors = [TransferError("stub: not installed", field="engine")]
    with pytest.raises(TransferError, match="not installed"):
        await PeerEngine("peer", lambda: engine).open([Region(4096, 4096)])


async def test_a_tier_that_is_closed_tries_no_more(engine) -> None:
    engine.errors = [TransferError("stub: no device", field="network")] * 1_000_000
    opened = PeerEngine("peer", lambda: engine)
    await opened.open([Region(4096, 4096)])
    await opened.close()
    left = len(engine.errors)
    await until(lambda: len(engine.errors) == left)
