"""Leases and peeks of slices with spans, beside their definition, for any presence, spans and leases of others."""

from __future__ import annotations

import hashlib
from typing import NamedTuple
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.keys import spans
from kvstrata.keys.batch import nth, part
from kvstrata.keys.spans import PromptKeys
from kvstrata.native.core import IndexReader, Pool, storage_keys
from kvstrata.types import unpack_extents
from tests.harness.amount import amount
from tests.harness.pool_files import IDENTITY, RECORD, Files, store
from tests.harness.validation import validate

MAX_CHUNKS, MAX_SLICES = 9, 4
PIECE = 16
"""Keys of a window that are derived together; they begin at a multiple of this."""


class Case(NamedTuple):
    """Chunks of some slices, and which of them are there, by (chunk, slice)."""

    n_chunks: int
    spans: tuple[int, ...]
    there: frozenset[tuple[int, int]]

    @property
    def chain(self) -> bytes:
        return b"".join(hashlib.sha256(b"chunk %d" % chunk).digest() for chunk in range(self.n_chunks))

    @property
    def slices(self) -> bytes:
        return b"".join(hashlib.sha256(b"slice %d" % number).digest() for number in range(len(self.spans)))

    def key(self, chunk: int, number: int) -> bytes:
        return storage_keys(IDENTITY, nth(self.chain, chunk), nth(self.slices, number))

    @property
    def keys(self) -> bytes:
        return storage_keys(IDENTITY, self.chain, self.slices)

    def needs(self, n: int) -> set[tuple[int, int]]:
        """The chunks that a hit of n chunks needs, by the words of the definition."""
        return {
            (chunk, number)
            for number, span in enumerate(self.spans)
            for chunk in (range(n) if span == 0 else range(n)[-span:])
        }

    def longest(self) -> int:
        prefix = 0
        whole = [number for number, span in enumerate(self.spans) if span == 0]
        while prefix < self.n_chunks and all((prefix, number) in self.there for number in whole):
            prefix += 1
        return max(n for n in range(prefix + 1) if self.needs(n) <= self.there)


