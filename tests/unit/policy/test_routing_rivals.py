"""Costs of each rival policy, computed by hand from its published formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstrata.policy.routing.baselines import LeastLoaded, RoundRobin, Session
from kvstrata.policy.routing.choose import AnyPolicy, choose, drawn, viewed
from kvstrata.policy.routing.dynamo import Dynamo
from kvstrata.policy.routing.llmd import EXCLUDED, GUIDE, Llmd
from kvstrata.policy.routing.lmetric import Lmetric
from kvstrata.policy.routing.model import Copy, EngineState, Fleet, Knowledge, LoadPath, Request
from kvstrata.policy.routing.mooncake_conductor import MooncakeConductor
from kvstrata.policy.routing.smg import NOT_PREFERRED, Smg

NOW_S = 100.0


def engine(name: str, **more: Any) -> EngineState:
    """An idle engine of 1,000 tokens a second."""
    return EngineState(name=name, at_s=NOW_S, **{"prefill_tokens_s": 1_000.0, **more})


def copy(of: str, tier: Any, tokens: int) -> Copy:
    return Copy(engine=of, tier=tier, tokens=tokens)


class Case(NamedTuple):
    """What a policy is asked, and the costs by hand."""

    name: str
    policy: AnyPolicy
    engines: list[EngineState]
    copies: list[Copy]
    costs: list[float]
    tokens: int = 1_600


PATHS = {"peer": LoadPath(latency_s=0.1, tokens_s=10_000.0)}

CASES = [
    # 1,600 tokens are 100 blocks of 16.
    Case(
        "dynamo: device 40, host 20 beyond, disk 10 beyond",
        Dynamo(),
        [engine("a"), engine("b", prefill_tokens=320, context_tokens=800)],
        [copy("a", "l0", 640), copy("a", "l1", 960), copy("a", "l2", 1_120)],
        # a: 100 - (40 + .75*20 + .25*10) + 100.  b: (20 + 100) + (50 + 100).
        [42.5 + 100, 120 + 150],
    ),
    Case(
        "dynamo: decay by the excess prefill of 50 blocks over 100",
        Dynamo(overlap_score_credit_decay=2.0),
        [engine("a", prefill_tokens=960), engine("b", prefill_tokens=160)],
        [copy("a", "l0", 640)],
        # decay = 1 / (1 + 2 * 50/100) = 1/2.  a: 60 + 100 - 20 + 100.
        [140 + 100, 110 + 100],
    ),
    Case(
        "dynamo: shared beyond device, request weight, prefill scale",
        Dynamo(shared_cache_multiplier=0.5, decode_active_request_weight=3.0, prefill_load_scale=2.0),
        [engine("a", requests=2), engine("b")],
        [copy("a", "l0", 640), copy("", "l2", 1_280)],
        # a: 2*(100 - 40 - .5*40) + 100 + 3*2.  b: 2*(100 - .5*80) + 100.
        [80 + 100 + 6, 120 + 100],
    ),
    Case(
        "lmetric: with queued prefills",
        Lmetric(count_queued=True),
        [engine("a", requests=4, prefill_tokens=100), engine("b", requests=1)],
        [copy("a", "l0", 1_200)],
        [500 * 5, 1_600 * 2],
    ),
    Case(
        "llmd: 3 prefix + 2 queue + 2 kv",
        Llmd(),
        [engine("a", waiting=4, kv_usage=0.5), engine("b", waiting=0, kv_usage=0.25), engine("c", waiting=1)],
        [copy("a", "l0", 800)],
        [-(1.5 + 0 + 1), -(0 + 2 + 1.5), -(0 + 1.5 + 2)],
    ),
    Case(
        "llmd: the guide keeps warm engines and weighs tokens in flight",
        GUIDE,
        [engine("a", inflight_tokens=4_194_304 // 16), engine("b"), engine("c", inflight_tokens=9_000_000)],
        [copy("a", "l0", 1_600), copy("c", "l0", 1_300)],
        [-0.9375, -(1 - 1_600 / 4_194_304) + EXCLUDED, -0.0],
    ),
    Case(
        "llmd: a warm engine that is 18 s behind loses its affinity",
        Llmd(prefix_weight=1, queue_weight=0, kv_weight=0, affinity_threshold=0.8, peak_prefill_tokens_s=100),
        [engine("a", inflight_tokens=1_801), engine("b")],
        [copy("a", "l0", 1_600)],
        [-1.0, -0.0],
    ),
    Case(
        "smg: holders of the longest prefix; wait and KV pressure",
        Smg(),
        [engine("a", backlog_tokens=1_000, kv_usage=0.5), engine("b", generated_tokens_s=500.0, backlog_tokens=100)],
        [copy("a", "l0", 1_000)],
        # a: 1000/2000 + .15*.5/.5.  b: 100/500.
        [0.65, 0.2 + NOT_PREFERRED],
    ),
    Case(
        "smg: half of the prompt is not enough",
        Smg(),
        [engine("a"), engine("b", backlog_tokens=200)],
        [copy("b", "l0", 800)],
        [0.0, 0.1],
    ),
    Case(
        "smg: a holder with more than the mean and 32 is under pressure",
        Smg(),
        [engine("a", requests=66), engine("b", requests=0)],
        [copy("a", "l0", 1_600)],
        [0.0, 0.0],  # The mean is 33; the limit max(36.3, 65).
    ),
    Case(
        "mooncake: own, or a transfer of the difference",
        MooncakeConductor(),
        [engine("a", backlog_tokens=3_000), engine("b", paths=PATHS), engine("c")],
        [copy("a", "l1", 1_200), copy("b", "l0", 200)],
        # a: 3 + .4.  b: .1 + 1000/10000 + .4.  c has no path: 1.6.
        [3.4, 0.6, 1.6],
    ),
    Case(
        "least_loaded: seconds of the queue",
        LeastLoaded(by="seconds"),
        [engine("a", backlog_tokens=500), engine("b", backlog_tokens=900, prefill_tokens_s=3_000.0)],
        [],
        [0.5, 0.3],
    ),
]  # fmt: skip


def test_a_cost_is_that_of_the_published_formula() -> None:
    for case in CASES:
        request = Request(id="r", tokens=case.tokens)
        view = viewed(request, Fleet(engines=case.engines), Knowledge(copies=case.copies), NOW_S)
        assert case.policy.scores(view) == pytest.approx(case.costs), case.name


def test_the_example_of_the_page_holds() -> None:
    page = (Path(__file__).parents[3] / "docs" / "routing.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})


def test_round_robin_takes_turns_by_name() -> None:
    fleet = Fleet(engines=[engine("c"), engine("a"), engine("b", healthy=False), engine("d")])
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
                Fleet(engines=engines),
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
    assert choose(request, Fleet(engines=engines), Knowledge(), NOW_S, policy=Session()).engine == "e0"


def test_a_draw_follows_the_softmax_of_costs_over_their_range() -> None:
    view = viewed(Request(id="r", tokens=1), Fleet(engines=[engine("b"), engine("a")]), Knowledge(), NOW_S)
    # a costs 30, b 10: weights e^-1 and 1 at temperature 1, in the order of names: a up to 0.2689.
    assert drawn(view, [10.0, 30.0], 1.0, 0.26) == 1
    assert drawn(view, [10.0, 30.0], 1.0, 0.28) == 0
    assert drawn(view, [5.0, 5.0], 1.0, 0.49) == 1
    assert drawn(view, [5.0, 5.0], 1.0, 0.51) == 0


def test_draws_of_dynamo_depend_on_the_seed_and_spread() -> None:
    fleet = Fleet(engines=[engine("a"), engine("b", context_tokens=1_600)])

    def drawn_with(seed: int) -> list[str]:
        return [
            choose(
                Request(id=str(number), tokens=1_600),
                fleet,
                Knowledge(),
                NOW_S,
                policy=Dynamo(router_temperature=1.0),
                seed=seed,
            ).engine
            for number in range(400)
        ]

    first = drawn_with(1)
    assert first == drawn_with(1) != drawn_with(2)
    assert first.count("a") / 400 == pytest.approx(0.731, abs=0.08)  # 1 / (1 + e^-1)


def test_a_transfer_of_mooncake_names_its_holder() -> None:
    fleet = Fleet(engines=[engine("a", backlog_tokens=9_000), engine("b", paths=PATHS)])
    knowledge = Knowledge(copies=[copy("a", "l1", 1_200)])
    way = choose(Request(id="r", tokens=1_600), fleet, knowledge, NOW_S, policy=MooncakeConductor()).way
    assert way is not None
    assert (way.tier, way.source, way.load_tokens, way.cached_tokens) == ("peer", "a", 1_200, 1_200)
    assert way.ttft_s == pytest.approx(0.1 + 0.12 + 0.4)
