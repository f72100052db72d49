"""Our policy: send a request where its first token comes soonest.

For engine i with prefill rate mu, and a way of having h of n tokens, u = n - h of which are computed:

    TTFT = Q + x(h) + u / mu                 Q: seconds of work before it; x: seconds to load what is not in its cache
    cost = TTFT + K                          K: expected preemption

The ways are the engine's own cache alone, or a load of a longer prefix from a tier that it has a path to.  A prefix
counts by the probability that it is still there:

    exact          1
    degraded       exp(-age / block life)
    predicted      1, after the seconds until the request in flight has computed it
    unconfirmed    1 until twice the event lag, then 0

K is what must be computed again if the request does not fit the engine's KV cache beside those in flight.  All parts
are seconds and measured; there are no knobs.
"""

from __future__ import annotations

import heapq
import math
from typing import ClassVar, NamedTuple

from kvstrata.policy.routing.interface import PlainPolicy, View
from kvstrata.policy.routing.model import Copy, EngineState, Knowledge, Way

EXACT = 4
"""Engines whose costs are exact in any case: the chosen one and those that a decision names beside it."""


class Estimate(NamedTuple):
    """What a request costs at one engine by its best way, in seconds."""

    queue_s: float
    load_s: float
    compute_s: float
    preemption_s: float
    copy: Copy | None
    cached_tokens: int
    load_tokens: int

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.queue_s + self.load_s + self.compute_s

    @property
    def cost_s(self) -> float:
        """Of the request, with the work that it makes others do again."""
        return self.queue_s + self.load_s + self.compute_s + self.preemption_s


def probability(copy: Copy, knowledge: Knowledge) -> float:
    """Return how likely it is that the copy can be used."""
    if copy.certainty == "degraded":
        return math.exp(-copy.age_s / knowledge.block_life_s)
    if copy.certainty == "unconfirmed" and copy.age_s > 2 * knowledge.event_lag_s:
        return 0.0
    return 1.0


class Ttft(PlainPolicy, frozen=True, kw_only=True, tag="ttft", tag_field="policy"):
    """See the module."""

    near_share: ClassVar[float] = 0.01
    """Rates are not known to within one per cent."""

    def scores(self, view: View) -> list[float]:
        """Return the cost in seconds at each engine.

        An engine that a load from a shared tier could not bring among the `EXACT` cheapest has its cost without one.
        """
        tokens, now_s, own = view.request.tokens, view.now_s, view.own
        cached = view.knowledge.cached.get
        known = bool(own or view.knowledge.cached)
        costs: list[float] = []
        add = costs.append
        # The formula is written out for engines of which at most their own cache is known, because a large fleet must
        # be scored within half a millisecond; `estimate` has it for all cases.
        for engine in view.engines:
            uncached = tokens
            if known:
                name = engine.name
                if own and name in own:
                    add(self.estimate(view, engine).cost_s)
                    continue
                uncached -= cached(name, 0)
                if uncached < 1:
                    uncached = 1
            rate = engine.prefill_tokens_s
            work = float(uncached)
            backlog = engine.backlog_tokens
            if backlog or engine.waiting:
                past_s = now_s - engine.at_s
                if past_s > 0.0:
                    backlog -= past_s * rate
                behind = engine.behind_tokens
                work += backlog if backlog > behind else behind
                moved_s = engine.moved_s
                if moved_s is not None and engine.waiting:
                    late = (now_s - moved_s) * rate - engine.prefill_tokens
                    if late > 0.0:
                        work += late
            kv_tokens = engine.kv_tokens
            if kv_tokens:
                excess = engine.context_tokens + tokens - kv_tokens
                if excess > 0:
                    work += excess
            add(work / rate)
        if view.shared:
            self._share(view, costs)
        return costs

    def _share(self, view: View, costs: list[float]) -> None:
        """Lower the costs of engines for which a load from a shared tier pays, as far as they may be chosen."""
        if not costs:
            return
        tokens, shared = view.request.tokens, view.shared
        longest = min(tokens - 1, max(copy.tokens for copy in shared))
        limit = heapq.nsmallest(EXACT, costs)[-1] * (1.0 + self.near_share)
        plain = len(shared) == 1 and shared[0].certainty == "exact"
        tier, cached, own = shared[0].tier, view.knowledge.cached.get, view.own
        for index, engine in enumerate(view.engines):
            token_s = 1.0 / engine.prefill_tokens_s
            if costs[index] - longest * token_s > limit:
                continue
            if plain and (not own or engine.name not in own):
                path = engine.paths.get(tier)
                load_tokens = longest - cached(engine.name, 0)
                if path is not None and tier != "l0" and load_tokens > 0:
                    load_s = path.latency_s + (path.queued_tokens + load_tokens) / path.tokens_s
                    saved_s = load_tokens * token_s - load_s
                    if saved_s > 0.0:
                        costs[index] -= saved_s
            else:
                costs[index] = self.estimate(view, engine).cost_s

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the seconds of each term, and the tokens behind them."""
        estimate = self.estimate(view, view.engines[index])
        return {
            "queue_s": estimate.queue_s,
            "load_s": estimate.load_s,
            "compute_s": estimate.compute_s,
            "preemption_s": estimate.preemption_s,
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
        """Return the cheapest way at one engine."""
        tokens, rate, knowledge = view.request.tokens, engine.prefill_tokens_s, view.knowledge
        queue_s = engine.queue_s(view.now_s)
        token_s = 1.0 / rate
        most = tokens - 1  # At least one token is always computed.
        held_tokens = sure = min(view.held(engine.name), most)
        held_expected = float(sure)
        best_s, uncached, best_load_s = token_s * (tokens - sure), tokens - held_expected, 0.0
        best: Copy | None = None
        loads = []
        for copy in (*view.own.get(engine.name, ()), *view.shared):
            if copy.tier != "l0":
                loads.append(copy)
                continue
            if copy.engine != engine.name:
                continue
            cached = min(copy.tokens, most)
            expected = cached * probability(copy, knowledge)
            wait_s = 0.0
            if copy.certainty == "predicted":
                wait_s = max(0.0, copy.ready_at_s - view.now_s - queue_s)
            elif expected > held_expected:
                held_tokens, held_expected = cached, expected
            cost_s = wait_s + token_s * (tokens - expected)
            if cost_s < best_s:
                best_s, uncached, best_load_s, best = cost_s, tokens - expected, wait_s, copy
        for copy in loads:
            path = engine.paths.get(copy.tier)
            cached = min(copy.tokens, most)
            if path is None or cached <= held_tokens:
                continue
            chance = probability(copy, knowledge)
            load_tokens = cached - held_tokens
            load_s = chance * (path.latency_s + (path.queued_tokens + load_tokens) / path.tokens_s)
            if copy.certainty == "predicted":
                load_s += max(0.0, copy.ready_at_s - view.now_s - queue_s)
            left = tokens - (chance * cached + (1.0 - chance) * held_expected)
            cost_s = load_s + token_s * left
            if cost_s < best_s:
                best_s, uncached, best_load_s, best = cost_s, left, load_s, copy
        excess = engine.context_tokens + tokens - engine.kv_tokens if engine.kv_tokens else 0
        cached = min(best.tokens, most) if best else sure
        return Estimate(
            queue_s,
            best_load_s,
            uncached / rate,
            max(0, excess) / rate,
            best,
            cached,
            cached - held_tokens if best and best.tier != "l0" else 0,
        )
