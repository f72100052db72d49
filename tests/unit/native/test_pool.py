"""The pool's Python interface, and what only real processes show: forks, kills, descriptors."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys

import pytest

from kvstrata import types
from kvstrata.native import core
from kvstrata.native.core import ExtentsMap, IndexReader, Pool, PoolError, PoolFormatError
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.types import unpack_extents
from tests.harness.alone import alone
from tests.harness.amount import amount
from tests.harness.pool_files import IDENTITY, PAGE, RECORD, Files, chain, key, seal, store
from tests.harness.validation import validate
from tests.unit.native import pool_churn

# arguments


def test_modules_without_native_code_know_how_many_quotas_a_pool_has() -> None:
    assert types.MAX_QUOTAS == core.MAX_QUOTAS


def test_a_batch_that_is_no_list_of_keys_is_refused(files: Files) -> None:
    pool = files.create()
    for call in (
        lambda: pool.peek(bytes(33)),
        lambda: pool.lease(bytes(32), 2, [0]),
        lambda: pool.lease(bytes(32), 1, []),
        lambda: pool.lease(bytes(32), 1, [1024]),
        lambda: pool.lease_chain(IDENTITY, bytes(31), bytes(32), [0], (), 9),
        lambda: pool.lease_chain(IDENTITY, bytes(32), bytes(64), [0], (1,), 9),
        lambda: pool.reserve(bytes(5), b"", RECORD, 0, IDENTITY),
        lambda: pool.reserve(bytes(32), b"", 0, 0, IDENTITY),
        lambda: pool.reserve(bytes(32), b"", RECORD, -1, IDENTITY),
        lambda: pool.claim_row(b"short", bytes(16), 1),
        lambda: pool.hold(b"short"),
    ):
        with pytest.raises(ValueError):
            call()
    validate(pool)


def test_a_row_that_nobody_claimed_is_refused(files: Files) -> None:
    pool = files.create()
    store(pool, chain(1, 1))
    for call in (
        lambda: pool.lease(chain(1, 1), 1, [5]),
        lambda: pool.reserve(chain(2, 1), b"", RECORD, 5, IDENTITY),
        lambda: pool.row_gone(5),
        lambda: pool.row_gone(0),
        lambda: pool.row_quiesced(5),
    ):
        with pytest.raises(PoolError) as refusal:
            call()
        assert refusal.value.reason == "not_found"
    validate(pool)


def test_files_of_another_kind_are_refused_by_field(files: Files) -> None:
    with pytest.raises(PoolFormatError) as refusal:
        Pool.adopt(files.index, files.extents)
    assert refusal.value.field == "index_file_bytes"
    with pytest.raises(PoolFormatError):
        IndexReader(files.index)
    pool = files.create()
    pool.close()
    for name, value in (("extents_bytes", PAGE), ("entry_capacity", 7)):
        with pytest.raises(PoolFormatError) as refusal:
            Pool.adopt(files.index, files.extents, **{name: value})  # type: ignore[arg-type]
        assert (refusal.value.field, refusal.value.expected) == (name, value)
    os.truncate(files.extents, 100 * RECORD)
    with pytest.raises(PoolFormatError) as refusal:
        Pool.adopt(files.index, files.extents)
    assert refusal.value.field == "extents_file_bytes"
    assert (refusal.value.found, refusal.value.expected) == (100 * RECORD, 64 * RECORD)


def test_a_pool_is_made_in_empty_files_only(files: Files) -> None:
    files.create().close()
    with pytest.raises(PoolError) as refusal:
        files.create()
    assert refusal.value.reason == "exists"


def test_version_5_of_the_index_is_frozen(files: Files) -> None:
    """A server adopts the pool that an older one left. Another layout is another version, and this test stays."""
    pool = files.create()
    store(pool, chain(1, 2))
    pool.close()
    data = os.pread(files.index, os.fstat(files.index).st_size, 0)
    assert (data[:12], len(data)) == (b"KVINDEX1\x05\0\0\0", 90_112)
    for number in (0, 1):
        head, name, _, size, parent = struct.unpack_from("<Q32sQQQ", data, 73_728 + 64 * number)
        assert (head >> 32 & 0xFF, name, size, parent) == (2, key(1, number), 1 << 32 | RECORD, number)
        cold = data[81_920 + 64 * number :]
        assert (cold[24:40], cold[40:42]) == (IDENTITY[:16], b"\xff\xff")
        assert (cold[56:60], cold[60:64] != bytes(4)) == (
            bytes([number, 0, 4, 0]),
            True,
        )  # loaded, not used yet


# administration


def test_a_closed_pool_says_so(files: Files) -> None:
    pool = files.create()
    pool.close()
    pool.close()
    for call in (
        lambda: pool.claim_row(bytes(16), bytes(16), 1),
        lambda: pool.lease(bytes(32), 1, [0]),
        lambda: pool.reserve(bytes(32), b"", RECORD, 0, IDENTITY),
        lambda: pool.hold(bytes(32)),
        lambda: pool.prefault_start(1),
    ):
        with pytest.raises(PoolError) as refusal:
            call()
        assert refusal.value.reason == "closed"
    assert pool.clear() == pool.cleared_in_use() == (0, 0)
    assert pool.remove(bytes(32)) == pool.peek(bytes(32)) == 0


def test_an_index_takes_no_more_memory_than_its_bucket_lines_and_the_entries_in_use(files: Files) -> None:
    pool = files.create(extents=1 << 20, entry_capacity=1 << 20)
    assert os.fstat(files.index).st_size <= 144 * (1 << 20) + (2 << 16)
    store(pool, chain(1, 16))
    assert os.fstat(files.index).st_blocks * 512 <= 16 * (1 << 20) + 4 * (2 << 20)
    pool.close()
    # A restart does not touch entries that were never used, either.
    again = Pool.adopt(files.index, files.extents)
    assert os.fstat(files.index).st_blocks * 512 <= 16 * (1 << 20) + 4 * (2 << 20)
    again.close()


# kills


def test_a_server_killed_anywhere_leaves_a_pool_that_the_next_one_adopts(files: Files) -> None:
    """One server after another adopts the pool and is killed after some operations, the first ones during adoption."""
    files.create(extents=48).close()
    for number in range(amount(8, 16)):
        read_end, write_end = os.pipe()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.native.pool_churn"]
            + [str(word) for word in (files.index, files.extents, write_end, number)],
            pass_fds=(files.index, files.extents, write_end),
        )
        os.close(write_end)
        leased: dict[str, tuple[int, int]] = {}
        with open(read_end) as reports:
            lines = [reports.readline() for _ in range(1 + number * number)]
            server.send_signal(signal.SIGKILL)
            assert server.wait() == -signal.SIGKILL, "the server ended by itself"
            lines += reports
        for line in lines:
            match line.removesuffix("\n").split(" "):
                case ["lease", ticket, prompt, n_chunks] if line.endswith("\n"):
                    leased[ticket] = (int(prompt), int(n_chunks))
                case ["release", ticket]:
                    leased.pop(ticket, None)
        pool = Pool.adopt(files.index, files.extents)
        validate(pool)
        rows = {row["session"]: row["row"] for row in pool.rows()}
        assert set(rows) <= set(pool_churn.SESSIONS)
        assert pool.verify_next(1 << 40) == 0
        assert pool.stats()["corrupt_entries"] == 0, "a commit made bytes visible that were not complete"
        pool_churn.check_contents(pool)
        # Chunks that the dead server had leased to living processes are still there.
        for prompt, n_chunks in leased.values():
            keys = b"".join(pool_churn.key(prompt, chunk) for chunk in range(n_chunks))
            assert pool.peek(keys) == n_chunks
        for row in rows.values():
            pool.row_quiesced(row)
        validate(pool)
        assert pool.stats()["quarantined_bytes"] == 0
        pool.close()


@alone
def test_pools_and_readers_leave_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        files = Files()
        pool = files.create()
        reader = IndexReader(files.index)
        extents = ExtentsMap(files.extents, pool.extents_bytes)
        store(pool, chain(1, 2))
        files.close()
        assert reader.peek(chain(1, 2)) == 2
        extents.close()
        reader.close()
        pool.close()
    assert len(os.listdir("/proc/self/fd")) == before


# tails

CHUNK = 4 * PAGE
"""Length of a chunk's record; that of a tail's record is RECORD."""


def put(pool: Pool, name: bytes, parent: bytes = b"", *, tail: bool = False) -> int:
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
    validate(pool)
    return extent.offset_bytes


def test_of_tails_the_one_used_longest_ago_leaves_first_but_none_in_use(files: Files) -> None:
    pool = files.create()
    tails = [key(i) for i in range(pool.extents_bytes // CHUNK)]
    for name in tails:
        put(pool, name, tail=True)
    leased = pool.lease(tails[0], 1, [0])[0]
    held = pool.hold(tails[1])
    put(pool, key(900))
    put(pool, key(901))
    assert [pool.peek(name) for name in tails[:5]] == [1, 1, 0, 0, 1]
    pool.release(leased, -1)
    del held


# hints


def test_a_hint_reaches_the_first_chunk_that_is_there_and_all_before_it(files: Files) -> None:
    pool = files.create()
    pool.log_requests(1)
    keys = chain(1, 6)
    store(pool, keys)
    pool.take_requests()
    assert pool.hint(key(9) + keys[-32:] + keys[:32], 1) == 6
    assert pool.hint(keys[3 * 32 : 4 * 32], 4) == 4
    assert pool.hint(key(9), 1) == 0
    said = pool.take_requests()
    found = []
    while said:
        _, chunks, next_, _, zero = struct.unpack_from("<QIBBH", said)
        found.append((chunks, next_, zero))
        said = said[16 + 8 * chunks :]
    assert found == [(6, 1, 0), (4, 4, 0)]
    with pytest.raises(ValueError):
        pool.hint(bytes(31), 1)
    validate(pool)


def test_a_hint_reaches_a_chain_of_any_length(files: Files) -> None:
    pool = files.create(extents=2_000, entry_capacity=2_000)
    keys = chain(1, 1_900)
    store(pool, keys)
    for end in (511, 512, 513, 1_024, 1_025, 1_900):
        assert pool.hint(keys[(end - 1) * 32 : end * 32], 1) == end
    validate(pool)
