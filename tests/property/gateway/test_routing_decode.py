"""What answers cost: seconds a token are found again from answers, and `auto` counts them."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gateway.routing.choose import AUTO, TTFT, choose
from kvstrata.gateway.routing.model import EngineState, Knowledge, Request
from kvstrata.gateway.routing.queues import Queue
from kvstrata.gateway.routing.rates import FEWEST, MAX_MODELS, Decoded, DecodeRates, PrefillRates
from tests.harness.amount import amount
from tests.property.gateway.test_routing import NOW_S, fleets, knowledges, requests

ENGINES = ["a", "b", "c", "d"]
answers = st.builds(
    Decoded, seconds=st.floats(-1, 1e6), requests=st.floats(0, 1e4), prompt_tokens=st.integers(0, 10**9)
)


@given(st.floats(0.001, 0.1), st.floats(0, 0.01), st.floats(0, 1e-3), st.integers(0, 10**6))
@settings(max_examples=amount(20, 200))
def test_the_seconds_of_a_token_are_found_whatever_prompts_were_computed_beside(alone, each, prompt, seed):
    draw, rates = random.Random(seed), DecodeRates()
    for number in range(400):
        engine = ENGINES[number % len(ENGINES)]
        slow = 3.0 if engine == "d" else 1.0
        tokens, requests, computed = draw.randint(8, 900), draw.uniform(1, 40), draw.randint(0, 20_000)
        seconds = slow * ((alone + each * requests) * (tokens - 1) + prompt * computed)
        rates.observe(engine, "m", Decoded(seconds * draw.uniform(0.97, 1.03), requests, computed), tokens)
    for engine, slow in (("a", 1.0), ("d", 3.0)):
        line = rates.line(engine)
        assert line is not None
        for requests in (2, 40):
            found = line.alone_s + requests * line.each_s
            assert found == pytest.approx(slow * (alone + requests * each), rel=0.15)


@given(st.lists(st.tuples(st.sampled_from(ENGINES), st.text(max_size=2), answers, st.integers(0, 10**6))))
@settings(max_examples=amount(40, 300))
def test_no_answers_make_a_token_take_less_than_nothing(told):
    rates = DecodeRates()
    for engine, model, decoded, tokens in told:
        rates.observe(engine, model, decoded, tokens)
        line = rates.line(engine)
        assert all(
            0 <= one < math.inf
            for one in (*(line or ()), *rates.answer_tokens(model), *rates.answer_tokens("x"))
        )
    if len(told) < FEWEST:
        assert rates.line("a") is None


def test_models_are_bounded_and_a_new_one_is_taken_for_the_others():
    rates = DecodeRates()
    for number in range(2 * MAX_MODELS):
        rates.observe("a", f"m{number}", Decoded(1.0, 1.0, 0), 100 if number % 2 else 300)
    assert len(rates._lengths) <= MAX_MODELS
    assert rates.answer_tokens("new")[0] == pytest.approx(200, rel=0.02)
    rates.observe("a", "chat", Decoded(1.0, 1.0, 0), 10**15)
    assert rates.answer_tokens("chat")[0] == pytest.approx(200, rel=0.02), "nobody answers so fast"
    rates.observe("a", "chat", Decoded(1.0, 1.0, 0), 7)
    assert rates.answer_tokens("chat") == pytest.approx((7, 7))


def fleet(holders: int, **more: float) -> list[EngineState]:
    return [
        EngineState(name=f"e{number}", prefill_tokens_s=10_000.0, token_s=0.0104, **more)
        for number in range(holders)
    ]


def test_the_holder_of_a_popular_prefix_does_not_get_every_request():
    knowledge = Knowledge(cached={"e0": 4_000})
    request = Request(id="r", tokens=4_060, answer_tokens=500)
    engines = fleet(4)
    sent = []
    for _ in range(60):
        decision = choose(request, engines, knowledge, 0.0, policy=AUTO)
        assert choose(request, engines, knowledge, 0.0, policy=TTFT).engine == "e0"
        chosen = next(one for one in engines if one.name == decision.engine)
        chosen.requests += 1
        chosen.running += 1
        chosen.token_s += 0.0004
        sent.append(decision.engine)
    assert 15 < sent.count("e0") < 40, "its answers would take longer there than the prefix elsewhere"
    # As long as little runs, its prefix decides.
    assert sent[:5] == ["e0"] * 5


def test_a_popular_prefix_is_spread_before_any_answer_was_measured():
    rates, knowledge = DecodeRates(), Knowledge(cached={"e0": 4_000})
    states = [EngineState(name=f"e{at}", prefill_tokens_s=10_000.0) for at in range(4)]
    queues = {one.name: Queue(one, PrefillRates(10_000.0)) for one in states}
    sent = []
    for number in range(60):
        request = Request(id="r", tokens=4_060, answer_tokens=rates.answer_tokens("m")[0], sharing=number)
        queue = queues[choose(request, states, knowledge, float(number), policy=AUTO).engine]
        queue.first_token(queue.send(60, float(number)), float(number))
        sent.append(queue.state.name)
    assert sent[:5] == ["e0"] * 5 and 15 < sent.count("e0") < 40


def test_a_long_prompt_goes_where_it_stalls_fewer_answers():
    busy, idle = fleet(2)
    busy.requests = busy.running = 20
    request = Request(id="r", tokens=20_000)
    queued = idle.__class__(name="e1", prefill_tokens_s=10_000.0, drained_s=0.9)
    assert choose(request, [busy, queued], Knowledge(), 0.0, policy=TTFT).engine == "e0"
    assert choose(request, [busy, queued], Knowledge(), 0.0, policy=AUTO).engine == "e1"


def test_a_class_that_would_be_missed_costs_seconds_of_everybody():
    busy, late = fleet(2)
    busy.requests = busy.running = 30
    busy.token_s, late.drained_s = 0.03, 4.0
    busy.expect(0.0, 0.0, 0.0, 0.0, 0.0)
    request = Request(id="r", tokens=20_000, answer_tokens=100, short_tokens=100)

    def chosen(**more: float) -> str:
        asked = msgspec.structs.replace(request, **more)
        return choose(asked, [busy, late], Knowledge(), 0.0, policy=AUTO).engine

    assert chosen() == chosen(within_s=7.0) == "e1"
    assert chosen(within_s=3.0) == "e0"
    assert chosen(within_s=0.5) == "e1", "where it is late at both, everybody's time decides"
    assert chosen(within_s=3.0, token_within_s=0.02) == "e1", "it would miss its class at both"


def test_a_request_without_a_class_goes_where_no_running_request_misses_its_own():
    """Although it waits longer there, or stalls as many that have no class."""
    strict, free = fleet(2, requests=4, running=4)
    free.drained_s = 1.0
    request = Request(id="r", tokens=8_000, answer_tokens=100)

    def chosen(limited: int, limit_s: float = 0.0) -> str:
        strict.limited = limited
        strict.expect(0.0004, 0.0, 0.0, limit_s, 100.0)
        return choose(request, [strict, free], Knowledge(), 0.0, policy=AUTO).engine

    assert chosen(0) == "e0"
    assert chosen(4, 0.0115) == "e1"
    assert chosen(4, 0.1) == "e0", "their class allows more"
    assert chosen(4, 0.0001) == "e0", "they have missed it anyway"


def test_a_copy_is_made_the_sooner_the_more_requests_share_the_prefix():
    knowledge = Knowledge(cached={"e0": 8_000})

    def queue_at_which_another_engine_is_taken(sharing: int) -> float:
        engines = fleet(8)
        for tenths in range(1, 40):
            engines[0].drained_s = tenths / 10
            request = Request(id="r", tokens=8_100, answer_tokens=100, sharing=sharing)
            if choose(request, engines, knowledge, 0.0, policy=AUTO).engine != "e0":
                return tenths / 10
        return math.inf

    waits = [queue_at_which_another_engine_is_taken(sharing) for sharing in (0, 2, 8, 64)]
    assert waits == sorted(waits, reverse=True) and waits[0] > 2 * waits[-1]


@given(requests, fleets(1, token_s=st.just(0.0), running=st.just(0)), knowledges)
@settings(max_examples=amount(30, 200))
def test_before_an_answer_was_seen_the_first_token_decides(request, fleet, knowledge):
    request = msgspec.structs.replace(request, sharing=0)
    auto, ttft = (choose(request, fleet, knowledge, NOW_S, policy=one) for one in (AUTO, TTFT))
    assert auto.cost == pytest.approx(ttft.cost, rel=0.011)
