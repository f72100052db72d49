"""What a request costs at an engine, in seconds, alone or with another engine that computes its prompt.

For an engine D that answers, with prefill rate μ, and a way of having h of n tokens, u = n - h of which are computed:

    alone   TTFT + SHARE · (o · t + R_run · u/μ) + MISSED_S · misses            TTFT = Q + x(h) + u/μ
    split   max(TTFT(P), Q) + HANDOVER_S + load + rest/μ
            + SHARE · (o · t + R_run(P) · u/μ(P) + R_run · rest/μ) + MISSED_S · misses

Q: seconds of work before it; x: seconds to load what is not in its cache; o: expected tokens of the answer; t: seconds
of an answer's token, once it is there; R_run: requests that have their first token, which wait while a prompt is
computed.  Without these terms the engine that holds a popular prefix would get every request.

The ways are the engine's own cache alone, or a load of a longer prefix from a tier that it has a path to.  A prefix
counts by the probability that it is still there:

    exact          1
    degraded       exp(-age / block life)
    predicted      1, after the seconds until the request in flight has computed it
    unconfirmed    1 until UNCONFIRMED_S, then 0

Replicas: u counts what lies before the end of the longest prefix that any engine has by 1 / (1 + k / N), where k
requests in flight begin with it at N engines: another copy of it serves the next ones.

Classes of service count by the number of requests that are expected to miss them: the request itself, by how likely its
first token is to be late and its answer to be stalled, and those in flight beside the prompt, each as if it had the
mean of their limits, by how much likelier it becomes.  Stalls are what tells the engines apart: a few in a short answer
exceed a limit that the mean time keeps.

The best P of D's instance and the best of all are enough: what P costs does not depend on D.  Between two hosts the
transfer adds what of it is not done while the prompt is computed.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.model import Copy, EngineState, Knowledge, LoadPath, Request, Tier, Way

SHARE = 0.125
"""Of the seconds that answers take, beside those until first tokens. For the last token it hardly matters between 1/8
and 1/2; first tokens come the later the more it is."""
MISSED_S = 5.0
"""What a request that misses its class costs.  Far more, and others are made to wait so long that fewer keep theirs."""
LATE_DOUBT, SLOW_DOUBT = 0.4, 0.1
"""Standard deviations of a first token's time and of a token's, beside the class's limits.  The first is large on
purpose: a queue that ends just within the limit makes all that come next late."""
UNCONFIRMED_S = 10.0
"""For so long a prompt counts as cached where it was computed although no event has told of it."""
HANDOVER_S = 0.03
"""From the last step of the engine that computes to the load of the other: an answer of the server and 1.5 steps."""
REST_TOKENS = {"kvstrata": 256, "nixl": 1, "mooncake": 1}
"""What the engine that answers computes itself at most, by contract: the rest of a chunk, or the last token."""
NOT_HIDDEN = 0.2
"""The share of a transfer between two hosts that is not done while the prompt is computed."""
LEGS = 3
"""Engines that are priced exactly as those that compute the prompt, by their lower bounds."""
RANK_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""
MAX_NAMES = 1 << 16
SQRT_HALF = math.sqrt(0.5)
_NO_PATH = LoadPath(latency_s=0.0, tokens_s=1.0)


class View(NamedTuple):
    """One decision's inputs, sorted by use. Built once for each decision; only what is remembered changes."""

    request: Request
    engines: list[EngineState]
    """They may answer."""
    everyone: list[EngineState]
    """The same, and then those that only compute prompts for others."""
    own: dict[str, list[Copy]]
    """Copies of one engine, by its name, without those of `Knowledge.cached`."""
    shared: list[Copy]
    """Copies that any engine with a path can have."""
    knowledge: Knowledge
    now_s: float
    contract: Contract
    """Empty: nothing is split."""
    share: float
    """Of the seconds that answers take."""
    held: int
    """The longest prefix that any engine has."""
    spared: float
    """The share of it that a further copy would not cost."""
    ways: dict[int, Estimate]
    """Remembered, as all that follows, by the index in `everyone`."""
    prices: dict[int, Price]
    legs: dict[str, list[Prefill]]
    """The best engines to compute the prompt, by instance; "": of all."""
    stalls: dict[str, float]
    prefills: dict[str, list[tuple[float, int]]]
    """Who may compute it and for how much at least, by instance; "": the cheapest of all."""


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


