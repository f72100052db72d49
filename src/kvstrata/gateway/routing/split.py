"""Whether one engine should compute a prompt and another one answer it: `auto`'s cost with both ways in it.

For an engine D that answers, and P, which may compute for it:

    alone   TTFT(D) + DECODE_SHARE · (o · t(D, u/μ) + R_run(D) · u/μ)
    split   max(TTFT(P), Q(D)) + HANDOVER_S + load + rest/μ + DECODE_SHARE · (o · t(D, rest/μ) + R_run(P) · u/μ(P)
            + R_run(D) · rest/μ)

t(e, w): seconds of an answer's token at e, longer by the share of its time in which e computes prompts, w more seconds
of prompts included.  So prompts gather where few answer, and answers where few prompts are computed.  What classes of
service do not allow counts by LATE, as in `auto`, and also what a prompt does to the answers beside it, as if each
had the mean of the limits of those in flight.

A request is split iff that costs less.  The best two P of each instance are enough: what P costs does not depend on D.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.choose import (
    LATE,
    AnyPolicy,
    Auto,
    Estimate,
    Policy,
    View,
    cheapest,
    choose,
    estimate,
    pick,
    policy_name,
    viewed,
)
from kvstrata.gateway.routing.model import (
    Alternative,
    Decision,
    EngineState,
    Knowledge,
    Leg,
    LoadPath,
    Request,
    Way,
)

HANDOVER_S = 0.03
"""From the last step of the engine that computes to the load of the other: an answer of the server and 1.5 steps."""
REST_TOKENS = {"kvstrata": 256, "nixl": 1, "mooncake": 1}
"""What the engine that answers computes itself at most, by contract: the rest of a chunk, or the last token."""
_NO_PATH = LoadPath(latency_s=0.0, tokens_s=1.0)


def may_hand_over(contract: Contract, prefill: EngineState, decode: EngineState) -> bool:
    """Whether one engine can compute a prompt for the other."""
    if prefill.name == decode.name or prefill.role == "decode" or decode.role == "prefill":
        return False
    return contract != "kvstrata" or bool(prefill.instance and prefill.instance == decode.instance)


def _place(contract: Contract, engine: EngineState) -> str:
    """Engines that can compute for each other have the same."""
    return engine.instance if contract == "kvstrata" else ""


class _Prefill(NamedTuple):
    """An engine that could compute the prompt for another."""

    cost: float
    name: str
    engine: EngineState
    found: Estimate
    compute_s: float
    """Without what a further copy is worth."""


class _Pair(NamedTuple):
    """The best split with one engine that answers."""

    cost: float
    prefill: _Prefill
    way: Way


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with all its inputs, to be logged and replayed. Encode it before the fleet's counters change."""

    request: Request
    engines: list[EngineState]
    helpers: list[EngineState] = []
    knowledge: Knowledge
    now_s: float
    policy: AnyPolicy
    contract: Contract = ""
    decision: Decision


def replay(record: Record) -> Decision:
    """Decide again; the result equals `record.decision` unless the code has changed since."""
    return decide(
        record.request,
        record.engines,
        record.helpers,
        record.knowledge,
        record.now_s,
        policy=record.policy,
        contract=record.contract,
    )


def decide(
    request: Request,
    engines: list[EngineState],
    helpers: Sequence[EngineState],
    knowledge: Knowledge,
    now_s: float,
    *,
    policy: Policy,
    contract: Contract,
) -> Decision:
    """As `choose`, with both ways. `engines` may answer, `helpers` only compute prompts. Raises as `choose`."""
    if not contract or not isinstance(policy, Auto) or not engines or request.tokens <= REST_TOKENS[contract]:
        return choose(request, engines, knowledge, now_s, policy=policy)
    view = viewed(request, engines, knowledge, now_s)
    held, spared = policy.replica(view)
    prefills: dict[str, list[_Prefill]] = {}
    for one in (*engines, *helpers):
        if one.role != "decode":
            prefills.setdefault(_place(contract, one), []).append(_prefill(policy, view, one, held, spared))
    best = {place: heapq.nsmallest(2, all_of, key=_rank) for place, all_of in prefills.items()}
    alone = [_alone(policy, view, one, held, spared) for one in engines]
    pairs = [_pair(policy, view, one, best.get(_place(contract, one), ()), contract) for one in engines]
    costs = [
        min(cost, pair.cost) if pair is not None else cost for cost, pair in zip(alone, pairs, strict=True)
    ]
    index, reason = pick(view, costs, policy.near_share)
    pair = pairs[index]
    splits = pair is not None and pair.cost < alone[index]

    def terms(at: int) -> dict[str, float]:
        other = pairs[at]
        both = {"alone_s": alone[at]} | ({"split_s": other.cost} if other is not None else {})
        return policy.terms(view, at) | both

    return Decision(
        policy=policy_name(policy),
        engine=engines[index].name,
        reason=reason,
        cost=costs[index],
        terms=terms(index),
        way=pair.way if pair is not None and splits else policy.way(view, index),
        prefill=Leg(engine=pair.prefill.name, way=pair.prefill.found.way)
        if pair is not None and splits
        else None,
        alternatives=[
            Alternative(engine=engines[at].name, cost=costs[at], terms=terms(at))
            for at in cheapest(view, costs, index)
        ],
        eligible=len(engines),
    )


