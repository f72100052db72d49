"""The decision: the policies, `choose`, which is a pure function over the fleet's state, and `replay` from a record.

1. Equal inputs give equal decisions, in any order of the engines.
2. Near-ties are decided by the rendezvous hash of the request's id over the engines' names.
3. Nothing is read but the arguments, and nothing is changed: the caller that sends the request reserves its tokens.
4. Engines that cannot win are priced by a lower bound of their cost only.

A policy is a frozen Struct that is tagged with its name, so that a record names it.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import math
from typing import ClassVar, NamedTuple

import msgspec

from kvstrata.gateway.routing.model import (
    Alternative,
    Copy,
    Decision,
    EngineState,
    Knowledge,
    Reason,
    Request,
    Way,
)

ALTERNATIVES = 3
"""Engines that a decision names beside the chosen one."""
RANK_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""
MAX_NAMES = 1 << 16
DECODE_SHARE = 0.125
"""Of the seconds that answers take, beside those until first tokens. For the last token it hardly matters between 1/8
and 1/2; first tokens come the later the more it is."""
LATE = 1_000.0
"""What a second later than a class of service allows costs: more than anything else does."""
UNCONFIRMED_S = 10.0
"""For so long a prompt counts as cached where it was computed although no event has told of it."""


class View(NamedTuple):
    """One decision's inputs, sorted by use. Built once for each decision; policies change nothing in it."""

    request: Request
    engines: list[EngineState]
    own: dict[str, list[Copy]]
    """Copies of one engine, by its name, without those of `Knowledge.cached`."""
    shared: list[Copy]
    """Copies that any engine with a path can have."""
    knowledge: Knowledge
    now_s: float


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all policies."""

    near_share: ClassVar[float] = 0.0
    """Costs at most this share above the lowest are a near-tie; 0: only equal costs are."""

    def scores(self, view: View) -> list[float]:
        """Return the cost at each engine of the view, in its order; finite, lower is better.

        Of those that are neither near the lowest nor among the ALTERNATIVES after it a lower bound will do.
        """
        raise NotImplementedError

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the parts of the cost at one engine, to be read by people."""
        raise NotImplementedError

    def way(self, view: View, index: int) -> Way | None:
        """Return how this engine should get the prefix, if the policy plans that."""
        return None


class Estimate(NamedTuple):
    """What a request costs at one engine by its best way, in seconds."""

    queue_s: float
    load_s: float
    compute_s: float
    copy: Copy | None
    """What the way begins with; None: what the engine's cache has for certain."""
    cached_tokens: int
    load_tokens: int

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.load_s + self.compute_s

    @property
    def way(self) -> Way:
        """The way, as decisions name it."""
        return Way(
            cached_tokens=self.cached_tokens,
            tier=self.copy.tier if self.copy else "l0",
            source=self.copy.source if self.copy else "",
            load_tokens=self.load_tokens,
            load_s=self.load_s,
            ttft_s=self.ttft_s,
        )