class Prefill(NamedTuple):
    """What it costs if an engine computes the prompt for another."""

    cost: float
    engine: EngineState
    found: Estimate
    spared_s: float
    """What a further copy is worth."""
    missed: float
    """Answers beside it that are expected to miss their classes for it."""


class Split(NamedTuple):
    """The best split with one engine that answers."""

    cost: float
    prefill: Prefill
    way: Way


class Price(NamedTuple):
    """What a request costs at one engine that answers it."""

    cost: float
    alone_s: float
    alone: Estimate
    spared_s: float
    """What a further copy is worth."""
    answer_s: float
    others_s: float
    missed: float
    split: Split | None
    """None: none costs less."""


def viewed(
    request: Request,
    engines: list[EngineState],
    knowledge: Knowledge,
    now_s: float,
    share: float = 0.0,
    helpers: Sequence[EngineState] = (),
    contract: Contract = "",
) -> View:
    """Return the inputs as policies see them; the order of copies and of engines decides nothing."""
    own: dict[str, list[Copy]] = {}
    shared: list[Copy] = []
    for copy in sorted(knowledge.copies, key=_rank):
        (own.setdefault(copy.engine, []) if copy.engine else shared).append(copy)
    held, spared = 0, 0.0
    if share and request.sharing:
        held = min(longest(knowledge), request.tokens - 1)
        spared = 1.0 - 1.0 / (1.0 + request.sharing / max(1, len(engines)))
    everyone = [*engines, *helpers] if contract else engines
    return View(
        request,
        engines,
        everyone,
        own,
        shared,
        knowledge,
        now_s,
        contract,
        share,
        held,
        spared,
        {},
        {},
        {},
        {},
        {},
    )


def _rank(copy: Copy) -> tuple[object, ...]:
    """Return what orders copies, so that of two equally good ones always the same is taken."""
    return copy.tier, copy.tokens, copy.certainty, copy.age_s, copy.ready_at_s, copy.source


def bounds(view: View) -> list[float]:
    """Return the least that it may cost to compute the prompt at each of `everyone`, without misses.

    Without copies and classes it is what it costs.
    """
    n, now_s, share = view.request.tokens, view.now_s, view.share
    held, spared = view.held, view.spared
    # An engine without copies computes what it has not cached for certain. One with copies computes that much at
    # least if the longest is loaded at once.
    most = view.knowledge.cached
    if view.own:
        most = dict(most)
        for name, copies in view.own.items():
            most[name] = max(most.get(name, 0), *(copy.tokens for copy in copies))
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
    return [
        (wait_s if (wait_s := one.drained_s - now_s) > one.behind_s else one.behind_s)
        + (now_s - one.late_s if now_s > one.late_s else 0.0)
        + get(one.name, usual) / one.prefill_tokens_s * (1.0 + share * one.running)
        for one in view.everyone
    ]


def price(view: View, at: int, most: float = math.inf) -> Price:
    """Return what the request costs at the engine with this index; of more than `most` a lower bound will do."""
    found = view.prices.get(at)
    if found is None:
        found = view.prices[at] = _priced(view, at, most)
    return found


def _priced(view: View, at: int, most: float) -> Price:
    engine, way = view.engines[at], _way(view, at)
    spared_s = _spared_s(view, engine, way)
    answer_s = view.request.answer_tokens * engine.token_s
    others_s = engine.running * (way.compute_s - spared_s)
    missed = _missed(view, engine, way.compute_s, way.ttft_s)
    alone_s = way.ttft_s - spared_s + view.share * (answer_s + others_s) + MISSED_S * missed
    split = _best_split(view, at, min(alone_s, most)) if view.contract else None
    cost = split.cost if split is not None else alone_s
    return Price(cost, alone_s, way, spared_s, answer_s, others_s, missed, split)


def _way(view: View, at: int) -> Estimate:
    found = view.ways.get(at)
    if found is None:
        found = view.ways[at] = estimate(view, view.everyone[at])
    return found


def _spared_s(view: View, engine: EngineState, way: Estimate) -> float:
    return view.spared * max(0, view.held - way.cached_tokens) / engine.prefill_tokens_s


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


def longest(knowledge: Knowledge) -> int:
    """Return how many tokens of the prompt the engine has that has most of them in its own cache."""
    copies = (copy.tokens for copy in knowledge.copies if copy.tier == "l0")
    return max(*knowledge.cached.values(), *copies, 0, 0)


