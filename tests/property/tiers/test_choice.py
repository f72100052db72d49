"""Load or recompute (tiers/choice.py): what is left, and how fast the measure follows a tier."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.observability.load_line import LEAST_BATCHES, LoadTimes, prompt_work
from kvstrata.tiers.choice import PROBE_COST, PROBE_S, SAVES_S, best_end

MB = 1 << 20
SECONDS = st.floats(0, 10)
TIERS = st.lists(st.tuples(st.integers(0, 40), SECONDS), min_size=1, max_size=4)
"""The first chunk of each tier, and the seconds to load what it has."""


def end_of(
    tiers: list[tuple[int, float]], tokens_s: float, n_chunks: int = 41, *, probes: bool = False
) -> int:
    def load_s(end: int) -> float:
        return sum(seconds * (end - first) / n_chunks for first, seconds in tiers if first < end)

    def compute_s(end: int) -> float:
        return prompt_work(end * 256, n_chunks * 256) / tokens_s

    ends = {n_chunks, *(first for first, _ in tiers)}
    best = best_end(ends, load_s, compute_s, probes=probes)
    least = min(load_s(end) + compute_s(end) for end in ends)
    most = PROBE_COST * (least + SAVES_S) if probes else least + SAVES_S
    assert best in ends and load_s(best) + compute_s(best) <= most + 1e-9
    return best


@given(TIERS, st.floats(100, 1e6), st.floats(1, 100), st.booleans())
def test_a_slower_tier_or_a_faster_engine_never_makes_the_hit_longer(tiers, tokens_s, factor, probes):
    before = end_of(tiers, tokens_s)
    for number, (first, seconds) in enumerate(tiers):
        slower = [*tiers[:number], (first, seconds * factor + SAVES_S), *tiers[number + 1 :]]
        # A hit that is as good as the longest one is not shortened, so the least saving may decide once.
        assert end_of(slower, tokens_s) <= before or end_of(slower, tokens_s) == 41
    end_of(tiers, tokens_s, probes=probes)


def test_what_saves_little_is_loaded():
    compute_s = prompt_work(0, 41 * 256) / 1e6
    assert end_of([(0, compute_s + 0.9 * SAVES_S)], 1e6) == 41
    assert end_of([(0, compute_s + 1.1 * SAVES_S)], 1e6) == 0


def tier(seconds_per_mb: float, noise: random.Random | None = None, n: int = 40) -> tuple[LoadTimes, float]:
    """A tier of which so many loads were measured, and the time of the last."""
    times, now_s = LoadTimes(), 0.0
    for number in range(n):
        now_s += 1
        measure(times, seconds_per_mb, now_s, 1 + number % 8, noise)
    return times, now_s


def measure(times, seconds_per_mb, now_s, mb=4, noise=None) -> None:
    factor = noise.lognormvariate(0, 0.4) if noise else 1.0
    times.measured(mb * MB, (0.001 + mb * seconds_per_mb) * factor, now_s)


def test_nothing_is_known_of_a_tier_before_some_loads():
    times, _ = tier(0.01, n=LEAST_BATCHES - 1)
    assert times.expected_s(MB) is None
    measure(times, 0.01, 9.0)
    assert times.expected_s(4 * MB) == pytest.approx(0.041, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_cross_a_factor_of_three_and_the_median_is_right(seed):
    noise = random.Random(seed)
    times, now_s = tier(0.01, noise)
    ratios = []
    for _ in range(300):
        now_s += 1
        ratios.append(times.expected_s(4 * MB) / 0.041)
        measure(times, 0.01, now_s, noise.choice([1, 4, 16]), noise)
    assert min(ratios) > 1 / 3 and max(ratios) < 3
    assert 0.8 < sorted(ratios)[150] < 1.25


@pytest.mark.parametrize("factor", [4, 10, 1_000])
def test_a_tier_that_becomes_slower_is_noticed_within_20_loads_and_recovers_within_a_minute_of_probes(factor):
    noise = random.Random(factor)
    times, now_s = tier(0.01, noise)
    bar_s = 2 * times.expected_s(4 * MB)
    slow = 0
    while times.expected_s(4 * MB) < bar_s:
        slow += 1
        measure(times, 0.01 * factor, now_s + slow, noise.choice([1, 4, 8]), noise)
    assert slow < 20
    for number in range(200):  # probes go on
        measure(times, 0.01 * factor, now_s + number, noise.choice([1, 4, 8]), noise)
    probes = 0
    while times.expected_s(4 * MB) > bar_s:
        probes += 1
        measure(times, 0.01, now_s + probes, noise.choice([1, 4, 8]), noise)
    assert probes * PROBE_S <= 60
