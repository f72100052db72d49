"""p2p/mac.py and what serving.py does for it: which tags an owner computes, and what stays in place meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
import threading

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import BadRequest, ClusterFailure
from kvstrata.native.core import verify_record
from kvstrata.p2p import mac as mac_module
from kvstrata.p2p import serving
from kvstrata.p2p.mac import MAC_KEY_BYTES, tags_of
from kvstrata.p2p.serving import PeerLeases
from kvstrata.rpc.cluster_wire import PeerRelease, PeerReleased
from kvstrata.types import EXTENT
from tests.harness.l1 import L1, RECORD, chain
from tests.unit.p2p.conftest import Owner

LONG_S = 120.0
KEY = bytes(range(MAC_KEY_BYTES))


def all_tags(records: list[tuple[bytes, int]]) -> bytes:
    return tags_of(KEY, records, range(len(records)))


def split(packed: bytes) -> list[bytes]:
    return [packed[at : at + EXTENT.size] for at in range(0, len(packed), EXTENT.size)]


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=5), st.integers(1, 100))
def test_a_tag_is_aes_gcms_of_the_extent_and_the_record(records: list[bytes], piece: int) -> None:
    buffers = [ctypes.create_string_buffer(record, len(record)) for record in records]
    extents = [EXTENT.pack(7 * n, len(record), n, 3, 0) for n, record in enumerate(records)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mac_module, "_PIECE_BYTES", piece)
        found = all_tags(list(zip(extents, map(ctypes.addressof, buffers), strict=True)))
    expected = [
        AESGCM(KEY).encrypt(n.to_bytes(12, "little"), b"", extent + record)
        for n, (extent, record) in enumerate(zip(extents, records, strict=True))
    ]
    assert found == b"".join(expected)


def test_the_pool_keeps_records_that_are_read_for_macs_after_their_lease_has_ended(l1: L1) -> None:
    leases = PeerLeases(l1.pool)
    keys = l1.store(chain("a", 3))
    leased = leases.lease(b"".join(keys), 1, 1.0, 0.0)
    found = leases.records(leased.number, split(leased.extents))
    assert found is not None
    records, lease = found
    lease.keep()
    lease.keep()
    assert leases.release(leased.number, 0, 0.5)
    assert leases.records(leased.number, split(leased.extents)) is None
    lease.let_go()
    assert l1.pool.remove(keys[2]) == 0
    assert verify_record(records[2][1], RECORD, keys[2]) == 0
    lease.let_go()
    assert l1.pool.remove(keys[2]) == 1
    assert leases.leased_bytes == 0


def test_a_reader_gets_macs_of_its_own_leases_records_alone(l1: L1) -> None:
    leases = PeerLeases(l1.pool)
    keys = l1.store(chain("a", 3))
    leased = leases.lease(b"".join(keys[:2]), 1, 1.0, 0.0)
    other = split(leases.lease(keys[2], 1, 1.0, 0.0).extents)
    one, two = split(leased.extents)
    older = EXTENT.pack(*EXTENT.unpack(one)[:3], EXTENT.unpack(one)[3] - 1, 0)
    for wrong in ([], other, [one, one], [one, *other], [older], [bytes(24)], [b"\xff" * 24]):
        with pytest.raises(BadRequest, match="this lease's"):
            leases.records(leased.number, wrong)
    found = leases.records(leased.number, [two, one])
    assert found is not None
    assert [extent for extent, _ in found[0]] == [two, one]
    leases.end_all()
    l1.nothing_in_use()


@pytest.fixture
def mac() -> bool:
    return True


async def test_other_readers_are_answered_while_tags_are_computed_and_a_close_waits_for_them(
    l1: L1, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = l1.store(chain("a", 1))
    goes_on, entered = threading.Event(), threading.Event()

    def slow(key: bytes, records: list[tuple[bytes, int]], numbers: range) -> bytes:
        entered.set()
        goes_on.wait(LONG_S)
        return tags_of(key, records, numbers)

    monkeypatch.setattr(serving, "tags_of", slow)
    leased = await owner.lease(keys)
    request = PeerRelease(0, leased.lease, 0, 0, KEY, leased.extents)
    asked = asyncio.create_task(owner.link.ask(request, PeerReleased, LONG_S))
    await asyncio.to_thread(entered.wait, LONG_S)
    again = await owner.lease(keys)
    assert again.lease
    assert not asked.done()
    closing = asyncio.create_task(owner.peers.close())
    await asyncio.sleep(0)
    assert len(owner.peers.leases) == 0
    assert l1.pool.remove(keys[0]) == 0
    assert not closing.done()
    goes_on.set()
    await closing
    assert l1.pool.remove(keys[0]) == 1
    asked.cancel()
    await asyncio.wait({asked})


async def test_an_impossible_request_for_tags_is_refused_and_releases_nothing(l1: L1, owner: Owner) -> None:
    leased = await owner.lease(l1.store(chain("a", 1)))
    for what, key, extents, field in (
        ("short key", bytes(31), bytes(24), "mac_key"),
        ("cut extent", KEY, bytes(23), "extents"),
        ("extent of no lease", KEY, bytes(24), "extents"),
        ("too many extents", KEY, bytes(24 * 4097), ""),
        ("long key", bytes(33), bytes(24), ""),
    ):
        with pytest.raises(ClusterFailure) as refused:
            await owner.link.ask(PeerRelease(0, leased.lease, 0, 0, key, extents), PeerReleased, LONG_S)
        assert (refused.value.code, refused.value.field) == ("bad_request", field), what
    assert (await owner.link.ask(PeerRelease(0, leased.lease), PeerReleased, LONG_S)).stood


async def test_tags_take_no_more_memory_than_a_queue_and_the_reader_is_told(l1, owner, monkeypatch):
    leased = await owner.lease(l1.store(chain("a", 1)))
    assert owner.peers._lanes is not None
    monkeypatch.setattr(owner.peers._lanes, "submit", lambda *given, **more: None)
    with pytest.raises(ClusterFailure, match="too many MACs") as refused:
        await owner.link.ask(PeerRelease(0, leased.lease, 0, 0, KEY, leased.extents), PeerReleased, LONG_S)
    assert refused.value.retryable
    assert (await owner.link.ask(PeerRelease(0, leased.lease), PeerReleased, LONG_S)).stood
