"""Tails in a pool: extents of a chunk's size, the first victims, and what a restarted server knows of them."""

from __future__ import annotations

from kvstrata.native.core import Pool
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.types import unpack_extents
from tests.unit.native.pool_files import IDENTITY, PAGE, RECORD, Files, key, seal

CHUNK = 4 * PAGE
"""Length of a chunk's record; that of a tail's record is RECORD."""


def tails_of(pool: Pool) -> tuple[int, int, int]:
    """Number of tails, and bytes of their records and extents."""
    stats = pool.stats()
    return stats["tails.entries"], stats["tails.record_bytes"], stats["tails.extent_bytes"]


def store(pool: Pool, name: bytes, parent: bytes = b"", *, tail: bool = False) -> int:
    """Store a chunk or a tail; its offset, -1 if it was refused."""
    length = RECORD if tail else CHUNK
    ticket, outcomes, packed = pool.reserve(
        name, parent, length, 0, IDENTITY, tail=tail, extent_bytes=CHUNK if tail else 0
    )
    if outcomes[0] != ReserveOutcome.RESERVED:
        return -1
    (extent,) = unpack_extents(packed)
    assert extent.length_bytes == length
    seal(pool, extent, name)
    assert pool.commit(ticket, [0])[0] == CommitOutcome.COMMITTED
    pool.validate()
    return extent.offset_bytes


def test_of_tails_the_one_used_longest_ago_leaves_first_but_none_in_use(files: Files) -> None:
    pool = files.create()
    tails = [key(i) for i in range(pool.extents_bytes // CHUNK)]
    for name in tails:
        store(pool, name, tail=True)
    leased = pool.lease(tails[0], 1, [0])[0]
    held = pool.hold(tails[1])
    store(pool, key(900))
    store(pool, key(901))
    assert [pool.peek(name) for name in tails[:5]] == [1, 1, 0, 0, 1]
    pool.release(leased, -1)
    del held


def test_a_restarted_server_knows_its_tails_and_where_they_lie(files: Files) -> None:
    pool = files.create()
    store(pool, key(0))
    offsets = [store(pool, key(i), key(0), tail=True) for i in (1, 2)]
    before = tails_of(pool)
    pool.close()
    again = Pool.adopt(files.index, files.extents)
    again.validate()
    assert again.stats()["adopted_entries"] == 3 and tails_of(again) == before
    assert again.verify(b"".join(key(i) for i in range(3))) == (3, 0)
    assert [again.is_tail(key(i)) for i in range(4)] == [False, True, True, False]
    ticket, n, packed = again.lease(key(0) + key(2), 1, [0])[:3]
    assert n == 2 and [e.offset_bytes for e in unpack_extents(packed)][1] == offsets[1]
    again.release(ticket, -1)
    while again.stats()["evicted_entries"] < 2:
        store(again, key(int(again.stats()["inserted_entries"]) + 50))
    assert tails_of(again) == (0, 0, 0)
