"""What holds of every routing decision, and of those of our policy."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.choose import AUTO, POLICIES, TTFT, Policy, Record, choose, replay
from kvstrata.gateway.routing.model import NEVER_S, Copy, Decision, EngineState, Knowledge, LoadPath, Request
from kvstrata.gateway.routing.price import MISSED_S, View, may_hand_over
from tests.harness.amount import amount

NOW_S = 1_000.0
MAKES = st.sampled_from(list(POLICIES.values()))
NAMES = [f"engine-{number}" for number in range(7)]
TIERS = ("l1", "l2", "peer")

paths = st.dictionaries(
    st.sampled_from(TIERS),
    st.builds(
        LoadPath,
        latency_s=st.floats(0, 2),
        tokens_s=st.floats(100, 1e6),
        free_s=st.floats(NOW_S - 5, NOW_S + 30),
    ),
)
copies = st.builds(
    Copy,
    engine=st.sampled_from([*NAMES, "unknown", ""]),
    tier=st.sampled_from(["l0", *TIERS]),
    tokens=st.integers(0, 40_000),
    certainty=st.sampled_from(["exact", "degraded", "predicted", "unconfirmed"]),
    age_s=st.floats(0, 1_000),
    ready_at_s=st.floats(NOW_S - 5, NOW_S + 30),
)
cached = st.dictionaries(st.sampled_from([*NAMES, "unknown"]), st.integers(0, 40_000))
knowledges = st.builds(Knowledge, cached=cached, copies=st.lists(copies, max_size=12))
requests = st.builds(
    Request,
    id=st.text(max_size=5),
    tokens=st.integers(1, 30_000),
    number=st.integers(0, 10**6),
    session=st.text(max_size=3),
    answer_tokens=st.floats(0, 1e5),
    sharing=st.integers(0, 10**4),
)


def engine(name: str, **more: Any) -> st.SearchStrategy[EngineState]:
    """An engine whose fields are drawn, except those given."""
    fields: dict[str, Any] = {
        "prefill_tokens_s": st.floats(100, 1e5),
        "drained_s": st.floats(NOW_S - 100, NOW_S + 100),
        "behind_s": st.floats(0, 100),
        "late_s": st.floats(NOW_S - 1_000, NOW_S + 1_000) | st.just(NEVER_S),
        "prefill_tokens": st.integers(0, 10**6),
        "inflight_tokens": st.integers(0, 10**7),
        "requests": st.integers(0, 300),
        "waiting": st.integers(0, 100),
        "running": st.integers(0, 300),
        "token_s": st.floats(0, 10),
        "paths": paths,
        "role": st.sampled_from(["both", "prefill", "decode"]),
        "instance": st.sampled_from(["", "one", "two"]),
        "limited": st.integers(0, 300),
    }
    told = st.tuples(
        st.floats(0, 1), st.floats(0, 9), st.floats(0, 20), st.floats(0.001, 1), st.floats(0, 1e4)
    )
    return st.builds(limited, st.builds(EngineState, name=st.just(name), **{**fields, **more}), told)


def limited(state: EngineState, told: tuple[float, float, float, float, float]) -> EngineState:
    """The engine, whose answers have limits: see EngineState.expect."""
    state.expect(*told)
    return state


def fleets(least: int = 0, **more: Any) -> st.SearchStrategy[list[EngineState]]:
    """Up to seven engines."""
    return st.integers(least, len(NAMES)).flatmap(
        lambda n: st.tuples(*(engine(name, **more) for name in NAMES[:n])).map(list)
    )


def decided(
    request: Request,
    fleet: list[EngineState],
    knowledge: Knowledge,
    policy: Policy,
    contract: Contract,
) -> Decision:
    """The decision among engines of which some compute prompts for others only."""
    engines = [one for one in fleet if one.role != "prefill"]
    helpers = [one for one in fleet if one.role == "prefill"]
    return choose(request, engines, knowledge, NOW_S, policy=policy, helpers=helpers, contract=contract)


CONTRACTS = st.sampled_from(["", "kvstrata", "nixl"])


@given(requests, fleets(), knowledges, MAKES, CONTRACTS, st.randoms(use_true_random=False))
@settings(max_examples=amount(30, 100))
def test_a_decision_is_repeatable_in_any_order_of_engines_and_copies(
    request: Request,
    fleet: list[EngineState],
    knowledge: Knowledge,
    policy: Policy,
    contract: Contract,
    chance: random.Random,
) -> None:
    decision = decided(request, fleet, knowledge, policy, contract)
    assert decided(request, fleet, knowledge, policy, contract) == decision
    fleet = chance.sample(fleet, len(fleet))
    knowledge = msgspec.structs.replace(
        knowledge, copies=chance.sample(knowledge.copies, len(knowledge.copies))
    )
    assert decided(request, fleet, knowledge, policy, contract) == decision


limits = st.fixed_dictionaries(
    {
        "short_tokens": st.floats(0, 1e4),
        "within_s": st.sampled_from([0.0, 0.5, 5.0]),
        "token_within_s": st.sampled_from([0.0, 0.02]),
    }
)


@given(
    requests,
    limits,
    fleets(1),
    knowledges,
    st.sampled_from([AUTO, TTFT]),
    st.sampled_from(["kvstrata", "nixl"]),
)
@settings(max_examples=amount(60, 200))
def test_a_request_is_split_iff_that_costs_less_and_only_between_engines_that_can_hand_over(
    request: Request,
    limits: dict[str, float],
    fleet: list[EngineState],
    knowledge: Knowledge,
    policy: Policy,
    contract: Contract,
) -> None:
    request = msgspec.structs.replace(request, **limits)
    decision = decided(request, fleet, knowledge, policy, contract)
    terms = decision.terms
    if "alone_s" in terms or decision.prefill is not None:
        assert decision.cost == pytest.approx(min(terms["alone_s"], terms["split_s"]))
    if decision.prefill is not None:
        assert decision.terms["split_s"] < decision.terms["alone_s"]
        by_name = {one.name: one for one in fleet}
        prefill, decode = by_name[decision.prefill.engine], by_name[decision.engine]
        assert may_hand_over(contract, prefill, decode)
        at_one = prefill.instance == decode.instance != ""
        assert contract == "nixl" or at_one or decision.way.tier == "peer"


@pytest.mark.parametrize("seed", range(amount(300, 3_000)))
def test_no_engine_and_no_pair_of_engines_would_cost_less(seed):
    draw = random.Random(seed)
    contract, classes, size = ("", "nixl", "kvstrata")[seed % 3], draw.random() < 0.7, draw.randrange(2, 24)
    request = Request(
        id=str(seed), tokens=draw.randrange(300, 30_000), answer_tokens=300.0, short_tokens=100.0,
        within_s=draw.choice((0.0, 1.0, 3.0)) if classes else 0.0,
        token_within_s=draw.choice((0.0, 0.015)) if classes else 0.0,
    )  # fmt: skip
    fleet = [
        busy(
            name=f"e{number}", instance=draw.choice(["one", "two", "three"]),
            prefill_tokens_s=draw.uniform(9e3, 11e3), drained_s=NOW_S + draw.uniform(-1, 1) * draw.random(),
            running=running, token_s=draw.uniform(0.008, 0.012) if running else 0.05,
            limited=draw.randrange(9) if classes and running else 0,
            paths={"l1": L1_PATH, "peer": L1_PATH if draw.random() < 0.5 else SLOW_PATH},
        )
        for number in range(size)
        for running in (draw.choice((0, 30, 40, 60)),)
    ]  # fmt: skip
    for one in fleet:
        one.expect(0.0003, draw.uniform(0, 1), 0.3, 0.02, 300.0)
    copies = [
        Copy(engine=draw.choice(["", "e0", "e1"]), tier=draw.choice(["l0", "l1"]), tokens=draw.randrange(30_000))
        for _ in range(draw.choice((0, 0, 2)))
    ]  # fmt: skip
    knowledge = Knowledge(cached={f"e{draw.randrange(size)}": draw.randrange(20_000)}, copies=copies)
    found = choose(request, fleet, knowledge, NOW_S, policy=AUTO, contract=contract)

    def cost(engine: EngineState, *helpers: EngineState) -> float:
        asked = request, [engine], knowledge, NOW_S
        return choose(*asked, policy=AUTO, helpers=helpers, contract=contract).cost

    pairs = ((one, other) for one in fleet for other in fleet if contract and one is not other)
    least = min(*map(cost, fleet), *itertools.starmap(cost, pairs))
    # The engine that computes is chosen before it is known when the other one answers.
    assert least - 1e-9 <= found.cost <= least + ((0.5 if classes else 0.01) if contract else 1e-9)


def busy(**more: Any) -> EngineState:
    """An engine that answers 20 requests, 10,000 of whose prompts' tokens take a second; a load takes an eighth."""
    path = LoadPath(latency_s=0.0, tokens_s=80_000.0)
    fields = {"name": "d", "prefill_tokens_s": 10_000.0, "running": 20, "requests": 20, "token_s": 0.01}
    return EngineState(**{**fields, "instance": "one", "paths": {"l1": path}, **more})