def _rank(one: _Prefill) -> tuple[float, str]:
    return one.cost, one.name


def _prefill(policy: Auto, view: View, one: EngineState, held: int, spared: float) -> _Prefill:
    found = estimate(view, one)
    compute_s = found.compute_s - spared * max(0, held - found.cached_tokens) / one.prefill_tokens_s
    cost = found.queue_s + found.load_s + compute_s
    cost += policy.decode_share * one.running * compute_s + LATE * _others_late_s(view, one, found.compute_s)
    if view.request.within_s:
        cost += LATE * max(0.0, found.ttft_s - view.request.within_s)
    return _Prefill(cost, one.name, one, found, compute_s)


def _alone(policy: Auto, view: View, one: EngineState, held: int, spared: float) -> float:
    found = estimate(view, one)
    spared_s = spared * max(0, held - found.cached_tokens) / one.prefill_tokens_s
    answer = _answer(policy, view, one, found.compute_s, found.ttft_s)
    return found.ttft_s - spared_s + policy.decode_share * one.running * (found.compute_s - spared_s) + answer


def _pair(
    policy: Auto, view: View, one: EngineState, prefills: Sequence[_Prefill], contract: Contract
) -> _Pair | None:
    prefill = next((p for p in prefills if may_hand_over(contract, p.engine, one)), None)
    n, own = view.request.tokens, estimate(view, one)
    rest = min(n, REST_TOKENS[contract])
    lacks = n - rest - own.cached_tokens
    if prefill is None or lacks <= 0:
        return None
    path = one.paths.get("l1", _NO_PATH)
    load_s = path.latency_s + (path.queued_tokens + lacks) / path.tokens_s
    rest_s, ready_s = rest / one.prefill_tokens_s, prefill.found.ttft_s
    ttft_s = max(ready_s, own.queue_s) + HANDOVER_S + load_s + rest_s
    others_s = prefill.engine.running * prefill.compute_s + one.running * rest_s
    cost = ttft_s - (prefill.found.compute_s - prefill.compute_s) + policy.decode_share * others_s
    cost += LATE * _others_late_s(view, prefill.engine, prefill.found.compute_s)
    cost += _answer(policy, view, one, rest_s, ttft_s)
    way = Way(cached_tokens=n - rest, tier="l1", load_tokens=lacks, load_s=load_s, ttft_s=ttft_s)
    return _Pair(cost, prefill, way)


def _answer(policy: Auto, view: View, one: EngineState, prompt_s: float, ttft_s: float) -> float:
    """What the answer costs, and what is late of it and of those beside it, at an engine that computes so long."""
    request = view.request
    token_s = one.token_s / (1.0 - one.prompt_share(view.now_s, prompt_s))
    late_s = max(0.0, ttft_s - request.within_s) if request.within_s else 0.0
    if request.token_within_s:
        late_s += request.answer_tokens * max(0.0, token_s - request.token_within_s)
    late_s += _others_late_s(view, one, prompt_s)
    return policy.decode_share * request.answer_tokens * token_s + LATE * late_s


def _others_late_s(view: View, one: EngineState, prompt_s: float) -> float:
    """By how much more the answers at an engine miss their classes if it computes so long, in seconds of all."""
    if not one.limited:
        return 0.0
    limit_s = one.limits_s / one.limited
    before, after = (one.token_s / (1.0 - one.prompt_share(view.now_s, more)) for more in (0.0, prompt_s))
    missed_s = max(0.0, after - limit_s) - max(0.0, before - limit_s)
    return one.limited * view.request.answer_tokens * missed_s
