"""What holds and clients see of a pool: views of records, maps of the index and of the extents, and when each ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvstrata.native.core import ExtentsMap, IndexReader, LentHold, PoolError, PoolFormatError
from kvstrata.types import unpack_extents
from tests.harness.alone import alone
from tests.harness.pool_files import IDENTITY, PAGE, RECORD, Files, chain, key, seal, store
from tests.harness.validation import validate

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


def test_a_dropped_hold_gives_no_view_and_dropping_twice_is_harmless(files: Files) -> None:
    pool = files.create()
    store(pool, chain(1, 1))
    hold = pool.hold(key(1))
    assert hold is not None
    with hold:
        assert pool.stats()["holds"] == 1
    assert pool.stats()["holds"] == 0
    hold.drop()
    with pytest.raises(PoolError):
        hold.view()
    assert pool.hold(key(2)) is None
    validate(pool)


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
    pool.set_has_promises(True)
    assert reader.has_l2 and reader.has_promises
    pool.set_has_l2(False)
    assert reader.has_promises and not reader.has_l2
    pool.set_has_promises(False)
    assert not reader.has_promises
    with pytest.raises(ValueError):
        reader.peek(bytes(32), 0)
    with pytest.raises(ValueError):
        reader.peek(bytes(31))
    reader.close()
    reader.close()
    with pytest.raises(PoolError):
        reader.peek(bytes(32))


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
    assert (hold.key, hold.offset, hold.length) == (bytes(32), RECORD, 100)
    assert hold.address == extents.address + RECORD
    with hold.view() as view:
        view[:5] = b"hello"
    assert bytes(extents.view(RECORD, 5)) == b"hello"
    hold.drop()
    hold.drop()
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


@alone
def test_a_forked_child_has_no_mapping() -> None:
    files = Files()
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