@st.composite
def cases(draw: st.DrawFn, min_span: int = 0, max_chunks: int = MAX_CHUNKS) -> Case:
    n_chunks = draw(st.integers(1, max_chunks))
    each = draw(
        st.lists(st.integers(min_span, max_chunks + 2) | st.just(1 << 16), min_size=1, max_size=MAX_SLICES)
    )
    places = [(chunk, number) for chunk in range(n_chunks) for number in range(len(each))]
    # Mostly there: of chunks drawn one by one, next to no window would be whole.
    absent = draw(
        st.sets(st.sampled_from(places), max_size=len(places) // 2) | st.sets(st.sampled_from(places))
    )
    return Case(n_chunks, tuple(each), frozenset(set(places) - absent))


def a_pool(files: Files, records: int) -> Pool:
    return files.create(records, entry_capacity=512, max_session_share=2)


def fill(pool: Pool, case: Case) -> None:
    """Store what is there."""
    for chunk, number in sorted(case.there):
        assert store(pool, case.key(chunk, number)) == 1


def lease(pool: Pool, case: Case, row: int) -> tuple[int, int, bytes, int, int]:
    """Lease by all keys, and again by the chain, which must give the same in every case; the second one stays."""
    n_slices = len(case.spans)
    ticket, *by_keys = pool.lease(case.keys, n_slices, [row], IDENTITY, case.spans)
    if ticket:
        assert pool.release(ticket, row)
    by_chain = pool.lease_chain(
        IDENTITY, case.chain, case.slices, [row], case.spans, case.n_chunks * n_slices
    )
    assert by_chain is not None, "no lookup derives a key twice"
    *leased, whole = by_chain
    assert leased[1:] == by_keys
    assert bool(leased[0]) == bool(ticket)
    numbers = [number for number, span in enumerate(case.spans) if not span]
    assert whole in (spans.of_slices(case.keys, n_slices, numbers), b"")
    assert whole or leased[1] == case.n_chunks or len(numbers) == 0
    return by_chain[:5]


def assert_leased(pool: Pool, case: Case, row: int, n_chunks: int) -> None:
    """Lease, assert that exactly what a hit of `n_chunks` needs was leased, and release it."""
    before = pool.stats()["leased_bytes"]
    ticket, leased, packed, _, _ = lease(pool, case, row)
    assert leased == n_chunks
    extents = unpack_extents(packed)
    assert len(extents) == n_chunks * len(case.spans)
    got = {divmod(i, len(case.spans)) for i, extent in enumerate(extents) if extent.length_bytes}
    assert got == case.needs(n_chunks)
    validate(pool)
    if ticket:
        assert pool.release(ticket, row)
    assert pool.stats()["leased_bytes"] == before


@given(cases())
@settings(max_examples=amount(133, 400))
def test_the_longest_hit_is_found_and_each_chunk_is_asked_for_once(case: Case) -> None:
    asked: list[tuple[int, int]] = []

    def there(chunk: int, number: int) -> bool:
        asked.append((chunk, number))
        return (chunk, number) in case.there or not case.spans[number]

    windows = frozenset((c, s) for c in range(case.n_chunks) for s, span in enumerate(case.spans) if not span)
    assert (
        spans.longest(case.n_chunks, case.spans, there) == case._replace(there=case.there | windows).longest()
    )
    assert len(asked) == len(set(asked))


@given(cases())
@settings(max_examples=amount(50, 150))
def test_a_lease_takes_what_the_longest_hit_needs(case: Case) -> None:
    with Files() as files:
        pool = a_pool(files, 200)
        row = pool.claim_row(bytes(16), b"g" * 16, 100)
        fill(pool, case)
        assert spans.peek(pool, case.keys, len(case.spans), case.spans) == case.longest()
        keys = PromptKeys(IDENTITY, case.chain, case.slices, case.spans)
        if any(case.spans):
            assert keys.peek_windows(pool, keys.peek_whole(pool)) == case.longest()
        assert_leased(pool, case, row, case.longest())
        foreign = pool.lease(case.keys, len(case.spans), [row], hashlib.sha256(b"other").digest(), case.spans)
        assert foreign[:2] == (0, 0)
        pool.close()


@given(cases(max_chunks=70), st.integers(0, 280))
@settings(max_examples=amount(33, 100))
def test_a_lease_by_the_chain_derives_no_more_keys_than_allowed_and_no_more_than_it_needs(case, max_keys):
    with Files() as files:
        pool = a_pool(files, 600)
        row = pool.claim_row(bytes(16), b"g" * 16, 100)
        fill(pool, case)
        assert_leased(pool, case, row, case.longest())
        enough = sum(min(case.n_chunks, span + PIECE) if span else case.n_chunks for span in case.spans)
        before = pool.stats()["leased_bytes"]
        leased = pool.lease_chain(IDENTITY, case.chain, case.slices, [row], case.spans, max_keys)
        if leased is None:
            assert max_keys < case.n_chunks * len(case.spans)
            assert max_keys < enough or case.longest() < case.n_chunks, "a whole hit needs its end only"
            assert pool.stats()["leased_bytes"] == before
        else:
            assert max_keys >= case.n_chunks * case.spans.count(0)
            assert leased[1] == case.longest()
        validate(pool)
        pool.close()


@given(cases(min_span=1), st.integers(1, 4))
@settings(max_examples=amount(50, 150))
def test_a_peek_at_windows_in_pieces_finds_the_longest_hit(case: Case, piece: int) -> None:
    with Files() as files:
        pool = a_pool(files, 200)
        reader = IndexReader(files.index)
        fill(pool, case)
        pool.heartbeat()
        assert pool.peek_windows(case.keys, case.spans) == case.longest()
        assert reader.peek_windows(case.keys, case.spans) == case.longest()
        with mock.patch.object(spans, "PIECE_CHUNKS", piece):
            found = spans.peek_end(
                pool, case.n_chunks, case.spans, lambda a, b: part(case.keys, a, b, len(case.spans))
            )
        assert found == case.longest()
        reader.close()
        pool.close()


@given(cases(), st.data())
@settings(max_examples=amount(33, 100))
def test_after_a_restart_a_lease_names_unverified_windows_until_they_are_verified(case, data):
    with Files() as files:
        pool = a_pool(files, 200)
        fill(pool, case)
        pool.close()
        pool = files.adopt()
        row = pool.claim_row(bytes(16), b"g" * 16, 100)
        verified = data.draw(st.sets(st.sampled_from(sorted(case.there)))) if case.there else set()
        for chunk, number in sorted(verified):
            assert pool.verify(case.key(chunk, number)) == (1, 0)
        part_only = case._replace(there=frozenset(verified))
        unverified = lease(pool, case, row)[3]
        assert unverified or part_only.longest() == case.longest()
        assert_leased(pool, part_only, row, part_only.longest())
        pool.verify(case.keys)
        assert lease(pool, case, row)[3] == 0
        assert_leased(pool, case, row, case.longest())
        pool.close()


@given(cases(), st.integers(2, 40), st.data())
@settings(max_examples=amount(66, 200))
def test_at_the_bound_a_lease_takes_the_longest_hit_that_fits(case, room, data):
    with Files() as files:
        pool = a_pool(files, 80)  # of which 40 may be leased
        row = pool.claim_row(bytes(16), b"g" * 16, 100)
        fill(pool, case)
        others = [hashlib.sha256(b"other %d" % i).digest() for i in range(40 - room)]
        for key in others:
            store(pool, key)
        shared = (
            data.draw(st.sets(st.sampled_from(sorted(case.there)), max_size=room)) if case.there else set()
        )
        for key in [*others, *(case.key(chunk, number) for chunk, number in shared)]:
            assert pool.lease(key, 1, [row])[1] == 1
        left = room - len(shared)
        fitting = max(
            n
            for n in range(case.longest() + 1)
            if case.needs(n) <= case.there and len(case.needs(n) - shared) <= left
        )
        _, leased, _, _, short_bytes = lease(pool, case, row)
        assert leased == fitting
        assert short_bytes or leased == case.longest()
        validate(pool)
        assert pool.stats()["leased_bytes"] <= 40 * RECORD
        pool.close()
