"""The pool's Python face, and what only real processes show: forks, kills, descriptors."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.errors import SegmentError
from kvstrata.native.copying import RecordSpec, seal_record
from kvstrata.native.pool import ExtentsMap, Hold, IndexReader, LentHold, Pool, PoolError, PoolFormatError
from kvstrata.rpc.wire import CommitOutcome, ReserveOutcome
from kvstrata.types import Extent, unpack_extents
from tests.harness import pool_churn

PAGE = 4096
RECORD = 2 * PAGE
IDENTITY = hashlib.sha256(b"identity").digest()


class Files:
    """The two descriptors of a segment, and a pool in it."""

    def __init__(self) -> None:
        self.index = os.memfd_create("index", os.MFD_CLOEXEC)
        self.extents = os.memfd_create("extents", os.MFD_CLOEXEC)

    def create(self, extents: int = 64, **more: object) -> Pool:
        options = {"extents_bytes": extents * RECORD, "entry_capacity": 128, **more}
        return Pool.create(self.index, self.extents, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        os.close(self.index)
        os.close(self.extents)


@pytest.fixture
def files() -> Iterator[Files]:
    files = Files()
    yield files
    files.close()


def key(number: int, chunk: int = 0) -> bytes:
    return hashlib.sha256(b"%d.%d" % (number, chunk)).digest()


def chain(number: int, chunks: int) -> bytes:
    return b"".join(key(number, chunk) for chunk in range(chunks))


def seal(pool: Pool, extent: Extent, name: bytes, identity: bytes = IDENTITY, parent: bytes = b"") -> None:
    spec = RecordSpec(name, identity, bytes(32), parent, 256)
    address = pool.extents_address + extent.offset_bytes
    seal_record(address, extent.length_bytes, spec, [extent.length_bytes - PAGE])


def store(pool: Pool, keys: bytes, row: int = 0) -> None:
    ticket, outcomes, packed = pool.reserve(keys, b"", RECORD, row, IDENTITY)
    indices = [i for i, outcome in enumerate(outcomes) if outcome == ReserveOutcome.RESERVED]
    for i in indices:
        seal(pool, unpack_extents(packed)[i], keys[32 * i : 32 * i + 32])
    if ticket:
        assert set(pool.commit(ticket, indices)) == {CommitOutcome.COMMITTED}


# arguments


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("extents_bytes", 0),
        ("extents_bytes", 5000),
        ("extents_bytes", -PAGE),
        ("entry_capacity", 0),
        ("entry_capacity", 1 << 31),
        ("policy", "lru"),
        ("watermark", (1.5, 0.2)),
        ("watermark", (0.5, float("nan"))),
        ("max_session_share", 0),
    ],
)
def test_an_impossible_option_is_named(files: Files, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        files.create(**{field: value})
    assert os.fstat(files.index).st_size == 0


def test_a_batch_that_is_no_row_of_keys_is_refused(files: Files) -> None:
    pool = files.create()
    for call in (
        lambda: pool.peek(bytes(33)),
        lambda: pool.lease(bytes(31), 1, [0]),
        lambda: pool.lease(bytes(32), 2, [0]),
        lambda: pool.lease(bytes(32), 0, [0]),
        lambda: pool.lease(bytes(32), 1, []),
        lambda: pool.lease(bytes(32), 1, [1024]),
        lambda: pool.reserve(bytes(5), b"", RECORD, 0, IDENTITY),
        lambda: pool.reserve(bytes(32), b"short", RECORD, 0, IDENTITY),
        lambda: pool.reserve(bytes(32), b"", 0, 0, IDENTITY),
        lambda: pool.reserve(bytes(32), b"", RECORD, -1, IDENTITY),
        lambda: pool.reserve(bytes(32), b"", RECORD, 0, b"short"),
        lambda: pool.claim_row(b"short", bytes(16), 1),
        lambda: pool.hold(b"short"),
        lambda: pool.hold(None, 1),
        lambda: pool.verify(bytes(1)),
    ):
        with pytest.raises(ValueError):
            call()
    pool.validate()


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
    pool.validate()


def test_a_full_row_table_is_an_error_of_its_own(files: Files) -> None:
    pool = files.create()
    for number in range(1023):
        pool.claim_row(number.to_bytes(16, "big"), bytes(16), 1)
    with pytest.raises(PoolError, match="sessions_full") as refusal:
        pool.claim_row(b"x" * 16, bytes(16), 1)
    assert refusal.value.reason == "sessions_full"
    assert isinstance(refusal.value, SegmentError)


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


# holds and views


def test_a_view_of_a_committed_record_is_read_only(files: Files) -> None:
    pool = files.create()
    ticket, _, packed = pool.reserve(chain(1, 1), b"", RECORD, 0, IDENTITY)
    hold = pool.hold(None, ticket, 0)
    assert hold is not None and not hold.view().readonly
    hold.view()[PAGE : PAGE + 5] = b"bytes"
    seal(pool, unpack_extents(packed)[0], key(1))
    pool.commit(ticket, [0])
    ready = pool.hold(key(1))
    assert ready is not None and ready.view().readonly
    assert (len(ready.view()), bytes(ready.view()[PAGE : PAGE + 5])) == (RECORD, b"bytes")
    assert (ready.key, ready.offset, ready.length) == (key(1), hold.offset, RECORD)
    assert ready.address == pool.extents_address + ready.offset
    assert ready.generation == hold.generation


def test_a_dropped_hold_gives_no_view_and_dropping_twice_is_harmless(files: Files) -> None:
    pool = files.create()
    store(pool, chain(1, 1))
    hold = pool.hold(key(1))
    assert hold is not None
    with hold:
        assert pool.stats()["holds"] == 1
    assert pool.stats()["holds"] == 0
    hold.drop()
    assert not hold.is_held
    with pytest.raises(PoolError):
        hold.view()
    assert pool.hold(key(2)) is None
    pool.validate()


def test_a_hold_ends_with_its_object(files: Files) -> None:
    pool = files.create()
    store(pool, chain(1, 1))
    hold = pool.hold(key(1))
    assert pool.remove(key(1)) == 0
    del hold
    assert pool.stats()["holds"] == 0
    assert pool.remove(key(1)) == 1


def test_a_view_outlives_pool_hold_and_close(files: Files) -> None:
    pool = files.create()
    store(pool, chain(1, 1))
    hold = pool.hold(key(1))
    assert hold is not None
    view = hold.view()
    before = bytes(view)
    pool.close()
    hold.drop()
    del pool, hold
    assert bytes(view) == before


def test_any_thread_may_drop_a_hold(files: Files) -> None:
    pool = files.create()
    store(pool, chain(1, 8))
    holds = [pool.hold(key(1, chunk % 8)) for chunk in range(400)]
    assert all(holds)

    def drop_all() -> None:
        for hold in holds:
            assert isinstance(hold, Hold)
            hold.drop()

    threads = [threading.Thread(target=drop_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.stats()["holds"] == 0
    assert pool.stats()["pinned_bytes"] == 0
    pool.validate()


def test_neither_pool_nor_hold_can_be_made_by_hand() -> None:
    for cls in (Pool, Hold):
        with pytest.raises(TypeError):
            cls()


# clients


def test_a_client_sees_what_the_server_does(files: Files) -> None:
    pool = files.create()
    reader = IndexReader(files.index)
    assert (reader.epoch, reader.pool_id, reader.extents_bytes) == (
        pool.epoch,
        pool.pool_id,
        pool.extents_bytes,
    )
    assert len(reader.pool_id) == 16
    store(pool, chain(1, 6))
    begun_s = time.monotonic()
    pool.heartbeat()
    age_s = reader.heartbeat_age_s
    assert 0 <= age_s <= time.monotonic() - begun_s
    assert [reader.peek(chain(1, 8), slices) for slices in (1, 2, 4, 8)] == [6, 3, 1, 0]
    assert reader.peek(b"") == 0
    assert not reader.has_l2
    pool.set_has_l2(True)
    assert reader.has_l2
    with pytest.raises(ValueError):
        reader.peek(bytes(32), 0)
    with pytest.raises(ValueError):
        reader.peek(bytes(31))
    reader.close()
    reader.close()
    with pytest.raises(PoolError):
        reader.peek(bytes(32))


def test_the_index_can_be_mapped_from_a_read_only_descriptor(files: Files) -> None:
    pool = files.create()
    store(pool, chain(1, 3))
    pool.heartbeat()
    read_only = os.open(f"/proc/self/fd/{files.index}", os.O_RDONLY | os.O_CLOEXEC)
    reader = IndexReader(read_only)
    os.close(read_only)
    assert reader.peek(chain(1, 3)) == 3


def test_an_extents_map_is_bounds_checked(files: Files) -> None:
    pool = files.create()
    with pytest.raises(PoolFormatError):
        ExtentsMap(files.extents, 65 * RECORD)
    with pytest.raises(ValueError):
        ExtentsMap(files.extents, 0)
    extents = ExtentsMap(files.extents, pool.extents_bytes)
    for offset, length in ((-1, 1), (0, -1), (pool.extents_bytes, 1), (0, pool.extents_bytes + 1)):
        with pytest.raises(ValueError):
            extents.view(offset, length)
    view = extents.view(RECORD, 5)
    view[:] = b"hello"
    with pytest.raises(BufferError):
        extents.close()
    view.release()
    extents.close()
    extents.close()
    with pytest.raises(PoolError):
        _ = extents.address


def test_a_lent_hold_is_dropped_once_by_a_call_a_block_or_its_end(files: Files) -> None:
    pool = files.create()
    extents = ExtentsMap(files.extents, pool.extents_bytes)
    drops: list[str] = []

    def lent(name: str, writable: bool = True) -> LentHold:
        return LentHold(
            extents, bytes(32), RECORD, 100, writable=writable, dropped=lambda: drops.append(name)
        )

    hold = lent("called")
    assert (hold.key, hold.offset, hold.length, hold.generation) == (bytes(32), RECORD, 100, 0)
    assert hold.address == extents.address + RECORD
    with hold.view() as view:
        view[:5] = b"hello"
    assert bytes(extents.view(RECORD, 5)) == b"hello"
    assert hold.is_held
    hold.drop()
    hold.drop()
    assert not hold.is_held
    with pytest.raises(PoolError):
        hold.view()
    with lent("left", writable=False) as hold, hold.view() as view:
        assert view.readonly
        with pytest.raises(BufferError):
            extents.close()
    del hold, view
    lent("forgotten")
    assert drops == ["called", "left", "forgotten"]
    for offset, length in ((-1, 1), (0, -1), (pool.extents_bytes, 1), (1, pool.extents_bytes)):
        with pytest.raises(ValueError, match=r"leaves the pool|negative"):
            LentHold(extents, bytes(32), offset, length, writable=True, dropped=lambda: drops.append("never"))
    assert len(drops) == 3
    hold = lent("last")
    extents.close()
    with pytest.raises(PoolError):
        hold.view()


def test_a_forked_child_has_no_mapping(files: Files) -> None:
    pool = files.create()
    reader = IndexReader(files.index)
    extents = ExtentsMap(files.extents, pool.extents_bytes)
    addresses = [pool.extents_address, extents.address]
    assert reader.epoch
    assert "memfd:index" in Path("/proc/self/maps").read_text()
    pid = os.fork()
    if pid == 0:
        text = Path("/proc/self/maps").read_text()
        inherited = "memfd:" in text or any(f"{address:x}-" in text for address in addresses)
        os._exit(1 if inherited else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# administration


def test_a_closed_pool_says_so(files: Files) -> None:
    pool = files.create()
    pool.close()
    pool.close()
    assert pool.closed
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
    assert pool.remove(bytes(32)) == pool.evict_to_watermark() == pool.peek(bytes(32)) == 0


def test_stats_tell_where_the_bytes_are(files: Files) -> None:
    pool = files.create()
    row = pool.claim_row(b"s" * 16, b"g" * 16, 1)
    store(pool, chain(1, 3))
    ticket, _, _ = pool.reserve(chain(2, 2), b"", RECORD, row, IDENTITY, 9)
    with pool.hold(key(2), ticket, 0) as written:
        assert written.tenant == 9
    pool.lease(chain(1, 2), 1, [row])
    hold = pool.hold(key(1))
    assert hold.tenant == 0
    stats = pool.stats()
    assert stats["bytes"] == {"ready": 3 * RECORD, "reserved": 2 * RECORD, "unverified": 0, "quarantined": 0}
    assert stats["entries"]["ready"] == 3
    assert stats["used_bytes"] + stats["free_bytes"] == stats["extents_bytes"] == pool.extents_bytes
    assert (stats["leased_bytes"], stats["pinned_bytes"], stats["holds"]) == (2 * RECORD, RECORD, 1)
    assert stats["classes"] == [{"extent_bytes": RECORD, "used": 5, "capacity": 6}]
    assert stats["tenants"][9] == {"bytes": 2 * RECORD, "quota_bytes": -1}
    assert stats["rows_claimed"] == stats["leases"] == stats["reservations"] == 1
    assert 0 <= stats["fragmentation"] < 1
    assert hold is not None


def test_a_session_limit_is_counted_and_ends_with_the_commit(files: Files) -> None:
    pool = files.create()
    row = pool.claim_row(b"s" * 16, b"g" * 16, 1)
    ticket, outcomes, packed = pool.reserve(chain(1, 9), b"", RECORD, row, IDENTITY)
    assert list(outcomes) == [ReserveOutcome.RESERVED] * 8 + [ReserveOutcome.SESSION_LIMIT]
    assert pool.stats()["refused"]["session_limit"] == 1
    seal(pool, unpack_extents(packed)[0], key(1))
    assert pool.commit(ticket, [0]) == bytes([CommitOutcome.COMMITTED])
    _, outcomes, _ = pool.reserve(chain(2, 2), b"", RECORD, row, IDENTITY)
    assert list(outcomes) == [ReserveOutcome.RESERVED, ReserveOutcome.SESSION_LIMIT]


def test_prefaulting_goes_on_beside_the_work_and_ends_with_close(files: Files) -> None:
    pool = files.create(extents=1 << 14)
    pool.prefault_start(1)
    with pytest.raises(PoolError) as refusal:
        pool.prefault_start(1)
    assert refusal.value.reason == "exists"
    store(pool, chain(1, 4))
    while pool.prefaulted_bytes < pool.extents_bytes and not pool.stats()["prefault_error"]:
        os.sched_yield()
    assert pool.stats()["prefault_error"] == 0
    assert os.fstat(files.extents).st_blocks * 512 == pool.extents_bytes
    pool.heartbeat()
    assert pool.peek(chain(1, 4)) == 4
    pool.close()


def test_an_index_takes_no_more_memory_than_its_bucket_lines_and_the_entries_in_use(files: Files) -> None:
    pool = files.create(extents=1 << 20, entry_capacity=1 << 20)
    assert os.fstat(files.index).st_size <= 144 * (1 << 20) + (2 << 16)
    store(pool, chain(1, 16))
    assert os.fstat(files.index).st_blocks * 512 <= 16 * (1 << 20) + 4 * (2 << 20)
    pool.close()
    # Nor does a restart touch what was never used.
    again = Pool.adopt(files.index, files.extents)
    assert os.fstat(files.index).st_blocks * 512 <= 16 * (1 << 20) + 4 * (2 << 20)
    again.close()


# kills


def test_a_server_killed_anywhere_leaves_a_pool_that_the_next_one_adopts(files: Files) -> None:
    """Servers in turn on one segment, each killed after some operations, the first ones while they adopt."""
    files.create(extents=48).close()
    for number in range(16):
        read_end, write_end = os.pipe()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.pool_churn"]
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
        pool.validate()
        rows = {row["session"]: row["row"] for row in pool.rows()}
        assert set(rows) <= set(pool_churn.SESSIONS)
        assert pool.verify_next(1 << 40) == 0
        assert pool.stats()["corrupt_entries"] == 0, "a commit made bytes visible that were not complete"
        pool_churn.check_contents(pool)
        # What the dead server had leased to processes that live is still there.
        for prompt, n_chunks in leased.values():
            keys = b"".join(pool_churn.key(prompt, chunk) for chunk in range(n_chunks))
            assert pool.peek(keys) == n_chunks
        for row in rows.values():
            pool.row_quiesced(row)
        pool.validate()
        assert pool.stats()["quarantined_bytes"] == 0
        pool.close()


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
