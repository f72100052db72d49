"""Decisions of the prefetch controller: how far a prefix reaches, and in which batches and reserves it is loaded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy.prefetch import Hole, Source, make_plan, next_batch, reserve_runs
from kvstrata.testing.strategies import key_of
from kvstrata.types import MissReason


def plan_of(
    n_chunks: int,
    n_slices: int,
    in_l1: set[int],
    in_l2: set[int],
    unknown: dict[int, str] | None = None,
    budget_bytes: int | None = None,
):
    keys = [key_of(i) for i in range(n_chunks * n_slices)]
    leading = []
    for s in range(n_slices):
        chunk = 0
        while chunk < n_chunks and chunk * n_slices + s in in_l1:
            chunk += 1
        leading.append(chunk)
    return make_plan(
        keys,
        n_slices,
        leading,
        {i: Source(0, 100) for i in in_l2},
        lambda key: keys.index(key) in in_l1,
        unknown or {},
        budget_bytes,
    )


def test_the_reason_for_the_first_missing_chunk_is_that_of_the_adapter() -> None:
    assert plan_of(2, 1, set(), {0}, {1: "breaker_open"}).reason == MissReason.BREAKER_OPEN
    assert plan_of(2, 1, set(), {0}, {1: "deadline"}).reason == MissReason.DEADLINE
    assert plan_of(2, 1, set(), {0}, {1: "closed"}).reason == MissReason.BREAKER_OPEN
    assert plan_of(2, 1, set(), {0}).reason == MissReason.NEVER_STORED


def test_a_budget_cuts_the_prefix_at_a_whole_chunk() -> None:
    plan = plan_of(4, 2, {0, 1}, set(range(8)), budget_bytes=500)
    assert plan.n_chunks == 3
    assert [hole.number for hole in plan.holes] == [2, 3, 4, 5]
    assert (plan.reason, plan.detail) == (MissReason.REFUSED, "budget")


@given(st.data(), st.integers(1, 8), st.integers(1, 3))
def test_the_prefix_ends_at_the_first_chunk_with_a_slice_that_nobody_has(
    data: st.DataObject, n_chunks: int, n_slices: int
) -> None:
    numbers = st.sets(st.integers(0, n_chunks * n_slices - 1))
    in_l1, in_l2 = data.draw(numbers), data.draw(numbers)
    plan = plan_of(n_chunks, n_slices, in_l1, in_l2)
    there = in_l1 | in_l2
    expected = 0
    while expected < n_chunks and all(expected * n_slices + s in there for s in range(n_slices)):
        expected += 1
    assert plan.n_chunks == expected
    holes = [hole.number for hole in plan.holes]
    assert holes == sorted(holes)
    assert set(holes) == set(range(expected * n_slices)) - in_l1


def holes_of(*places: tuple[int, int, int]) -> list[Hole]:
    return [Hole(number, key_of(number), Source(adapter, size)) for number, adapter, size in places]


def test_a_batch_has_one_adapter_and_is_bounded_in_items_and_bytes() -> None:
    pending = holes_of((0, 0, 10), (1, 0, 10), (2, 0, 10), (3, 1, 10), (4, 1, 100), (5, 1, 10))
    assert next_batch(pending, 64, 1000) == 3
    assert next_batch(pending, 2, 1000) == 2
    assert next_batch(pending, 64, 25) == 2
    assert next_batch(pending[3:], 64, 50) == 1
    assert next_batch(pending[4:], 64, 50) == 1, "a record larger than a batch goes alone"
    assert next_batch([], 64, 50) == 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50)), max_size=40),
    st.integers(1, 8),
    st.integers(1, 200),
)
def test_batches_lose_nothing_and_keep_the_order(
    sources: list[tuple[int, int]], max_items: int, max_bytes: int
) -> None:
    pending = holes_of(*((i, adapter, size) for i, (adapter, size) in enumerate(sources)))
    seen: list[Hole] = []
    while pending:
        count = next_batch(pending, max_items, max_bytes)
        batch, pending = pending[:count], pending[count:]
        assert 1 <= count <= max_items
        assert len({hole.source.adapter for hole in batch}) == 1
        assert count == 1 or sum(hole.source.record_bytes for hole in batch) <= max_bytes
        seen += batch
    assert [hole.number for hole in seen] == list(range(len(sources)))


def test_neighbours_of_one_slice_are_reserved_together_with_their_parent() -> None:
    keys = [key_of(n) for n in range(12)]
    batch = holes_of((4, 0, 10), (5, 0, 10), (6, 0, 10), (7, 0, 20), (10, 0, 10))
    runs = reserve_runs(batch, keys, 2, [])
    assert [(run.parent, [hole.number for hole in run.holes], run.record_bytes) for run in runs] == [
        (keys[2], [4, 6], 10),
        (keys[3], [5], 10),
        (keys[5], [7], 20),
        (keys[8], [10], 10),
    ]


def test_the_first_chunk_has_the_parents_that_the_caller_gave() -> None:
    keys = [key_of(n) for n in range(4)]
    before = [key_of(100), key_of(101)]
    batch = holes_of((0, 0, 10), (1, 0, 10))
    assert [run.parent for run in reserve_runs(batch, keys, 2, before)] == before
    assert [run.parent for run in reserve_runs(batch, keys, 2, [])] == [b"", b""]
