"""The planner's pure functions: what is predicted, and how a plan changes."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.controller.plan import (
    Engine,
    Measured,
    Shape,
    advise,
    predict,
    scaled,
)

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
QUICK = settings(max_examples=40, deadline=None)


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


def test_where_prompts_and_answers_are_long_splitting_is_predicted_to_gain() -> None:
    both = [msgspec.structs.replace(READER, requests_s=4.0), WRITER]
    apart, together = predict(FOUR, both, 0), predict(FOUR, both, 0, splits=False)
    assert apart.met_s > 1.1 * together.met_s
    assert apart.score >= max(predict(FOUR, both, k).score for k in range(4))


def test_more_of_what_is_short_is_worth_requests_and_seconds() -> None:
    load = msgspec.structs.replace(READER, requests_s=8.0)
    plan = advise(Measured(engines=FOUR, shapes=[load], saved={"1": 0.5, "2": 0.75}))
    buys = {one.what: one for one in plan.buys}
    assert abs(buys["2 × the L1"].compute_s - plan.predicted.compute_s / 2) < 1e-9
    assert buys["2 × the L1"].met_s > 0 and buys["another engine"].met_s > 0
