"""Adoption survives any bytes: it loses the damaged entries, or refuses the pool and names a field."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstrata.native.core import IndexReader, Pool, PoolFormatError
from tests.harness.amount import amount
from tests.harness.pool_files import IDENTITY, PAGE, RECORD, Files, chain, key, store
from tests.harness.validation import validate

LIBC = ctypes.CDLL(None)
LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
KEEP_SIZE, PUNCH_HOLE = 1, 2
EXTENTS, ENTRIES = 24, 24
ROWS_OFFSET, LINES_OFFSET = 4096, 69632


@contextmanager
def segment() -> Iterator[tuple[int, int]]:
    """Make the files of a pool with entries in every state, as a killed server leaves them."""
    with Files() as files:
        pool = files.create(EXTENTS, entry_capacity=ENTRIES, max_session_share=2)
        rows = [pool.claim_row(bytes([n]) * 16, b"g" * 16, 100 + n) for n in range(3)]
        for prompt in range(4):
            store(pool, chain(prompt, 3), size=(2 + prompt % 2) * PAGE)
        pool.lease(chain(0, 2), 1, rows[:2])
        pool.lease(chain(1, 3), 1, rows[2:])
        pool.reserve(chain(7, 2), b"", RECORD, rows[0], IDENTITY)
        pool.reserve(chain(8, 1), b"", RECORD, 0, IDENTITY)
        pool.remove(key(2, 1))
        pool.close()
        yield files.index, files.extents


def use(pool: Pool) -> None:
    """Assert that the adopted pool works."""
    validate(pool)
    pool.verify_next(1 << 40)
    validate(pool)
    for row in pool.rows():
        pool.row_gone(row["row"])
        validate(pool)
    stats = pool.stats()
    assert stats["quarantined_bytes"] == stats["blocked_bytes"] == 0
    for prompt in range(100, 112):
        assert store(pool, chain(prompt, 2), size=(2 + prompt % 3) * PAGE) == 2
        assert pool.peek(chain(prompt, 2)) == 2
        validate(pool)


def survives(index: int, extents: int) -> None:
    """Assert that the next server refuses the files by a field, or adopts a pool that works."""
    try:
        pool = Pool.adopt(index, extents, max_session_share=2)
    except PoolFormatError as refusal:
        assert refusal.field
        return
    use(pool)
    pool.close()


FILE_BYTES = LINES_OFFSET + 4096 + 4096 + 4096
# Mostly places that are in use: the start of the header, rows and lines in use, entries.
places = st.one_of(
    st.integers(0, 640),
    st.integers(ROWS_OFFSET, ROWS_OFFSET + 4 * 64),
    st.integers(LINES_OFFSET, FILE_BYTES - 1),
    st.integers(0, FILE_BYTES - 1),
)
noises = st.one_of(st.binary(min_size=1, max_size=1), st.sampled_from([b"\0", b"\1", b"\xff", b"\x80"]),
                   st.binary(min_size=8, max_size=2_000))  # fmt: skip


@given(damage=st.lists(st.tuples(places, noises), min_size=1, max_size=40))
@settings(max_examples=amount(133, 400))
@example(damage=[(0, b"\0")])
def test_any_damage_of_the_index_is_survived_by_server_and_clients(damage: list[tuple[int, bytes]]) -> None:
    with segment() as (index, extents):
        for place, noise in damage:
            os.pwrite(index, noise[: FILE_BYTES - place], place)
        try:
            reader = IndexReader(index)
        except PoolFormatError:
            pass
        else:
            for prompt in range(9):
                assert 0 <= reader.peek(chain(prompt, 3)) <= 3
            reader.close()
        survives(index, extents)


@given(
    holes=st.lists(
        st.tuples(st.booleans(), st.integers(0, 2 * EXTENTS), st.integers(1, 6)), min_size=1, max_size=6
    )
)
@settings(max_examples=amount(40, 400))
def test_holes_in_both_files_are_survived(holes: list[tuple[bool, int, int]]) -> None:
    with segment() as files:
        for in_extents, page, pages in holes:
            fd = files[in_extents]
            page %= os.fstat(fd).st_size // PAGE
            assert LIBC.fallocate(fd, PUNCH_HOLE | KEEP_SIZE, page * PAGE, pages * PAGE) == 0
        survives(*files)


committed = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11])
"""Entries of committed chunks in `segment`; entry 7 was removed."""
HOT_OFFSET, COLD_OFFSET = FILE_BYTES - 2 * 4096, FILE_BYTES - 4096


@given(
    circle=st.lists(committed, min_size=1, max_size=6, unique=True),
    more=st.lists(st.tuples(committed, st.integers(0, ENTRIES + 2)), max_size=8),
)
@settings(max_examples=amount(33, 100))
def test_circles_of_parents_are_broken(circle: list[int], more: list[tuple[int, int]]) -> None:
    links = more + [
        (entry, parent + 1) for entry, parent in zip(circle, circle[1:] + circle[:1], strict=True)
    ]
    with segment() as (index, extents):
        for entry, parent in links:
            os.pwrite(index, parent.to_bytes(8, "little"), HOT_OFFSET + 64 * entry + 56)
        pool = Pool.adopt(index, extents, max_session_share=2)
        use(pool)
        pool.close()


@given(one=committed, other=committed, rows=st.sampled_from([0, 2, 4, 1 << 77]))
@settings(max_examples=60)
def test_two_entries_on_one_extent_are_both_distrusted(one: int, other: int, rows: int) -> None:
    with segment() as (index, extents):
        keys = [os.pread(index, 32, HOT_OFFSET + 64 * entry + 8) for entry in (one, other)]
        os.pwrite(index, os.pread(index, 16, HOT_OFFSET + 64 * one + 40), HOT_OFFSET + 64 * other + 40)
        os.pwrite(index, rows.to_bytes(16, "little"), COLD_OFFSET + 64 * other)
        pool = Pool.adopt(index, extents, max_session_share=2)
        pool.verify_next(1 << 40)
        if one != other:
            assert [pool.peek(key) for key in keys] == [0, 0]
        use(pool)
        pool.close()


@given(
    one=committed, other=committed, state=st.sampled_from([2, 3, 0, 1, 4, 5, 255]), half_changed=st.booleans()
)
@settings(max_examples=amount(33, 100))
def test_a_key_is_kept_at_most_once_and_only_in_a_valid_state(one, other, state, half_changed):
    with segment() as (index, extents):
        name = os.pread(index, 32, HOT_OFFSET + 64 * one + 8)
        os.pwrite(index, name, HOT_OFFSET + 64 * other + 8)
        head = (state << 32) | (2 + half_changed)
        os.pwrite(index, head.to_bytes(8, "little"), HOT_OFFSET + 64 * one)
        pool = Pool.adopt(index, extents, max_session_share=2)
        validate(pool)
        pool.verify_next(1 << 40)
        if one == other:
            assert pool.peek(name) == (state in (2, 3) and not half_changed)
        use(pool)
        pool.close()
