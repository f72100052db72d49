"""A reader of peers and an owner in one process; the transfer engine copies within that process."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import msgspec
import pytest
import zmq

from kvstrata.keys.batch import split
from kvstrata.native.core import Pool
from kvstrata.p2p.engines.base import (
    CANCELLED,
    DEADLINE,
    NOT_CONNECTED,
    ReadItem,
    Region,
    TransferEngine,
    in_range,
    pack_metadata,
    unpack_metadata,
)
from kvstrata.p2p.lent import split_extents
from kvstrata.p2p.settings import PeerSettings
from kvstrata.p2p.tier import PeerTier
from kvstrata.rpc.cluster_wire import (
    TO_INSTANCE,
    ClusterReply,
    Failure,
    Owner,
    PeerHello,
    PeerLease,
    PeerLeased,
    PeerRelease,
    PeerReleased,
    PeerWelcome,
)
from kvstrata.rpc.zmq_curve import CurveKeys
from kvstrata.testing.strategies import (
    Found,
    Settled,
    ask_for,
    lent_context,
    load_item,
    loaded_payload,
    payload_of,
    settled,
    watched,
)
from kvstrata.tiers.base import Ask, Item, Outcome, Presence
from kvstrata.types import EXTENT, KEY_BYTES
from tests.harness.directory_double import Directory, Endpoint
from tests.harness.l1 import L1, SIZE, chain

LOADED = Settled(Outcome.LOADED)
ABSENT = Settled(Outcome.ABSENT)
THERE = Found(Presence.PRESENT)
NOT_THERE = Found(Presence.ABSENT)
KEYS = chain("a", 8)


def failed(reason: str) -> Settled:
    return Settled(Outcome.FAILED, reason)


def unknown(reason: str) -> Found:
    return Found(Presence.UNKNOWN, reason)


class CopyEngine(TransferEngine):
    """Copies at once. While `held`, it copies at `let_go`, which may come after the deadline, as a late DMA would."""

    name = "copy"
    quiesce: Literal["drain", "never"] = "drain"

    def __init__(self) -> None:
        self.peers: dict[str, tuple[int, int]] = {}
        self.local = (0, 0)
        self.held = False
        self.answer = ""
        """If not empty, reads copy nothing and answer this."""
        self.waiting: list[tuple[str, Callable[[], None], asyncio.Future[str]]] = []
        self.reads = 0
        self.before_read: Callable[[], None] = lambda: None

    async def open(self, region: Region) -> bytes:
        self.local = (region.address, region.length)
        return metadata_of(*region)

    async def connect(self, peer: str, metadata: bytes) -> None:
        known = unpack_metadata(self.name, peer, metadata)
        self.peers[peer] = (int.from_bytes(known.part, "little"), known.region_bytes)

    async def read(
        self, peer: str, items: Sequence[ReadItem], deadline_s: float, ended: Callable[[], None]
    ) -> str:
        self.reads += 1
        if peer not in self.peers:
            ended()
            return NOT_CONNECTED
        address, length = self.peers[peer]
        assert in_range(items, self.local[1], length)
        self.before_read()
        if self.answer:
            ended()
            return self.answer

        def copy() -> None:
            for item in items:
                ctypes.memmove(self.local[0] + item.local_offset, address + item.remote_offset, item.length)
            ended()

        if not self.held:
            copy()
            return ""
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append((peer, copy, outcome))
        await asyncio.wait({outcome}, timeout=deadline_s)
        return outcome.result() if outcome.done() else DEADLINE

    def let_go(self) -> None:
        """Copy the bytes of held reads and end these reads."""
        waiting, self.waiting = self.waiting, []
        for _, copy, outcome in waiting:
            copy()
            if not outcome.done():
                outcome.set_result("")

    async def disconnect(self, peer: str) -> None:
        self.peers.pop(peer, None)
        for name, _, outcome in self.waiting:
            if name == peer and not outcome.done():
                outcome.set_result(CANCELLED)

    async def close(self) -> None:
        self.let_go()


def metadata_of(address: int, length: int) -> bytes:
    """Return the metadata that connect a `CopyEngine` to this region."""
    return pack_metadata("copy", Region(address, length), address.to_bytes(8, "little"))


class TestOwner(Endpoint):
    """An owner of a real pool; a test decides what it leases, refuses and forgets."""

    __test__ = False

    def __init__(self, instance: str, pool: Pool) -> None:
        public, secret = zmq.curve_keypair()
        super().__init__(TO_INSTANCE, CurveKeys(secret, None))
        self.public_key = public.decode()
        self.instance = instance
        self.pool = pool
        self.epoch = 11
        self.row = pool.claim_row(b"p" * 16, b"p" * 16, 1)
        self.metadata = metadata_of(pool.extents_address, pool.extents_bytes)
        self.leases: dict[int, int] = {}
        self.kept = 0
        """How many releases prolonged their lease."""
        self.lies = False
        self.each_answer: Callable[[PeerLease], bytes] | None = None
        """The extents that it claims for single keys; None: those that it has."""
        self.max_leased = 1 << 20
        """Most records that are leased at the same time."""
        self.refuses: dict[str, str] = {}
        """Failure codes by the name of the request that they answer."""

    @property
    def entry(self) -> Owner:
        """The owner as the directory names it."""
        return Owner(self.instance, self.epoch, self.endpoint, len(KEYS), True, self.public_key)

    def answer(self, request: Any) -> ClusterReply | None:
        seq, epoch = request.seq, self.epoch
        if (code := self.refuses.get(type(request).__name__)) is not None:
            return Failure(seq, epoch, code, "the test says so", "", False)
        if isinstance(request, PeerHello):
            return PeerWelcome(seq, epoch, self.instance, self.metadata, self.pool.extents_bytes)
        if isinstance(request, PeerLease):
            if self.lies:
                return PeerLeased(seq, epoch, 1, b"\xff" * 24, 1_000, "")
            if self.each_answer is not None and request.each:
                return PeerLeased(seq, epoch, 1, self.each_answer(request), request.ttl_ms, "")
            if request.each:
                return self._lease_each(request)
            room = self.max_leased - sum(self.leases.values())
            keys = request.keys[: room * KEY_BYTES]
            ticket, n_chunks, extents, _, _ = self.pool.lease(keys, request.n_slices, [self.row])
            if ticket:
                self.leases[ticket] = n_chunks
            whole = n_chunks * KEY_BYTES == len(request.keys)
            reason = "" if whole else "limit" if n_chunks * KEY_BYTES == len(keys) else "absent"
            return PeerLeased(seq, epoch, ticket, extents, request.ttl_ms, reason)
        assert isinstance(request, PeerRelease)
        stood = request.lease in self.leases
        if request.keep_ms:
            self.kept += stood
        elif stood:
            self.expire(request.lease)
        return PeerReleased(seq, epoch, stood)

    def _lease_each(self, request: PeerLease) -> PeerLeased:
        keys = split(request.keys)
        there = [key for key in keys if self.pool.peek(key)]
        ticket, n_leased, extents, _, _ = self.pool.lease(b"".join(there), 1, [self.row])
        if ticket:
            self.leases[ticket] = n_leased
        of_key = dict(zip(there, split_extents(extents), strict=True))
        all_extents = b"".join(of_key.get(key, bytes(EXTENT.size)) for key in keys)
        return PeerLeased(request.seq, self.epoch, ticket, all_extents, request.ttl_ms, "")

    def expire(self, lease: int) -> None:
        del self.leases[lease]
        self.pool.release(lease)


class Net:
    """One reader, one owner with eight records, and a directory that knows the owner."""

    def __init__(self, l1: L1, **settings: object) -> None:
        self.l1 = l1
        self.directory = Directory()
        self.owner = TestOwner("owner", l1.pool)
        self.others: list[TestOwner] = []
        self.engine = CopyEngine()
        values = {
            # Tests of silent parties set shorter times by `patience`.
            "lookup_timeout_ms": 60_000,
            "load_timeout_ms": 60_000,
            "lease_ms": 60_000,
            "remember_ms": 0,
            "remember_none_ms": 0,
            **settings,
        }
        self.settings = PeerSettings((self.directory.endpoint,), "copy", **values)
        self.adapter = PeerTier(self.settings, lambda: self.engine)
        self.each = False
        """Whether the reader's keys are asked for as those of windows are."""
        self.named = b""
        """The owner that is named for the reader's keys."""
        l1.store(KEYS)
        self.directory.tell(self.owner.entry, KEYS)

    def patience(self, **settings: int) -> None:
        """Set how long the reader waits from now on."""
        shared = self.adapter._parts.shared
        shared.settings = msgspec.structs.replace(shared.settings, **settings)

    async def ask(self, keys: Sequence[bytes]) -> list[Found]:
        return await ask_for(self.adapter, keys, each=self.each, owner=self.named)

    async def load(self, *keys: bytes, items: list[Item] | None = None) -> list[Settled]:
        """Load; assert that the holds of loaded items were dropped and that loaded bytes are right."""
        asked = [load_item(key, SIZE) for key in keys]
        for item in asked:
            item.ask = Ask(each=self.each, owner=self.named)
        items = items or asked
        outcomes = await settled(self.adapter.load, items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome == LOADED:
                watched(item).check()
                assert loaded_payload(item, SIZE) == payload_of(item.key, SIZE)
        return outcomes

    def counted(self, name: str) -> int:
        return self.adapter.numbers()[name]


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
