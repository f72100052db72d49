"""`p2p.mac`: whoever changes bytes between an owner and a reader, checksums and all, gets nothing served."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import zmq

from kvstrata.clock import SystemClock
from kvstrata.native import core
from kvstrata.p2p import serving
from kvstrata.p2p.engines.base import ReadItem
from kvstrata.p2p.mac import MAC_KEY_BYTES, TAG_BYTES, tags_of
from kvstrata.p2p.owners import OwnerLimits
from kvstrata.p2p.serving import PeerServer
from kvstrata.p2p.settings import PeerSettings
from kvstrata.p2p.tier import PeerTier
from kvstrata.rpc.cluster_wire import Owner
from kvstrata.rpc.control_port import ControlPort
from kvstrata.rpc.zmq_curve import CurveKeys
from kvstrata.testing.strategies import (
    IDENTITY,
    Settled,
    ask_for,
    lent_context,
    load_item,
    loaded_payload,
    payload_of,
    section_lengths,
    settled,
    watched,
)
from tests.fault.p2p.conftest import ABSENT, KEYS, LOADED, THERE, CopyEngine, failed, metadata_of, unknown
from tests.harness.directory_double import Directory
from tests.harness.l1 import L1, RECORD, SIZE

FORGED = bytes(SIZE)
CHANGED = failed("unauthenticated")


class HostilePath(CopyEngine):
    """Lets `forge` change the bytes of each read after they have left the owner."""

    def __init__(self) -> None:
        super().__init__()
        self.forge: Callable[[int, int], None] = lambda remote_offset, address: None

    async def read(
        self, peer: str, items: Sequence[ReadItem], deadline_s: float, ended: Callable[[], None]
    ) -> str:
        word = await super().read(peer, items, deadline_s, ended)
        for item in items:
            self.forge(item.remote_offset, self.local[0] + item.local_offset)
        return word


def write_record(key: bytes, payload: bytes, address: int) -> None:
    """Write a record whose key, identity and checksums are right."""
    ctypes.memmove(address + RECORD - SIZE, payload, SIZE)
    spec = core.RecordSpec(key, IDENTITY, bytes(32), bytes(32), 256)
    core.seal_record(address, RECORD, spec, section_lengths(SIZE))


class Scene:
    """A real server of peers, and a reader that reaches its memory by a `HostilePath`."""

    def __init__(self, l1: L1, *, reader: bool, owner: bool) -> None:
        """`reader`, `owner`: the `p2p.mac` of each."""
        public, secret = zmq.curve_keypair()
        self.port = ControlPort(asyncio.get_running_loop(), 11)
        port = self.port.server.bind_tcp("127.0.0.1", 0, curve=CurveKeys(secret, None), insecure=False)
        metadata = metadata_of(l1.pool.extents_address, l1.pool.extents_bytes)
        self.owner = PeerServer(
            l1.pool, SystemClock(), self.port, instance_id="owner", incarnation=11,
            engine="copy", metadata=lambda: metadata, mac=owner,
        )  # fmt: skip
        self.port.start()
        self.directory = Directory()
        entry = Owner("owner", 11, f"tcp://127.0.0.1:{port}", len(KEYS), True, public.decode())
        self.directory.tell(entry, KEYS)
        settings = PeerSettings(
            (self.directory.endpoint,), "copy", mac=reader, lookup_timeout_ms=60_000, load_timeout_ms=60_000,
            remember_ms=0, remember_none_ms=0, limits=OwnerLimits(open_s=600, max_open_s=600),
        )  # fmt: skip
        self.path = HostilePath()
        self.reader = PeerTier(settings, lambda: self.path)

    async def load(self, keys: list[bytes]) -> list[tuple[Settled, bytes]]:
        """Each outcome, with the payload that is then in the reader's memory."""
        items = [load_item(key, SIZE) for key in keys]
        outcomes = await settled(self.reader.load, items)
        for item in items:
            watched(item).check()
        return [(outcome, loaded_payload(item, SIZE)) for item, outcome in zip(items, outcomes, strict=True)]

    async def close(self) -> None:
        await self.reader.close()
        await self.port.close()
        await self.owner.close()
        self.directory.close()


@pytest.fixture
async def scene(l1: L1) -> AsyncIterator[Callable[..., object]]:
    """Opens scenes over the pool, which holds KEYS."""
    l1.store(KEYS)
    scenes: list[Scene] = []

    async def opened(*, reader: bool, owner: bool | None = None) -> Scene:
        made = Scene(l1, reader=reader, owner=reader if owner is None else owner)
        scenes.append(made)
        await made.reader.open(lent_context(lambda key: None, "reader"))
        return made

    yield opened
    for made in scenes:
        await made.close()


def place_of(l1: L1, key: bytes) -> int:
    """The offset of a record in the pool."""
    hold = l1.pool.hold(key)
    assert hold is not None
    with hold:
        return hold.offset


@pytest.mark.parametrize("mac", [False, True], ids=["without", "with"])
async def test_a_record_forged_between_the_hosts_with_right_checksums_is_served_only_without_the_mac(
    scene, l1: L1, caplog: pytest.LogCaptureFixture, *, mac: bool
) -> None:
    one = await scene(reader=mac)
    place = place_of(l1, KEYS[3])
    one.path.forge = lambda offset, address: (
        write_record(KEYS[3], FORGED, address) if offset == place else None
    )
    assert await ask_for(one.reader, KEYS) == [THERE] * 8
    loaded = await one.load(KEYS)
    right = [(LOADED, payload_of(key, SIZE)) for key in KEYS]
    assert loaded[:3] + loaded[4:] == right[:3] + right[4:]
    assert loaded[3] == (CHANGED if mac else LOADED, FORGED)
    numbers = one.reader.numbers()
    assert (numbers["unauthenticated_records"], numbers["unsound_records"]) == (int(mac), 0)
    assert caplog.text.count("1 records read from owner are not the bytes that it holds (p2p.mac)") == int(
        mac
    )
    # As after any bad record, the owner is skipped for a while.
    assert await ask_for(one.reader, KEYS) == [unknown("peer_skipped") if mac else THERE] * 8


