"""The connector's worker side over a client, a mover and a clock that the test sets."""

from __future__ import annotations

import pytest

from kvstrata.connectors.vllm.worker import GroupSide, WorkerSide
from tests.unit.connectors.worker_double import MINE, Fake


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def side(fake):
    return WorkerSide([GroupSide(fake, fake, slice_digest=MINE, record_blocks=2)], now=fake)


@pytest.fixture
def device_side(fake):
    """A worker side with two sections; the layer `shared` lies in the section of `first`."""
    fake.sections = {"first": 0, "second": 1, "shared": 0}
    return WorkerSide([GroupSide(fake, fake, slice_digest=MINE, record_blocks=2)], now=fake)
