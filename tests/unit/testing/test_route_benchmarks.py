"""The comparison of routing policies: what the oracle knows, what a killed engine costs, Dynamo's own choice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.route_gateway import Death, Run, first_token_ps
from benchmarks.route_loads import Asked
from kvstrata.gateway.routing.policies import POLICIES
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import PS_PER_S, EngineModel
from kvstrata.testing.engine_sim.requests import SimRequest

MODEL = EngineModel(kv_blocks=512, max_model_tokens=4_096)
SHORT = st.tuples(st.integers(0, 200), st.integers(0, 3), st.integers(1, 1_500), st.integers(1, 40))
"""Milliseconds since the request before, the family that its prompt is of, and the lengths of prompt and answer."""


def request(name: str, family: int, prompt_tokens: int, answer_tokens: int = 20) -> SimRequest:
    """The prompts of a family are parts of one sequence."""
    tokens = [family * 10_000 + number for number in range(prompt_tokens)]
    return SimRequest(name, tokens, answer=bytes(answer_tokens))


def busy(load: list[tuple[int, int, int, int]]) -> tuple[SimEngine, int]:
    """An engine that got a load, and the time of the last request."""
    engine, at_ps = SimEngine(MODEL), 0
    for number, (gap_ms, family, prompt_tokens, answer_tokens) in enumerate(load):
        at_ps += gap_ms * PS_PER_S // 1_000
        engine.submit(request(str(number), family, prompt_tokens, answer_tokens), at_ps)
    return engine, at_ps


@given(st.lists(SHORT, max_size=12), SHORT)
def test_the_oracle_foresees_the_first_token_of_a_request_that_is_the_last(
    load: list[tuple[int, int, int, int]], last: tuple[int, int, int, int]
) -> None:
    engine, at_ps = busy(load)
    at_ps += last[0] * PS_PER_S // 1_000
    asked = request("last", *last[1:])
    engine.advance(at_ps)
    foreseen_ps = first_token_ps(engine, asked, at_ps)
    assert foreseen_ps is not None
    assert first_token_ps(engine, asked, at_ps, foreseen_ps) == foreseen_ps
    assert first_token_ps(engine, asked, at_ps, foreseen_ps - 1) is None
    engine.submit(asked, at_ps)
    engine.advance(1 << 100)
    assert asked.first_token_ps == foreseen_ps


LOAD = [Asked(0.02 * n, [n % 5 * 1_000 + k for k in range(800)], b"x" * 30, f"s{n}", 0) for n in range(100)]
DEATH = Death("engine-0", 0.665, 1.4)
"""Just after it has got a request."""
ENGINES = {f"engine-{number}": MODEL for number in range(3)}


def test_after_a_killed_engine_has_come_back_all_counts_are_zero() -> None:
    run = Run(POLICIES["ttft"](), ENGINES, deaths=[DEATH])
    results = run.serve(LOAD)
    assert len(results) == len(LOAD)
    assert all(result.ttft_s > 0 for result in results)
    for engine in run.fleet.engines.values():
        assert (engine.load.requests, engine.load.waiting, engine.load.context_tokens) == (0, 0, 0)
