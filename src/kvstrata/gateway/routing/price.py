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
first token is to be late and its answer to be stalled, and those in flight beside it, by how much likelier its prompt
and its answer make that (model.Classes).

One pass over all engines tells what each costs at least, and exactly if it has no copies and nothing is split; the
others are priced as far as that is below the best cost.  What P costs is taken not to depend on D, so that D's best P
is the best of its instance or of all: where D's queue is longer than P's, or a class limits the first token, another
pair may cost a little less.  Between two hosts the transfer adds what of it is not done while the prompt is computed.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.model import (
    SLOW_DOUBT,
    SQRT_HALF,
    Copy,
    EngineState,
    Knowledge,
    LoadPath,
    Request,
    Tier,
    Way,
)

SHARE = 0.125
"""Of the seconds that answers take, beside those until first tokens. For the last token it hardly matters between 1/8
and 1/2; first tokens come the later the more it is."""
MISSED_S = 5.0
"""What a request that misses its class costs.  Far more, and others are made to wait so long that fewer keep theirs."""
LATE_DOUBT = 0.4
"""Standard deviation of a first token's time, beside the class's limit. It is large on purpose: a queue that ends just
within the limit makes all that come next late."""
UNCONFIRMED_S = 10.0
"""For so long a prompt counts as cached where it was computed although no event has told of it."""
HANDOVER_S = 0.03
"""From the last step of the engine that computes to the load of the other: an answer of the server and 1.5 steps."""
REST_TOKENS = {"kvstrata": 256, "nixl": 1, "mooncake": 1}
"""What the engine that answers computes itself at most, by contract: the rest of a chunk, or the last token."""
NOT_HIDDEN = 0.2
"""The share of a transfer between two hosts that is not done while the prompt is computed."""
RANK_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""
MAX_NAMES = 1 << 16
_NO_PATH = LoadPath(latency_s=0.0, tokens_s=1.0)


class Estimate(NamedTuple):
    """What a request costs at one engine by its best way, in seconds."""

    queue_s: float
    load_s: float
    compute_s: float
    copy: Copy | None
    """What the way begins with; None: what the engine's cache has for certain."""
    cached_tokens: int
    load_tokens: int
    spared_s: float
    """What a further copy is worth."""

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.load_s + self.compute_s

    @property
    def way(self) -> Way:
        """The way, as decisions name it."""
        tier, source = (self.copy.tier, self.copy.source) if self.copy else ("l0", "")
        return Way(
            cached_tokens=self.cached_tokens, tier=tier, source=source, load_tokens=self.load_tokens,
            load_s=self.load_s, ttft_s=self.ttft_s,
        )  # fmt: skip


class Prefill(NamedTuple):
    """What it costs if an engine computes the prompt for another."""

    cost: float
    engine: EngineState
    found: Estimate
    ttft_s: float
    others_s: float
    """What it costs those beside it, less what a further copy is worth."""


class Split(NamedTuple):
    """The best split with one engine that answers."""

    cost: float
    prefill: Prefill
    way: Way


