"""The reader of peers against owners that are silent, restarted, lying, full or gone."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvstrata.native import core
from kvstrata.p2p.engines import base as transfer
from kvstrata.p2p.owners import OwnerLimits
from kvstrata.rpc.cluster_wire import PeerLease
from kvstrata.testing.strategies import Found, load_item, settled, watched
from kvstrata.tiers.base import Outcome
from kvstrata.tiers.reasons import PEER_FAILED, blames_medium, miss_reason
from kvstrata.types import EXTENT, KEY_BYTES, MissReason
from tests.fault.p2p.conftest import ABSENT, KEYS, LOADED, NOT_THERE, THERE, Net, failed, metadata_of, unknown
from tests.harness.l1 import L1, RECORD, SIZE, chain
from tests.harness.waiting import until


async def test_a_silent_owner_costs_one_deadline_and_is_then_skipped(net) -> None:
    one = await net(limits=OwnerLimits(open_s=600, max_open_s=600))
    assert await one.ask(KEYS[:1]) == [THERE]
    one.owner.silent = True
    one.patience(lookup_timeout_ms=500)
    # The reader gives up the connection and with it the lease.
    assert await one.ask(KEYS) == [unknown("peer_deadline")] * 8
    asked = one.owner.asked["PeerLease"]
    assert await one.ask(KEYS) == [unknown("peer_skipped")] * 8
    assert one.owner.asked["PeerLease"] == asked
    assert one.counted("owners_skipped") == 1


@pytest.mark.parametrize(
    ("how", "word", "reason"),
    [
        ("is silent", "peer_deadline", MissReason.DEADLINE),
        ("refuses the lease", "peer_failed", MissReason.L2_FAILED),
        ("refuses the greeting", "peer_failed", MissReason.L2_FAILED),
        ("lies", "peer_failed", MissReason.L2_FAILED),
        ("has restarted", "peer_gone", MissReason.DEADLINE),
        ("has nothing", "", None),
    ],
)
@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_chunks_of_an_owner_that_fails_are_not_absent(net, l1, named, how, word, reason):
    one = await net(limits=OwnerLimits(open_s=600, max_open_s=600))
    if named:
        one.named = msgspec.msgpack.encode(one.owner.entry)
        one.directory.holds = {}
    match how:
        case "is silent":
            one.owner.silent = True
            one.patience(lookup_timeout_ms=500)
        case "refuses the lease":
            one.owner.refuses["PeerLease"] = "not_permitted"
        case "refuses the greeting":
            one.owner.refuses["PeerHello"] = "wrong_version"
        case "lies":
            one.owner.lies = True
        case "has restarted":
            assert await one.ask(KEYS[:1]) == [THERE]
            one.owner.epoch += 1
        case "has nothing":
            l1.lose(KEYS)
    found = await one.ask(KEYS)
    if how == "has restarted":  # the first chunk is still leased from the process that was
        found = found[1:]
    assert set(found) == {unknown(word) if word else NOT_THERE}
    assert one.engine.reads == 0, "not even where a lie points"
    if reason is not None:
        assert miss_reason(word) is reason
        assert not blames_medium(word), "one bad owner is no reason to leave all others alone"


async def test_what_another_owner_has_is_there_and_the_rest_is_not_absent(second, net) -> None:
    one = await net()
    pool, other, _ = second
    pool.lose(KEYS[4:])
    one.owner.refuses["PeerLease"] = "not_permitted"
    one.directory.tell(other.entry, KEYS[:4])
    assert await one.ask(KEYS) == [THERE] * 4 + [unknown("peer_failed")] * 4


async def test_chunks_that_an_owner_that_fails_never_had_are_absent(second, net, l1: L1) -> None:
    one = await net()
    _, other, _ = second
    other.refuses["PeerLease"] = "not_permitted"
    one.directory.holds = {}
    one.directory.tell(other.entry, KEYS)  # the one that fails is asked first, and has no more than the other
    one.directory.tell(one.owner.entry, KEYS)
    assert await one.ask([*KEYS, *chain("b", 2)]) == [THERE] * 8 + [NOT_THERE] * 2
    assert other.asked["PeerLease"] == 1


async def test_a_read_that_hangs_is_a_miss_at_its_deadline_and_its_bytes_stay_held_until_it_ends(net) -> None:
    one = await net()
    assert await one.ask(KEYS) == [THERE] * 8
    one.engine.held = True
    one.patience(load_timeout_ms=50)
    items = [load_item(key, SIZE) for key in KEYS]
    assert await one.load(items=items) == [failed("peer_deadline")] * 8
    assert all(watched(item).drops == 0 for item in items)
    one.engine.let_go()
    for item in items:
        watched(item).check()


async def test_a_cancelled_load_keeps_its_holds_until_the_read_has_ended(net) -> None:
    one = await net()
    await one.ask(KEYS)
    one.engine.held = True
    items = [load_item(key, SIZE) for key in KEYS]
    load = asyncio.create_task(settled(one.adapter.load, items))
    await until(lambda: one.engine.waiting)
    load.cancel()
    await asyncio.wait({load})
    assert all(watched(item).drops == 0 for item in items)
    one.engine.let_go()
    await until(lambda: all(watched(item).drops for item in items))
    for item in items:
        watched(item).check()


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (transfer.PEER_GONE, "peer_gone"),
        pytest.param(transfer.FAILED, "transfer", marks=pytest.mark.long),
        pytest.param(transfer.BUSY, "throttled", marks=pytest.mark.long),
        pytest.param(transfer.DEADLINE, "peer_deadline", marks=pytest.mark.long),
    ],
)
async def test_a_failure_of_the_engine_is_reported_and_every_hold_dropped(net, word, reason):
    one = await net()
    await one.ask(KEYS)
    one.engine.answer = word
    items = [load_item(key, SIZE) for key in KEYS]
    assert await one.load(items=items) == [failed(reason)] * 8
    for item in items:
        watched(item).check()


async def test_a_lease_that_ended_before_its_bytes_were_read_is_a_miss(net, l1: L1) -> None:
    """Before the read the owner has cleared its pool and stored other records in the same places."""
    one = await net()
    await one.ask(KEYS)

    def ends() -> None:
        for lease in list(one.owner.leases):
            one.owner.expire(lease)
        assert l1.pool.clear() == (8, 0)
        l1.store(chain("others", 8))

    one.engine.before_read = ends
    assert await one.load(*KEYS) == [ABSENT] * 8
    assert one.counted("leases_lost") == 1


async def test_a_read_that_the_owner_cannot_confirm_is_a_miss(net) -> None:
    """The owner falls silent after the last byte was read."""
    one = await net()
    assert await one.ask(KEYS) == [THERE] * 8

    def cut_off() -> None:
        one.owner.silent = True
        one.patience(load_timeout_ms=50)

    one.engine.before_read = cut_off
    items = [load_item(key, SIZE) for key in KEYS]
    assert await one.load(items=items) == [failed("peer_gone")] * 8
    for item in items:
        watched(item).check()
    assert one.counted("read_records") == 8


async def test_wrong_bytes_are_a_miss_though_the_lease_held(net, l1: L1) -> None:
    one = await net()
    await one.ask(KEYS)
    hold = l1.pool.hold(KEYS[3])
    assert hold is not None
    address = hold.address
    hold.drop()

    def damage() -> None:
        l1.write(KEYS[4], address - l1.pool.extents_address, bytes(32))

    one.engine.before_read = damage
    assert await one.load(*KEYS) == [LOADED] * 3 + [ABSENT] + [LOADED] * 4
    assert one.counted("unsound_records") == 1
    assert core.verify_record(address, RECORD, KEYS[4]) == 0


async def test_a_restarted_owner_is_greeted_anew(net) -> None:
    one = await net(limits=OwnerLimits(open_s=0.0, max_open_s=0.0))
    assert await one.load(*KEYS[:2]) == [LOADED] * 2
    one.owner.epoch = 12
    await one.ask(KEYS)
    assert await one.ask(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 8
    assert one.owner.asked["PeerHello"] == 2


async def test_an_owner_with_another_record_version_or_metadata_is_a_miss_and_logged_once(net, caplog):
    one = await net(limits=OwnerLimits(open_s=0.0, max_open_s=0.0))
    one.owner.refuses["PeerHello"] = "wrong_version"
    for _ in range(3):
        assert await one.ask(KEYS) == [unknown("peer_failed")] * 8
    assert caplog.text.count("wrong_version") == 1
    one.owner.refuses.clear()
    one.owner.metadata = b"garbage"
    assert await one.ask(KEYS) == [unknown("peer_failed")] * 8
    one.owner.metadata = metadata_of(one.l1.pool.extents_address, one.l1.pool.extents_bytes)
    assert await one.ask(KEYS) == [THERE] * 8


async def test_a_record_of_another_length_than_was_reserved_is_not_read(net) -> None:
    one = await net()
    assert await one.ask(KEYS) == [THERE] * 8
    items = [load_item(KEYS[0], SIZE - 1), load_item(KEYS[1], SIZE)]
    assert await one.load(items=items) == [failed("length"), LOADED]
    watched(items[0]).check()


async def test_a_record_that_is_longer_than_its_room_is_a_miss(net, l1: L1) -> None:
    one = await net()
    one.owner.max_leased = 3
    l1.lose(KEYS[4:])
    assert l1.store(KEYS, first=4, size=SIZE + 4096) == KEYS[4:]
    assert await one.ask(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 4 + [failed("length")] * 4


async def test_leases_that_nobody_reads_are_given_back(net) -> None:
    one = await net()
    await one.ask(KEYS)
    assert len(one.owner.leases) == 1
    await until(lambda: not one.owner.leases)
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_after_close_nothing_is_asked_or_read(net) -> None:
    one = await net()
    await one.ask(KEYS)
    await one.adapter.close()
    await until(lambda: one.owner.leases == {})
    assert await one.ask(KEYS) == [unknown("closed")] * 8
    items = [load_item(KEYS[0], SIZE)]
    assert await one.load(items=items) == [failed("closed")]
    watched(items[0]).check()
    await one.adapter.close()


ABSENT_KEYS = chain("never stored", 4)
MIXED = [ABSENT_KEYS[0], KEYS[2], ABSENT_KEYS[1], KEYS[5], KEYS[1], ABSENT_KEYS[2]]
FOUND = [NOT_THERE, THERE, NOT_THERE, THERE, THERE, NOT_THERE]


async def test_each_of_scattered_keys_is_found_with_one_question_and_read(net, l1: L1) -> None:
    made = await net()
    made.each = True
    assert await made.ask(MIXED) == FOUND
    assert made.directory.asked["Where"] == 1
    assert made.owner.asked["PeerLease"] == 1
    assert await made.load(KEYS[5], KEYS[2], KEYS[1]) == [LOADED] * 3
    assert made.owner.asked["PeerLease"] == 1
    await until(lambda: not made.owner.leases)


async def test_keys_of_a_prefix_are_still_found_up_to_the_first_gap(net) -> None:
    made = await net()
    assert await made.ask([KEYS[0], ABSENT_KEYS[0], KEYS[1]]) == [THERE, NOT_THERE, NOT_THERE]
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
    made.each = True
    assert await made.ask(keys) == [THERE, NOT_THERE, THERE]
    assert await made.load(KEYS[1], KEYS[6]) == [LOADED, LOADED]


async def test_a_scattered_key_that_is_gone_since_its_lookup_is_a_miss_and_the_others_are_read(net) -> None:
    made = await net()
    made.each = True
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
    made.each = True
    assert await made.ask(MIXED) == [unknown(PEER_FAILED)] * len(MIXED)
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
    made.each = True
    found: list[Found] = await made.ask(MIXED)
    assert found == [THERE] * len(MIXED)
    made.owner.leases[1] = 1
    outcomes = await made.load(*MIXED)
    assert all(outcome.outcome is not Outcome.LOADED for outcome in outcomes)
    assert made.counted("unsound_records") == len(MIXED)
    made.owner.leases.pop(1, None)
    assert l1.pool.release(ticket)
