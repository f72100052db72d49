"""Decisions of the store controller: which chunks an adapter gets, and how many chunks may wait for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.storage.config import StorePolicy
from kvstrata.testing.strategies import key_of
from kvstrata.tiers.decisions import Backlog, EvictAhead, PutPlanner, RecentKeys, RetryRule

A, B, C = (key_of(n) for n in range(3))


def test_on_evict_puts_a_chunk_once_until_the_adapter_loses_it() -> None:
    planner = PutPlanner(StorePolicy.ON_EVICT)
    planner.stored(A)
    assert not planner.leaving(A)
    planner.gone([A])
    assert planner.leaving(A)
    planner.stored(A)
    planner.forget()
    assert planner.leaving(A)


def test_on_evict_notices_chunks_that_left_before_their_put() -> None:
    planner = PutPlanner(StorePolicy.ON_EVICT)
    assert planner.left(A)
    planner.stored(B)
    assert not planner.left(B)


@given(st.lists(st.integers(0, 30), max_size=80), st.integers(1, 10))
def test_remembered_keys_are_the_newest_and_never_more_than_the_limit(numbers: list[int], limit: int) -> None:
    recent = RecentKeys(limit)
    for number in numbers:
        recent.add(key_of(number))
    newest: list[int] = []
    for number in reversed(numbers):
        if number not in newest:
            newest.append(number)
    assert len(recent) == min(limit, len(newest))
    assert all(key_of(number) in recent for number in newest[:limit])
    assert not any(key_of(number) in recent for number in newest[limit:])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=100))
def test_the_backlog_counts_each_key_once_and_stays_within_its_limit(steps: list[tuple[bool, int]]) -> None:
    sizes = {key_of(n): 10 * (n + 1) for n in range(6)}
    backlog = Backlog(80)
    pins: dict[bytes, int] = {}
    for admit, number in steps:
        key = key_of(number)
        if admit:
            expected = pins.get(key, 0) > 0 or sum(sizes[k] for k in pins if pins[k]) + sizes[key] <= 80
            assert backlog.admit(key, sizes[key]) == expected
            pins[key] = pins.get(key, 0) + expected
        elif pins.get(key):
            backlog.release(key)
            pins[key] -= 1
        assert backlog.pinned_bytes == sum(sizes[k] for k in pins if pins[k])
        assert backlog.pinned_bytes <= 80


def test_throttled_puts_are_retried_a_bounded_number_of_times_after_growing_pauses() -> None:
    rule = RetryRule(retries=4, first_s=0.5, longest_s=2.0)
    assert [rule.delay_s(attempts) for attempts in range(1, 7)] == [0.5, 1.0, 2.0, 2.0, None, None]


@given(st.integers(0, 2000))
def test_cleaning_ahead_begins_at_the_watermark_and_goes_in_steps(used: int) -> None:
    rule = EvictAhead(low_watermark=0.6, step=0.1)
    need = rule.need_bytes(used, 1000)
    if used <= 600:
        assert need == 0
    else:
        assert 0 < need <= min(used - 600, 100)
