"""Costs that are fitted to the times of steps."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError
from kvstrata.testing.engine_sim.engine_model import EngineModel
from kvstrata.testing.engine_sim.fitting import FIELDS, StepSample, fit_costs


def samples(costs: list[float], *, noise: float, seed: int, count: int = 400) -> list[StepSample]:
    """Steps of an engine with these costs, of all kinds."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        tokens = draw.choice([0, 0, draw.randrange(1, 500), draw.randrange(1, 2000)])
        before = draw.randrange(3000)
        decodes = draw.randrange(40)
        numbers = (
            tokens,
            tokens * before + tokens * (tokens + 1) // 2,
            decodes,
            decodes * draw.randrange(4000),
        )
        took = sum(cost * number for cost, number in zip(costs, (1, *numbers), strict=True))
        made.append(StepSample(took * draw.uniform(1 - noise, 1 + noise), *numbers))
    return made


@given(
    st.tuples(
        st.floats(100, 20_000),
        st.floats(1, 200),
        st.floats(0.001, 0.1),
        st.floats(1, 500),
        st.floats(0.01, 1),
    ),
    st.integers(0, 100),
)
def test_costs_are_found_again(costs: tuple[float, ...], seed: int) -> None:
    fitted = fit_costs(samples(list(costs), noise=0, seed=seed))
    assert [fitted[name] for name in FIELDS] == pytest.approx(costs, rel=1e-3)
    msgspec.convert(fitted, EngineModel)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda made: made[:99], "99 steps are too few"),
        (lambda made: [each._replace(prefill_tokens=0) for each in made], "no step has any prefill_tokens"),
        (lambda made: [each._replace(decode_sequences=0) for each in made], "no step has any decode_sequences"),
    ],
)  # fmt: skip
def test_samples_that_tell_too_little_are_refused(change, match: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=match):
        fit_costs(change(samples([1000, 20, 0.01, 5, 0.02], noise=0, seed=1)))