IDLE = {"name": "p", "running": 0, "requests": 0}
L1_PATH, SLOW_PATH = (LoadPath(latency_s=0.0, tokens_s=rate) for rate in (80_000.0, 20_000.0))
READS, READS_SLOWLY = (
    {"paths": {"l1": L1_PATH, "peer": LoadPath(latency_s=0.0, tokens_s=rate)}} for rate in (80_000.0, 200.0)
)


@pytest.mark.parametrize(
    ("why", "tokens", "prefill", "decode", "splits"),
    [
        ("the prompt would delay many answers", 8_000, IDLE, {}, True),
        ("a short one delays them little", 400, IDLE, {}, False),
        ("nothing is delayed", 8_000, IDLE, {"running": 0, "requests": 0}, False),
        ("the other engine's queue is longer than that", 8_000, {**IDLE, "drained_s": NOW_S + 5}, {}, False),
        ("the engines have other servers", 8_000, {**IDLE, "instance": "two"}, {}, False),
        ("it reads from the other's", 8_000, {**IDLE, "instance": "two"}, READS, True),
        ("it reads from the other's slowly", 8_000, {**IDLE, "instance": "two"}, READS_SLOWLY, False),
        ("the server is not known", 8_000, {**IDLE, "instance": ""}, {"instance": ""}, False),
        ("the other engine only answers", 8_000, {**IDLE, "role": "decode"}, {}, False),
        ("both delay as many", 8_000, {"name": "p"}, {}, False),
    ],
)
def test_long_prompts_are_computed_where_they_delay_no_answers(why, tokens, prefill, decode, splits):
    request = Request(id="r", tokens=tokens, answer_tokens=500.0)
    helper, engine = busy(**prefill), busy(**decode)
    decision = choose(
        request, [engine], Knowledge(), NOW_S, policy=AUTO, helpers=[helper], contract="kvstrata"
    )
    assert (decision.prefill is not None) == splits, why


