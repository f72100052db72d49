"""Costs of the benchmarks' rivals by hand from their published formulas; turns and sessions; how fast engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.route_formulas import EXCLUDED, GUIDE, Llmd, Lmetric, MooncakeConductor, Smg
from kvstrata.gateway.loading import Loading
from kvstrata.gateway.routing.choose import choose, viewed
from kvstrata.gateway.routing.load_rates import ASSUMED_GAIN, LoadRates
from kvstrata.gateway.routing.model import Copy, EngineState, Knowledge, LoadPath, Request
from kvstrata.gateway.routing.policies import Policy, RoundRobin, Session

NOW_S = 100.0


def engine(name: str, **more: Any) -> EngineState:
    """An idle engine of 1,000 tokens a second."""
    return EngineState(name=name, at_s=NOW_S, **{"prefill_tokens_s": 1_000.0, **more})


def copy(of: str, tier: Any, tokens: int) -> Copy:
    return Copy(engine=of, tier=tier, tokens=tokens)


class Case(NamedTuple):
    """What a policy is asked for a prompt of 1,600 tokens, and the costs by hand."""

    name: str
    policy: Policy
    engines: list[EngineState]
    copies: list[Copy]
    costs: list[float]


PATHS = {"peer": LoadPath(latency_s=0.1, tokens_s=10_000.0)}

CASES = [
    Case(
        "lmetric: with queued prefills",
        Lmetric(count_queued=True),
        [engine("a", requests=4, prefill_tokens=100), engine("b", requests=1)],
        [copy("a", "l0", 1_200)],
        [500 * 5, 1_600 * 2],
    ),
    Case(
        "llmd: 3 prefix + 2 queue",
        Llmd(),
        [engine("a", waiting=4), engine("b", waiting=0), engine("c", waiting=1)],
        [copy("a", "l0", 800)],
        [-(1.5 + 0), -(0 + 2), -(0 + 1.5)],
    ),
    Case(
        "llmd: the guide keeps warm engines and weighs tokens in flight",
        GUIDE,
        [engine("a", inflight_tokens=4_194_304 // 16), engine("b"), engine("c", inflight_tokens=9_000_000)],
        [copy("a", "l0", 1_600), copy("c", "l0", 1_300)],
        [-0.9375, -(1 - 1_600 / 4_194_304) + EXCLUDED, -0.0],
    ),
    Case(
        "smg: holders of the longest prefix",
        Smg(),
        [engine("a", backlog_tokens=1_000), engine("b", backlog_tokens=100)],
        [copy("a", "l0", 1_000)],
        [0.5, 0.05 + EXCLUDED],
    ),
    Case(
        "mooncake: own, or a transfer of the difference",
        MooncakeConductor(),
        [engine("a", backlog_tokens=3_000), engine("b", paths=PATHS), engine("c")],
        [copy("a", "l1", 1_200), copy("b", "l0", 200)],
        # a: 3 + .4.  b: .1 + 1000/10000 + .4.  c has no path: 1.6.
        [3.4, 0.6, 1.6],
    ),
]  # fmt: skip


def test_a_cost_is_that_of_the_published_formula() -> None:
    for case in CASES:
        request = Request(id="r", tokens=1_600)
        view = viewed(request, case.engines, Knowledge(copies=case.copies), NOW_S)
        assert case.policy.scores(view) == pytest.approx(case.costs), case.name


def test_the_example_of_the_page_holds() -> None:
    page = (Path(__file__).parents[3] / "docs" / "routing.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})


def test_round_robin_takes_turns_by_name() -> None:
    fleet = [engine("c"), engine("a"), engine("b", healthy=False), engine("d")]
    turns = [
        choose(
            Request(id="r", tokens=1, number=number), fleet, Knowledge(), NOW_S, policy=RoundRobin()
        ).engine
        for number in range(6)
    ]
    assert turns == ["a", "c", "d", "a", "c", "d"]


def test_a_session_stays_and_moves_only_when_its_engine_goes() -> None:
    engines = [engine(f"e{number}", requests=number) for number in range(8)]

    def homes() -> dict[str, str]:
        return {
            session: choose(
                Request(id="r", tokens=1, session=session),
                engines,
                Knowledge(),
                NOW_S,
                policy=Session(),
            ).engine
            for session in map(str, range(200))
        }

    before = homes()
    assert len(set(before.values())) == 8
    engines[3].healthy = False
    after = homes()
    assert {session for session in before if before[session] != after[session]} == {
        session for session in before if before[session] == "e3"
    }
    request = Request(id="r", tokens=1)
    assert choose(request, engines, Knowledge(), NOW_S, policy=Session()).engine == "e0"


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


def test_loads_count_by_engine_and_by_peer_until_they_end() -> None:
    now_s = 10.0
    loading = Loading(lambda: now_s)
    loading.began(1, "a", "peer", "one", 1_000, 2.0)
    loading.began(2, "b", "peer", "other", 500, 1.0)
    loading.began(3, "a", "l2", "disk", 300, 1.0)
    assert loading.queued() == {("a", "peer"): 1_000, ("b", "peer"): 500, ("a", "l2"): 300}
    assert loading.queued({"one"}) == {("", "peer"): 1_000, ("b", "peer"): 500, ("a", "l2"): 300}
    assert loading.queued({"disk"}) == loading.queued(), "only peers are shared by engines"
    now_s = 10.5
    assert loading.queued() == {("a", "peer"): 750, ("b", "peer"): 250, ("a", "l2"): 150}
    now_s = 13.0
    assert not +loading.queued(), "what is late counts as ended"
    for number in (1, 2, 3, 3, 4):
        loading.ended(number)
    assert not len(loading)
