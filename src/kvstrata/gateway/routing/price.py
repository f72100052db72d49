"""The cost of a request at an engine, in seconds, alone or with another engine that computes its prompt.

For an engine D that answers, with prefill rate μ, that has h of n tokens (u = n - h are computed):

    alone   TTFT + SHARE · (o · t + R_run · u/μ) + MISSED_S · misses            TTFT = Q + x(h) + u/μ
    split   max(TTFT(P), Q) + HANDOVER_S + load + rest/μ
            + SHARE · (o · t + R_run(P) · u/μ(P) + R_run · rest/μ) + MISSED_S · misses

Q: seconds of work queued before it; x: seconds to load the tokens that are not in its cache; o: expected tokens of the
answer; t: seconds per token of the answer, with this request running; R_run: requests that have their first token,
which wait while a prompt is computed.  Without the SHARE terms the engine that has a popular prefix would get every
request.

The h tokens come from the engine's own cache alone, or by a load of a longer prefix from a tier that it can reach.  A
prefix is weighted by the probability that it is still present:

    exact          1
    degraded       exp(-age / block life)
    predicted      1, after the seconds until the request in flight has computed it
    unconfirmed    1 until UNCONFIRMED_S, then 0

Replicas: let k requests in flight at N engines begin with the longest prefix that any engine has.  Tokens of u within
this prefix are weighted by 1 / (1 + k / N), since another copy of it serves the next requests.

Classes of service count by the expected number of requests that miss them: the request itself, by the probability that
its first token is late or its answer stalls, and those in flight beside it, by how much its prompt and answer increase
that probability (`EngineState.limited` and following).

One pass over all engines computes a lower bound of each engine's cost; the terms for classes, tiers and splits are
computed only for engines whose bound is not above the best cost so far, so the result is that of a full search.  P's
cost is assumed to be independent of D, so D's best P is the best of its instance or of all: where D's queue is longer
than P's, or a class limits the first token, another pair may cost a little less.  Between two hosts, the part of the
transfer that does not overlap with computing the prompt is added.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.model import (
    SLOW_DOUBT,
    SQRT_HALF,
    Copy,
    EngineState,
    Knowledge,
    Leg,
    LoadPath,
    Request,
    Tier,
    Way,
)

SHARE = 0.125
"""Weight of answers' seconds beside the seconds until first tokens. Values from 1/8 to 1/2 give nearly the same time
to the last token; a larger value delays first tokens."""
MISSED_S = 5.0
"""Cost of a request that misses its class. With a much larger cost, others wait so long that more of them miss it."""
LATE_DOUBT = 0.4
"""Assumed standard deviation of the time to first token, as a share of the class's limit. It is large on purpose: a
queue that ends just within the limit makes all later requests late."""
UNCONFIRMED_S = 10.0
"""Time for which a computed prompt counts as cached although no event has confirmed it."""
HANDOVER_S = 0.03
"""Time from the prefilling engine's last step to the other's load: a response of the server and 1.5 steps."""
REST_TOKENS = {"kvstrata": 256, "nixl": 1, "mooncake": 1}
"""By contract: maximum tokens of the prompt that the answering engine computes (a partial chunk, or the last token)."""
NOT_HIDDEN = 0.2
"""Share of a transfer between two hosts that does not overlap with computing the prompt."""
RANK_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""
MAX_NAMES = 1 << 16
_NO_PATH = LoadPath(latency_s=0.0, tokens_s=1.0)


class Prefill(NamedTuple):
    """The cost of computing the prompt at one engine for another."""

    cost: float
    engine: EngineState
    way: Way
    others_s: float
    """The cost for the requests running there, less the value of a further copy of the prefix."""


class Split(NamedTuple):
    """The best split for one answering engine."""

    cost: float
    prefill: Prefill
    way: Way


class Explained(NamedTuple):
    """The parts of a cost."""

    terms: dict[str, float]
    """Parts by name, for people."""
    way: Way | None = None
    """How the engine is to get the prefix; None: not planned."""
    leg: Leg | None = None
    """The other engine that is to compute the prompt; None: no split."""


class View:
    """One decision's inputs, indexed, and the engines' costs. Built for each decision. The order of copies and of
    engines does not affect the result."""

    def __init__(
        self,
        request: Request,
        engines: list[EngineState],
        knowledge: Knowledge,
        now_s: float,
        share: float = 0.0,
        helpers: Sequence[EngineState] = (),
        contract: Contract = "",
        near_share: float = 0.0,
    ) -> None:
        """`share`: weight of answers' seconds. `helpers`: engines that only compute prompts for others. `near_share`:
        costs that differ by at most this share count as equal."""
        self.request, self.engines, self.knowledge = request, engines, knowledge
        self.now_s, self.share, self.contract, self.near_share = now_s, share, contract, near_share
        self.everyone = [*engines, *helpers] if contract else engines
        self.own: dict[str, list[Copy]] = {}
        """By engine: the copies that only this engine can use, without `Knowledge.cached`."""
        self.shared: list[Copy] = []
        """Copies that any engine with a path to their tier can load."""
        for copy in sorted(knowledge.copies, key=_rank):
            (self.own.setdefault(copy.engine, []) if copy.engine else self.shared).append(copy)
        self.held, self.spared = 0, 0.0
        """Length of the longest prefix that any engine has; discount on computing tokens within it."""
        if share and request.sharing:
            self.held = min(longest(knowledge), request.tokens - 1)
            self.spared = 1.0 - 1.0 / (1.0 + request.sharing / max(1, len(engines)))
        self._is_limited = request.token_within_s > 0 and request.short_tokens > 0
        self._lacks, self._usual = self._tokens_to_compute()
        """Minimum number of tokens to compute: by engine, and for all engines that are not listed."""
        self._prefills: list[float] = []
        self._answers: list[float] = []
        self._alone: list[float] = []
        """Costs by index, lower bounds at first: of the prefill in `everyone`, of the answer in `engines`, of both."""
        self._slow: dict[int, float] = {}
        """By index: probability that the answer is too slow, where it was computed."""
        self._late: dict[int, float] = {}
        """By index: probability that the first token is late, where the cost is exact."""
        self._ways: dict[int, Way] = {}
        """By index: the best way, for engines with more than one."""
        self._places: dict[str, list[int]] = {}
        """By instance ("": all): indices in `everyone` of the engines that may compute the prompt for another."""
        self._legs: dict[str, Prefill] = {}
        """By instance ("": all): the cheapest prefill."""
        self.splits: dict[int, Split] = {}
        """By index: the best split, where it costs less than the engine alone."""

    def costs(self) -> list[float]:
        """Return the cost at each engine: exact for the lowest and those near it, lower bounds for the others."""
        request, share, now_s, spared = self.request, self.share, self.now_s, self.spared
        beyond, usual = request.tokens - self.held, float(self._usual)
        pays: Mapping[str, float] = self._lacks
        if spared:
            usual -= spared * max(0.0, usual - beyond)
            pays = {
                name: lacks - spared * (lacks - beyond) if lacks > beyond else lacks
                for name, lacks in pays.items()
            }
        paid = [pays.get(one.name, usual) for one in self.everyone] if pays else [usual] * len(self.everyone)
        prefills = self._prefills = [
            (wait_s if (wait_s := one.drained_s - now_s) > one.behind_s else one.behind_s)
            + (now_s - one.late_s if now_s > one.late_s else 0.0)
            + tokens * (1.0 + share * one.running) / one.prefill_tokens_s
            for one, tokens in zip(self.everyone, paid, strict=True)
        ]
        answer = share * request.answer_tokens
        answers = self._answers = [answer * one.token_s + MISSED_S * one.crowded for one in self.engines]
        alone = self._alone = list(map(operator.add, prefills, answers))
        least_s = min(prefills) if self.contract else 0.0
        self._settle(alone)
        return self._with_splits(least_s, min(alone)) if self.contract else alone

    def _near(self, cost: float) -> float:
        return cost + self.near_share * abs(cost)

    def _settle(self, costs: list[float], some: Sequence[int] = ()) -> None:
        """Make the lowest costs, and those near the lowest, exact among `some` (empty: all).

        `costs`: `_prefills` or `_alone`, which is updated.
        """
        first = min(some, key=costs.__getitem__) if some else costs.index(min(costs))
        self._make_exact((first,))
        near_s = self._near(costs[first])
        if some:
            some = [at for at in some if costs[at] <= near_s]
        else:
            some = [at for at, cost in enumerate(costs) if cost <= near_s]
        self._make_exact(some, ways=False)
        for at in sorted(some, key=costs.__getitem__) if self.shared or self.own else ():
            if costs[at] > near_s:
                break
            self._make_exact((at,))
            near_s = min(near_s, self._near(costs[at]))

    def _make_exact(self, some: Sequence[int], *, ways: bool = True) -> None:
        """Add the expected misses of classes to the costs at these indices of `everyone`, and use the best way.

        Without `ways`, the cost of an engine with several ways stays a lower bound.
        """
        request, now_s, erfc, late = self.request, self.now_s, math.erfc, self._late
        within_s, each_s = request.within_s, SQRT_HALF / (LATE_DOUBT * (request.within_s or 1.0))
        ways = ways and bool(self.shared or self.own)
        if not (within_s or self._is_limited or ways):
            some = [at for at in some if self.everyone[at].limited]
        if self._is_limited:
            self._find_slow([at for at in some if at < len(self.engines)])
        for at in some:
            one, missed, chance = self.everyone[at], 0.0, 0.0
            if ways and at not in self._ways and (self.shared or one.name in self.own):
                way = self._ways[at] = self._way(at)
                compute_s, wait_s = way.compute_s, way.ttft_s - way.compute_s
                self._prefills[at] = wait_s + (compute_s - way.spared_s) * (1.0 + self.share * one.running)
            elif at in late:
                continue
            else:
                compute_s = self._lacks.get(one.name, self._usual) / one.prefill_tokens_s
                wait_s = one.drained_s - now_s
                if wait_s < one.behind_s:
                    wait_s = one.behind_s
                if now_s > one.late_s:
                    wait_s += now_s - one.late_s
            if one.limited:
                missed = 0.5 * one.limited * erfc(one.spare - one.strain * compute_s) - one.missed
            if within_s:
                chance = 0.5 * erfc((within_s - wait_s - compute_s) * each_s)
            late[at] = chance
            self._prefills[at] += MISSED_S * (missed + chance)
            if at < len(self.engines):  # a request misses its class once, however late and slow it is
                slow = self._slow[at] * (1.0 - chance) if self._is_limited else 0.0
                self._alone[at] = self._prefills[at] + self._answers[at] + MISSED_S * slow

    def _find_slow(self, some: Sequence[int]) -> None:
        """Compute the probability that the answer is too slow at each of these engines: model.spare, inlined."""
        tokens, limit_s, slow = self.request.short_tokens, self.request.token_within_s, self._slow
        doubt_s, root, all_ = SLOW_DOUBT * tokens * limit_s + 1e-9, math.sqrt(tokens), SQRT_HALF * tokens
        for at in some:
            if at not in slow:
                one = self.engines[at]
                slow[at] = 0.5 * math.erfc(all_ * (limit_s - one.pace_s) / (doubt_s + root * one.jitter_s))

    def _with_splits(self, least_s: float, best_s: float) -> list[float]:
        """Return the costs with splits where these cost less. `least_s`: lowest cost of the prefill without misses."""
        is_ours, everyone = self.contract == "kvstrata", self.everyone
        able = [
            at for at, one in enumerate(everyone) if one.role != "decode" and (one.instance or not is_ours)
        ]
        if not able:
            return self._alone
        self._places[""] = able
        for at in able if is_ours else ():
            self._places.setdefault(everyone[at].instance, []).append(at)
        found, leg, rest, now_s = list(self._alone), self._leg(""), REST_TOKENS[self.contract], self.now_s
        near_s, first_s, once_s = self._near(best_s), HANDOVER_S + leg.cost, MISSED_S + least_s - leg.cost
        most_s = near_s - first_s - min(0.0, once_s)
        able = [at for at, cost in enumerate(self._answers) if cost <= most_s]
        if self._is_limited:
            self._find_slow(able)
        bounds = {}
        for at in able:
            one = self.engines[at]
            path = one.paths.get("l1", _NO_PATH)
            load_s = path.latency_s + (self._lacks.get(one.name, self._usual) - rest) / path.tokens_s
            bounds[at] = first_s + load_s + self._answers[at] + self._slow.get(at, 0.0) * once_s
        for at in sorted(bounds, key=bounds.__getitem__):
            if bounds[at] > near_s:
                break
            one = self.engines[at]
            own = self._places.get(one.instance, ()) if leg.engine.instance != one.instance else ()
            more_s = max(0.0, one.queue_s(now_s) - leg.way.ttft_s)
            if own and "peer" in one.paths:
                lacks = self._lacks.get(one.name, self._usual) - rest
                more_s += _handed_s(one, lacks, now_s, far=True) - _handed_s(one, lacks, now_s)
            places = [""] if bounds[at] + more_s <= near_s else []
            if own and bounds[at] - leg.cost + min([self._prefills[other] for other in own]) <= near_s:
                places.append(one.instance)
            for place in places:
                split = self._split(at, self._leg(place))
                if split is not None and split.cost < found[at]:
                    self.splits[at], found[at] = split, split.cost
            near_s = min(near_s, self._near(found[at]))
        return found

    def _tokens_to_compute(self) -> tuple[dict[str, int], int]:
        """Return `_lacks` and `_usual`: tokens to compute if the longest copy were free and certain."""
        n, most = self.request.tokens, self.knowledge.cached
        anywhere = max([copy.tokens for copy in self.shared], default=0)
        if self.own or anywhere:
            most = {name: max(tokens, anywhere) for name, tokens in most.items()}
            for name, copies in self.own.items():
                most[name] = max(most.get(name, anywhere), *(copy.tokens for copy in copies))
        return {name: n - tokens if tokens < n else 1 for name, tokens in most.items()}, max(1, n - anywhere)

    def explained(self, at: int) -> Explained:
        """Return the parts of the cost at one engine."""
        self._make_exact((at,))
        engine, way, split = self.engines[at], self._ways.get(at) or self._way(at), self.splits.get(at)
        answer_s = self.request.answer_tokens * engine.token_s
        others_s = engine.running * (way.compute_s - way.spared_s)
        missed = self._missed(at, way.compute_s, way.ttft_s)
        terms = {"queue_s": engine.queue_s(self.now_s), "load_s": way.load_s, "compute_s": way.compute_s}
        if missed:
            terms["missed"] = missed
        if self.share:
            terms |= {"answer_s": answer_s, "others_s": others_s, "spared_s": way.spared_s}
        terms["cached_tokens"] = way.cached_tokens
        if split is None:
            return Explained(terms, way)
        alone_s = way.ttft_s - way.spared_s + self.share * (answer_s + others_s) + MISSED_S * missed
        terms |= {"alone_s": alone_s, "split_s": split.cost}
        return Explained(terms, split.way, Leg(engine=split.prefill.engine.name, way=split.prefill.way))

    def _missed(self, at: int, prompt_s: float, ttft_s: float) -> float:
        """Expected number of misses of classes if an engine computes for `prompt_s` and answers after `ttft_s`."""
        one, late, slow = self.engines[at], self._lateness(ttft_s), self._slow.get(at, 0.0)
        harmed = 0.0
        if one.limited:
            harmed = (
                one.crowded + 0.5 * one.limited * math.erfc(one.spare - one.strain * prompt_s) - one.missed
            )
        return late + slow - late * slow + harmed

    def _lateness(self, ttft_s: float) -> float:
        """Probability that a first token expected after `ttft_s` is later than the class allows."""
        within_s = self.request.within_s
        return 0.5 * math.erfc((within_s - ttft_s) * SQRT_HALF / (LATE_DOUBT * within_s)) if within_s else 0.0

    def _way(self, at: int) -> Way:
        """Return the cheapest way at one engine; of equally cheap ones, the first in the order of `_rank`."""
        engine, knowledge, tokens = self.everyone[at], self.knowledge, self.request.tokens
        token_s = 1.0 / engine.prefill_tokens_s
        own = self.own.get(engine.name, ())
        most = tokens - 1  # at least one token is always computed
        queue_s = engine.queue_s(self.now_s)
        start_s = self.now_s + queue_s
        held = min(knowledge.cached.get(engine.name, 0), most)
        expected_held: float = held
        load_s, compute_s = 0.0, token_s * (tokens - held)
        copy: Copy | None = None
        cached_tokens, load_tokens = held, 0
        # Its own cache first: a load adds only the tokens beyond that.
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
            free_s = max(path.free_s, knowledge.busy.get(one.source, 0.0)) if knowledge.busy else path.free_s
            wait_s = chance * (
                max(0.0, free_s - self.now_s) + path.latency_s + (cached - held) / path.tokens_s
            )
            if one.certainty == "predicted":
                wait_s += max(0.0, one.ready_at_s - start_s)
            seconds = token_s * (tokens - (chance * cached + (1.0 - chance) * expected_held))
            if wait_s + seconds < load_s + compute_s:
                load_s, compute_s = wait_s, seconds
                copy, cached_tokens, load_tokens = one, cached, cached - held
        spared_s = token_s * self.spared * max(0, self.held - cached_tokens)
        tier, source = (copy.tier, copy.source) if copy is not None else ("l0", "")
        return Way(
            cached_tokens=cached_tokens, tier=tier, source=source, load_tokens=load_tokens, load_s=load_s,
            compute_s=compute_s, spared_s=spared_s, ttft_s=queue_s + load_s + compute_s,
        )  # fmt: skip

    def _leg(self, place: str) -> Prefill:
        """Return the cheapest prefill at an instance ("": at all), cached."""
        if place not in self._legs:
            able, costs = self._places[place], self._prefills
            self._settle(costs, able)
            best, _ = cheapest(
                [costs[at] for at in able], [self.everyone[at] for at in able], self.request.id
            )
            at = able[best]
            one, way = self.everyone[at], self._ways.get(at) or self._way(at)
            others_s = costs[at] - way.ttft_s - MISSED_S * self._late.get(at, 0.0)
            self._legs[place] = Prefill(costs[at], one, way, others_s)
        return self._legs[place]

    def _split(self, at: int, leg: Prefill) -> Split | None:
        """Return the split between a prefill and an answering engine; None: they cannot split, or need not."""
        one, n, rest = self.engines[at], self.request.tokens, REST_TOKENS[self.contract]
        # If the leg is the engine itself, no other engine computes the prompt for less.
        if not may_hand_over(self.contract, leg.engine, one):
            return None
        self._make_exact((at,))
        own = self._ways.get(at)
        lacks = (n - own.cached_tokens if own else self._lacks.get(one.name, self._usual)) - rest
        if lacks <= 0:
            return None
        is_far = self.contract == "kvstrata" and leg.engine.instance != one.instance
        load_s, rest_s = _handed_s(one, lacks, self.now_s, far=is_far), rest / one.prefill_tokens_s
        ttft_s = max(leg.way.ttft_s, one.queue_s(self.now_s)) + HANDOVER_S + load_s + rest_s
        own_s = self.share * (one.running * rest_s + self.request.answer_tokens * one.token_s)
        cost = ttft_s + leg.others_s + own_s + MISSED_S * self._missed(at, rest_s, ttft_s)
        tier: Tier = "peer" if is_far else "l1"
        way = Way(cached_tokens=n - rest, tier=tier, load_tokens=lacks, load_s=load_s, ttft_s=ttft_s)
        return Split(cost, leg, way)


def _handed_s(one: EngineState, lacks: int, now_s: float, *, far: bool = False) -> float:
    """Return the time of a load of `lacks` tokens that another engine has computed; `far`: at another instance."""
    path = one.paths.get("l1", _NO_PATH)
    link, free_s = one.paths.get("peer", _NO_PATH) if far else path, path.free_s
    hidden_s = (1.0 - NOT_HIDDEN) * lacks * (1 / link.tokens_s - 1 / path.tokens_s)
    free_s = max(free_s, link.free_s)
    return max(0.0, free_s - now_s) + link.latency_s + lacks / link.tokens_s - hidden_s


def _rank(copy: Copy) -> tuple[object, ...]:
    """Return the sort key of copies, so that the choice between equally good ones is deterministic."""
    return copy.tier, copy.tokens, copy.certainty, copy.age_s, copy.ready_at_s, copy.source


def longest(knowledge: Knowledge) -> int:
    """Return the length of the longest prefix of the prompt in any engine's own cache."""
    copies = (copy.tokens for copy in knowledge.copies if copy.tier == "l0")
    return max(*knowledge.cached.values(), *copies, 0, 0)


def _probability(copy: Copy, knowledge: Knowledge) -> float:
    """Return the probability that a copy is still present."""
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


def cheapest(
    costs: list[float], engines: Sequence[EngineState], key: str, near_share: float = 0.0
) -> tuple[int, bool]:
    """Return the index of the lowest cost; among near-ties, the one that `key` selects, and True."""
    lowest = min(costs)
    limit = lowest + abs(lowest) * near_share
    if not near_share and costs.count(lowest) == 1:
        return costs.index(lowest), False
    near = [at for at, cost in enumerate(costs) if cost <= limit]
    if len(near) == 1:
        return near[0], False
    near.sort(key=[one.name for one in engines].__getitem__)
    return near[_hashed(key) % len(near)], True


@functools.lru_cache(MAX_NAMES)
def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def ranked_first(key: str, names: list[str]) -> int:
    """Return the index of the name that the key ranks first, for any order of the names, which must differ.

    This is rendezvous hashing: an added or removed engine moves only its own keys.
    """
    hashed = _hashed(key)
    ranks = [(hashed ^ _hashed(name)) * RANK_MULTIPLIER & 0xFFFFFFFFFFFFFFFF for name in names]
    return ranks.index(max(ranks))
