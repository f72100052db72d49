"""The policies that choose an engine: their costs of a request at each one, of which the lowest wins.

A policy is a frozen Struct that is tagged with its name, so that a record names it.  It reads only the view: no clock,
no I/O, no memory of earlier decisions.
"""

from __future__ import annotations

import hashlib
import math
from typing import ClassVar, NamedTuple

import msgspec

from kvstrata.gateway.routing.model import Copy, EngineState, Knowledge, Request, Way

RANK_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""
MAX_NAMES = 1 << 16
DECODE_SHARE = 0.25
"""Of the seconds that answers take, beside those until first tokens; between 1/8 and 1/2 it hardly matters."""


class View(NamedTuple):
    """One decision's inputs, sorted by use. Built once for each decision; policies change nothing in it."""

    request: Request
    engines: list[EngineState]
    """The healthy ones."""
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
        """Return the cost at each engine of the view, in its order; finite, lower is better."""
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


class Ttft(Policy, frozen=True, kw_only=True, tag="ttft", tag_field="policy"):
    """Our policy: the engine where the first token comes soonest.

    For an engine with prefill rate mu, and a way of having h of n tokens, u = n - h of which are computed:

        cost = TTFT = Q + x(h) + u / mu      Q: seconds of work before it; x: seconds to load what is not in its cache

    The ways are the engine's own cache alone, or a load of a longer prefix from a tier that it has a path to.  A prefix
    counts by the probability that it is still there:

        exact          1
        degraded       exp(-age / block life)
        predicted      1, after the seconds until the request in flight has computed it
        unconfirmed    1 until twice the event lag, then 0

    All parts are seconds and measured; there are no knobs.
    """

    near_share: ClassVar[float] = 0.01
    """Rates are not known to within one per cent."""

    def scores(self, view: View) -> list[float]:
        """Return the cost in seconds at each engine."""
        tokens, now_s, cached, own = view.request.tokens, view.now_s, view.knowledge.cached.get, view.own
        if view.shared:
            return [self.estimate(view, engine).ttft_s for engine in view.engines]
        return [
            self.estimate(view, engine).ttft_s
            if engine.name in own
            else engine.queue_s(now_s)
            + (tokens - min(cached(engine.name, 0), tokens - 1)) / engine.prefill_tokens_s
            for engine in view.engines
        ]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the seconds of each term, and the tokens behind them."""
        estimate = self.estimate(view, view.engines[index])
        return {
            "queue_s": estimate.queue_s,
            "load_s": estimate.load_s,
            "compute_s": estimate.compute_s,
            "cached_tokens": estimate.cached_tokens,
        }

    def way(self, view: View, index: int) -> Way:
        """Return the way behind the cost."""
        estimate = self.estimate(view, view.engines[index])
        copy = estimate.copy
        return Way(
            cached_tokens=estimate.cached_tokens,
            tier=copy.tier if copy else "l0",
            source=copy.source if copy else "",
            load_tokens=estimate.load_tokens,
            load_s=estimate.load_s,
            ttft_s=estimate.ttft_s,
        )

    def estimate(self, view: View, engine: EngineState) -> Estimate:
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


class Auto(Ttft, frozen=True, kw_only=True, tag="auto", tag_field="policy"):
    """Our policy: what the request costs everybody until its last token, and not only itself until its first.

        cost = TTFT + DECODE_SHARE · (o · (α + β · (R + 1)) + R_run · u / mu)

    o: expected tokens of the answer; α + β·R: the engine's seconds a token with R requests; R_run: its requests that
    have their first token, which wait while it computes u tokens.  Without these terms the engine that holds a
    popular prefix would get every request.

    Replicas: u counts what lies before the end of the longest prefix that any engine has by 1 / (1 + k / N), where k
    requests in flight begin with it at N engines: another copy of it serves the next ones.
    """

    near_share: ClassVar[float] = 0.0
    """The answer's part is large and nearly the same everywhere: one per cent of the whole may be all of the rest."""

    def scores(self, view: View) -> list[float]:
        """Return the cost in seconds at each engine."""
        held, spared_share = self._replica(view)
        own, cached, now_s, most = view.own, view.knowledge.cached.get, view.now_s, view.request.tokens - 1
        answer = DECODE_SHARE * view.request.answer_tokens
        costs = []
        for engine in view.engines:
            if view.shared or engine.name in own:
                costs.append(self._cost(view, engine, held, spared_share)[1])
                continue
            has = min(cached(engine.name, 0), most)
            computed = most + 1 - has - (spared_share * (held - has) if held > has else 0.0)
            costs.append(
                engine.queue_s(now_s)
                + computed / engine.prefill_tokens_s * (1.0 + DECODE_SHARE * engine.running)
                + answer * (engine.token_s + engine.token_each_s * (engine.requests + 1))
            )
        return costs

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the seconds of each term, and the tokens behind them."""
        engine = view.engines[index]
        spared_s, _, answer_s, others_s = self._cost(view, engine, *self._replica(view))
        more = {"answer_s": answer_s, "others_s": others_s, "spared_s": spared_s}
        return super().terms(view, index) | more

    @staticmethod
    def _replica(view: View) -> tuple[int, float]:
        """The longest prefix that any engine has, and the share of it that a further copy would not cost."""
        held = min(longest(view.knowledge), view.request.tokens - 1)
        return held, 1.0 - 1.0 / (1.0 + view.request.sharing / max(1, len(view.engines)))

    def _cost(self, view: View, engine: EngineState, held: int, spared_share: float) -> tuple[float, ...]:
        """(What a further copy is worth, the cost, its answer's part, the others' part), in seconds."""
        estimate = self.estimate(view, engine)
        spared_s = spared_share * max(0, held - estimate.cached_tokens) / engine.prefill_tokens_s
        answer_s = view.request.answer_tokens * (engine.token_s + engine.token_each_s * (engine.requests + 1))
        others_s = engine.running * (estimate.compute_s - spared_s)
        cost_s = estimate.ttft_s - spared_s + DECODE_SHARE * (answer_s + others_s)
        return spared_s, cost_s, answer_s, others_s


def longest(knowledge: Knowledge) -> int:
    """Return how many tokens of the prompt the engine has that has most of them in its own cache."""
    copies = (copy.tokens for copy in knowledge.copies if copy.tier == "l0")
    return max(*knowledge.cached.values(), *copies, 0, 0)


def _probability(copy: Copy, knowledge: Knowledge) -> float:
    """Return how likely it is that a copy can be used."""
    if copy.certainty == "degraded":
        return math.exp(-copy.age_s / knowledge.block_life_s)
    if copy.certainty == "unconfirmed" and copy.age_s > 2 * knowledge.event_lag_s:
        return 0.0
    return 1.0


class LeastLoaded(Policy, frozen=True, kw_only=True, tag="least_loaded", tag_field="policy"):
    """The engine with the fewest requests in flight."""

    def scores(self, view: View) -> list[float]:
        """Return the requests, this one included, over the engine's share."""
        return [(engine.requests + 1) / engine.share - 1.0 for engine in view.engines]

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
