"""Measured rates of engines: what moves them, what must not, and that those of engines of known speed are right."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.routing.rates import Rates, load_class
from tests.harness.amount import amount


@given(
    tokens_s=st.floats(500, 50_000),
    latency_s=st.floats(0, 0.05),
    tokens=st.lists(st.integers(16, 60_000), min_size=20, max_size=60),
)
@example(tokens_s=500, latency_s=0.03125, tokens=[16] * 20)  # One long prompt is an outlier.
def test_a_rate_is_the_slope_of_a_line(tokens_s: float, latency_s: float, tokens: list[int]) -> None:
    rates = Rates(1.0)
    sizes = sorted([*tokens, 100, 50_000])
    for each in sizes:
        assert rates.observe("a", each, latency_s + each / tokens_s, 0) is not None
    # At worst the longer half of the prompts tells nothing of the latency: each of its tokens has a share of it.
    share = latency_s / statistics.median(sizes[len(sizes) // 2 :]) + 1 / tokens_s
    # Cells stand by their medians, so a line is found again but for the spread within cells.
    assert 0.8 / tokens_s <= 1 / rates.rate("a", 0) <= 1.25 * share


def test_short_prompts_say_little_of_a_rate() -> None:
    rates = Rates(1.0)
    for number in range(40):
        rates.observe("a", 1_000 * (1 + number % 20), 0.02 + 0.05 * (1 + number % 20), 0)
    for number in range(40):
        rates.observe("a", 20 + number % 9, 0.1, 8)
    assert rates.rate("a", 0) == pytest.approx(20_000, rel=0.05)
    assert rates.rate("a", 8) == pytest.approx(20_000, rel=0.25), (
        "20 tokens in 0.1 s are not 200 tokens a second"
    )


@given(
    wild=st.lists(st.tuples(st.integers(1, 40_000), st.floats(1e-3, 1e3)), max_size=3),
    seed=st.integers(0, 999),
)
def test_a_few_outliers_do_not_move_a_rate(wild: list[tuple[int, float]], seed: int) -> None:
    draw = random.Random(seed)
    rates = Rates(1.0)
    for size in (300, 3_000, 24_000):
        for _ in range(9):
            tokens = round(size * draw.uniform(0.9, 1.1))
            rates.observe("abc"[draw.randrange(3)], tokens, 0.01 + tokens / 20_000, 2)
    before = rates.rate("a", 2)
    for tokens, seconds in wild:
        rates.observe("b", tokens, seconds, 2)
    assert rates.rate("a", 2) == pytest.approx(before, rel=0.1)


@given(seed=st.integers(0, 999))
def test_engines_that_differ_by_chance_have_one_rate_and_a_slow_one_its_own(seed: int) -> None:
    draw = random.Random(seed)
    rates = Rates(1.0)
    for _ in range(60):
        for engine, speed in (("a", 1.0), ("b", 1.0), ("c", 1.0), ("slow", 0.25)):
            tokens = round(math.exp(draw.uniform(3, 10)))
            seconds = (0.01 + tokens / 20_000) / speed * draw.uniform(0.8, 1.2)
            rates.observe(engine, tokens, seconds, draw.choice([0, 3, 9]))
    found = {engine: rates.rate(engine, 3) for engine in ("a", "b", "c", "slow", "new")}
    assert found["slow"] == pytest.approx(0.25 * found["new"], rel=0.6)  # 0.43 in one of the thousand draws
    for engine in "abc":
        assert found[engine] == pytest.approx(found["new"], rel=0.25)


def test_a_rate_comes_from_the_nearest_load() -> None:
    rates = Rates(777.0)
    assert rates.rate("a", 0) == 777.0
    for tokens in (1_000, 2_000, 4_000, 8_000, 16_000) * 20:
        rates.observe("a", tokens, tokens / 1_000, 0)
        rates.observe("a", tokens, tokens / 500, 20)
    assert rates.rate("a", 1) == pytest.approx(1_000, rel=0.2)
    assert rates.rate("a", 100) == pytest.approx(500, rel=0.2)
    assert [load_class(load) for load in (0, 1, 3, 4, 127, 128, 9_999)] == [0, 1, 2, 3, 7, 8, 8]


def test_few_samples_show_an_engine_that_takes_twice_as_long_and_none_that_takes_a_little_longer() -> None:
    rates = Rates(1.0)
    for number in range(10):
        rates.observe("a", 1_000 + number, 0.1, 0)
        rates.observe("b", 1_000 + number, 0.1, 0)
    for _ in range(3):
        assert rates.rate("slow", 0) == rates.rate("a", 0)
        rates.observe("slow", 1_000, 0.4, 0)
        rates.observe("late", 1_000, 0.15, 0)
    assert rates.rate("slow", 0) == pytest.approx(0.25 * rates.rate("a", 0), rel=0.05)
    assert rates.rate("late", 0) == rates.rate("a", 0)


@given(
    seen=st.lists(st.tuples(st.integers(1, 9_000), st.floats(0.01, 9)), max_size=90),
    wrong=st.lists(st.tuples(st.integers(1, 9_000), st.floats(0.01, 9)), max_size=5),
)
def test_a_sample_that_is_retracted_leaves_nothing(seen, wrong):
    with_wrong, without = Rates(5.0), Rates(5.0)
    taken = [with_wrong.observe("b", tokens, seconds, 1) for tokens, seconds in wrong]
    for rates in (with_wrong, without):
        for tokens, seconds in seen[:50]:
            rates.observe("a", tokens, seconds, 1)
    for sample in taken:
        assert sample is not None
        with_wrong.retract(sample)
        with_wrong.retract(sample)
    assert with_wrong.rate("a", 1) == pytest.approx(without.rate("a", 1))
    assert with_wrong.rate("b", 1) == pytest.approx(without.rate("b", 1))


@given(
    whole=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9_000), st.floats(0.01, 9)), max_size=90),
    streamed=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 9_000), st.floats(0.01, 9)), min_size=1, max_size=60
    ),
    first=st.booleans(),
)
def test_samples_of_whole_answers_count_only_as_long_as_there_are_no_others(whole, streamed, first):
    both, alone, never = Rates(5.0), Rates(5.0), Rates(5.0)
    added = []
    for part in (whole, streamed) if first else (streamed, whole):
        for engine, tokens, seconds in part:
            added.append(both.observe(engine, tokens, seconds, 1, whole=part is whole))
    for engine, tokens, seconds in streamed:
        alone.observe(engine, tokens, seconds, 1)
    for engine, tokens, seconds in whole:
        never.observe(engine, tokens, seconds, 1)
    for engine in "ab":
        assert both.samples(engine) == alone.samples(engine)
        assert both.rate(engine, 1) == pytest.approx(alone.rate(engine, 1))
    for sample in added:
        if sample is not None and not sample.whole:
            both.retract(sample)
    for engine in "ab":
        assert both.samples(engine) == never.samples(engine)
        assert both.rate(engine, 1) == pytest.approx(never.rate(engine, 1))


def test_a_sample_that_says_nothing_is_not_kept() -> None:
    for tokens, seconds in ((0, 1.0), (5, 0.0), (5, -1.0), (5, math.inf), (5, math.nan)):
        rates = Rates(1.0)
        assert not rates.observe("a", tokens, seconds, 0)
        assert rates.samples("a") == 0


RATE = 10_000.0


class Engine:
    """Computes prompts in their order, a step at a time, each of which has at most `step_tokens` of several prompts."""

    def __init__(self, step_tokens: int, at_once: int) -> None:
        """`at_once`: prompts of which one step may have a part; 1: one after the other."""
        self.now_s = 0.0
        self.step_tokens = step_tokens
        self.at_once = at_once
        self.waiting: deque[list[int]] = deque()
        """Numbers, and tokens that are left."""

    def clock(self) -> float:
        return self.now_s

    def step(self) -> list[int]:
        """Returns the prompts whose first tokens come at its end."""
        room, share = self.step_tokens, -(-self.step_tokens // self.at_once)
        done = []
        for prompt in list(self.waiting):
            taken = min(prompt[1], room, share if self.at_once > 1 else room)
            prompt[1] -= taken
            room -= taken
            if not prompt[1]:
                done.append(prompt[0])
                self.waiting.remove(prompt)
            if not room:
                break
        self.now_s += (self.step_tokens - room) / RATE
        return done


def measured(
    draw: random.Random, sizes: tuple[int, int], step_tokens: int, at_once: int, waiting: int, rests: int
) -> tuple[float, int]:
    """Serve prompts of drawn sizes; returns the rate that was measured and the number of samples.

    `waiting`: prompts that wait all the time. `rests`: after so many all are computed before others come; 0: never.
    """
    engine = Engine(step_tokens, at_once)
    fleet = Fleet(engine.clock)
    [target] = fleet.set_places([Place("a", Address("127.0.0.1", 1, False))])
    fleet.up(target, {"m": {}})
    timed = {}
    sent = computed = 0
    while computed < 3_000:
        while len(engine.waiting) < waiting and not (rests and sent and not sent % rests and engine.waiting):
            tokens = draw.randrange(*sizes)
            timed[sent] = fleet.began(target, str(sent), tokens, tokens)
            engine.waiting.append([sent, tokens])
            sent += 1
        for number in engine.step():
            fleet.answers(target, str(number), timed[number])
            fleet.ended(target, str(number))
            computed += 1
    return fleet.rates.rate("a", 0.0), fleet.rates.samples("a")


SIZES = [((100, 1_000), 2_048), ((500, 1_500), 2_048), ((50, 20_000), 2_048), ((4_000, 30_000), 8_192)]
"""Tokens of a prompt, and of a step."""
CASES = list(itertools.product(SIZES, (2, 20, 100), (1, 4), (0, 12, 24, 70)))


@pytest.mark.parametrize(("prompts", "waiting", "at_once", "rests"), amount(CASES[::11], CASES))
def test_the_rate_is_right(prompts, waiting, at_once, rests):
    sizes, step_tokens = prompts
    seed = amount(7, random.randrange(1 << 30))
    rate, samples = measured(random.Random(seed), sizes, step_tokens, at_once, waiting, rests)
    assert samples >= 8, seed
    assert rate == pytest.approx(RATE, rel=0.04), seed


def test_a_single_sample_makes_no_engine_different() -> None:
    rates = Rates(1.0)
    for number in range(30):
        for engine in ("a", "b"):
            rates.observe(engine, 1_000 + number, 0.1, 0)
    rates.observe("c", 500, 5.0, 0)
    rates.observe("d", 500, 0.001, 0)
    assert rates.rate("c", 0) == rates.rate("d", 0) == rates.rate("a", 0) == rates.rate("new", 0)
    assert (rates.samples("c"), rates.samples("new")) == (1, 0)


def test_a_forgotten_engine_has_the_usual_rate() -> None:
    rates = Rates(1.0)
    for number in range(20):
        rates.observe("a", 1_000 + number, 1.0, 0)
        rates.observe("b", 1_000 + number, 1.1, 0)
        rates.observe("slow", 1_000 + number, 10.0, 0)
    assert rates.rate("slow", 0) < 0.2 * rates.rate("a", 0)
    rates.forget("slow")
    assert rates.rate("slow", 0) == rates.rate("new", 0)
