"""The decision: the policies, `choose`, which is a pure function over the fleet's state, and `replay` from a record.

1. Equal inputs give equal decisions, in any order of the engines.
2. Near-ties are decided by a hash of the request's id.
3. `choose` reads only its arguments and changes nothing; the caller counts the request at the engine when it sends it.
4. The chosen engine's cost is exact; an engine that cannot win has only a lower bound of its cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.model import (
    Alternative,
    Decision,
    EngineState,
    Knowledge,
    Request,
)
from kvstrata.gateway.routing.price import (
    REST_TOKENS,
    SHARE,
    Explained,
    View,
    cheapest,
    ranked_first,
)

ALTERNATIVES = 3
"""Maximum number of engines that a decision lists besides the chosen one."""


class Policy(NamedTuple):
    """A rule that compares engines."""

    name: str
    scores: Callable[[View], list[float]]
    """The cost of the request at each engine of the view, in the view's order; lower bounds except for the lowest."""
    explained: Callable[[View, int], Explained] = lambda view, index: Explained({})
    """The parts of the cost at one engine."""
    share: float = 0.0
    """Weight of answers' seconds in the cost (price.py)."""
    near_share: float = 0.0
    """Costs at most this share above the lowest are a near-tie; 0: only equal costs are."""
    splits: bool = False
    """Whether another engine may compute the prompt if that costs less."""


def _least_loaded(view: View) -> list[float]:
    return [float(engine.requests) for engine in view.engines]


def _round_robin(view: View) -> list[float]:
    """Each engine in turn, ordered by name; the request's number gives the turn."""
    names = sorted(engine.name for engine in view.engines)
    turn = names[view.request.number % len(names)]
    return [0.0 if engine.name == turn else 1.0 for engine in view.engines]


def _session(view: View) -> list[float]:
    """All requests of a session at one engine, by rendezvous hash; without a session, the fewest requests in flight."""
    if not view.request.session:
        return _least_loaded(view)
    chosen = ranked_first(view.request.session, [engine.name for engine in view.engines])
    return [0.0 if index == chosen else 1.0 for index in range(len(view.engines))]


# The time that the request costs all requests until its last token.  The answer's part is large and nearly the same at
# all engines, so one per cent of the total may be the whole rest: only equal costs are a tie.
AUTO = Policy("auto", View.costs, View.explained, share=SHARE, splits=True)
# The expected time to first token.  Differences below one per cent are less than the error of the measured rates.
TTFT = Policy("ttft", View.costs, View.explained, near_share=0.01, splits=True)
POLICIES = {
    one.name: one
    for one in (
        AUTO,
        TTFT,
        Policy("least_loaded", _least_loaded),
        Policy("round_robin", _round_robin),
        Policy("session", _session),
    )
}
"""All policies, by their names in settings and records."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with all its inputs, for replay. It must be encoded before the fleet's counters change."""

    request: Request
    engines: list[EngineState]
    helpers: list[EngineState] = []
    knowledge: Knowledge
    now_s: float
    policy: str
    contract: Contract = ""
    decision: Decision


def replay(record: Record) -> Decision:
    """Decide again from a record; the result equals `record.decision` unless the code has changed since."""
    inputs = record.request, record.engines, record.knowledge, record.now_s
    return choose(*inputs, policy=POLICIES[record.policy], helpers=record.helpers, contract=record.contract)


def choose(
    request: Request,
    engines: list[EngineState],
    knowledge: Knowledge,
    now_s: float,
    *,
    policy: Policy,
    helpers: Sequence[EngineState] = (),
    contract: Contract = "",
) -> Decision:
    """Choose the engine of a request. `engines`: those that serve its model, with different names.

    `contract`: how one engine, or one of `helpers`, may compute the prompt for another; empty: no split.
    Raises ValueError if the request has no tokens, since its cost would be 0 everywhere.
    """
    if request.tokens < 1:
        raise ValueError(f"request.tokens: must be at least 1, found {request.tokens} ({request.id!r})")
    if not engines:
        return Decision(policy=policy.name, engine="", reason="none_eligible")
    if contract and not (policy.splits and request.tokens > REST_TOKENS[contract]):
        contract = ""
    view = View(request, engines, knowledge, now_s, policy.share, helpers, contract, policy.near_share)
    costs = policy.scores(view)
    index, is_tie = cheapest(costs, engines, request.id, policy.near_share)
    found = policy.explained(view, index)
    limit = heapq.nsmallest(ALTERNATIVES + 1, costs)[-1]
    others = [(cost, engines[at].name) for at, cost in enumerate(costs) if cost <= limit and at != index]
    return Decision(
        policy=policy.name,
        engine=engines[index].name,
        reason="only_eligible" if len(engines) == 1 else "near_tie" if is_tie else "lowest_cost",
        cost=costs[index],
        terms=found.terms,
        way=found.way,
        prefill=found.leg,
        alternatives=[
            Alternative(engine=other, cost=cost) for cost, other in heapq.nsmallest(ALTERNATIVES, others)
        ],
        eligible=len(engines),
    )
