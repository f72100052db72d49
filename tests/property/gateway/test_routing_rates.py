"""Measured rates of prompts: what moves them, what must not, and that those of engines of known speed are right."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.routing.rates import EACH, PrefillRates
from tests.harness.amount import amount

SAMPLES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 9_000), st.floats(0.01, 9)), min_size=1, max_size=90
)


def seconds_of(tokens: int, running: int) -> float:
    """At an engine of 20,000 tokens a second, and of 10,000 beside 20 running requests."""
    return 0.01 + 0.0005 * running + tokens / 20_000 * (1 + running / 20)


def taught(draw: random.Random, speeds: dict[str, float], count: int, spread: float) -> PrefillRates:
    rates = PrefillRates(1.0)
    for _ in range(count):
        for engine, speed in speeds.items():
            tokens, running = round(math.exp(draw.uniform(3, 10))), draw.choice([0, 3, 9, 20])
            seconds = seconds_of(tokens, running) / speed * draw.uniform(1 - spread, 1 + spread)
            rates.observe(engine, tokens, seconds, running)
    return rates


@given(seed=st.integers(0, 999))
@settings(max_examples=amount(12, 100), deadline=None)
def test_a_rate_is_what_more_tokens_take_beside_the_running_requests(seed: int) -> None:
    rates = taught(random.Random(seed), {"a": 1.0, "b": 1.0}, 60, 0.1)
    for running, tokens_s in ((0, 20_000), (20, 10_000)):
        assert rates.rate("a", running) == pytest.approx(tokens_s, rel=0.15)
        assert rates.rate("new", running) == rates.rate("a", running)


def test_prompts_of_one_size_are_taken_to_cost_by_their_tokens() -> None:
    rates = PrefillRates(777.0)
    assert rates.rate("a", 0) == 777.0
    for number in range(20):
        rates.observe("a", 1_000, 0.1, 0)
        assert rates.rate("a", 0) == pytest.approx(10_000, rel=0.05), number


@given(
    wild=st.lists(st.tuples(st.integers(1, 40_000), st.floats(1e-3, 1e3)), max_size=3),
    seed=st.integers(0, 999),
)
@settings(max_examples=amount(12, 100), deadline=None)
def test_a_few_outliers_move_a_rate_little(wild: list[tuple[int, float]], seed: int) -> None:
    rates = taught(random.Random(seed), {"a": 1.0, "b": 1.0, "c": 1.0}, 40, 0.1)
    before = rates.rate("a", 2)
    for tokens, seconds in wild:
        rates.observe("b", tokens, seconds, 2)
    assert 0.4 * before < rates.rate("a", 2) < 2.5 * before


@given(seed=st.integers(0, 999))
@settings(max_examples=amount(12, 100), deadline=None)
def test_engines_that_differ_by_chance_have_one_rate_and_a_slow_one_its_own(seed: int) -> None:
    speeds = {"a": 1.0, "b": 1.0, "c": 1.0, "slow": 0.25}
    rates = taught(random.Random(seed), speeds, 60, 0.2)
    found = {engine: rates.rate(engine, 3) for engine in (*speeds, "new")}
    assert found["slow"] == pytest.approx(0.25 * found["new"], rel=0.5)
    for engine in "abc":
        assert found[engine] == pytest.approx(found["new"], rel=0.25)
    rates.forget("slow")
    assert rates.rate("slow", 3) == rates.rate("new", 3)


def test_few_samples_show_an_engine_that_takes_four_times_as_long_and_one_shows_nothing() -> None:
    rates = PrefillRates(1.0)
    for number in range(30):
        rates.observe("a", 1_000 + number, 0.1, 0)
        rates.observe("b", 1_000 + number, 0.1, 0)
    rates.observe("once", 1_000, 5.0, 0)
    assert rates.rate("once", 0) == rates.rate("a", 0) and rates.samples("once") == 1
    for _ in range(3):
        assert rates.rate("slow", 0) == rates.rate("a", 0)
        rates.observe("slow", 1_000, 0.4, 0)
    rates.observe("together", 3_000, 1.2, 0, prompts=3)
    for _ in range(EACH - 1):
        rates.observe("b", 1_000, 0.1, 0)
    for engine in ("slow", "together"):
        assert rates.rate(engine, 0) == pytest.approx(0.25 * rates.rate("a", 0), rel=0.2)


@given(seen=SAMPLES, wrong=SAMPLES)
@settings(max_examples=amount(20, 100))
def test_a_sample_that_is_retracted_leaves_nothing(seen, wrong):
    rates = PrefillRates(5.0)
    taken = [rates.observe("c", tokens, seconds, 1) for _, tokens, seconds in wrong[:5]]
    for sample in (*taken, *taken):
        assert sample is not None
        sample[0].retract(sample[1])
    assert rates.samples("c") == 0 and rates.rate("c", 1) == rates.rate("new", 1) == 5.0
    for engine, tokens, seconds in seen:
        rates.observe(engine, tokens, seconds, 1)
    squares = [[list(row) for row in rates._fits[False]._squares]]
    last = rates.observe("c", 9_000, 0.5, 1)
    assert last is not None
    last[0].retract(last[1])
    squares.append(rates._fits[False]._squares)
    for before, after in zip(*squares, strict=True):
        assert after == pytest.approx([0.998 * one for one in before], rel=1e-3, abs=1e-3)


@given(whole=SAMPLES, streamed=SAMPLES)
@settings(max_examples=amount(20, 100))
def test_samples_of_whole_answers_count_only_as_long_as_there_are_no_others(whole, streamed):
    rates, alone, never = PrefillRates(5.0), PrefillRates(5.0), PrefillRates(5.0)
    for engine, tokens, seconds in whole:
        rates.observe(engine, tokens, seconds, 1, whole=True)
        never.observe(engine, tokens, seconds, 1, whole=True)
    assert [rates.rate(one, 1) for one in "ab"] == [never.rate(one, 1) for one in "ab"]
    for engine, tokens, seconds in streamed:
        rates.observe(engine, tokens, seconds, 1)
        alone.observe(engine, tokens, seconds, 1)
    assert [rates.rate(one, 1) for one in "ab"] == [alone.rate(one, 1) for one in "ab"]
    assert [rates.samples(one) for one in "ab"] == [alone.samples(one) for one in "ab"]


def test_a_sample_that_says_nothing_is_not_kept() -> None:
    for tokens, seconds in ((0, 1.0), (5, 0.0), (5, -1.0), (5, math.inf), (5, math.nan)):
        rates = PrefillRates(1.0)
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
            timed[sent] = target.queue.send(tokens, engine.clock())
            engine.waiting.append([sent, tokens])
            sent += 1
        for number in engine.step():
            fleet.answers(timed[number])
            target.queue.end(timed[number], engine.clock())
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
    assert rate == pytest.approx(RATE, rel=0.1), seed
