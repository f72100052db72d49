"""The decision: the policies, `choose`, which is a pure function over the fleet's state, and `replay` from a record.

1. Equal inputs give equal decisions, in any order of the engines.
2. Near-ties are decided by a hash of the request's id.
3. Nothing is read but the arguments, and nothing is changed: the caller that sends the request reserves its tokens.
4. Engines that cannot win are priced by a lower bound of their cost only, and the chosen one exactly.

A policy is a frozen Struct that is tagged with its name, so that a record names it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import msgspec

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.model import (
    Alternative,
    Decision,
    EngineState,
    Knowledge,
    Leg,
    Request,
    Way,
)
from kvstrata.gateway.routing.price import (
    REST_TOKENS,
    SHARE,
    View,
    cheapest,
    ranked_first,
)

ALTERNATIVES = 3
"""Engines that a decision names beside the chosen one."""


class Explained(NamedTuple):
    """What stands behind a cost."""

    terms: dict[str, float]
    """Its parts, to be read by people."""
    way: Way | None = None
    """How the engine should get the prefix, if the policy plans that."""
    leg: Leg | None = None
    """The other engine that should compute the prompt, if there is one."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all policies."""

    near_share: ClassVar[float] = 0.0
    """Costs at most this share above the lowest are a near-tie; 0: only equal costs are."""
    share: ClassVar[float] = 0.0
    """Of the seconds that answers take, see price.py."""
    splits: ClassVar[bool] = False
    """Whether it may let another engine compute the prompt."""

    def scores(self, view: View) -> list[float]:
        """Return what it costs at least at each engine of the view, in its order."""
        raise NotImplementedError

    def explained(self, view: View, index: int) -> Explained:
        """Return what stands behind the cost at one engine; here it says all."""
        return Explained({})


class Auto(Policy, frozen=True, kw_only=True, tag="auto", tag_field="policy"):
    """Our policy: what the request costs everybody until its last token, see price.py; all parts are measured.

    A request is split iff that costs less.
    """

    share: ClassVar[float] = SHARE
    """The answer's part is large and nearly the same everywhere: one per cent of the whole may be all of the rest, so
    only equal costs are a tie."""
    splits: ClassVar[bool] = True

    def scores(self, view: View) -> list[float]:
        """Return the seconds at each engine."""
        return view.costs()

    def explained(self, view: View, index: int) -> Explained:
        """Return the seconds of each term and the tokens behind them, the way, and the other engine of a split."""
        return Explained(*view.explained(index))


class Ttft(Auto, frozen=True, kw_only=True, tag="ttft", tag_field="policy"):
    """The engine where the first token comes soonest: `cost = TTFT`, see price.py."""

    near_share: ClassVar[float] = 0.01
    """Rates are not known to within one per cent."""
    share: ClassVar[float] = 0.0


class LeastLoaded(Policy, frozen=True, kw_only=True, tag="least_loaded", tag_field="policy"):
    """The engine with the fewest requests in flight."""

    def scores(self, view: View) -> list[float]:
        """Return the requests."""
        return [float(engine.requests) for engine in view.engines]


class RoundRobin(Policy, frozen=True, kw_only=True, tag="round_robin", tag_field="policy"):
    """The engines in turn, in the order of their names, by the request's number."""

    def scores(self, view: View) -> list[float]:
        """Return 0 for the engine whose turn it is, 1 for the others."""
        names = sorted(engine.name for engine in view.engines)
        turn = names[view.request.number % len(names)]
        return [0.0 if engine.name == turn else 1.0 for engine in view.engines]


class Session(LeastLoaded, frozen=True, kw_only=True, tag="session", tag_field="policy"):
    """Every request of a session at one engine, by rendezvous hash; without a session, the least requests in flight."""

    def scores(self, view: View) -> list[float]:
        """Return 0 for the session's engine, 1 for the others."""
        if not view.request.session:
            return LeastLoaded.scores(self, view)
        chosen = ranked_first(view.request.session, [engine.name for engine in view.engines])
        return [0.0 if index == chosen else 1.0 for index in range(len(view.engines))]


AnyPolicy = Auto | Ttft | LeastLoaded | RoundRobin | Session

POLICIES: dict[str, type[AnyPolicy]] = {
    str(one.__struct_config__.tag): one for one in (Auto, Ttft, LeastLoaded, RoundRobin, Session)
}
"""All policies by the names under which they are configured and recorded."""


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
    inputs = record.request, record.engines, record.knowledge, record.now_s
    return choose(*inputs, policy=record.policy, helpers=record.helpers, contract=record.contract)


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
    """Return where the request goes; `engines` serve its model, and have different names.

    `contract`: by which one of them, or of the `helpers`, may compute the prompt for another; empty: none may.
    Raises ValueError if the request has no tokens: it would cost nothing anywhere.
    """
    if request.tokens < 1:
        raise ValueError(f"request.tokens: {request.tokens} of request {request.id!r}; it must be at least 1")
    name = policy_name(policy)
    if not engines:
        return Decision(policy=name, engine="", reason="none_eligible")
    if contract and not (policy.splits and request.tokens > REST_TOKENS[contract]):
        contract = ""
    view = View(request, engines, knowledge, now_s, policy.share, helpers, contract, policy.near_share)
    costs = policy.scores(view)
    index, is_tie = cheapest(costs, engines, request.id, policy.near_share)
    found = policy.explained(view, index)
    limit = heapq.nsmallest(ALTERNATIVES + 1, costs)[-1]
    others = [(cost, engines[at].name) for at, cost in enumerate(costs) if cost <= limit and at != index]
    return Decision(
        policy=name,
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


def policy_name(policy: Policy) -> str:
    """Return the tag under which the policy is configured and recorded."""
    return str(policy.__struct_config__.tag)
