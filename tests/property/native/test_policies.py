"""The promises of eviction by every policy: it makes room in time, from the oldest chunks that nothing uses."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.native.core import Pool
from tests.harness import pool_files
from tests.harness.amount import amount
from tests.harness.pool_files import IDENTITY, PAGE, Files
from tests.harness.validation import validate

POLICIES = ("VALUE", "LRU")
REFUSED = range(3, 11)
PARENT_ABSENT = 10


def make_pool(pages: int, policy: str, entries: int = 0) -> Pool:
    with Files() as files:
        return files.create(
            extents_bytes=pages * PAGE, entry_capacity=entries or pages, policy=policy, max_session_share=1
        )


def key(*path: int) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def store(pool: Pool, keys: Sequence[bytes], pages: int, first: int = 0) -> None:
    """Store keys[first:] behind keys[:first]."""
    parent = keys[first - 1] if first else b""
    stored = pool_files.store(pool, b"".join(keys[first:]), parent=parent, size=pages * PAGE, sealed=False)
    assert stored == len(keys) - first, "refused"


def use(pool: Pool, keys: Sequence[bytes]) -> int:
    """Lease the leading chunks of a prompt and release them at once; return how many there were."""
    ticket, hits, *_ = pool.lease(b"".join(keys), 1, [0])
    if ticket:
        assert pool.release(ticket)
    return hits


@given(
    pages=st.integers(60, 3000),
    sizes=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
    order=st.lists(st.integers(0, 3), min_size=4, max_size=40),
)
@settings(max_examples=amount(20, 60))
def test_the_newest_chunks_survive_any_mix_of_sizes(pages: int, sizes: list[float], order: list[int]) -> None:
    """Chunks of up to a 20th of the pool, in all four times its size: none is refused, the newest quarter stays."""
    pool = make_pool(pages, "LRU")
    chunk_pages = [1 + int(size**3 * (pages / 20 - 1)) for size in sizes]
    prompts: list[tuple[list[bytes], int]] = []
    stored = 0
    while stored < 4 * pages:
        size = chunk_pages[order[len(prompts) % len(order)] % len(chunk_pages)]
        count = max(1, min(6, pages // 20 // size))
        keys = [key(len(prompts), chunk) for chunk in range(count)]
        store(pool, keys, size)
        assert pool.peek(b"".join(keys)) == count
        prompts.append((keys, size * count))
        stored += size * count
    validate(pool)
    kept = 0
    for keys, size in reversed(prompts):
        if pool.peek(b"".join(keys)) < len(keys):
            break
        kept += size
    assert kept >= pages / 4
    pool.close()


@given(
    policy=st.sampled_from(POLICIES),
    pages=st.integers(12, 120),
    percent=st.integers(10, 300),
    others=st.lists(st.integers(1, 5), max_size=30),
    batch=st.integers(1, 40),
    in_flight=st.integers(1, 4),
    has_l2=st.booleans(),
)
@settings(max_examples=amount(50, 150))
def test_a_chain_too_long_for_the_pool_keeps_its_beginning_and_evicts_nothing_for_the_rest(
    policy: str, pages: int, percent: int, others: list[int], batch: int, in_flight: int, has_l2: bool
) -> None:
    """As a client does, the test reserves some batches before it commits the first one."""
    pool = make_pool(pages, policy, 4 * pages)
    pool.set_has_l2(has_l2)
    row = pool.claim_row(b"s" * 16, b"g" * 16, 1)
    held: list[bytes] = []
    for number, length in enumerate(others):
        keys = [key(number, chunk) for chunk in range(length)]
        store(pool, keys, 1)
        held += keys
    chain = [key(-1, chunk) for chunk in range(max(1, pages * percent // 100))]
    reserved: collections.deque[tuple[int, list[int]]] = collections.deque()
    at_refusal: list[bytes] | None = None

    def commit_oldest() -> None:
        ticket, indices = reserved.popleft()
        assert not any(pool.commit(ticket, indices, check=False))

    for first in range(0, len(chain), batch):
        parent = chain[first - 1] if first else b""
        ticket, outcomes, _ = pool.reserve(
            b"".join(chain[first : first + batch]), parent, PAGE, row, IDENTITY
        )
        if ticket:
            reserved.append((ticket, [i for i, outcome in enumerate(outcomes) if outcome == 0]))
        if at_refusal is None and any(outcomes):
            at_refusal = [name for name in held if pool.peek(name)]
        if len(reserved) == in_flight:
            commit_oldest()
    while reserved:
        commit_oldest()
    assert pool.peek(b"".join(chain)) == min(len(chain), pages)
    assert sum(pool.peek(name) for name in chain) == min(len(chain), pages)
    assert at_refusal is None or all(pool.peek(name) for name in at_refusal)
    validate(pool)
    pool.close()


@pytest.mark.parametrize("has_l2", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_behind_a_refused_one_take_no_room_from_others(policy: str, has_l2: bool) -> None:
    """A chain is refused while most of the pool is in use; it must not grow behind the gap when others leave."""
    pool = make_pool(16, policy)
    pool.set_has_l2(has_l2)
    row = pool.claim_row(b"s" * 16, b"g" * 16, 1)
    in_use = [key(0, chunk) for chunk in range(8)]
    others = [key(1, chunk) for chunk in range(6)]
    store(pool, in_use, 1)
    lease, *_ = pool.lease(b"".join(in_use), 1, [0])
    chain = [key(2, chunk) for chunk in range(20)]
    store(pool, chain[:8], 1)
    _, outcomes, _ = pool.reserve(b"".join(chain[8:12]), chain[7], PAGE, row, IDENTITY)
    assert outcomes[0] in REFUSED and len(set(outcomes)) == 1
    assert pool.release(lease)
    store(pool, others, 1)
    _, outcomes, _ = pool.reserve(b"".join(chain[12:]), chain[11], PAGE, row, IDENTITY)
    assert set(outcomes) == {PARENT_ABSENT}
    assert pool.peek(b"".join(others)) == len(others)
    # Once the gap is closed, the rest is stored as usual.
    there = pool.peek(b"".join(chain))
    for first in range(there, 14):
        store(pool, chain[: first + 1], 1, first)
    assert pool.peek(b"".join(chain)) == 14
    assert pool.stats()["refused"]["parent_absent"] == 8
    validate(pool)
    pool.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_refused_load_from_l2_stops_neither_loads_nor_stores_behind_it(policy: str) -> None:
    pool = make_pool(8, policy)
    pool.set_has_l2(True)
    row = pool.claim_row(b"s" * 16, b"g" * 16, 1)
    in_use = [key(0, chunk) for chunk in range(8)]
    store(pool, in_use[:4], 1)
    store(pool, in_use, 1, 4)
    lease, *_ = pool.lease(b"".join(in_use[:4]), 1, [0])
    other, *_ = pool.reserve(b"".join(key(1, chunk) for chunk in range(4)), b"", PAGE, 0, IDENTITY)
    chain = [key(2, chunk) for chunk in range(6)]
    ticket, outcomes, _ = pool.reserve(b"".join(chain[:4]), b"", PAGE, 0, IDENTITY)
    assert ticket == 0 and set(outcomes) <= set(REFUSED)
    assert pool.release(lease) and pool.abort(other, None) == 4
    for who, first in ((0, 4), (row, 5)):
        _, outcomes, _ = pool.reserve(chain[first], chain[3], PAGE, who, IDENTITY)
        assert list(outcomes) == [0]
    validate(pool)
    pool.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_whose_parent_is_gone_evicts_only_for_the_sake_of_an_l2_that_may_have_the_parent(policy):
    pool = make_pool(8, policy)
    others = [key(0, chunk) for chunk in range(6)]
    store(pool, others, 1)
    absent, orphans = key(1, 0), [key(1, chunk) for chunk in range(1, 5)]
    _, outcomes, _ = pool.reserve(b"".join(orphans), absent, PAGE, 0, IDENTITY)
    assert list(outcomes) == [0, 0, PARENT_ABSENT, PARENT_ABSENT]  # free room evicts nothing
    assert pool.peek(b"".join(others)) == len(others)
    pool.set_has_l2(True)
    _, outcomes, _ = pool.reserve(key(2, 1), key(2, 0), PAGE, 0, IDENTITY)
    assert list(outcomes) == [0]
    validate(pool)
    pool.close()


paths = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(prompts=st.lists(paths, min_size=1, max_size=80), capacity=st.integers(16, 48))
@settings(max_examples=amount(33, 100))
def test_lru_hits_the_same_chunks_as_a_plain_lru(prompts: list[list[int]], capacity: int) -> None:
    pool = make_pool(capacity, "LRU")
    cache: collections.OrderedDict[bytes, None] = collections.OrderedDict()
    for path in prompts:
        keys = [key(*path[: end + 1]) for end in range(len(path))]
        expected = 0
        while expected < len(keys) and keys[expected] in cache:
            expected += 1
        assert use(pool, keys) == expected
        store(pool, keys, 1, expected)
        for name in reversed(keys):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > capacity:
            cache.popitem(last=False)
        validate(pool)
    pool.close()


@given(
    prompts=st.lists(paths, min_size=20, max_size=120),
    policy=st.sampled_from(POLICIES),
    shared=st.integers(1, 5),
)
@settings(max_examples=amount(20, 60))
def test_a_prefix_that_every_request_uses_is_never_evicted(prompts, policy, shared):
    pool = make_pool(30, policy)
    system = [key(-1, chunk) for chunk in range(shared)]
    store(pool, system, 1)
    for number, path in enumerate(prompts):
        keys = system + [key(number, *path[: end + 1]) for end in range(len(path))]
        hits = use(pool, keys)
        assert hits == shared
        store(pool, keys, 1, hits)
        assert pool.peek(b"".join(keys)) == len(keys)
    validate(pool)
    pool.close()


def test_noop_keeps_everything_and_says_pinned() -> None:
    pool = make_pool(8, "noop", entries=20)
    for prompt in range(8):
        store(pool, [key(prompt)], 1)
    ticket, outcomes, _ = pool.reserve(key(9), b"", PAGE, 0, IDENTITY)
    assert (ticket, list(outcomes)) == (0, [4])
    assert pool.clear() == (8, 0)
    store(pool, [key(9)], 1)
    pool.close()
