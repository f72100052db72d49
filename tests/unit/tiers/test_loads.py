"""Reservations of one batch of loads (Pool.reserve_batch)."""

from __future__ import annotations

from kvstrata.native.core import LoadRequest
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.testing.strategies import IDENTITY
from tests.harness.l1 import L1, RECORD, chain


def request(keys: list[bytes], n_slices: int = 1) -> LoadRequest:
    return LoadRequest(b"".join(keys), b"", [RECORD] * n_slices, IDENTITY, 1)


def test_from_the_first_refused_chunk_on_nothing_is_reserved_in_any_slice() -> None:
    l1 = L1()
    keys = chain("a", 6, 2)
    l1.store(keys[:2], 2)
    ticket, _, _ = l1.pool.reserve(keys[7], keys[5], RECORD, l1.row, IDENTITY, 1)  # chunk 3 of slice 1
    batch = l1.pool.reserve_batch(request(keys, 2), range(12))
    assert (batch.present, sorted(batch.numbers)) == ([0, 1], [2, 3, 4, 5])
    assert batch.refusal == (3, ReserveOutcome.IN_FLIGHT)
    assert l1.pool.abort(ticket) == 1
    for number, hold in zip(batch.numbers, batch.holds, strict=True):
        l1.write(keys[number], hold.offset, IDENTITY)
        hold.drop()
    loaded = bytes(number != 4 for number in batch.numbers)
    ended = dict(zip(batch.numbers, batch.finish(loaded), strict=True))
    assert ended == {**dict.fromkeys((2, 3, 5), CommitOutcome.COMMITTED), 4: 255}
    assert l1.pool.has(b"".join(keys[:8])) == bytes([1, 1, 1, 1, 0, 1, 0, 0])
    l1.nothing_in_use()


def test_a_batch_that_is_not_finished_gives_its_extents_back_and_another_record_is_not_committed() -> None:
    l1 = L1()
    keys = chain("a", 3)
    batch = l1.pool.reserve_batch(request(keys), [0, 2])
    l1.write(keys[1], batch.holds[0].offset, IDENTITY)  # of another key
    for hold in batch.holds:
        hold.drop()
    assert batch.finish(b"\1\0") == bytes([CommitOutcome.BAD_RECORD, 255])
    given_up = l1.pool.reserve_batch(request(keys), range(3))
    assert given_up.numbers == [0, 1, 2] and given_up.refusal is None
    del given_up
    l1.nothing_in_use()
    assert not any(l1.pool.has(b"".join(keys)))
