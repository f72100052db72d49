"""The planner's pure functions: what is predicted, and how a plan changes."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.controller.plan import (
    BARRED_HOLDS,
    Engine,
    Measured,
    Shape,
    predict,
    scaled,
    step,
)

HOLD_S = 60.0
READER = Shape(requests_s=5.4, prompt_tokens=8_600, answer_tokens=125, ttft_s=2.0, tpot_s=0.015)
WRITER = Shape(requests_s=2.0, prompt_tokens=430, answer_tokens=2_500, ttft_s=2.0, tpot_s=0.015)


def engine(name: str, **other: Any) -> Engine:
    return Engine(**{"name": name, "prefill_tokens_s": 22_000, "alone_s": 0.0055, "each_s": 0.0001, **other})


FOUR = [engine(f"e{number}") for number in range(4)]

engines = st.lists(
    st.builds(
        Engine,
        name=st.sampled_from("abcdef"),
        prefill_tokens_s=st.floats(1_000, 50_000),
        alone_s=st.floats(0.001, 0.05),
        each_s=st.floats(1e-6, 0.001) | st.just(0.0),
        role=st.sampled_from(["both", "prefill", "decode"]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda one: one.name,
)
shapes = st.lists(
    st.builds(
        Shape,
        requests_s=st.floats(0.01, 50),
        prompt_tokens=st.floats(1, 100_000),
        answer_tokens=st.floats(1, 10_000),
        ttft_s=st.floats(0, 10),
        tpot_s=st.floats(0, 0.1),
    ),
    max_size=4,
)
measured = st.builds(
    Measured,
    engines=engines,
    shapes=shapes,
    met_share=st.none() | st.floats(0, 1),
    saved=st.just({}) | st.fixed_dictionaries({"1": st.floats(0, 1), "2": st.floats(0, 1)}),
    splits=st.booleans(),
)


QUICK = settings(max_examples=40, deadline=None)


@QUICK
@given(st.lists(measured, min_size=1, max_size=5), st.floats(0, 100))
def test_a_bound_changes_at_most_once_in_a_hold_time_and_lets_each_engine_have_a_request(
    seen: list[Measured], pause_s: float
) -> None:
    plan, changed_s = None, -HOLD_S
    for number, one in enumerate(seen):
        before = plan.in_flight if plan is not None else 0
        plan = step(one, plan, number * pause_s, HOLD_S)
        if plan.in_flight != before:
            assert number * pause_s - changed_s >= HOLD_S and plan.change is not None
            changed_s = number * pause_s
            assert (plan.change.before, plan.change.after) == (before, plan.in_flight)
        assert plan.in_flight >= 0


@QUICK
@given(engines, shapes, st.floats(0, 1), st.data())
def test_more_memory_is_never_predicted_to_lose(
    fleet: list[Engine], load: list[Shape], left: float, data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, len(fleet) - 1))
    less, more = predict(fleet, load, k), predict(fleet, scaled(load, left), k)
    assert more.score >= less.score - 1e-6 * (1 + less.score)
    assert more.compute_s <= less.compute_s + 1e-9
    assert 0 <= less.met_s <= sum(one.requests_s for one in load) * (1 + 1e-9)


@QUICK
@given(measured)
def test_what_is_measured_again_and_again_changes_the_plan_at_most_twice(one: Measured) -> None:
    plan, found = None, [0]
    for number in range(40):
        plan = step(one, plan, number * HOLD_S / 2, HOLD_S)
        found.append(plan.in_flight)
    assert sum(a != b for a, b in itertools.pairwise(found)) <= 2


def crowded(met_share: float, requests_s: float = 9.0) -> Measured:
    load = msgspec.structs.replace(WRITER, requests_s=requests_s)
    return Measured(engines=FOUR, shapes=[load], met_share=met_share)


def test_more_answers_than_their_limit_allows_get_a_bound() -> None:
    assert step(crowded(0.97, 5.0), None, 0.0, HOLD_S).in_flight == 0
    plan = step(crowded(0.1, 12.0), None, 0.0, HOLD_S)
    # A token takes 5.5 ms and 0.1 ms for each of them, and prompts little more, of nine tenths of 15 ms.
    assert 70 <= plan.in_flight <= 85
    assert plan.change is not None and plan.change.predicted_share > 0.3


def test_a_change_that_loses_is_undone_and_nothing_is_changed_for_long() -> None:
    plan = step(crowded(0.5, 12.0), None, 0.0, HOLD_S)
    assert step(crowded(0.1, 12.0), plan, HOLD_S - 1, HOLD_S) == msgspec.structs.replace(
        plan, predicted=step(crowded(0.1, 12.0), plan, HOLD_S - 1, HOLD_S).predicted
    )
    undone = step(crowded(0.1, 12.0), plan, HOLD_S, HOLD_S)
    assert undone.change is not None and undone.change.undoes and undone.in_flight == 0
    until_s = HOLD_S * (1 + BARRED_HOLDS)
    assert step(crowded(0.1, 12.0), undone, until_s - 1, HOLD_S).in_flight == 0
    assert step(crowded(0.1, 12.0), undone, until_s, HOLD_S).in_flight > 0


def test_a_change_stays_if_what_is_lost_is_lost_to_a_greater_load() -> None:
    plan = step(crowded(0.5, 9.0), None, 0.0, HOLD_S)
    assert plan.in_flight and plan.change is not None
    later = step(crowded(0.45, 20.0), plan, HOLD_S, HOLD_S)
    assert later.change is not None and not later.change.undoes and later.in_flight
    better = step(crowded(0.9, 9.0), plan, HOLD_S, HOLD_S)
    assert better.change is not None and abs((better.change.measured_share or 0) - 0.4) < 1e-9


def test_where_prompts_and_answers_are_long_splitting_is_predicted_to_gain() -> None:
    both = [msgspec.structs.replace(READER, requests_s=4.0), WRITER]
    apart, together = predict(FOUR, both, 0), predict(FOUR, both, 0, splits=False)
    assert apart.met_s > 1.1 * together.met_s
    assert apart.score >= max(predict(FOUR, both, k).score for k in range(4))


def test_more_of_what_is_short_is_worth_requests_and_seconds() -> None:
    load = msgspec.structs.replace(READER, requests_s=8.0)
    plan = step(Measured(engines=FOUR, shapes=[load], saved={"1": 0.5, "2": 0.75}), None, 0.0, HOLD_S)
    buys = {one.what: one for one in plan.buys}
    assert abs(buys["2 × the L1"].compute_s - plan.predicted.compute_s / 2) < 1e-9
    assert buys["2 × the L1"].met_s > 0 and buys["another engine"].met_s > 0
