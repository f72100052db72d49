"""Measured loads follow the line that made them, whatever else is told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy.routing.load_rates import ASSUMED_GAIN, ENOUGH_SAMPLES, MAX_SAMPLES, LoadRates
from kvstrata.policy.routing.model import LoadPath

TOKENS = st.integers(1, 1 << 17)


@given(
    latency_s=st.floats(0.001, 0.5),
    tokens_s=st.floats(1e3, 1e6),
    tokens=st.lists(TOKENS, min_size=2, max_size=100, unique=True),
)
def test_latency_and_rate_are_those_of_the_samples(
    latency_s: float, tokens_s: float, tokens: list[int]
) -> None:
    rates = LoadRates()
    for each in tokens:
        assert rates.observe("a", "l1", each, latency_s + each / tokens_s)
    path = rates.path("a", "l1", 1_000.0)
    for each in tokens[-MAX_SAMPLES:]:
        assert path.latency_s + each / path.tokens_s == pytest.approx(latency_s + each / tokens_s, rel=1e-3)


@given(samples=st.lists(st.tuples(TOKENS, st.floats(1e-6, 1e3)), min_size=1, max_size=80))
def test_any_samples_give_a_path_that_loads_can_follow(samples: list[tuple[int, float]]) -> None:
    rates = LoadRates()
    for tokens, seconds in samples:
        rates.observe("a", "l1", tokens, seconds)
    path = rates.path("a", "l1", 1_000.0)
    assert path.latency_s >= 0 and 0 < path.tokens_s < math.inf


def test_engines_and_tiers_are_apart_and_others_stand_in() -> None:
    rates = LoadRates()
    assert rates.path("a", "l1", 1_000.0).tokens_s == ASSUMED_GAIN * 1_000.0
    rates.observe("b", "l1", 1_000, 0.1)
    assert rates.path("a", "l1", 1_000.0).tokens_s == pytest.approx(10_000.0)
    # Loaded into L1 at the assumed rate, and on from there at the measured one.
    assert rates.path("a", "l2", 1_000.0).tokens_s == pytest.approx(1 / (1 / 8_000 + 1 / 10_000))
    rates.tell("a", "l2", LoadPath(latency_s=0.5, tokens_s=10_000.0))
    assert rates.path("a", "l2", 1_000.0) == LoadPath(latency_s=0.5, tokens_s=pytest.approx(5_000.0))
    for _ in range(ENOUGH_SAMPLES - 1):
        rates.observe("a", "l2", 1_000, 0.01)
        assert rates.path("a", "l2", 1_000.0).latency_s == 0.5
    rates.observe("a", "l2", 1_000, 0.01)
    assert rates.path("a", "l2", 1_000.0).tokens_s == pytest.approx(100_000.0)
    # How an engine loads from L1 is told too.
    rates.tell("a", "l1", LoadPath(latency_s=0.25, tokens_s=40_000.0))
    assert rates.path("a", "l1", 1_000.0) == LoadPath(latency_s=0.25, tokens_s=40_000.0)
    assert rates.path("a", "peer", 1_000.0).tokens_s == pytest.approx(1 / (1 / 8_000 + 1 / 40_000))
    for _ in range(ENOUGH_SAMPLES):
        rates.observe("a", "l1", 1_000, 0.5)
    assert rates.path("a", "l1", 1_000.0).tokens_s == pytest.approx(2_000.0)
    rates.forget("a")
    assert rates.path("a", "l1", 1_000.0).tokens_s == pytest.approx(10_000.0)


def test_what_says_nothing_is_left_out() -> None:
    for tokens, seconds in ((0, 1.0), (-5, 1.0), (5, 0.0), (5, -1.0), (5, math.nan)):
        assert not LoadRates().observe("a", "l1", tokens, seconds)