@pytest.mark.parametrize(("reads", "computes"), [(READS, "far"), (READS_SLOWLY, "near")])
def test_a_prompt_is_computed_beside_the_engine_that_answers_unless_it_reads_as_fast_from_another_host(
    reads, computes
):
    """The engine on the other host has a shorter queue."""
    helpers = [
        busy(**IDLE | {"name": "far", "instance": "two"}),
        busy(**IDLE | {"name": "near", "drained_s": NOW_S + 0.05}),
    ]
    request = Request(id="r", tokens=8_000, answer_tokens=500.0)
    ask = [busy(**reads)], Knowledge(), NOW_S
    decision = choose(request, *ask, policy=AUTO, helpers=helpers, contract="kvstrata")
    assert decision.prefill.engine == computes


@pytest.mark.parametrize(("limit_s", "splits"), [(0.011, True), (0.1, False), (0.0, False)])
def test_a_prompt_is_computed_elsewhere_when_an_answer_beside_it_would_miss_its_class(limit_s, splits):
    """One answer runs: for its time alone a split would not pay."""
    engine = busy(running=1, requests=1, limited=limit_s > 0)
    engine.expect(0.0, 0.0, 0.0, limit_s, 100.0)
    request = Request(id="r", tokens=8_000, answer_tokens=100.0, short_tokens=50.0)
    ask = [engine], Knowledge(), NOW_S
    decision = choose(request, *ask, policy=AUTO, helpers=[busy(**IDLE)], contract="kvstrata")
    assert (decision.prefill is not None) == splits


