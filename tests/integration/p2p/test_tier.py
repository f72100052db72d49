"""The reader of peers with a real owner and real transfer engines, both ends in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq

from kvstrata.clock import SystemClock
from kvstrata.errors import TransferError
from kvstrata.p2p.engines.base import Region
from kvstrata.p2p.engines.ucx import UcxEngine
from kvstrata.p2p.serving import PeerServer
from kvstrata.p2p.settings import PeerSettings
from kvstrata.p2p.tier import PeerTier
from kvstrata.rpc.cluster_wire import Owner, tags_of
from kvstrata.rpc.zmq_curve import CurveKeys
from kvstrata.rpc.zmq_server import ZmqServer
from kvstrata.storage.base import LoadOutcome, LoadStatus
from kvstrata.testing.strategies import WAIT_S, lent_context, load_item, loaded_payload, payload_of, watched
from tests.harness.directory_double import Directory
from tests.harness.l1 import L1, SIZE, chain

pytestmark = pytest.mark.integration

LOADED = LoadOutcome(LoadStatus.LOADED)
KEYS = chain("a", 8)


class Pair:
    """An owner and a reader, with `p2p.mac` or without."""

    def __init__(self, *, mac: bool = False) -> None:
        self.mac = mac
        self.l1 = L1()
        self.directory = Directory()
        settings = PeerSettings(
            (self.directory.endpoint,),
            "ucx",
            mac=mac,
            lookup_timeout_ms=60_000,
            load_timeout_ms=60_000,
            remember_none_ms=0,
        )
        self.reader = PeerTier(settings, UcxEngine)
        self.engine = UcxEngine()

    async def open(self) -> None:
        pool = self.l1.pool
        try:
            metadata = await self.engine.open(Region(pool.extents_address, pool.extents_bytes))
        except TransferError as why:
            pytest.skip(why.message)
        public, secret = zmq.curve_keypair()
        socket = ZmqServer(asyncio.get_running_loop())
        port = socket.bind_tcp("127.0.0.1", 0, curve=CurveKeys(secret, None), insecure=False)
        self.owner = PeerServer(
            pool,
            SystemClock(),
            socket,
            instance_id="owner",
            incarnation=5,
            engine="ucx",
            metadata=lambda: metadata,
            mac=self.mac,
        )
        self.owner.start()
        self.entry = Owner("owner", 5, f"tcp://127.0.0.1:{port}", 0, True, public.decode())
        await self.reader.open(lent_context(lambda key: None, "reader"))

    def holds(self, keys: list[bytes]) -> list[bytes]:
        """Store these keys at the owner, and tell the directory."""
        known = self.directory.holds.get("owner", (self.entry, set()))[1]
        self.directory.holds["owner"] = (self.entry, known | {tags_of(key) for key in keys})
        return self.l1.store(keys)

    async def load(self, keys: list[bytes]) -> list[LoadOutcome]:
        items = [load_item(key, SIZE) for key in keys]
        outcomes = await self.reader.load(items)
        for item, outcome in zip(items, outcomes, strict=True):
            watched(item).check()
            if outcome == LOADED:
                assert loaded_payload(item, SIZE) == payload_of(item.key, SIZE)
        return outcomes

    async def close(self) -> None:
        await self.reader.close()
        await self.owner.close()
        await self.engine.close()
        self.directory.close()
        self.l1.nothing_in_use()
        self.l1.pool.close()


@pytest.fixture(params=[False, True], ids=["without macs", "with macs"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    made = Pair(mac=request.param)
    await made.open()
    yield made
    await made.close()


async def test_under_eviction_only_right_bytes_are_read_and_at_most_a_quarter_of_l1_is_leased(
    pair: Pair,
) -> None:
    """The owner goes on storing while it is read; a chunk that it evicts is a miss."""
    right = missed = 0
    limit_bytes = pair.l1.pool.extents_bytes // 4

    async def read(prompt: list[bytes]) -> None:
        nonlocal right, missed
        await pair.reader.exists(prompt)
        for outcome in await pair.load(prompt):
            right += outcome == LOADED
            missed += outcome != LOADED
        assert pair.owner.leases.leased_bytes <= limit_bytes

    async with asyncio.timeout(WAIT_S):
        for n in range(25):
            prompts = [chain(f"p{n} {i}", 6) for i in range(4)]
            for prompt in prompts:
                pair.holds(prompt)
            await asyncio.gather(*map(read, prompts), read(chain(f"p{n - 5} 0", 6)))
    assert right > 200
    assert missed > 0