class View:
    """One decision's inputs, sorted by use, and what they cost. Built for each decision; the order of copies and of
    engines decides nothing."""

    def __init__(
        self,
        request: Request,
        engines: list[EngineState],
        knowledge: Knowledge,
        now_s: float,
        share: float = 0.0,
        helpers: Sequence[EngineState] = (),
        contract: Contract = "",
    ) -> None:
        """`share`: of the seconds that answers take. `helpers` only compute prompts for others."""
        self.request, self.engines, self.knowledge = request, engines, knowledge
        self.now_s, self.share, self.contract = now_s, share, contract
        self.everyone = [*engines, *helpers] if contract else engines
        self.own: dict[str, list[Copy]] = {}
        """Copies of one engine, by its name, without those of `Knowledge.cached`."""
        self.shared: list[Copy] = []
        """Copies that any engine with a path can have."""
        for copy in sorted(knowledge.copies, key=_rank):
            (self.own.setdefault(copy.engine, []) if copy.engine else self.shared).append(copy)
        self.held, self.spared = 0, 0.0
        """The longest prefix that any engine has; the share of it that a further copy would not cost."""
        if share and request.sharing:
            self.held = min(longest(knowledge), request.tokens - 1)
            self.spared = 1.0 - 1.0 / (1.0 + request.sharing / max(1, len(engines)))
        self._within_s, self._each_s = request.within_s, SQRT_HALF / (LATE_DOUBT * (request.within_s or 1.0))
        self._waits: list[float] = []
        self._lacks: list[int] = []
        """Seconds before it and tokens to compute, at each of `everyone`; the second at least."""
        self._prefills: list[float] = []
        """What it costs at least if each of `everyone` computes the prompt for another."""
        self._alone: list[float] = []
        self._slow: list[float] = []
        """What it costs at least at each engine alone; how likely its answer is to be too slow; empty: never."""
        self._places: dict[str, list[int]] = {}
        """Who may compute it for another, as indices in `everyone`, by instance; "": all of them."""
        self._first_s = 0.0
        self._handing: dict[int, float] = {}
        """The least of the first; what a split costs at least where it may be the best, by the index of the engine."""
        self._legs: dict[str, Prefill] = {}

    def bounds(self) -> list[float]:
        """Return what it costs at each engine at least; no more than that if it has no copies and nothing is split."""
        request, everyone, share, now_s = self.request, self.everyone, self.share, self.now_s
        lacking = self._lacks = self._lacking()
        waits = self._waits = [
            (wait_s if (wait_s := one.drained_s - now_s) > one.behind_s else one.behind_s)
            + (now_s - one.late_s if now_s > one.late_s else 0.0)
            for one in everyone
        ]
        computes = [tokens / one.prefill_tokens_s for tokens, one in zip(lacking, everyone, strict=True)]
        paid = computes
        if self.spared:
            beyond = request.tokens - self.held
            paid = [
                seconds * (1.0 - self.spared * (1.0 - beyond / tokens)) if tokens > beyond else seconds
                for seconds, tokens in zip(computes, lacking, strict=True)
            ]
        costs = [
            wait_s + seconds * (1.0 + share * one.running)
            for wait_s, seconds, one in zip(waits, paid, everyone, strict=True)
        ]
        answer = share * request.answer_tokens
        answers = [answer * one.token_s for one in self.engines]
        late: list[float] = []
        if any(one.limited for one in everyone):
            costs = [
                cost + MISSED_S * harmed(one, seconds) if one.limited else cost
                for cost, seconds, one in zip(costs, computes, everyone, strict=True)
            ]
            answers = [cost + MISSED_S * one.crowded for cost, one in zip(answers, self.engines, strict=True)]
        least_s = min(costs)
        if request.within_s:
            late = [self._late(wait_s + seconds) for wait_s, seconds in zip(waits, computes, strict=True)]
            costs = [cost + MISSED_S * chance for cost, chance in zip(costs, late, strict=True)]
        if request.token_within_s and request.short_tokens:
            self._slow = self._slowly(request.short_tokens, request.token_within_s)
            answers = [cost + MISSED_S * chance for cost, chance in zip(answers, self._slow, strict=True)]
        self._prefills, self._alone = costs, list(map(operator.add, costs, answers))
        if self._slow and late:  # it misses its class once
            both = map(operator.mul, self._slow, late)
            self._alone = [cost - MISSED_S * chance for cost, chance in zip(self._alone, both, strict=False)]
        found = list(self._alone)
        if self.contract and self._may_compute():
            self._first_s = min([costs[at] for at in self._places[""]])
            first_s = HANDOVER_S + self._first_s
            splits = [first_s + cost for cost in answers]
            if self._slow and late:
                over_s = first_s - least_s
                splits = [cost - over_s * chance for cost, chance in zip(splits, self._slow, strict=True)]
            at = found.index(min(found))
            best_s = self.price(at)[0] if self.has_copies(at) else found[at]
            for at in [at for at, cost in enumerate(splits) if cost < best_s]:
                handing = self._handing[at] = splits[at] + sum(self._handed(at, lacking[at]))
                found[at] = min(found[at], handing)
        return found

    def _handed(self, at: int, lacks: int) -> tuple[float, float]:
        """Return the seconds of a load from the own server when another engine has computed, and of the rest."""
        one, rest = self.engines[at], REST_TOKENS[self.contract]
        path = one.paths.get("l1", _NO_PATH)
        return path.latency_s + (
            path.queued_tokens + lacks - rest
        ) / path.tokens_s, rest / one.prefill_tokens_s

    def _may_compute(self) -> bool:
        """Note who may compute the prompt for another one; returns whether somebody may."""
        is_ours, places = self.contract == "kvstrata", self._places
        able = places[""] = [
            at
            for at, one in enumerate(self.everyone)
            if one.role != "decode" and (one.instance or not is_ours)
        ]
        if is_ours:
            for at in able:
                places.setdefault(self.everyone[at].instance, []).append(at)
        return bool(able)

    def _lacking(self) -> list[int]:
        """Return what each of `everyone` computes of the prompt, at least: as if the longest copy were at hand."""
        n, most, usual = self.request.tokens, self.knowledge.cached, self.request.tokens
        if self.own:
            most = dict(most)
            for name, copies in self.own.items():
                most[name] = max(most.get(name, 0), *(copy.tokens for copy in copies))
        if self.shared:
            anywhere = min(max(copy.tokens for copy in self.shared), n - 1)
            usual = n - anywhere
            most = {name: tokens for name, tokens in most.items() if tokens > anywhere}
        get = {name: n - tokens if tokens < n else 1 for name, tokens in most.items()}.get
        return [get(one.name, usual) for one in self.everyone]

    def has_copies(self, at: int) -> bool:
        """Whether the bound of an engine may be less than its cost alone."""
        return bool(self.shared) or self.engines[at].name in self.own

    def cost(self, at: int) -> float:
        """Return what it costs at the engine with this index."""
        alone_s = self.price(at)[0] if self.has_copies(at) else self._alone[at]
        split = self.split(at, alone_s)
        return alone_s if split is None else split.cost

    def price(self, at: int) -> tuple[float, Estimate, dict[str, float]]:
        """Return what it costs at an engine alone, the way, and the terms of the cost, by their names."""
        engine, way = self.engines[at], self._way(at)
        answer_s = self.request.answer_tokens * engine.token_s
        others_s = engine.running * (way.compute_s - way.spared_s)
        missed = self._missed(at, way.compute_s, way.ttft_s)
        alone_s = way.ttft_s - way.spared_s + self.share * (answer_s + others_s) + MISSED_S * missed
        terms = {"queue_s": way.queue_s, "load_s": way.load_s, "compute_s": way.compute_s}
        if missed:
            terms["missed"] = missed
        if self.share:
            terms |= {"answer_s": answer_s, "others_s": others_s, "spared_s": way.spared_s}
        return alone_s, way, terms

    def _missed(self, at: int, prompt_s: float, ttft_s: float) -> float:
        """How many requests are expected to miss their classes at an engine that computes so long, and answers."""
        one = self.engines[at]
        late = self._late(ttft_s) if self.request.within_s else 0.0
        slow = self._slow[at] if self._slow else 0.0
        return late + slow - late * slow + (one.crowded + harmed(one, prompt_s) if one.limited else 0.0)

    def _late(self, ttft_s: float) -> float:
        """How likely a first token that is expected then is to come later than the class allows."""
        return 0.5 * math.erfc((self._within_s - ttft_s) * self._each_s)

    def _slowly(self, tokens: float, limit_s: float) -> list[float]:
        """How likely each engine's answer of so many tokens is to miss its limit: as model.spare has it, at once."""
        doubt_s, root, all_ = SLOW_DOUBT * tokens * limit_s + 1e-9, math.sqrt(tokens), SQRT_HALF * tokens
        return [
            0.5 * math.erfc(all_ * (limit_s - one.pace_s) / (doubt_s + root * one.jitter_s))
            for one in self.engines
        ]

    def _way(self, at: int) -> Estimate:
        """Return the cheapest way at one engine; of equally cheap ones the first."""
        engine, knowledge, tokens = self.everyone[at], self.knowledge, self.request.tokens
        token_s = 1.0 / engine.prefill_tokens_s
        own = self.own.get(engine.name, ())
        most = tokens - 1  # at least one token is always computed
        queue_s = engine.queue_s(self.now_s)
        start_s = self.now_s + queue_s
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
        for one in (*own, *self.shared) if own else self.shared:
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
        spared_s = token_s * self.spared * max(0, self.held - cached_tokens)
        return Estimate(queue_s, load_s, compute_s, copy, cached_tokens, load_tokens, spared_s)

    def split(self, at: int, most: float) -> Split | None:
        """Return the best split with an engine that answers, if it costs less than `most`."""
        least_s = self._handing.get(at, math.inf)
        one, best, own = self.engines[at], None, self._places.get(self.engines[at].instance, ())
        for place in ("", one.instance) if 0 < len(own) < len(self._places.get("", ())) else ("",):
            if place:
                more_s = min([self._prefills[other] for other in own]) - self._first_s
                least_s += more_s * (1.0 - self._slow[at]) if self._slow else more_s
            if least_s >= most:
                continue
            leg = self._leg(place)  # itself: then no other one computes it for less
            if may_hand_over(self.contract, leg.engine, one):
                split = self._split(at, leg)
                if split is not None and split.cost < most:
                    best, most = split, split.cost
        return best

    def _leg(self, place: str) -> Prefill:
        """Return the engine of an instance, or of all, that computes the prompt for the least; remembered."""
        if place not in self._legs:
            able, found = self._places[place], dict[int, Prefill]()

            def exact(index: int) -> float:
                found[index] = self._prefill(able[index])
                return found[index].cost

            costs, engines = [self._prefills[at] for at in able], [self.everyone[at] for at in able]
            self._legs[place] = found[cheapest(costs, engines, self.request.id, exact)[0]]
        return self._legs[place]

    def _prefill(self, at: int) -> Prefill:
        one, way = self.everyone[at], self._way(at)
        others_s = self.share * one.running * (way.compute_s - way.spared_s) - way.spared_s
        if one.limited:
            others_s += MISSED_S * harmed(one, way.compute_s)
        late = self._late(way.ttft_s) if self.request.within_s else 0.0
        return Prefill(way.ttft_s + others_s + MISSED_S * late, one, way, way.ttft_s, others_s)

    def _split(self, at: int, leg: Prefill) -> Split | None:
        one, n, rest = self.engines[at], self.request.tokens, REST_TOKENS[self.contract]
        lacks = n - self._way(at).cached_tokens if self.has_copies(at) else self._lacks[at]
        if lacks <= rest:
            return None
        load_s, rest_s = self._handed(at, lacks)
        lacks -= rest
        tier: Tier = "l1"
        if self.contract == "kvstrata" and leg.engine.instance != one.instance:
            tier, path, link = "peer", one.paths.get("l1", _NO_PATH), one.paths["peer"]
            load_s += link.latency_s - path.latency_s
            load_s += (link.queued_tokens + NOT_HIDDEN * lacks) * (1 / link.tokens_s - 1 / path.tokens_s)
        ttft_s = max(leg.ttft_s, self._waits[at]) + HANDOVER_S + load_s + rest_s
        own_s = self.share * (one.running * rest_s + self.request.answer_tokens * one.token_s)
        cost = ttft_s + leg.others_s + own_s + MISSED_S * self._missed(at, rest_s, ttft_s)
        way = Way(cached_tokens=n - rest, tier=tier, load_tokens=lacks, load_s=load_s, ttft_s=ttft_s)
        return Split(cost, leg, way)