class Auto(Policy, frozen=True, kw_only=True, tag="auto", tag_field="policy"):
    """Our policy: what the request costs everybody until its last token, and not only itself until its first.

    For an engine with prefill rate mu, and a way of having h of n tokens, u = n - h of which are computed:

        TTFT = Q + x(h) + u / mu             Q: seconds of work before it; x: seconds to load what is not in its cache
        cost = TTFT + DECODE_SHARE · (o · (α + β · (R + 1)) + R_run · u / mu)

    o: expected tokens of the answer; α + β·R: the engine's seconds a token with R requests; R_run: its requests that
    have their first token, which wait while it computes u tokens.  Without these terms the engine that holds a
    popular prefix would get every request.

    The ways are the engine's own cache alone, or a load of a longer prefix from a tier that it has a path to.  A prefix
    counts by the probability that it is still there:

        exact          1
        degraded       exp(-age / block life)
        predicted      1, after the seconds until the request in flight has computed it
        unconfirmed    1 until UNCONFIRMED_S, then 0

    Replicas: u counts what lies before the end of the longest prefix that any engine has by 1 / (1 + k / N), where k
    requests in flight begin with it at N engines: another copy of it serves the next ones.

    All parts are seconds and measured.  What the request's class of service does not allow counts first, by LATE.
    """

    decode_share: ClassVar[float] = DECODE_SHARE
    """The answer's part is large and nearly the same everywhere: one per cent of the whole may be all of the rest, so
    only equal costs are a tie."""

    def scores(self, view: View) -> list[float]:
        """Return the cost in seconds at each engine."""
        n, now_s, share = view.request.tokens, view.now_s, self.decode_share
        held, spared = self.replica(view)
        # An engine without copies computes what it has not cached for certain. One with copies computes that much at
        # least if the longest is loaded at once, so this is a bound of its cost.
        most = view.knowledge.cached
        if view.own:
            most = dict(most)
            for name, copies in view.own.items():
                most[name] = max(most.get(name, 0), *(copy.tokens for copy in copies))
        anywhere = 0
        if view.shared:
            anywhere = min(max(copy.tokens for copy in view.shared), n - 1)
            usual = n - anywhere - spared * max(0, held - anywhere)
            most = {name: tokens for name, tokens in most.items() if tokens > anywhere}
        else:
            usual = n - spared * held
        get = {
            name: n - has - (spared * (held - has) if held > has else 0.0)
            for name, tokens in most.items()
            for has in (tokens if tokens < n else n - 1,)
        }.get
        answer = share * view.request.answer_tokens
        costs = [
            (wait_s if (wait_s := one.drained_s - now_s) > one.behind_s else one.behind_s)
            + (now_s - one.late_s if now_s > one.late_s else 0.0)
            + get(one.name, usual) / one.prefill_tokens_s * (1.0 + share * one.running)
            + answer * one.token_s
            for one in view.engines
        ]
        if view.request.within_s or view.request.token_within_s:
            for at, one in enumerate(view.engines):
                compute_s = (n - min(most.get(one.name, anywhere), n - 1)) / one.prefill_tokens_s
                costs[at] += LATE * _late_s(view, one, one.queue_s(now_s) + compute_s)
        if view.own or view.shared:
            self._refine(view, costs, held, spared)
        return costs

    def _refine(self, view: View, costs: list[float], held: int, spared: float) -> None:
        """Replace the bounds of engines that have copies by costs, as far as they may matter."""
        everybody, own, near = bool(view.shared), view.own, 1.0 + self.near_share
        best, limit = [math.inf] * (ALTERNATIVES + 1), math.inf
        for index, engine in enumerate(view.engines):
            cost = costs[index]
            if cost <= limit:
                if everybody or engine.name in own:
                    cost = costs[index] = self._cost(view, engine, held, spared)[1]
                if cost < best[-1]:
                    best.pop()
                    bisect.insort(best, cost)
                    limit = max(best[-1], best[0] * near)

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the seconds of each term, and the tokens behind them."""
        engine = view.engines[index]
        estimate, _, spared_s, answer_s, others_s = self._cost(view, engine, *self.replica(view))
        terms: dict[str, float] = {
            "queue_s": estimate.queue_s,
            "load_s": estimate.load_s,
            "compute_s": estimate.compute_s,
            "cached_tokens": estimate.cached_tokens,
        }
        if late_s := _late_s(view, engine, estimate.ttft_s):
            terms["late_s"] = late_s
        more = {"answer_s": answer_s, "others_s": others_s, "spared_s": spared_s}
        return terms | more if self.decode_share else terms

    def way(self, view: View, index: int) -> Way:
        """Return the way behind the cost."""
        return estimate(view, view.engines[index]).way

    def replica(self, view: View) -> tuple[int, float]:
        """The longest prefix that any engine has, and the share of it that a further copy would not cost."""
        if not (self.decode_share and view.request.sharing):
            return 0, 0.0
        held = min(longest(view.knowledge), view.request.tokens - 1)
        return held, 1.0 - 1.0 / (1.0 + view.request.sharing / max(1, len(view.engines)))

    def _cost(
        self, view: View, engine: EngineState, held: int, spared: float
    ) -> tuple[Estimate, float, float, float, float]:
        """(The estimate, the cost, what a further copy is worth, the answer's part, the others' part), in seconds."""
        found = estimate(view, engine)
        spared_s = spared * max(0, held - found.cached_tokens) / engine.prefill_tokens_s
        answer_s = view.request.answer_tokens * engine.token_s
        others_s = engine.running * (found.compute_s - spared_s)
        cost_s = found.ttft_s - spared_s + self.decode_share * (answer_s + others_s)
        cost_s += LATE * _late_s(view, engine, found.ttft_s)
        return found, cost_s, spared_s, answer_s, others_s


class Ttft(Auto, frozen=True, kw_only=True, tag="ttft", tag_field="policy"):
    """The engine where the first token comes soonest: `cost = TTFT`, see Auto."""

    near_share: ClassVar[float] = 0.01
    """Rates are not known to within one per cent."""
    decode_share: ClassVar[float] = 0.0


class LeastLoaded(Policy, frozen=True, kw_only=True, tag="least_loaded", tag_field="policy"):
    """The engine with the fewest requests in flight."""

    def scores(self, view: View) -> list[float]:
        """Return the requests."""
        return [float(engine.requests) for engine in view.engines]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the requests."""
        return {"requests": view.engines[index].requests}


