"""The reader of peers while its transfer engine is replaced, because a network device came up."""

from __future__ import annotations

import asyncio

from kvstrata.errors import TransferError
from kvstrata.p2p.engines import base as transfer
from kvstrata.p2p.owners import OwnerLimits
from tests.fault.p2p.net import (
    KEYS,
    LOADED,
    THERE,
    CopyEngine,
    failed,
    unknown,
)
from tests.harness.waiting import until


async def test_leases_and_connections_go_on_when_the_engine_is_opened_anew(net) -> None:
    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert await one.load(*KEYS[:3]) == [LOADED] * 3
    before = await one.reopen(CopyEngine())
    assert await one.load(*KEYS[3:]) == [LOADED] * 5
    assert (before.reads, one.engine.reads) == (1, 1)
    assert one.owner.asked["PeerHello"] == one.owner.asked["PeerLease"] == 1
    assert "eth1 10.0.1.1" in one.adapter.remarks()["reopened"]


async def test_a_read_under_way_ends_on_the_old_engine_when_the_engine_is_opened_anew(net) -> None:
    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    one.engine.held = True
    reading = asyncio.create_task(one.load(*KEYS[:4]))
    await until(lambda: one.engine.waiting)
    before = await one.reopen(CopyEngine())
    assert await one.load(*KEYS[4:]) == [LOADED] * 4
    assert not reading.done()
    before.let_go()
    assert await reading == [LOADED] * 4
    assert one.owner.asked["PeerHello"] == 1


async def test_a_failure_in_the_old_engine_leaves_connections_of_the_new_one_alone(net) -> None:
    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    one.engine.held = True
    reading = asyncio.create_task(one.load(*KEYS[:4]))
    await until(lambda: one.engine.waiting)
    before = await one.reopen(CopyEngine())
    [(_, copy, outcome)] = before.waiting
    before.waiting = []
    outcome.set_result(transfer.PEER_GONE)
    assert await reading == [failed("peer_gone")] * 4
    copy()  # drops the holds
    assert await one.load(*KEYS[4:]) == [LOADED] * 4
    assert one.owner.asked["PeerHello"] == 1


async def test_a_peer_that_the_new_engine_cannot_connect_is_asked_for_its_metadata_again(net) -> None:
    class Refuses(CopyEngine):
        refusals = 1

        async def connect(self, peer: str, metadata: bytes) -> None:
            if self.refusals:
                self.refusals -= 1
                raise TransferError("copy: the metadata are those of an earlier engine", field="network")
            await super().connect(peer, metadata)

    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    await one.reopen(Refuses())
    assert await one.load(*KEYS[:1]) == [LOADED]
    assert one.owner.asked["PeerHello"] == 2


async def test_skipped_owners_are_asked_again_when_the_engine_is_opened_anew(net) -> None:
    one = await net(limits=OwnerLimits(open_s=1e6, max_open_s=1e6))
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    one.engine.answer = transfer.PEER_GONE
    assert await one.load(KEYS[0]) == [failed("peer_gone")]
    assert await one.adapter.exists(KEYS) == [unknown("peer_skipped")] * 8
    await one.reopen(CopyEngine())
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_closing_the_adapter_while_its_engine_is_opened_anew_closes_both_engines(net) -> None:
    class Slow(CopyEngine):
        closed = False
        opening: asyncio.Future[bytes] | None = None

        async def open(self, regions):
            self.opening = asyncio.get_running_loop().create_future()
            return await self.opening

        async def close(self) -> None:
            self.closed = True

    one = await net()
    before, slow = one.engine, Slow()
    one.engine, one.usable = slow, one.usable | {"eth1 10.0.1.1"}
    one.adapter._engines.look_now()
    await until(lambda: slow.opening)
    assert await one.load(*KEYS) == [LOADED] * 8  # through the present engine
    await one.adapter.close()
    assert slow.closed
    one.engine = before