def _rank(copy: Copy) -> tuple[object, ...]:
    """Return what orders copies, so that of two equally good ones always the same is taken."""
    return copy.tier, copy.tokens, copy.certainty, copy.age_s, copy.ready_at_s, copy.source


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


def harmed(one: EngineState, prompt_s: float) -> float:
    """How many of the answers in flight are expected to miss their classes for a prompt that takes so long."""
    return 0.5 * one.limited * math.erfc(one.spare - one.strain * prompt_s) - one.missed


def cheapest(
    costs: list[float],
    engines: Sequence[EngineState],
    key: str,
    exact: Callable[[int], float],
    near_share: float = 0.0,
) -> tuple[int, bool]:
    """Return the index of the lowest cost, and whether others hardly differ, of which the key chooses one.

    `costs` are bounds, and are replaced by what `exact` says as far as they may be the lowest.
    """
    least = min(costs)
    first = costs.index(least)
    lowest = costs[first] = exact(first)
    below = [at for at, bound in enumerate(costs) if bound < lowest] if lowest > least else []
    for at in sorted(below, key=costs.__getitem__):
        if costs[at] >= lowest:
            break
        costs[at] = exact(at)
        lowest = min(lowest, costs[at])
    limit = lowest + abs(lowest) * near_share
    while True:
        near = [at for at, cost in enumerate(costs) if cost <= limit]
        if len(near) == 1:
            return near[0], False
        at = near[ranked_first(key, [engines[at].name for at in near])]
        costs[at] = exact(at)
        if costs[at] <= limit:
            return at, True


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
    ranks = [(hashed ^ hashes[name]) * RANK_MULTIPLIER & 0xFFFFFFFFFFFFFFFF for name in names]
    return ranks.index(max(ranks))