@pytest.mark.parametrize("mac", [False, True], ids=["without", "with"])
async def test_an_older_record_of_the_same_key_in_the_same_place_is_served_only_without_the_mac(
    scene, l1: L1, *, mac: bool
) -> None:
    one = await scene(reader=mac)
    place = place_of(l1, KEYS[7])
    older = ctypes.string_at(l1.pool.extents_address + place, RECORD)
    l1.lose(KEYS[7:])
    l1.store(KEYS, first=7)
    assert place_of(l1, KEYS[7]) == place
    write_record(KEYS[7], FORGED, l1.pool.extents_address + place)
    one.path.forge = lambda offset, address: (
        ctypes.memmove(address, older, RECORD) if offset == place else None
    )
    assert await ask_for(one.reader, KEYS) == [THERE] * 8
    assert (await one.load(KEYS))[7] == (CHANGED if mac else LOADED, payload_of(KEYS[7], SIZE))


async def test_damage_that_the_checksums_find_is_no_record_of_the_owners_either(scene) -> None:
    one = await scene(reader=True)
    one.path.forge = lambda offset, address: ctypes.memset(address + RECORD - SIZE, 1, 1)
    await ask_for(one.reader, KEYS)
    assert [outcome for outcome, _ in await one.load(KEYS)] == [CHANGED] * 8
    assert one.reader.numbers()["unauthenticated_records"] == 8


async def test_a_record_that_is_bad_at_the_owner_is_none_that_was_changed_on_the_way(scene, l1: L1) -> None:
    one = await scene(reader=True)
    await ask_for(one.reader, KEYS)
    ctypes.memset(l1.pool.extents_address + place_of(l1, KEYS[2]) + RECORD - SIZE, 1, 1)
    outcomes = [outcome for outcome, _ in await one.load(KEYS)]
    assert outcomes == [LOADED] * 2 + [ABSENT] + [LOADED] * 5
    assert one.reader.numbers()["unsound_records"] == 1
    assert one.reader.numbers()["unauthenticated_records"] == 0


Records = list[tuple[bytes, int]]


def in_another_order(key: bytes, records: Records, numbers: range, earlier: bytes) -> bytes:
    return tags_of(key, records[::-1], numbers)


@pytest.mark.parametrize(
    ("tags", "served"),
    [
        (lambda key, records, numbers, earlier: tags_of(key, records, numbers), LOADED),
        (lambda key, records, numbers, earlier: earlier, CHANGED),
        (lambda key, records, numbers, earlier: b"", CHANGED),
        (lambda key, records, numbers, earlier: tags_of(bytes(MAC_KEY_BYTES), records, numbers), CHANGED),
        (in_another_order, CHANGED),
        (lambda key, records, numbers, earlier: bytes(TAG_BYTES * len(numbers)), CHANGED),
    ],
    ids=["right", "of an earlier read", "none", "of another key", "in another order", "zeros"],
)
async def test_only_the_tags_of_this_read_are_believed(scene, monkeypatch, tags, served):
    """Both reads are of the same records in the same place."""
    told: dict[int, bytes] = {}

    def answer(key: bytes, records: Records, numbers: range) -> bytes:
        if numbers.start in told:
            return tags(key, records, numbers, told[numbers.start])
        told[numbers.start] = tags_of(key, records, numbers)
        return told[numbers.start]

    monkeypatch.setattr(serving, "tags_of", answer)
    one = await scene(reader=True)
    for expected in (LOADED, served):
        await ask_for(one.reader, KEYS[:2])
        assert [outcome for outcome, _ in await one.load(KEYS[:2])] == [expected] * 2


@pytest.mark.parametrize(("reader", "owner"), [(True, False), (False, True)])
async def test_instances_with_and_without_the_setting_do_not_read_each_other_and_say_which_setting_differs(
    scene, caplog: pytest.LogCaptureFixture, *, reader: bool, owner: bool
) -> None:
    one = await scene(reader=reader, owner=owner)
    assert await ask_for(one.reader, KEYS) == [unknown("mac_differs")] * 8
    loaded = [outcome for outcome, _ in await one.load(KEYS)]
    assert loaded == [failed("peer_skipped")] * 8, "the owner is skipped for a while"
    said = f"p2p.mac is {str(reader).lower()} for the reader, but {str(owner).lower()} for owner; set the same p2p.mac"
    assert caplog.text.count(said) == 1
    assert one.path.reads == 0
    assert one.owner.leases.granted == 0


async def test_reads_of_parts_of_a_lease_have_macs_of_their_own_and_the_lease_ends_with_the_last(scene):
    one = await scene(reader=True)
    await ask_for(one.reader, KEYS)
    for part in (KEYS[:1], KEYS[5:], KEYS[1:5]):
        assert await one.load(part) == [(LOADED, payload_of(key, SIZE)) for key in part]
    assert len(one.owner.leases) == 0
    assert one.owner.leases.leased_bytes == 0
