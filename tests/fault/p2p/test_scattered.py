"""Keys of windows and states at peers: each is found by itself, and an owner that lies about them costs a miss."""

from __future__ import annotations

import pytest

from kvstrata.policy.reasons import PEER_FAILED
from kvstrata.rpc.cluster_wire import PeerLease
from kvstrata.storage.base import Found, LoadStatus
from kvstrata.types import EXTENT, KEY_BYTES
from tests.fault.p2p.net import ABSENT, KEYS, LOADED, NOT_THERE, THERE, Net, unknown
from tests.harness.l1 import L1, RECORD, chain
from tests.harness.waiting import until

ABSENT_KEYS = chain("never stored", 4)
MIXED = [ABSENT_KEYS[0], KEYS[2], ABSENT_KEYS[1], KEYS[5], KEYS[1], ABSENT_KEYS[2]]
FOUND = [NOT_THERE, THERE, NOT_THERE, THERE, THERE, NOT_THERE]


async def test_each_of_scattered_keys_is_found_with_one_question_and_read(net, l1: L1) -> None:
    made = await net()
    made.adapter.scatter(MIXED)
    assert await made.adapter.exists(MIXED) == FOUND
    assert made.directory.asked["Where"] == 1
    assert made.owner.asked["PeerLease"] == 1
    assert await made.load(KEYS[5], KEYS[2], KEYS[1]) == [LOADED] * 3
    assert made.owner.asked["PeerLease"] == 1
    await until(lambda: not made.owner.leases)


async def test_keys_of_a_prefix_are_still_found_up_to_the_first_gap(net) -> None:
    made = await net()
    assert await made.adapter.exists([KEYS[0], ABSENT_KEYS[0], KEYS[1]]) == [THERE, NOT_THERE, NOT_THERE]
    assert len(made.owner.leases) == 1
    assert set(made.owner.leases.values()) == {1}


async def test_what_one_owner_lacks_is_asked_of_the_next_one(second, net) -> None:
    made = await net()
    _, owner, _ = second
    made.others.append(owner)
    made.directory.tell(owner.entry, KEYS[4:])
    for key in KEYS[4:]:
        assert made.l1.pool.remove(key)
    made.directory.tell(made.owner.entry, KEYS[:4])
    keys = [KEYS[1], ABSENT_KEYS[0], KEYS[6]]
    made.adapter.scatter(keys)
    assert await made.adapter.exists(keys) == [THERE, NOT_THERE, THERE]
    assert await made.load(KEYS[1], KEYS[6]) == [LOADED, LOADED]


async def test_a_scattered_key_that_is_gone_since_its_lookup_is_a_miss_and_the_others_are_read(net) -> None:
    made = await net()
    made.adapter.scatter(MIXED)
    wanted = [ABSENT_KEYS[0], KEYS[2], KEYS[5]]
    assert await made.load(*wanted) == [ABSENT, LOADED, LOADED]


def _too_many(request: PeerLease) -> bytes:
    return bytes(EXTENT.size) * (len(request.keys) // KEY_BYTES + 1)


def _half_an_extent(request: PeerLease) -> bytes:
    return bytes(EXTENT.size // 2)


def _outside(request: PeerLease) -> bytes:
    return EXTENT.pack(1 << 50, RECORD, 1, 1, 0) * (len(request.keys) // KEY_BYTES)


def _of_no_length(request: PeerLease) -> bytes:
    return EXTENT.pack(4096, 0, 1, 1, 0) * (len(request.keys) // KEY_BYTES)


@pytest.mark.parametrize("answer", [_too_many, _half_an_extent, _outside, _of_no_length])
async def test_an_impossible_answer_for_single_keys_is_a_miss_and_the_owner_is_skipped(net, answer) -> None:
    made: Net = await net()
    made.owner.each_answer = answer
    made.adapter.scatter(MIXED)
    assert await made.adapter.exists(MIXED) == [unknown(PEER_FAILED)] * len(MIXED)
    assert made.counted("owners_skipped") == 1
    assert made.counted("reads") == 0


async def test_windows_that_an_owner_claims_and_does_not_have_are_never_loaded(net, l1: L1) -> None:
    made: Net = await net()
    ticket, _, extents, _, _ = l1.pool.lease(KEYS[0], 1, [l1.row])
    assert ticket

    def claim(request: PeerLease) -> bytes:
        """The bytes of another record, for each key."""
        return extents * (len(request.keys) // KEY_BYTES)

    made.owner.each_answer = claim
    made.adapter.scatter(MIXED)
    found: list[Found] = await made.adapter.exists(MIXED)
    assert found == [THERE] * len(MIXED)
    made.owner.leases[1] = 1
    outcomes = await made.load(*MIXED)
    assert all(outcome.status is not LoadStatus.LOADED for outcome in outcomes)
    assert made.counted("unsound_records") == len(MIXED)
    made.owner.leases.pop(1, None)
    assert l1.pool.release(ticket)