class RoundRobin(Policy, frozen=True, kw_only=True, tag="round_robin", tag_field="policy"):
    """The engines in turn, in the order of their names, by the request's number."""

    def scores(self, view: View) -> list[float]:
        """Return 0 for the engine whose turn it is, 1 for the others."""
        names = sorted(engine.name for engine in view.engines)
        turn = names[view.request.number % len(names)]
        return [0.0 if engine.name == turn else 1.0 for engine in view.engines]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the number that decided."""
        return {"number": view.request.number}


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
    "auto": Auto,
    "ttft": Ttft,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "session": Session,
}
"""All policies by the names under which they are configured and recorded."""


def choose(
    request: Request, engines: list[EngineState], knowledge: Knowledge, now_s: float, *, policy: Policy
) -> Decision:
    """Return where the request goes; `engines` serve its model, and have different names.

    Raises ValueError if the request has no tokens: it would cost nothing anywhere.
    """
    if request.tokens < 1:
        raise ValueError(f"request.tokens: {request.tokens} of request {request.id!r}; it must be at least 1")
    name = policy_name(policy)
    if not engines:
        return Decision(policy=name, engine="", reason="none_eligible")
    view = viewed(request, engines, knowledge, now_s)
    costs = policy.scores(view)
    index, reason = pick(view, costs, policy.near_share)
    others = cheapest(view, costs, index)
    return Decision(
        policy=name,
        engine=engines[index].name,
        reason=reason,
        cost=costs[index],
        terms=policy.terms(view, index),
        way=policy.way(view, index),
        alternatives=[
            Alternative(engine=engines[at].name, cost=costs[at], terms=policy.terms(view, at))
            for at in others
        ],
        eligible=len(engines),
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
    return View(request, engines, own, shared, knowledge, now_s)


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


def cheapest(view: View, costs: list[float], chosen: int) -> list[int]:
    """Return the indices of the cheapest engines but the chosen one; equal ones by their names."""
    left = [*costs[:chosen], *costs[chosen + 1 :]]
    limit = heapq.nsmallest(ALTERNATIVES, left)[-1] if left else -math.inf
    found = [at for at, cost in enumerate(costs) if cost <= limit and at != chosen]
    if len(found) > ALTERNATIVES:
        names = heapq.nsmallest(ALTERNATIVES, [view.engines[at].name for at in found if costs[at] == limit])
        found = [at for at in found if costs[at] < limit or view.engines[at].name in names]
    return sorted(found, key=lambda at: (costs[at], view.engines[at].name))[:ALTERNATIVES]


def estimate(view: View, engine: EngineState) -> Estimate:
    """Return the cheapest way at one engine; of equally cheap ones the first."""
    tokens, token_s, knowledge = view.request.tokens, 1.0 / engine.prefill_tokens_s, view.knowledge
    own = view.own.get(engine.name, ())
    most = tokens - 1  # at least one token is always computed
    queue_s = engine.queue_s(view.now_s)
    start_s = view.now_s + queue_s
    held = min(knowledge.cached.get(engine.name, 0), most)
    expected_held: float = held
    load_s, compute_s = 0.0, token_s * (tokens - held)
    copy, cached_tokens, load_tokens = None, held, 0
    # Its own cache first: a load brings only what is beyond that.
    for one in own:
        if one.tier != "l0":
            continue
        cached = min(one.tokens, most)
        expected = cached * _probability(one, knowledge)
        wait_s = max(0.0, one.ready_at_s - start_s) if one.certainty == "predicted" else 0.0
        if one.certainty != "predicted" and expected > expected_held:
            held, expected_held = cached, expected
        seconds = token_s * (tokens - expected)
        if wait_s + seconds < load_s + compute_s:
            load_s, compute_s = wait_s, seconds
            copy, cached_tokens = one, cached
    for one in (*own, *view.shared) if own else view.shared:
        path = engine.paths.get(one.tier)
        cached = min(one.tokens, most)
        if one.tier == "l0" or path is None or cached <= held:
            continue
        chance = 1.0 if one.certainty == "exact" else _probability(one, knowledge)
        wait_s = chance * (path.latency_s + (path.queued_tokens + cached - held) / path.tokens_s)
        if one.certainty == "predicted":
            wait_s += max(0.0, one.ready_at_s - start_s)
        seconds = token_s * (tokens - (chance * cached + (1.0 - chance) * expected_held))
        if wait_s + seconds < load_s + compute_s:
            load_s, compute_s = wait_s, seconds
            copy, cached_tokens, load_tokens = one, cached, cached - held
    return Estimate(queue_s, load_s, compute_s, copy, cached_tokens, load_tokens)


def _late_s(view: View, engine: EngineState, ttft_s: float) -> float:
    """Return by how much a request would miss its class of service, in seconds until its last token."""
    request = view.request
    late_s = max(0.0, ttft_s - request.within_s) if request.within_s else 0.0
    if request.token_within_s:
        late_s += request.answer_tokens * max(0.0, engine.token_s - request.token_within_s)
    return late_s


def longest(knowledge: Knowledge) -> int:
    """Return how many tokens of the prompt the engine has that has most of them in its own cache."""
    copies = (copy.tokens for copy in knowledge.copies if copy.tier == "l0")
    return max(*knowledge.cached.values(), *copies, 0, 0)


def _probability(copy: Copy, knowledge: Knowledge) -> float:
    """Return how likely it is that a copy can be used."""
    if copy.certainty == "degraded":
        return math.exp(-copy.age_s / knowledge.block_life_s)
    return 0.0 if copy.certainty == "unconfirmed" and copy.age_s > UNCONFIRMED_S else 1.0


class _Hashes(dict[str, int]):
    """64 bits of each engine's name, remembered."""

    def __missing__(self, name: str) -> int:
        if len(self) >= MAX_NAMES:
            self.clear()
        value = self[name] = _hashed(name)
        return value


_HASHES = _Hashes()


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def ranked_first(key: str, names: list[str]) -> int:
    """Return the index of the name that the key ranks first, for any order of the names, which must differ.

    A rendezvous hash: an engine that comes or goes moves only its keys.
    """
    hashes, hashed = _HASHES, _hashed(key)
    weights = [(hashed ^ hashes[name]) * RANK_MULTIPLIER & 0xFFFFFFFFFFFFFFFF for name in names]
    return weights.index(max(weights))
