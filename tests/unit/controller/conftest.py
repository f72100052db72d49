"""A cluster of instances in this process, whose clock a test puts forward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstrata.clock import SystemClock
from kvstrata.config.controller_model import ControllerSettings
from kvstrata.controller.cluster import Cluster
from kvstrata.controller.orders import Orders
from kvstrata.process.supervisor import Supervisor
from kvstrata.rpc.zmq_curve import ClusterKeys, new_secret
from tests.harness.known_members import KEY


class Clock(SystemClock):
    """A clock that tests put forward."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def listed() -> dict[str, tuple[str, ...]]:
    """The names that each key may use; () stands for all."""
    return {KEY: ()}


@pytest.fixture
async def cluster(clock: Clock, listed: dict[str, tuple[str, ...]]) -> AsyncIterator[Cluster]:
    loop = asyncio.get_running_loop()
    made = Cluster(
        ControllerSettings(),
        clock,
        Orders(),
        name="c",
        epoch=clock.unix_ms(),
        supervisor=Supervisor(loop),
        keys=ClusterKeys(new_secret()),
        listed=lambda: listed,
    )
    yield made
    for member in made.members:
        made.commands.end_all(member, "the test ends")
    await made.close()
