"""The tier that reads peers keeps the contract of storage: an owner's L1 is the medium, and puts go there directly."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstrata.native.core import buffer_address, libc_copy_at
from kvstrata.p2p.settings import OwnerLimits, PeerSettings
from kvstrata.p2p.tier import PeerTier
from kvstrata.rpc.cluster_wire import WhereReply
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.testing.adapter_contract import ABSENT, LOADED, SIZE, AdapterContract, Medium
from kvstrata.testing.strategies import IDENTITY, key_of
from kvstrata.tiers.base import (
    AdapterContext,
    Ask,
    Item,
    Outcome,
    StorageAdapter,
    Usage,
)
from kvstrata.types import unpack_extents
from tests.harness.directory_double import Directory
from tests.harness.l1 import L1
from tests.harness.peers import PeerOwner

L1_BYTES = 64 << 20


class OwnersL1(Medium):
    """The records of an owner's pool."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.l1, self.known = folder, L1(L1_BYTES), set[bytes]()

    def put(self, key: bytes, record: memoryview) -> Outcome:
        pool = self.l1.pool
        ticket, outcomes, packed = pool.reserve(key, b"", len(record), self.l1.row, IDENTITY, 1)
        if outcomes[0] in (ReserveOutcome.PRESENT, ReserveOutcome.IN_FLIGHT):
            return Outcome.EXISTS
        assert outcomes[0] == ReserveOutcome.RESERVED
        [extent] = unpack_extents(packed)
        libc_copy_at(pool.extents_address + extent.offset_bytes, buffer_address(record), len(record))
        if pool.commit(ticket, [0]) != bytes([CommitOutcome.COMMITTED]):
            return Outcome.FAILED
        self.known.add(key)
        return Outcome.STORED

    def keys(self) -> set[bytes]:
        return {key for key in self.known if self.l1.pool.peek(key)}

    def read(self, key: bytes) -> bytes:
        hold = self.l1.pool.hold(key)
        assert hold is not None
        with hold, hold.view() as view:
            return bytes(view)

    def write(self, key: bytes, stored: bytes) -> None:
        hold = self.l1.pool.hold(key)
        assert hold is not None
        with hold:
            ctypes.memmove(hold.address, stored, min(len(stored), hold.length))

    def remove(self, key: bytes) -> None:
        assert self.l1.pool.remove(key) == 1

    def used_bytes(self) -> int:
        return int(self.l1.pool.stats()["used_bytes"])


class OwnerAndReader(StorageAdapter):
    """Puts into the owner's pool, and loads through a reader of peers."""

    name = "peer"

    def __init__(self, medium: OwnersL1, seal: bool) -> None:
        self.medium, self.seal = medium, seal
        self.reader: PeerTier | None = None

    @property
    def capabilities(self) -> Any:  # type: ignore[override]
        assert self.reader is not None
        return self.reader.capabilities

    async def open(self, context: AdapterContext) -> None:
        self.owner = PeerOwner(self.medium.l1, seal=self.seal, socket_path=self.medium.folder / "peers.sock")
        self.directory = Directory()
        self.directory.answer = self._where  # type: ignore[method-assign]
        settings = PeerSettings(
            (self.directory.endpoint,), "tcp", seal=self.seal, lookup_timeout_ms=60_000, load_timeout_ms=60_000,
            remember_ms=0, remember_none_ms=0, limits=OwnerLimits(open_s=0.0, max_open_s=0.0),
        )  # fmt: skip
        self.reader = PeerTier(settings)
        await self.reader.open(context)

    def _where(self, request: Any) -> WhereReply:
        tags = [request.tags[at : at + 8] for at in range(0, len(request.tags), 8)]
        held = {key[:8] for key in self.medium.known if self.medium.l1.pool.peek(key)}
        owner = msgspec.structs.replace(self.owner.entry, n_keys=len(tags))
        return WhereReply(request.seq, 1, [owner] if held.intersection(tags) else [])

    async def exists(self, keys: bytes, ask: Ask) -> bytes:
        # The suite's keys are no prefix.
        assert self.reader is not None
        each = Ask(each=True)
        found = await self.reader.exists(keys, each)
        ask.reason = each.reason
        return found

    async def put(self, items: Sequence[Item]) -> None:
        for item in items:
            with item.hold.view() as view:
                outcome = self.medium.put(item.key, view)
            item.settle(outcome)

    async def load(self, items: Sequence[Item]) -> None:
        assert self.reader is not None
        for item in items:
            item.ask = Ask(each=True)
        await self.reader.load(items)

    async def delete(self, keys: bytes) -> int:
        return self.medium.l1.pool.remove(keys)

    async def usage(self) -> Usage:
        return Usage(self.medium.used_bytes(), 0, len(self.medium.keys()))

    async def close(self) -> None:
        if self.reader is not None:
            await self.reader.close()
            self.directory.close()
            await self.owner.close()
            self.reader = None


class PeerContract(AdapterContract):
    """What is damaged in an owner's L1 is a miss for its peers; the owner's own check heals it."""

    has_cap, waits_in_threads = False, False
    seal = False
    test_a_cancelled_put_keeps_its_holds_until_the_medium_is_done = (
        None  # puts are the test's, not the reader's
    )

    def make_medium(self, folder: Path) -> Medium:
        return OwnersL1(folder)

    def make_adapter(self, medium: Medium, capacity_bytes: int = 0) -> StorageAdapter:
        assert isinstance(medium, OwnersL1)
        return OwnerAndReader(medium, self.seal)

    async def test_one_bad_item_does_not_fail_its_batch(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 2, 3)
            medium.flip(key_of(2), -1)
            assert await self.load(adapter, 1, 2, 3) == [LOADED, ABSENT, LOADED]

    @pytest.mark.parametrize("damage", AdapterContract.damages[:6])  # a record in L1 keeps its length
    async def test_damaged_records_are_corrupt_and_healed_by_the_next_put(
        self, medium: Medium, damage: str
    ) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 2)
            self.damage(medium, 1, damage)
            assert await self.load(adapter, 1, 2) == [ABSENT, LOADED]

    async def test_swapped_records_are_corrupt(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1, 2)
            medium.swap(key_of(1), key_of(2))
            assert await self.load(adapter, 1, 2) == [ABSENT, ABSENT]

    async def test_swapped_records_of_different_length_are_corrupt_and_healed(self, medium: Medium) -> None:
        async with self.opened(medium) as adapter:
            await self.put(adapter, 1)
            await self.put(adapter, 2, size=77)
            medium.swap(key_of(1), key_of(2))
            for number, size in ((1, SIZE), (2, 77)):
                assert await self.load(adapter, number, size=size) == [ABSENT]


class TestPeer(PeerContract):
    pass


class TestSealedPeer(PeerContract):
    seal = True