def _probability(copy: Copy, knowledge: Knowledge) -> float:
    """Return how likely it is that a copy can be used."""
    if copy.certainty == "degraded":
        return math.exp(-copy.age_s / knowledge.block_life_s)
    return 0.0 if copy.certainty == "unconfirmed" and copy.age_s > UNCONFIRMED_S else 1.0


def may_hand_over(contract: Contract, prefill: EngineState, decode: EngineState) -> bool:
    """Whether one engine can compute a prompt for the other."""
    if prefill.name == decode.name or prefill.role == "decode" or decode.role == "prefill":
        return False
    if contract != "kvstrata":
        return True
    known = bool(prefill.instance and decode.instance)
    return known and (prefill.instance == decode.instance or "peer" in decode.paths)


def offer(view: View, bounds: Sequence[float]) -> float:
    """Note who may compute the prompt for another, and for how much at least; returns the least of all."""
    found: dict[str, list[tuple[float, int]]] = {"": []}
    able = [
        math.inf if one.role == "decode" else cost for cost, one in zip(bounds, view.everyone, strict=True)
    ]
    if view.contract == "kvstrata":
        for at, one in enumerate(view.everyone):
            if able[at] < math.inf:
                found.setdefault(one.instance, []).append((able[at], at))
    found[""] = [(able[at], at) for at in least(view, able, LEGS) if able[at] < math.inf]
    view.prefills.update(found)
    return min(able)


def _legs(view: View, place: str) -> list[Prefill]:
    """Return the two engines of an instance, or of all, that compute the prompt for the least."""
    found = view.legs.get(place)
    if found is None:
        ranked = view.prefills[place]
        if len(ranked) > LEGS:
            costs, ats = [cost for cost, _ in ranked], [at for _, at in ranked]
            ranked = [ranked[i] for i in least(view, costs, LEGS, ats)]
        priced = [_prefill(view, at) for _, at in ranked]
        found = view.legs[place] = sorted(priced, key=lambda leg: (leg.cost, leg.engine.name))[:2]
    return found


def _prefill(view: View, at: int) -> Prefill:
    one, way = view.everyone[at], _way(view, at)
    spared_s = _spared_s(view, one, way)
    missed = _others_missed(view, one, way.compute_s, answers=False) if one.limited else 0.0
    cost = way.ttft_s - spared_s + view.share * one.running * (way.compute_s - spared_s)
    cost += MISSED_S * (missed + _late(view.request.within_s, way.ttft_s))
    return Prefill(cost, one, way, spared_s, missed)


def _best_split(view: View, at: int, most: float) -> Split | None:
    """Return the best split with an engine that answers: the other one is at its instance, or the best of all.

    None: there is none that costs less than `most`.
    """
    one, best = view.engines[at], None
    least_s = HANDOVER_S + view.share * view.request.answer_tokens * one.token_s
    for place in dict.fromkeys((one.instance if view.contract == "kvstrata" else "", "")):
        if min(view.prefills.get(place, ()), default=(math.inf, 0))[0] + least_s >= most:
            continue
        able = (leg for leg in _legs(view, place) if may_hand_over(view.contract, leg.engine, one))
        leg = next(able, None)
        if leg is not None and leg.cost + least_s < most:  # a bound of its cost
            split = _split(view, at, leg)
            if split is not None and split.cost < most:
                best, most = split, split.cost
    return best


def _split(view: View, at: int, leg: Prefill) -> Split | None:
    one, own, n = view.engines[at], _way(view, at), view.request.tokens
    rest = min(n, REST_TOKENS[view.contract])
    lacks = n - rest - own.cached_tokens
    if lacks <= 0:
        return None
    path = one.paths.get("l1", _NO_PATH)
    load_s = path.latency_s + (path.queued_tokens + lacks) / path.tokens_s
    tier: Tier = "l1"
    if view.contract == "kvstrata" and leg.engine.instance != one.instance:
        tier, link = "peer", one.paths["peer"]
        load_s += link.latency_s - path.latency_s
        load_s += (link.queued_tokens + NOT_HIDDEN * lacks) * (1 / link.tokens_s - 1 / path.tokens_s)
    rest_s = rest / one.prefill_tokens_s
    ttft_s = max(leg.found.ttft_s, own.queue_s) + HANDOVER_S + load_s + rest_s
    others_s = leg.engine.running * (leg.found.compute_s - leg.spared_s) + one.running * rest_s
    cost = ttft_s - leg.spared_s + view.share * (others_s + view.request.answer_tokens * one.token_s)
    cost += MISSED_S * (leg.missed + _missed(view, one, rest_s, ttft_s))
    way = Way(cached_tokens=n - rest, tier=tier, load_tokens=lacks, load_s=load_s, ttft_s=ttft_s)
    return Split(cost, leg, way)


