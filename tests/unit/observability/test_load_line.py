"""Latency and rate of an adapter's loads."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.observability.load_line import LEAST_BATCHES, LoadLine


def test_latency_and_rate_are_told_apart_by_batches_of_several_sizes() -> None:
    line = LoadLine()
    for n in range(1, LEAST_BATCHES + 1):
        assert line.fitted() is None
        line.add(n * 1_000_000, 0.004 + n * 0.001)
    latency_s, bytes_s = line.fitted() or (0.0, 0.0)
    assert latency_s == pytest.approx(0.004) and bytes_s == pytest.approx(1e9)


def test_what_became_slower_is_told_soon() -> None:
    line = LoadLine()
    for _ in range(1_000):
        line.add(1_000_000, 0.001)
    for _ in range(200):
        line.add(1_000_000, 0.01)
    assert line.fitted() == (0.0, pytest.approx(1e8, rel=0.1))


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-9, 1e6)), min_size=LEAST_BATCHES))
def test_any_batches_give_what_a_load_can_follow(batches: list[tuple[int, float]]) -> None:
    line = LoadLine()
    for n_bytes, seconds in batches:
        line.add(n_bytes, seconds)
    found = line.fitted()
    assert found is not None
    latency_s, bytes_s = found
    assert math.isfinite(latency_s) and latency_s >= 0 and math.isfinite(bytes_s) and bytes_s > 0
