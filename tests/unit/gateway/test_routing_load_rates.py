"""How fast engines load, by what is told and what is assumed."""

from __future__ import annotations

import pytest

from kvstrata.gateway.routing.load_rates import ASSUMED_GAIN, LoadRates
from kvstrata.gateway.routing.model import LoadPath


def test_what_is_told_counts_and_a_load_into_l1_goes_on_from_there() -> None:
    rates = LoadRates()
    assert rates.path("a", "l1", 1_000.0).tokens_s == ASSUMED_GAIN * 1_000.0
    rates.tell("a", "l2", LoadPath(latency_s=0.5, tokens_s=10_000.0))
    assert rates.path("a", "l2", 1_000.0).tokens_s == pytest.approx(1 / (1 / 10_000 + 1 / 8_000))
    rates.tell("a", "l1", LoadPath(latency_s=0.25, tokens_s=40_000.0))
    assert rates.path("a", "l1", 1_000.0) == LoadPath(latency_s=0.25, tokens_s=40_000.0)
    assert rates.path("a", "l2", 1_000.0) == LoadPath(latency_s=0.75, tokens_s=pytest.approx(8_000.0))
    rates.forget("a")
    assert rates.path("a", "l1", 1_000.0) == rates.path("b", "l1", 1_000.0)
