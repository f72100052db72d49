"""Whether one engine should compute a prompt and another one answer it: `auto`'s cost with both ways in it.

For an engine D that answers, and P, which may compute for it:

    alone   TTFT(D) + DECODE_SHARE · (o · t(D) + R_run(D) · u/μ) + MISSED_S · misses
    split   max(TTFT(P), Q(D)) + HANDOVER_S + load + rest/μ
            + DECODE_SHARE · (o · t(D) + R_run(P) · u/μ(P) + R_run(D) · rest/μ) + MISSED_S · misses

t(e): seconds of an answer's token at e, longer by the share of its time in which e computes prompts.  So prompts gather
where few answer, and answers where few prompts are computed.

Classes of service count by the number of requests that are expected to miss them: the request itself, by how likely its
first token is to be late and its answer to be stalled, and those in flight beside the prompt, each as if it had the
mean of their limits, by how much likelier it becomes.  Stalls are what tells the engines apart: a few in a short answer
exceed a limit that the mean time keeps.

A request is split iff that costs less.  The best two P of each instance, and of all, are enough: what P costs does not
depend on D.  Between two hosts the transfer adds what of it is not done while the prompt is computed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.choose import (
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
    Tier,
    Way,
)

HANDOVER_S = 0.03
"""From the last step of the engine that computes to the load of the other: an answer of the server and 1.5 steps."""
MISSED_S = 1_000.0
"""What a request that misses its class costs: more than anything else does."""
LATE_DOUBT, SLOW_DOUBT = 0.4, 0.1
"""Standard deviations of a first token's time and of a token's, beside the class's limits.  The first is large on
purpose: a queue that ends just within the limit makes all that come next late."""
REST_TOKENS = {"kvstrata": 256, "nixl": 1}
"""What the engine that answers computes itself at most, by contract: the rest of a chunk, or the last token."""
NOT_HIDDEN = 0.2
"""The share of a transfer between two hosts that is not done while the prompt is computed."""
_NO_PATH = LoadPath(latency_s=0.0, tokens_s=1.0)


def may_hand_over(contract: Contract, prefill: EngineState, decode: EngineState) -> bool:
    """Whether one engine can compute a prompt for the other."""
    if prefill.name == decode.name or prefill.role == "decode" or decode.role == "prefill":
        return False
    if contract != "kvstrata":
        return True
    known = bool(prefill.instance and decode.instance)
    return known and (prefill.instance == decode.instance or "peer" in decode.paths)


class _Prefill(NamedTuple):
    """An engine that could compute the prompt for another."""

    cost: float
    name: str
    engine: EngineState
    found: Estimate
    compute_s: float
    """Without what a further copy is worth."""
    missed: float
    """Answers beside it that are expected to miss their classes for it."""


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
    prefills: dict[str, list[_Prefill]] = {"": []}
    ways = {one.name: estimate(view, one) for one in (*engines, *helpers)}
    for one in (*engines, *helpers):
        if one.role != "decode":
            prefills[""].append(_prefill(policy, view, one, ways[one.name], held, spared))
            if one.instance:
                prefills.setdefault(one.instance, []).append(prefills[""][-1])
    best = {place: heapq.nsmallest(2, all_of, key=_rank) for place, all_of in prefills.items()}
    alone = [_alone(policy, view, one, ways[one.name], held, spared) for one in engines]
    pairs = [
        _best_pair(policy, view, one, ways[one.name], best, contract, most)
        for one, most in zip(engines, alone, strict=True)
    ]
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


def _prefill(
    policy: Auto, view: View, one: EngineState, found: Estimate, held: int, spared: float
) -> _Prefill:
    compute_s = found.compute_s - spared * max(0, held - found.cached_tokens) / one.prefill_tokens_s
    cost = found.queue_s + found.load_s + compute_s
    cost += policy.decode_share * one.running * compute_s
    missed = _others_missed(view, one, found.compute_s, answers=False)
    cost += MISSED_S * (missed + _late(view, found.ttft_s))
    return _Prefill(cost, one.name, one, found, compute_s, missed)


def _alone(policy: Auto, view: View, one: EngineState, found: Estimate, held: int, spared: float) -> float:
    spared_s = spared * max(0, held - found.cached_tokens) / one.prefill_tokens_s
    answer = _answer(policy, view, one, found.compute_s, found.ttft_s)
    return found.ttft_s - spared_s + policy.decode_share * one.running * (found.compute_s - spared_s) + answer


def _best_pair(
    policy: Auto,
    view: View,
    one: EngineState,
    own: Estimate,
    best: Mapping[str, Sequence[_Prefill]],
    contract: Contract,
    most: float,
) -> _Pair | None:
    """The best split with an engine that answers: the other one is at its host, or the best of all.

    None: there is none that costs less than `most`.
    """
    places = dict.fromkeys((one.instance if contract == "kvstrata" else "", ""))
    able = (
        next((p for p in best.get(at, ()) if may_hand_over(contract, p.engine, one)), None) for at in places
    )
    found = {p.name: p for p in able if p is not None and p.cost + HANDOVER_S < most}  # a bound of its cost
    pairs = [_pair(policy, view, one, own, prefill, contract) for prefill in found.values()]
    return min((pair for pair in pairs if pair is not None), key=lambda pair: pair.cost, default=None)


def _pair(
    policy: Auto, view: View, one: EngineState, own: Estimate, prefill: _Prefill, contract: Contract
) -> _Pair | None:
    n = view.request.tokens
    rest = min(n, REST_TOKENS[contract])
    lacks = n - rest - own.cached_tokens
    if lacks <= 0:
        return None
    path = one.paths.get("l1", _NO_PATH)
    load_s = path.latency_s + (path.queued_tokens + lacks) / path.tokens_s
    tier: Tier = "l1"
    if contract == "kvstrata" and prefill.engine.instance != one.instance:
        tier, link = "peer", one.paths["peer"]
        load_s += link.latency_s - path.latency_s
        load_s += (link.queued_tokens + NOT_HIDDEN * lacks) * (1 / link.tokens_s - 1 / path.tokens_s)
    rest_s, ready_s = rest / one.prefill_tokens_s, prefill.found.ttft_s
    ttft_s = max(ready_s, own.queue_s) + HANDOVER_S + load_s + rest_s
    others_s = prefill.engine.running * prefill.compute_s + one.running * rest_s
    cost = ttft_s - (prefill.found.compute_s - prefill.compute_s) + policy.decode_share * others_s
    cost += MISSED_S * prefill.missed
    cost += _answer(policy, view, one, rest_s, ttft_s)
    way = Way(cached_tokens=n - rest, tier=tier, load_tokens=lacks, load_s=load_s, ttft_s=ttft_s)
    return _Pair(cost, prefill, way)


def _answer(policy: Auto, view: View, one: EngineState, prompt_s: float, ttft_s: float) -> float:
    """What the answer costs, and what misses its class at an engine that computes so long."""
    request = view.request
    token_s = one.token_s / (1.0 - one.prompt_share(view.now_s))
    missed = _late(view, ttft_s)
    if request.token_within_s:
        missed = 1.0 - (1.0 - missed) * (
            1.0 - _slow(view, one, request.short_tokens, request.token_within_s, 0.0)
        )
    missed += _others_missed(view, one, prompt_s, answers=True)
    return policy.decode_share * request.answer_tokens * token_s + MISSED_S * missed


def _late(view: View, ttft_s: float) -> float:
    """How likely the first token is to come later than its class allows."""
    within_s = view.request.within_s
    return _above((within_s - ttft_s) / (LATE_DOUBT * within_s)) if within_s else 0.0


def _others_missed(view: View, one: EngineState, prompt_s: float, *, answers: bool) -> float:
    """How many more answers at an engine are expected to miss their classes if it computes so long.

    `answers`: it also answers this request, so that each token takes longer.
    """
    if not one.limited:
        return 0.0
    limit_s, tokens = one.limits_s / one.limited, view.request.answer_tokens
    each_s = one.token_each_s
    with_it = _slow(view, one, tokens, limit_s, prompt_s, 0.0 if answers else each_s)
    return one.limited * (with_it - _slow(view, one, tokens, limit_s, 0.0, each_s))


def _slow(
    view: View, one: EngineState, tokens: float, limit_s: float, more_s: float = 0.0, less_s: float = 0.0
) -> float:
    """How likely an answer of so many tokens is to take longer for each than `limit_s`.

    `more_s`: seconds for which it is stalled beside what stalls it usually; `less_s`: of each token, since this request
    is answered elsewhere.
    Prompts of unlike lengths stall it at random times: their sum is taken to be normal.
    """
    if not tokens:
        return 0.0  # nothing is known of answers yet
    share = one.prompt_share(view.now_s)
    token_s = max(0.0, one.token_s - less_s)
    spare_s = tokens * (limit_s - token_s) - more_s
    mean_s = tokens * token_s * share / (1.0 - share)
    return _above(
        (spare_s - mean_s) / (SLOW_DOUBT * tokens * limit_s + math.sqrt(mean_s * one.prompt_size_s) + 1e-9)
    )


def _above(deviations: float) -> float:
    """The share of a normal distribution that lies so many deviations above its mean."""
    return 0.5 * math.erfc(deviations / math.sqrt(2.0))
