"""What an instance serves to its peers: leases."""

from __future__ import annotations

import asyncio
import os

import pytest
import zmq
import zmq.asyncio
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.errors import ClusterFailure
from kvstrata.native.core import Pool
from kvstrata.p2p.leases import Lease, LeaseBook, LeaseState
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
from kvstrata.testing.strategies import key_of
from kvstrata.types import FORMAT_VERSION, Extent, unpack_extents
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


def test_an_overdue_lease_that_nobody_has_ended_still_confirms_what_was_read(l1, leases):
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


def hello(**other: object) -> PeerHello:
    values = {"protocol": CLUSTER_PROTOCOL_VERSION, "record_version": FORMAT_VERSION, "engine": "ucx"}
    return PeerHello(0, reader="reader", **{**values, **other})  # type: ignore[arg-type]


async def test_a_lease_of_a_reader_that_is_gone_ends_after_its_time(l1, owner, link):
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


async def test_an_impossible_request_of_a_reader_is_refused_with_its_field(owner, link):
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
    assert owner.port.refused == len(wrong)


async def test_while_no_engine_is_up_the_reader_is_told_to_come_back(owner: Owner, link: AskLink) -> None:
    owner.metadata = b""
    with pytest.raises(ClusterFailure) as refused:
        await link.ask(hello(), PeerWelcome, LONG_S)
    assert refused.value.retryable


async def test_garbage_is_answered_with_an_error_and_disturbs_no_other_reader(l1, owner, link):
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


KEYS = [key_of(n) for n in range(8)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.sampled_from(KEYS), min_size=1, unique=True)),
        st.tuples(st.just("take"), st.lists(st.sampled_from(KEYS), min_size=1)),
        st.tuples(st.just("read"), st.integers(0, 5)),
        st.tuples(st.just("lost"), st.integers(0, 5)),
        st.tuples(st.just("unused"), st.integers(0, 3)),
        st.tuples(st.just("released"), st.integers(0, 5)),
    )
)


@given(steps)
@example([("add", KEYS[:1]), ("take", KEYS[:1]), ("lost", 0), ("read", 0)])
def test_each_leased_key_is_given_out_once_and_each_lease_ends_once(history: list) -> None:
    book = LeaseBook()
    model: dict[bytes, Lease] = {}
    over: list[Lease] = []
    told: set[Lease] = set()
    gone: set[Lease] = set()
    reading: list[tuple[Lease, int]] = []
    granted: list[Lease] = []
    now_s = 0.0
    for word, what in history:
        now_s += 1.0
        if word == "add":
            extents = {key: Extent(0, 100, 0, 0) for key in what}
            lease = Lease("a", len(granted) + 1, 1, extents, now_s + 4.0, now_s)
            granted.append(lease)
            replaced = book.add(lease)
            model.update(dict.fromkeys(what, lease))
            for older in replaced:
                assert older not in model.values()
                assert all(one is not older for one, _ in reading)
            over += replaced
        elif word == "take":
            taken = book.take(what, now_s)
            for lease, extents in taken.items():
                for place, _ in extents:
                    assert model.pop(what[place]) is lease
                reading.append((lease, 100 * len(extents)))
            missing = set(range(len(what))) - {place for extents in taken.values() for place, _ in extents}
            for place in missing:
                lease = model.get(what[place])
                assert lease is None or lease.until_s <= now_s
        elif word == "read" and reading:
            lease, n_bytes = reading.pop(what % len(reading))
            if book.read(lease, n_bytes, now_s):
                assert lease not in gone and lease not in model.values()
                assert all(one is not lease for one, _ in reading)
                over.append(lease)
        elif word == "lost" and granted:
            lease = granted[what % len(granted)]
            book.lost(lease)
            gone.add(lease)
            model = {key: one for key, one in model.items() if one is not lease}
        elif word == "unused":
            for lease in book.unused(now_s, float(what)):
                model = {key: one for key, one in model.items() if one is not lease}
                over.append(lease)
        elif word == "released" and over:
            lease = over[what % len(over)]
            if lease not in told:
                told.add(lease)
                gone.add(lease)
                book.released(lease)
        assert len(over) == len(set(over)), "a lease is over twice"
        assert len(book) == sum(lease not in gone for lease in granted)
        assert book.under_way_bytes("a") == 100 * len(model) + sum(n for _, n in reading)
        standing = book.leading(KEYS, now_s)
        expected = 0
        for key in KEYS:
            if key not in model or model[key].until_s < now_s:
                break
            expected += 1
        assert len(standing) == expected
    for lease, n_bytes in reading:
        over += [lease] if book.read(lease, n_bytes, now_s) else []
    over += book.end_all()
    assert len(over) == len(set(over))
    for lease in set(over) - told:
        book.released(lease)
    assert {lease.state for lease in granted} <= {LeaseState.GONE}
    assert (len(book), book.under_way_bytes("a"), book.leading(KEYS, 0.0)) == (0, 0, [])


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


def test_records_leased_to_peers_by_a_server_that_was_killed_are_free_for_the_next() -> None:
    fds = [os.memfd_create(name) for name in ("index", "extents")]
    first = L1.__new__(L1)
    first.pool = Pool.create(*fds, extents_bytes=L1_BYTES, entry_capacity=1024)
    first.row = first.pool.claim_row(b"s" * 16, b"g" * 16, os.getpid())
    [key] = first.store(chain("a", 1))
    assert PeerLeases(first.pool).lease(key, 1, 60.0, 0.0).number
    assert first.pool.remove(key) == 0
    second = Pool.adopt(*fds)
    assert second.verify(key) == (1, 0)
    assert second.remove(key) == 1
    for fd in fds:
        os.close(fd)
