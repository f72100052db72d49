"""Reads by a transfer engine under an owner's grant; the engine copies within this process."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvstrata.p2p import serving
from kvstrata.p2p.nixl import DEADLINE, PEER_GONE, ReadItem, Region
from kvstrata.p2p.settings import OwnerLimits
from kvstrata.p2p.tier import PeerTier
from kvstrata.testing.strategies import load_item, watched
from tests.harness.l1 import L1, SIZE, chain
from tests.harness.peers import ABSENT, KEYS, LOADED, PeerNet, PeerOwner, failed
from tests.harness.waiting import until


class CopyEngine:
    """In place of NIXL: copies at once, or with `late` at `let_go`, as a transfer that nothing can stop would."""

    def __init__(self, owner: Region) -> None:
        self.owner, self.local = owner, Region(0, 0)
        self.happens: Callable[[], None] = lambda: None
        """What happens before the bytes are read."""
        self.answer, self.late = "", False
        self.reaches = self.connected = b"metadata"
        """The metadata of the owner's engine, and those by which it was connected."""
        self.waiting: list[Callable[[], None]] = []

    async def open(self, region: Region) -> bytes:
        self.local = region
        return b"metadata"

    async def connect(self, peer: str, metadata: bytes) -> None:
        self.connected = metadata

    async def read(
        self, peer: str, items: Sequence[ReadItem], deadline_s: float, ended: Callable[[], None]
    ) -> str:
        await asyncio.to_thread(self.happens)
        if self.connected != self.reaches:
            ended()
            return PEER_GONE

        def copy() -> None:
            for item in items:
                source, target = (
                    self.owner.address + item.remote_offset,
                    self.local.address + item.local_offset,
                )
                ctypes.memmove(target, source, item.length)
            ended()

        if self.late:
            self.waiting.append(copy)
            return DEADLINE
        copy()
        return self.answer

    async def disconnect(self, peer: str) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture
async def granted(l1: L1) -> AsyncIterator[tuple[PeerNet, CopyEngine]]:
    owner = PeerOwner(l1, engine="nixl", metadata=b"metadata")
    made = PeerNet(l1, owner, limits=OwnerLimits(open_s=0.0, max_open_s=0.0))
    engine: Any = CopyEngine(Region(l1.pool.extents_address, l1.pool.extents_bytes))
    settings = msgspec.structs.replace(made.settings, engine="nixl")
    made.adapter = PeerTier(settings, lambda: engine)
    yield await made.open(), engine
    await made.close()


async def test_granted_records_are_read_and_the_grant_ends_with_the_readers_word(granted, l1: L1) -> None:
    one, _ = granted
    l1.lose(KEYS[6:])
    assert await one.load(*KEYS) == [LOADED] * 6 + [ABSENT] * 2
    assert (one.owner.records.sending_bytes, one.owner.records.sent_records) == (0, 6)


async def test_a_read_under_a_grant_that_ended_meanwhile_is_a_miss_whatever_its_bytes(
    granted, l1: L1
) -> None:
    """As when the reader was frozen: the owner has cut it, and other records lie where it reads."""
    one, engine = granted

    def ends() -> None:
        [connection] = one.owner.records._connections
        connection.cut()
        connection.thread.join()
        assert l1.pool.clear() == (8, 0)

    engine.happens = ends
    assert await one.load(*KEYS) == [failed("peer_gone")] * 8
    engine.happens = lambda: None
    l1.store(KEYS)
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_granted_records_keep_their_place_until_they_have_been_read(granted, l1: L1) -> None:
    one, engine = granted

    def others_come() -> None:
        l1.pool.clear()
        l1.store(chain("others", 100))

    engine.happens = others_come
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_a_grant_that_its_reader_keeps_to_itself_is_cut_and_the_read_a_miss(
    granted, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, engine = granted
    monkeypatch.setenv("KVSTRATA_PATIENCE", "1")
    monkeypatch.setattr(serving.frames, "STALL_S", 0.05)
    monkeypatch.setattr(serving, "GRANT_S", 0.0)

    def is_cut() -> None:
        while one.owner.records._connections:
            pass

    engine.happens = is_cut
    assert await one.load(*KEYS) == [failed("peer_gone")] * 8
    assert one.owner.records.sending_bytes == 0


async def test_a_transfer_that_nothing_can_stop_keeps_its_destinations_until_it_has_ended(granted) -> None:
    one, engine = granted
    engine.late = True
    items = [load_item(key, SIZE) for key in KEYS]
    await one.adapter.load(items)
    assert {(item.outcome.name, item.reason) for item in items} == {("FAILED", "peer_deadline")}
    assert all(watched(item).drops == 0 for item in items)
    await until(lambda: one.owner.records.sending_bytes == 0)
    for copy in engine.waiting:
        copy()
    for item in items:
        await watched(item).until_dropped()
        watched(item).check()


async def test_an_engine_that_fails_is_a_miss_and_the_next_read_gets_a_new_connection(granted) -> None:
    one, engine = granted
    engine.answer = PEER_GONE
    assert await one.load(*KEYS) == [failed("peer_gone")] * 8
    engine.answer = ""
    assert await one.load(*KEYS) == [LOADED] * 8
    assert one.counted("hellos") == 2


async def test_an_owner_whose_engine_is_another_one_is_reached_by_its_next_metadata(granted) -> None:
    """As after the death of its adapter host: the server, and so the connections to it, go on."""
    one, engine = granted
    assert await asyncio.gather(*(one.load(key) for key in KEYS)) == [[LOADED]] * 8
    engine.reaches = one.owner.metadata = b"another"
    assert await one.load(*KEYS) == [LOADED] * 8
