"""The decision itself: `choose` is a pure function, and `replay` repeats it from a record.

1. Equal inputs give equal decisions, in any order of the engines.
2. Only healthy engines are chosen; without one the decision names no engine.
3. Near-ties are decided by the rendezvous hash of the request's id over the engines' names.
4. Nothing is read but the arguments, and nothing is changed: the caller that sends the request reserves its tokens.
"""

from __future__ import annotations

import heapq

import msgspec

from kvstrata.gateway.routing.model import (
    Alternative,
    Copy,
    Decision,
    EngineState,
    Knowledge,
    Reason,
    Request,
)
from kvstrata.gateway.routing.policies import AnyPolicy, Policy, View, ranked_first

ALTERNATIVES = 3
"""Engines that a decision names beside the chosen one."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with all its inputs, to be logged and replayed. Encode it before the fleet's counters change."""

    request: Request
    engines: list[EngineState]
    knowledge: Knowledge
    now_s: float
    policy: AnyPolicy
    decision: Decision


def replay(record: Record) -> Decision:
    """Decide again; the result equals `record.decision` unless the code has changed since."""
    return choose(record.request, record.engines, record.knowledge, record.now_s, policy=record.policy)


def choose(
    request: Request, engines: list[EngineState], knowledge: Knowledge, now_s: float, *, policy: Policy
) -> Decision:
    """Return where the request goes; `engines` serve its model, and have different names.

    Raises ValueError if the request has no tokens: it would cost nothing anywhere.
    """
    if request.tokens < 1:
        raise ValueError(f"request.tokens: {request.tokens} of request {request.id!r}; it must be at least 1")
    view = viewed(request, engines, knowledge, now_s)
    unhealthy = len(engines) - len(view.engines)
    name = policy_name(policy)
    if not view.engines:
        return Decision(policy=name, engine="", reason="none_eligible", unhealthy=unhealthy)
    costs = policy.scores(view)
    index, reason = pick(view, costs, policy.near_share)
    names = [engine.name for engine in view.engines]
    cheapest = heapq.nsmallest(ALTERNATIVES + 1, zip(costs, names, range(len(costs)), strict=True))
    others = [one for one in cheapest if one[2] != index][:ALTERNATIVES]
    return Decision(
        policy=name,
        engine=names[index],
        reason=reason,
        cost=costs[index],
        terms=policy.terms(view, index),
        way=policy.way(view, index),
        alternatives=[
            Alternative(engine=other, cost=cost, terms=policy.terms(view, place))
            for cost, other, place in others
        ],
        eligible=len(view.engines),
        unhealthy=unhealthy,
    )


def policy_name(policy: Policy) -> str:
    """Return the tag under which the policy is configured and recorded."""
    return str(policy.__struct_config__.tag)


def viewed(request: Request, engines: list[EngineState], knowledge: Knowledge, now_s: float) -> View:
    """Return the inputs as policies see them; the order of copies and of engines decides nothing."""
    own: dict[str, list[Copy]] = {}
    shared: list[Copy] = []
    for copy in sorted(knowledge.copies, key=_rank):
        (own.setdefault(copy.engine, []) if copy.engine else shared).append(copy)
    return View(request, [engine for engine in engines if engine.healthy], own, shared, knowledge, now_s)


def _rank(copy: Copy) -> tuple[object, ...]:
    """Return what orders copies, so that of two equally good ones always the same is taken."""
    return copy.tier, copy.tokens, copy.certainty, copy.age_s, copy.ready_at_s, copy.source


def pick(view: View, costs: list[float], near_share: float) -> tuple[int, Reason]:
    """Return the index of the chosen engine, and why."""
    if len(costs) == 1:
        return 0, "only_eligible"
    lowest = min(costs)
    limit = lowest + abs(lowest) * near_share
    near = [index for index, cost in enumerate(costs) if cost <= limit]
    if len(near) == 1:
        return near[0], "lowest_cost"
    return near[ranked_first(view.request.id, [view.engines[index].name for index in near])], "near_tie"
