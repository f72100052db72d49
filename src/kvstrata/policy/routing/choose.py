"""The decision itself: `choose` is a pure function, and `replay` repeats it from a record.

1. Equal inputs give equal decisions, in any order of the engines.
2. Only healthy engines are chosen; without one the decision names no engine.
3. Near-ties are decided by the rendezvous hash of the request's `affinity`, or of its id, over the engines' names.
4. Nothing is read but the arguments, and nothing is changed: whoever dispatches the request reserves its tokens.
"""

from __future__ import annotations

import heapq
import math

import msgspec

from kvstrata.native.routing import lowest
from kvstrata.policy.routing.baselines import LeastLoaded, RoundRobin, Session
from kvstrata.policy.routing.dynamo import Dynamo
from kvstrata.policy.routing.hashing import draw, first
from kvstrata.policy.routing.interface import Policy, View
from kvstrata.policy.routing.llmd import Llmd
from kvstrata.policy.routing.lmetric import Lmetric
from kvstrata.policy.routing.model import Alternative, Copy, Decision, Fleet, Knowledge, Reason, Request
from kvstrata.policy.routing.mooncake_conductor import MooncakeConductor
from kvstrata.policy.routing.smg import Smg
from kvstrata.policy.routing.ttft import Ttft

ALTERNATIVES = 3
"""Engines that a decision names beside the chosen one."""

AnyPolicy = Ttft | LeastLoaded | RoundRobin | Session | Dynamo | Lmetric | Llmd | Smg | MooncakeConductor

POLICIES: dict[str, type[AnyPolicy]] = {
    "ttft": Ttft,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "session": Session,
    "dynamo": Dynamo,
    "lmetric": Lmetric,
    "llmd": Llmd,
    "smg": Smg,
    "mooncake_conductor": MooncakeConductor,
}
"""All policies by the names under which they are configured and recorded."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with all its inputs, to be logged and replayed. Encode it before the fleet's counters change."""

    request: Request
    fleet: Fleet
    knowledge: Knowledge
    now_s: float
    policy: AnyPolicy
    seed: int = 0
    decision: Decision


def replay(record: Record) -> Decision:
    """Decide again; the result equals `record.decision` unless the code has changed since."""
    return choose(
        record.request, record.fleet, record.knowledge, record.now_s, policy=record.policy, seed=record.seed
    )


def choose(
    request: Request, fleet: Fleet, knowledge: Knowledge, now_s: float, *, policy: Policy, seed: int = 0
) -> Decision:
    """Return where the request goes. `seed` enters only draws of a policy with a temperature.

    Raises ValueError if the request has no tokens: it would cost nothing anywhere.
    """
    if request.tokens < 1:
        raise ValueError(f"request.tokens: {request.tokens} of request {request.id!r}; it must be at least 1")
    view = viewed(request, fleet, knowledge, now_s)
    unhealthy = len(fleet.engines) - len(view.engines)
    name = policy_name(policy)
    if not view.engines:
        return Decision(policy=name, engine="", reason="none_eligible", unhealthy=unhealthy)
    costs = policy.scores(view)
    near, below, tied = lowest(costs, ALTERNATIVES + 1, policy.near_share)
    index, reason = pick(view, costs, policy, near, seed)
    return Decision(
        policy=name,
        engine=view.engines[index].name,
        reason=reason,
        cost=costs[index],
        terms=policy.terms(view, index),
        way=policy.way(view, index),
        alternatives=rejected(view, costs, policy, index, below, tied),
        eligible=len(view.engines),
        unhealthy=unhealthy,
    )


def policy_name(policy: Policy) -> str:
    """Return the tag under which the policy is configured and recorded."""
    return str(policy.__struct_config__.tag)


def viewed(request: Request, fleet: Fleet, knowledge: Knowledge, now_s: float) -> View:
    """Return the inputs as policies see them; the order of copies and of engines decides nothing."""
    own: dict[str, list[Copy]] = {}
    shared: list[Copy] = []
    for copy in knowledge.copies:
        name = copy.engine
        if not name:
            shared.append(copy)
        elif name in own:
            own[name] = sorted([*own[name], copy], key=rank)
        else:
            own[name] = [copy]
    shared.sort(key=rank)
    engines = [engine for engine in fleet.engines if engine.healthy]
    return View(request, engines, own, shared, knowledge, now_s)


def rank(copy: Copy) -> tuple[object, ...]:
    """Return what orders copies, so that of two equally good ones always the same is taken."""
    return copy.tier, copy.tokens, copy.certainty, copy.age_s, copy.ready_at_s, copy.source


def pick(view: View, costs: list[float], policy: Policy, near: list[int], seed: int) -> tuple[int, Reason]:
    """Return the index of the chosen engine, and why; `near` are those of the lowest costs."""
    if len(costs) == 1:
        return 0, "only_eligible"
    temperature = policy.temperature
    if temperature > 0.0:
        return drawn(view, costs, temperature, draw(seed, view.request.id)), "drawn"
    if len(near) == 1:
        return near[0], "lowest_cost"
    key = view.request.affinity or view.request.id
    return near[first(key, [view.engines[index].name for index in near])], "near_tie"


def drawn(view: View, costs: list[float], temperature: float, sample: float) -> int:
    """Return an index by a softmax of the costs over their range, in the order of names; `sample` is in [0, 1)."""
    lowest, highest = min(costs), max(costs)
    order = sorted(range(len(costs)), key=lambda index: view.engines[index].name)
    range_ = (highest - lowest) * temperature
    weights = [math.exp((lowest - costs[index]) / range_) if range_ else 1.0 for index in order]
    left = sample * math.fsum(weights)
    for index, weight in zip(order, weights, strict=True):
        left -= weight
        if left < 0.0:
            return index
    return order[-1]


def rejected(
    view: View, costs: list[float], policy: Policy, chosen: int, below: list[int], tied: list[int]
) -> list[Alternative]:
    """Return the cheapest engines but the chosen one; equal costs in the order of names.

    `below`: the engines whose costs are below the `ALTERNATIVES + 1`-th lowest, and `tied` those that have it.
    """
    engines = view.engines
    found = sorted((costs[index], engines[index].name, index) for index in below if index != chosen)
    if len(found) < ALTERNATIVES:
        # A whole idle fleet may tie here, so names are compared, not a tuple for each engine.
        names = [engines[index].name for index in tied]
        first_names = heapq.nsmallest(ALTERNATIVES + 1 - len(found), names)
        places = [tied[names.index(name)] for name in first_names]
        found += [(costs[index], engines[index].name, index) for index in places if index != chosen]
    return [
        Alternative(engine=name, cost=cost, terms=policy.terms(view, index))
        for cost, name, index in found[:ALTERNATIVES]
    ]
