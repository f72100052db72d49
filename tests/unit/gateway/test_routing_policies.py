"""Costs of the benchmarks' rivals by hand from their published formulas; turns and sessions; how fast engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstrata.gateway.routing.choose import POLICIES, choose
from kvstrata.gateway.routing.model import EngineState, Knowledge, LoadPath, Request, Tier
from kvstrata.gateway.routing.rates import ASSUMED_GAIN, load_path

NOW_S = 100.0


def engine(name: str, **more: Any) -> EngineState:
    """An idle engine of 1,000 tokens a second."""
    return EngineState(name=name, **{"prefill_tokens_s": 1_000.0, **more})


def test_the_example_of_the_page_holds() -> None:
    page = (Path(__file__).parents[3] / "docs" / "routing.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})


def test_a_session_stays_and_moves_only_when_its_engine_goes() -> None:
    engines = [engine(f"e{number}", requests=number) for number in range(8)]

    def homes() -> dict[str, str]:
        return {
            session: choose(
                Request(id="r", tokens=1, session=session),
                engines,
                Knowledge(),
                NOW_S,
                policy=POLICIES["session"],
            ).engine
            for session in map(str, range(200))
        }

    before = homes()
    assert len(set(before.values())) == 8
    del engines[3]
    after = homes()
    assert {session for session in before if before[session] != after[session]} == {
        session for session in before if before[session] == "e3"
    }
    request = Request(id="r", tokens=1)
    assert choose(request, engines, Knowledge(), NOW_S, policy=POLICIES["session"]).engine == "e0"


def test_what_is_told_counts_and_a_load_into_l1_goes_on_from_there() -> None:
    told: dict[Tier, LoadPath] = {}
    assert load_path(told, "l1", 1_000.0).tokens_s == ASSUMED_GAIN * 1_000.0
    told["l2"] = LoadPath(latency_s=0.5, tokens_s=10_000.0)
    assert load_path(told, "l2", 1_000.0).tokens_s == pytest.approx(1 / (1 / 10_000 + 1 / 8_000))
    told["l1"] = LoadPath(latency_s=0.25, tokens_s=40_000.0)
    assert load_path(told, "l1", 1_000.0) == told["l1"]
    assert load_path(told, "l2", 1_000.0) == LoadPath(latency_s=0.75, tokens_s=pytest.approx(8_000.0))
