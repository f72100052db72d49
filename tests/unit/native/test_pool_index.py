"""The pool writes its index file as docs/formats.md describes it: a reader written from that page finds everything."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import pytest

from kvstrata.native.core import Pool
from kvstrata.types import unpack_extents
from tests.oracles import pool_index as oracle
from tests.oracles.pool_index import PoolIndex

PAGE = 4096
EXTENTS_BYTES = 256 * PAGE
CAPACITY = 128
IDENTITY = hashlib.sha256(b"identity").digest()
SESSION, GROUP = b"s" * 16, b"g" * 16
TENANT = 7


@pytest.fixture
def fds() -> Iterator[tuple[int, int]]:
    found = os.memfd_create("index", os.MFD_CLOEXEC), os.memfd_create("extents", os.MFD_CLOEXEC)
    yield found
    for fd in found:
        os.close(fd)


def make(fds: tuple[int, int]) -> Pool:
    return Pool.create(*fds, extents_bytes=EXTENTS_BYTES, entry_capacity=CAPACITY)


def index_of(fds: tuple[int, int]) -> PoolIndex:
    return PoolIndex(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))


def one_home(count: int) -> list[bytes]:
    """Keys whose hashes name the same line, with different tags."""
    return [b"home" + hashlib.sha256(b"%d" % i).digest()[:28] for i in range(count)]


def put(pool: Pool, keys: list[bytes], record_bytes: int = 2 * PAGE - 100, row: int = 0) -> bytes:
    ticket, _, extents = pool.reserve(b"".join(keys), b"", record_bytes, row, IDENTITY, TENANT)
    pool.commit(ticket, list(range(len(keys))), check=False)
    return extents


def test_the_header_rows_and_runs_are_where_the_page_says(fds: tuple[int, int]) -> None:
    pool = make(fds)
    row = pool.claim_row(SESSION, GROUP, 4711, True)
    put(pool, one_home(3))
    pool.set_has_l2(True)
    pool.heartbeat()
    index = index_of(fds)
    assert (index.pool_id, index.epoch) == (pool.pool_id, pool.epoch)
    assert (index.extents_bytes, index.capacity, index.entries_touched) == (EXTENTS_BYTES, CAPACITY, 3)
    assert index.flags == 1 and index.heartbeat_ns > 0
    assert index.slab_bytes == pool.stats()["slab_bytes"]
    [(_, _, extent_bytes)] = index.runs()
    assert extent_bytes == 2 * PAGE
    assert index.row(row) == (1, SESSION, GROUP, pool.epoch, 4711, 1)
    assert index.row(0)[0] == 1 and index.row(row + 1)[0] == 0


def test_every_chunk_is_found_with_its_extent_even_beyond_its_home_line(fds: tuple[int, int]) -> None:
    pool = make(fds)
    keys = one_home(20)
    extents = unpack_extents(put(pool, keys))
    index = index_of(fds)
    home = int.from_bytes(b"home", "little") * index.lines >> 32
    assert index.probe_length(home) == 2, "20 keys fill three lines of 8"
    for at, (key, extent) in enumerate(zip(keys, extents, strict=True)):
        entry = index.find(key)
        assert entry is not None and entry.state == oracle.READY
        assert (entry.offset, entry.length) == (extent.offset_bytes, extent.length_bytes)
        assert entry.generation == extent.generation
        parent = index.find(keys[at - 1]) if at else None
        assert entry.parent == (parent.number if parent else None)
        assert (entry.tenant, entry.identity, entry.owner) == (TENANT, IDENTITY[:16], oracle.NO_OWNER)
    assert index.find(one_home(21)[-1]) is None


def test_states_rows_and_owners_are_those_of_the_page(fds: tuple[int, int]) -> None:
    pool = make(fds)
    row = pool.claim_row(SESSION, GROUP, 4711)
    leased, reserved, dropped = one_home(3)
    put(pool, [leased])
    put(pool, [dropped])
    pool.lease(leased, 1, [row])
    pool.reserve(reserved, b"", PAGE, row, IDENTITY)
    pool.remove(dropped)
    index = index_of(fds)
    entry = index.find(leased)
    assert entry is not None and (entry.state, entry.rows) == (oracle.READY, 1 << row)
    entry = index.find(reserved)
    assert entry is not None and (entry.state, entry.owner) == (oracle.RESERVED, row)
    assert index.find(dropped) is None
    pool.close()
    Pool.adopt(*fds)
    entry = index_of(fds).find(leased)
    assert entry is not None and (entry.state, entry.rows) == (oracle.UNVERIFIED, 1 << row)