def _missed(view: View, one: EngineState, prompt_s: float, ttft_s: float) -> float:
    """How many requests are expected to miss their classes at an engine that computes so long, and answers."""
    request = view.request
    missed = _late(request.within_s, ttft_s)
    if limit_s := request.token_within_s:
        slow = _slow(one, _stalls(view, one), request.short_tokens, limit_s, one.token_s)
        missed = 1.0 - (1.0 - missed) * (1.0 - slow)
    return missed + _others_missed(view, one, prompt_s, answers=True) if one.limited else missed


def _late(within_s: float, ttft_s: float) -> float:
    """How likely the first token is to come later than its class allows."""
    return _above((within_s - ttft_s) / (LATE_DOUBT * within_s)) if within_s else 0.0


def _others_missed(view: View, one: EngineState, prompt_s: float, *, answers: bool) -> float:
    """How many more answers at an engine are expected to miss their classes if it computes so long.

    `answers`: it also answers this request, so that each token takes longer.
    """
    limit_s, tokens, stalls = one.limits_s / one.limited, view.request.answer_tokens, _stalls(view, one)
    without_s = max(0.0, one.token_s - one.token_each_s)
    with_it = _slow(one, stalls, tokens, limit_s, one.token_s if answers else without_s, prompt_s)
    return one.limited * (with_it - _slow(one, stalls, tokens, limit_s, without_s))


def _stalls(view: View, one: EngineState) -> float:
    """Seconds in which an engine computes prompts for each in which it answers; remembered by its name."""
    found = view.stalls.get(one.name)
    if found is None:
        share = one.prompt_share(view.now_s)
        found = view.stalls[one.name] = share / (1.0 - share)
    return found


def _slow(
    one: EngineState, stalls: float, tokens: float, limit_s: float, token_s: float, more_s: float = 0.0
) -> float:
    """How likely an answer of so many tokens, each of `token_s`, is to take longer for each than `limit_s`.

    `stalls`: see _stalls; `more_s`: seconds for which it is stalled beside that.
    Prompts of unlike lengths stall it at random times: their sum is taken to be normal.
    """
    if not tokens:
        return 0.0  # nothing is known of answers yet
    mean_s = tokens * token_s * stalls
    spare_s = tokens * (limit_s - token_s) - more_s - mean_s
    return _above(spare_s / (SLOW_DOUBT * tokens * limit_s + math.sqrt(mean_s * one.prompt_size_s) + 1e-9))


def _above(deviations: float) -> float:
    """The share of a normal distribution that lies so many deviations above its mean."""
    return 0.5 * math.erfc(deviations * SQRT_HALF)


def least(view: View, costs: Sequence[float], most: int, among: Sequence[int] = ()) -> Sequence[int]:
    """Return the indices of the `most` lowest costs; of equal ones those that the request's id ranks first.

    `among`: the indices of the costs in `everyone`; empty: all.
    """
    if len(costs) <= most:
        return range(len(costs))
    limit = heapq.nsmallest(most, costs)[-1]
    found = [at for at, cost in enumerate(costs) if cost <= limit]
    if len(found) > most:
        tied = [at for at in found if costs[at] == limit]
        names = [view.everyone[among[at] if among else at].name for at in tied]
        by_weight = sorted(zip(weights(view.request.id, names), tied, strict=True), reverse=True)
        found = [at for at in found if costs[at] < limit]
        found += [at for _, at in by_weight[: most - len(found)]]
    return found


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
    found = weights(key, names)
    return found.index(max(found))


def weights(key: str, names: list[str]) -> list[int]:
    """Return how high the key ranks each name."""
    hashes, hashed = _HASHES, _hashed(key)
    return [(hashed ^ hashes[name]) * RANK_MULTIPLIER & 0xFFFFFFFFFFFFFFFF for name in names]