def test_an_answer_goes_where_all_miss_their_class_rather_than_where_it_would_make_others_miss_it():
    """Or an overloaded fleet would serve nobody in time."""
    lost = busy(name="lost", running=200, requests=200, token_s=0.03, limited=200)
    full = busy(name="full", token_s=0.016, limited=20)
    lost.expect(0.0, 0.0, 0.0, 0.015, 500.0)
    full.expect(0.002, 0.0, 0.0, 0.015, 500.0)
    request = Request(id="r", tokens=300, answer_tokens=500.0, short_tokens=400.0, token_within_s=0.015)
    assert choose(request, [lost, full], Knowledge(), NOW_S, policy=AUTO).engine == "lost"


@pytest.mark.parametrize("limit_s", [0.012, 0.0])
def test_an_answer_with_a_limit_goes_where_prompts_stall_it_less(limit_s):
    """The other engine has more answers, each of whose tokens takes longer."""
    stalled = busy(name="stalled", running=0, requests=0)
    calm = busy(name="calm", running=40, requests=40, token_s=0.011)
    stalled.expect(0.0, 0.4 / 0.6, 0.5, 0.0, 0.0)
    calm.expect(0.0, 0.0, 0.0, 0.0, 0.0)
    request = Request(id="r", tokens=2_000, answer_tokens=50.0, short_tokens=50.0, token_within_s=limit_s)
    decision = choose(request, [stalled, calm], Knowledge(), NOW_S, policy=AUTO)
    assert decision.engine == ("calm" if limit_s else "stalled")


@given(requests, fleets(), knowledges, MAKES, CONTRACTS)
@settings(max_examples=amount(30, 100))
def test_a_decision_is_replayed_from_its_record_in_json(request, fleet, knowledge, policy, contract):
    decision = choose(
        request, fleet[1:], knowledge, NOW_S, policy=policy, helpers=fleet[:1], contract=contract
    )
    record = Record(
        request=request, engines=fleet[1:], helpers=fleet[:1], knowledge=knowledge, now_s=NOW_S, policy=policy.name,
        contract=contract, decision=decision,
    )  # fmt: skip
    read = msgspec.json.decode(msgspec.json.encode(record), type=Record)
    assert read == record
    assert replay(read) == decision


@given(requests, fleets(), knowledges, MAKES)
@settings(max_examples=amount(40, 100))
def test_engines_and_the_cheapest_others_are_named(request, fleet, knowledge, policy):
    before = msgspec.json.encode(fleet)
    decision = choose(request, fleet, knowledge, NOW_S, policy=policy)
    assert msgspec.json.encode(fleet) == before
    names = {each.name for each in fleet}
    assert decision.eligible == len(names)
    others = [other.engine for other in decision.alternatives]
    if not names:
        assert (decision.engine, decision.reason, others) == ("", "none_eligible", [])
        return
    assert decision.engine in names
    assert len(others) == len(set(others)) == min(3, len(names) - 1)
    assert set(others) <= names - {decision.engine}
    assert [other.cost for other in decision.alternatives] == sorted(
        other.cost for other in decision.alternatives
    )
    if decision.reason == "lowest_cost":
        assert all(decision.cost < other.cost for other in decision.alternatives)


@given(requests, limits, fleets(1), knowledges, st.sampled_from([AUTO, TTFT]))
@settings(max_examples=amount(60, 500))
def test_a_cost_is_the_sum_of_its_terms_and_not_below_its_bound(request, limits, fleet, knowledge, policy):
    request = msgspec.structs.replace(request, **limits)
    view = View(request, fleet, knowledge, NOW_S, policy.share, near_share=policy.near_share)
    bounds, costs = view.costs(), []
    for at in range(len(fleet)):
        terms, way, _ = view.explained(at)
        first_s = sum(terms[name] for name in ("queue_s", "load_s", "compute_s"))
        others_s = terms.get("answer_s", 0.0) + terms.get("others_s", 0.0)
        cost = first_s - terms.get("spared_s", 0.0) + policy.share * others_s
        costs.append(cost + MISSED_S * terms.get("missed", 0.0))
        assert bounds[at] <= costs[at] * (1 + 1e-9) + 1e-9
        assert way.ttft_s == pytest.approx(first_s)
        assert 0 <= way.load_tokens <= way.cached_tokens < request.tokens
    least = min(costs)
    for bound, cost in zip(bounds, costs, strict=True):
        if bound <= least + abs(least) * policy.near_share:
            assert bound == pytest.approx(cost, rel=1e-9, abs=1e-9)
    chosen = choose(request, fleet, knowledge, NOW_S, policy=policy)
    assert chosen.cost <= least + abs(least) * policy.near_share + 1e-9


