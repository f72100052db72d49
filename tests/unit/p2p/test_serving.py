"""p2p/serving.py: what is leased to other instances stays where it is until the lease ends, and no longer."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio

from kvstrata.errors import ClusterFailure, Refused
from kvstrata.p2p import serving
from kvstrata.p2p.lent import ABSENT, LIMIT
from kvstrata.p2p.serving import DRAINING, MAX_LEASES, PeerLeases
from kvstrata.rpc.cluster_wire import (
    ANSWERS,
    CLUSTER_PROTOCOL_VERSION,
    Failure,
    Goodbye,
    PeerHello,
    PeerLease,
    PeerLeased,
    PeerRelease,
    PeerReleased,
    PeerWelcome,
    encode,
)
from kvstrata.rpc.zmq_link import AskLink
from kvstrata.types import FORMAT_VERSION, unpack_extents
from tests.harness.l1 import L1, L1_BYTES, RECORD, chain
from tests.harness.waiting import until
from tests.unit.p2p.conftest import Owner

LONG_S = 120.0
QUARTER = L1_BYTES // 4


@pytest.fixture
def leases(l1: L1) -> PeerLeases:
    return PeerLeases(l1.pool)


def evicts(l1: L1, key: bytes) -> bool:
    """Whether the pool would give the record up."""
    return l1.pool.remove(key) == 1


def test_a_lease_names_the_leading_records_and_keeps_them(l1: L1, leases: PeerLeases) -> None:
    keys = chain("a", 4)
    l1.store(keys[:3])
    leased = leases.lease(b"".join(keys), 1, 1.0, 0.0)
    assert leased.reason == ABSENT
    extents = unpack_extents(leased.extents)
    assert len(extents) == 3
    assert leases.leased_bytes == 3 * RECORD
    assert not evicts(l1, keys[2])
    assert leases.release(leased.number, 0, 0.5)
    assert evicts(l1, keys[2])
    assert leases.leased_bytes == 0


def test_only_whole_chunks_are_leased(l1: L1, leases: PeerLeases) -> None:
    keys = chain("a", 2, 2)
    l1.store(keys, 2)
    l1.lose(keys[3:])
    assert len(unpack_extents(leases.lease(b"".join(keys), 2, 1.0, 0.0).extents)) == 2


def test_a_lease_ended_by_the_clock_no_longer_confirms_what_was_read(l1: L1, leases: PeerLeases) -> None:
    [key] = l1.store(chain("a", 1))
    leased = leases.lease(key, 1, 2.0, 10.0)
    assert leases.expire(11.9) == 12.0
    assert not evicts(l1, key)
    assert leases.expire(12.0) is None
    assert not leases.release(leased.number, 0, 12.0)
    assert evicts(l1, key)


def test_an_overdue_lease_that_nobody_has_ended_still_confirms_what_was_read(
    l1: L1, leases: PeerLeases
) -> None:
    """As after the owner was frozen: no other record can have come to where it lies."""
    [key] = l1.store(chain("a", 1))
    leased = leases.lease(key, 1, 2.0, 10.0)
    assert leases.release(leased.number, 0, 99.0)


def test_a_release_that_keeps_prolongs_the_lease(l1: L1, leases: PeerLeases) -> None:
    [key] = l1.store(chain("a", 1))
    leased = leases.lease(key, 1, 2.0, 10.0)
    assert leases.release(leased.number, 5.0, 11.0, read_bytes=RECORD)
    assert leases.expire(12.5) == 16.0
    assert leases.release(leased.number, 0, 15.0)
    assert leases.read_bytes == RECORD
    assert not leases.release(leased.number, 5.0, 15.0)


def test_peers_get_a_share_of_l1_and_records_that_several_read_count_once(l1: L1, leases: PeerLeases) -> None:
    keys = l1.store(chain("a", 40))
    first = leases.lease(b"".join(keys), 1, 1.0, 0.0)
    n = len(unpack_extents(first.extents))
    assert first.reason == LIMIT
    assert n == QUARTER // RECORD
    assert leases.leased_bytes <= QUARTER
    again = leases.lease(b"".join(keys[:n]), 1, 1.0, 0.0)
    assert again.reason == ""
    others = leases.lease(b"".join(keys[n:]), 1, 1.0, 0.0)
    assert (others.number, others.reason) == (0, LIMIT)
    assert leases.release(first.number, 0, 0.0)
    assert not evicts(l1, keys[n - 1])
    assert leases.release(again.number, 0, 0.0)
    assert leases.lease(b"".join(keys[n:]), 1, 1.0, 0.0).number
    l1.pool.validate()


def test_numbers_of_another_process_name_nothing(l1: L1, leases: PeerLeases) -> None:
    [key] = l1.store(chain("a", 1))
    before = PeerLeases(l1.pool).lease(key, 1, 1.0, 0.0)
    leases.lease(key, 1, 1.0, 0.0)
    assert not leases.release(before.number, 0, 0.0)


def test_leases_and_the_memory_of_ended_leases_are_bounded(l1: L1, leases: PeerLeases) -> None:
    [key] = l1.store(chain("a", 1))
    for _ in range(4 * MAX_LEASES):
        leases.release(leases.lease(key, 1, 60.0, 0.0).number, 0, 0.0)
    assert len(leases._due) <= 2 * MAX_LEASES + 1
    for _ in range(MAX_LEASES):
        assert leases.lease(key, 1, 60.0, 0.0).number
    assert leases.lease(key, 1, 60.0, 0.0) == (0, b"", LIMIT)
    assert leases.leased_bytes == RECORD
    leases.end_all()
    l1.nothing_in_use()
    assert l1.pool.stats()["leases"] == 0


def test_a_draining_owner_grants_no_new_lease_and_keeps_those_it_has(l1: L1, leases: PeerLeases) -> None:
    [key] = l1.store(chain("a", 1))
    leased = leases.lease(key, 1, 1.0, 0.0)
    leases.draining = True
    assert leases.lease(key, 1, 1.0, 0.0).reason == DRAINING
    assert leases.release(leased.number, 0, 0.0)


def test_pins_keep_the_chunks_that_are_there_until_they_end(l1: L1, leases: PeerLeases) -> None:
    keys = l1.store(chain("a", 2)) + chain("absent", 1) + l1.store(chain("b", 2))
    assert leases.pin("claim", b"".join(keys), 60.0, 0.0) == 4
    assert leases.leased_bytes == 4 * RECORD
    assert leases.pin("claim", b"".join(keys), 90.0, 0.0) == 4
    assert leases.leased_bytes == 4 * RECORD
    assert not evicts(l1, keys[0])
    assert leases.expire(60.0) == 90.0
    assert leases.unpin("claim") == 4
    assert leases.unpin("claim") == 0
    assert evicts(l1, keys[4])
    assert leases.pin("other", keys[0], 1.0, 0.0) == 1
    assert leases.expire(1.0) is None
    assert leases.pins == 0


def test_a_pin_that_is_too_large_pins_nothing(l1: L1, leases: PeerLeases) -> None:
    keys = l1.store(chain("a", 40))
    with pytest.raises(Refused, match="may keep"):
        leases.pin("claim", b"".join(keys), 60.0, 0.0)
    assert leases.leased_bytes == 0
    assert l1.pool.stats()["leases"] == 0


def test_a_pin_of_chunks_with_gaps_between_them_counts_as_one_lease(
    l1: L1, leases: PeerLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_LEASES", 2)
    keys = chain("green", 6)
    for key in keys[::2]:
        l1.store([key])
    assert leases.pin("claim", b"".join(keys), 60.0, 0.0) == 3
    assert leases.lease(keys[0], 1, 60.0, 0.0).number
    assert leases.lease(keys[0], 1, 60.0, 0.0).reason == LIMIT
    leases.unpin("claim")
    assert leases.lease(keys[0], 1, 60.0, 0.0).number


def hello(**other: object) -> PeerHello:
    values = {"protocol": CLUSTER_PROTOCOL_VERSION, "record_version": FORMAT_VERSION, "engine": "ucx"}
    return PeerHello(0, reader="reader", **{**values, **other})  # type: ignore[arg-type]


async def test_a_lease_of_a_reader_that_is_gone_ends_after_its_time(
    l1: L1, owner: Owner, link: AskLink
) -> None:
    keys = l1.store(chain("a", 1))
    await link.ask(PeerLease(0, "reader", b"".join(keys), 1, 60_000), PeerLeased, LONG_S)
    await link.ask(PeerLease(0, "reader", b"".join(keys), 1, 10), PeerLeased, LONG_S)
    owner.clock.now_s += 0.01
    await until(lambda: len(owner.peers.leases) == 1)  # by the timer alone: nobody asks
    owner.clock.now_s += 60
    status = await link.ask(PeerRelease(0, 1), PeerReleased, LONG_S)
    assert not status.stood
    assert len(owner.peers.leases) == 0
    assert evicts(l1, keys[0])


async def test_an_impossible_request_of_a_reader_is_refused_with_its_field(
    owner: Owner, link: AskLink
) -> None:
    wrong = [
        (hello(protocol=9), "wrong_version", "protocol"),
        (hello(record_version=9), "wrong_version", "record_version"),
        (hello(engine="nixl"), "bad_request", "engine"),
        (PeerLease(0, "reader", b"", 1, 1), "bad_request", "keys"),
        (PeerLease(0, "reader", bytes(32), 2, 1), "bad_request", "keys"),
        (PeerLease(0, "no name!", bytes(32), 1, 1), "bad_request", ""),
    ]
    for request, code, field in wrong:
        with pytest.raises(ClusterFailure) as refused:
            await link.ask(request, PeerLeased, LONG_S)
        assert (refused.value.code, refused.value.field) == (code, field)
    assert owner.peers.errors == len(wrong)


async def test_while_no_engine_is_up_the_reader_is_told_to_come_back(owner: Owner, link: AskLink) -> None:
    owner.metadata = b""
    with pytest.raises(ClusterFailure) as refused:
        await link.ask(hello(), PeerWelcome, LONG_S)
    assert refused.value.retryable


async def test_garbage_is_answered_with_an_error_and_disturbs_no_other_reader(
    l1: L1, owner: Owner, link: AskLink
) -> None:
    sender = zmq.asyncio.Context()
    socket = sender.socket(zmq.DEALER)
    socket.connect(owner.endpoint)
    for frame in (
        b"",
        b"\xc1",
        b"\x93\xabpeer_hello\x07",
        b"\x91" * 5_000,
        encode(Goodbye(7, "reader", 1)),
        b"\x92\xaapeer_lease\xcf" + b"\xff" * 8,
    ):
        await socket.send(frame)
        answer = ANSWERS.decode(await asyncio.wait_for(socket.recv(), LONG_S))
        assert isinstance(answer, Failure) and answer.code == "bad_request", frame
    sender.destroy(linger=0)
    [key] = l1.store(chain("a", 1))
    assert (await link.ask(PeerLease(0, "reader", key, 1, 1_000), PeerLeased, LONG_S)).lease
