"""The native costs of routing, beside plain Python."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.native.routing import lowest, ranked_first
from kvstrata.policy.routing.choose import viewed
from kvstrata.policy.routing.model import COSTS, Copy, EngineState, Fleet, Knowledge, Request
from tests.harness.amount import amount
from tests.oracles import routing as oracle
from tests.property.policy.test_routing import NOW_S, copies, engine, paths, requests

own_copies = st.lists(copies, min_size=1, max_size=8).map(
    lambda found: [msgspec.structs.replace(copy, engine="e" if copy.engine else "") for copy in found]
)
"""Copies of one engine, and such that any engine can have."""
words = st.integers(0, 2**64 - 1)
close = 1e-12
"""Processors that fuse a product and a sum round once where Python rounds twice."""


@settings(max_examples=amount(100, 300))
@given(
    requests,
    st.lists(engine("e", healthy=st.just(True), paths=paths), max_size=2),
    st.integers(0, 40_000) | st.none(),
    own_copies,
)
def test_costs_are_those_of_plain_python(
    request: Request, engines: list[EngineState], held: int | None, found_copies: list[Copy]
) -> None:
    fleet = Fleet(engines=engines)
    knowledge = Knowledge(cached={} if held is None else {"e": held}, copies=found_copies)
    view = viewed(request, fleet, knowledge, NOW_S)
    moment = request.tokens, NOW_S, knowledge.block_life_s, knowledge.event_lag_s
    sources = {"cached": knowledge.cached, "own": view.own, "shared": view.shared}
    costs = COSTS.scores(view.engines, moment, **sources)
    assert len(costs) == len(view.engines)
    for one, cost in zip(view.engines, costs, strict=True):
        wanted = oracle.estimate(
            one, request.tokens, knowledge, [*view.own.get(one.name, ()), *view.shared], NOW_S
        )
        found = oracle.Estimate(*COSTS.estimate(one, moment, **sources))
        assert found[:4] == pytest.approx(wanted[:4], rel=close, abs=close)
        assert found[4:] == wanted[4:]
        assert cost == pytest.approx(sum(wanted[:4]), rel=close, abs=close)
        assert one.queue_s(NOW_S) == wanted.queue_s


@given(words, st.lists(words, min_size=1, max_size=9))
def test_a_key_ranks_hashes_as_in_plain_python(key: int, hashes: list[int]) -> None:
    assert ranked_first(key, hashes) == oracle.ranked_first(key, hashes)


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 1.0, 1.005, 1.02]) | st.floats(-9, 9), min_size=1, max_size=30),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.01, 0.5]),
)
def test_the_lowest_costs_are_those_of_plain_python(
    costs: list[float], count: int, near_share: float
) -> None:
    assert lowest(costs, count, near_share) == oracle.lowest(costs, count, near_share)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="not a number"):
        lowest([1.0, math.nan], 4, 0.0)
    with pytest.raises(ValueError, match="costs: 0 of them"):
        lowest([], 4, 0.0)
    with pytest.raises(ValueError, match="hashes: is empty"):
        ranked_first(1, [])


def test_a_field_that_is_not_set_is_an_error() -> None:
    engine = EngineState(name="a", prefill_tokens_s=1.0)
    del engine.backlog_tokens
    with pytest.raises(AttributeError, match="a field is not set"):
        COSTS.queue_s(engine, 1.0)