@given(requests, engine("a"), knowledges, copies)
def test_more_knowledge_never_makes_an_engine_dearer(request, state, knowledge, more):
    """An exact copy of the engine's own cache is at least as good as none."""
    fleet = [state]
    own = msgspec.structs.replace(more, engine="a", tier="l0", certainty="exact")
    longer = msgspec.structs.replace(knowledge, cached={"a": more.tokens}, copies=[])
    nothing = msgspec.structs.replace(knowledge, cached={}, copies=[])
    with_it = choose(request, fleet, longer, NOW_S, policy=TTFT)
    assert with_it.cost <= choose(request, fleet, nothing, NOW_S, policy=TTFT).cost
    # Both ways to say it cost the same: the formula that `scores` writes out, and `estimate`.
    said = msgspec.structs.replace(nothing, copies=[own])
    assert choose(request, fleet, said, NOW_S, policy=TTFT).cost == pytest.approx(with_it.cost)


def loads_at(*known: Copy, tokens: int = 10_000, **fields: Any) -> Decision:
    """One engine of 1,000 tokens a second that can load from `l2` at 10,000 after 0.5 s."""
    state = EngineState(
        name="a",
        paths={"l2": LoadPath(latency_s=0.5, tokens_s=10_000.0)},
        **{"prefill_tokens_s": 1_000.0, **fields},
    )
    knowledge = Knowledge(copies=list(known), block_life_s=100.0)
    return choose(Request(id="r", tokens=tokens), [state], knowledge, NOW_S, policy=TTFT)


def test_a_cost_of_ours_by_hand() -> None:
    for known, fields, cost in (
        ([], {}, 10.0),
        ([], {"drained_s": NOW_S + 3}, 13.0),
        ([], {"drained_s": NOW_S + 3, "behind_s": 4.0}, 14.0),
        ([], {"running": 2}, 10.0),
        ([Copy(engine="a", tier="l0", tokens=8_000)], {}, 2.0),
        ([Copy(engine="a", tier="l0", tokens=10_000)], {}, 0.001),
        (
            [Copy(engine="a", tier="l0", tokens=8_000, certainty="degraded", age_s=100.0)],
            {},
            10 - 8 / 2.718281828,
        ),
        ([Copy(engine="a", tier="l0", tokens=8_000, certainty="unconfirmed", age_s=10.0)], {}, 2.0),
        ([Copy(engine="a", tier="l0", tokens=8_000, certainty="unconfirmed", age_s=10.1)], {}, 10.0),
        ([Copy(engine="a", tier="l0", tokens=8_000, certainty="predicted", ready_at_s=NOW_S + 3)], {}, 5.0),
        ([Copy(engine="", tier="l2", tokens=8_000)], {}, 0.5 + 0.8 + 2.0),
        ([Copy(engine="", tier="peer", tokens=8_000)], {}, 10.0),
        ([Copy(engine="a", tier="l0", tokens=4_000), Copy(engine="", tier="l2", tokens=8_000)], {}, 2.9),
        ([Copy(engine="a", tier="l0", tokens=7_900), Copy(engine="", tier="l2", tokens=8_000)], {}, 2.1),
        ([Copy(engine="other", tier="l0", tokens=8_000)], {}, 10.0),
    ):
        assert loads_at(*known, **fields).cost == pytest.approx(cost)


def test_near_ties_spread_over_all_engines() -> None:
    fleet = [EngineState(name=name, prefill_tokens_s=1_000.0) for name in NAMES]
    counts = dict.fromkeys(NAMES, 0)
    for number in range(7_000):
        request = Request(id=f"request {number}", tokens=100)
        decision = choose(request, fleet, Knowledge(), NOW_S, policy=TTFT)
        assert decision.reason == "near_tie"
        assert choose(request, fleet[::-1], Knowledge(), NOW_S, policy=TTFT).engine == decision.engine
        counts[decision.engine] += 1
    assert all(800 < count < 1_200 for count in counts.values()), counts
