"""An owner that lends records of a real pool over a real socket, and a reader's link to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstrata.clock import SystemClock
from kvstrata.p2p.serving import PeerServer
from kvstrata.rpc.cluster_wire import PeerLease, PeerLeased
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_link import AskLink, Links
from tests.harness.l1 import L1
from tests.harness.waiting import HANG_S


class Clock(SystemClock):
    """Stands still until it is told."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


class Owner:
    """Lends the records of `l1`, with MACs or without."""

    def __init__(self, l1: L1, *, mac: bool) -> None:
        self.port = ControlPort(asyncio.get_running_loop(), 7)
        number = self.port.server.bind_tcp("localhost", 0, curve=None, insecure=False)
        self.endpoint = f"tcp://127.0.0.1:{number}"
        self.clock = Clock()
        self.metadata = b"how to get there"
        self.peers = PeerServer(
            l1.pool, self.clock, self.port, instance_id="owner", incarnation=7,
            engine="ucx", metadata=lambda: self.metadata, mac=mac,
        )  # fmt: skip
        self.port.start()
        self.links = Links(asyncio.get_running_loop())
        self.link: AskLink = self.links.ask(self.endpoint)

    async def lease(self, keys: list[bytes]) -> PeerLeased:
        return await self.link.ask(PeerLease(0, "reader", b"".join(keys), 1, 60_000), PeerLeased, HANG_S)


@pytest.fixture
def l1() -> L1:
    return L1()


@pytest.fixture
def mac() -> bool:
    """Whether the owner computes MACs."""
    return False


@pytest.fixture
async def owner(l1: L1, mac: bool) -> AsyncIterator[Owner]:
    made = Owner(l1, mac=mac)
    yield made
    made.links.close()
    await made.port.close()
    await made.peers.close()
    l1.nothing_in_use()
    assert l1.pool.stats()["leases"] == 0


@pytest.fixture
def link(owner: Owner) -> AskLink:
    return owner.link
