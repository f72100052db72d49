"""Formulas of other routers, from their published sources, as policies that `choose` takes; they are not those routers.

`Lmetric`, the product of what is left to prefill and the size of the batch: arXiv 2603.15202 by its abstract, and
llm-d's `lmetric-scorer`.

    cost = (uncached tokens of the prompt) * (requests in flight + 1)

`count_queued` adds the engine's own prefill tokens without a first token to the first factor, as Dynamo's `lmetric`.

`Llmd`, the endpoint picker of llm-d: an affinity filter, then a weighted sum of scores from 0 to 1; the cost is its
negative.  llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling, the weights of its default profile.

    score = 3 * prefix + 2 * queue + token_load_weight * token load
    prefix      cached share of the prompt
    queue       (most waiting - waiting) / (most - least), 1 if all are equal
    token load  1 - min(1, (tokens in flight + the prompt's uncached ones) / queue_threshold_tokens)

The filter keeps the engines that have at least `affinity_threshold` of the prompt, if there are any, unless the
shortest of their queues, in tokens over `peak_prefill_tokens_s`, is more than `max_ttft_penalty_s` longer than the
shortest of the others.  A threshold of 0 switches it off; `GUIDE` has the weights of llm-d's guide.  Left out: the
filter's exploration, and the share of the KV cache that is free, which the gateway does not poll.

`Smg`, the cache-aware policy of the Shepherd Model Gateway: smg-project/smg, model_gateway/src/policies, pull requests
2161 and 2341.  If the longest cached prefix of all engines is more than `cache_threshold` of the prompt, the engines
that hold it are preferred, each unless it is under pressure:

    load > balance_rel_threshold * mean  and  load > mean + balance_abs_threshold        (load: requests in flight)

Among the preferred ones, or among all if there are none, the fewest queued tokens decide.  Left out: what a poll of the
engine's KV use and throughput would add.

`MooncakeConductor`, the KVCache-centric scheduling of Mooncake (FAST 2025), with `own` the prefix in an engine's cache
and host, and `best` the longest of all engines:

    best / own > balancing_threshold:   TTFT = transfer(best - own) + queue + prefill(prompt - best)
    else:                               TTFT = queue + prefill(prompt - own)

The paper gives no value of the threshold; 1 means that a transfer is taken whenever another engine has more.  An engine
without a path to peers computes.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvstrata.gateway.routing.model import EngineState, Tier, Way
from kvstrata.gateway.routing.price import Explained, View

EXCLUDED = 1e6
"""Added to the cost of engines that are not preferred; no score or wait comes near it."""


def holders(view: View, *tiers: Tier) -> dict[str, int]:
    """The longest prefix that an engine has in these tiers, by its name; some may have gone or be unhealthy.

    Each copy counts at its full length, except those that are only predicted or unconfirmed: indices of other routers
    know only what events told.
    """
    held = dict(view.knowledge.cached) if "l0" in tiers else {}
    for name, copies in view.own.items():
        for copy in copies:
            if copy.tier in tiers and copy.certainty in ("exact", "degraded"):
                held[name] = max(held.get(name, 0), copy.tokens)
    return {name: min(tokens, view.request.tokens) for name, tokens in held.items()}


class Formula(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the policies here, which `choose` takes as a Policy: their costs are of one term."""

    name: ClassVar[str]
    share: ClassVar[float] = 0.0
    near_share: ClassVar[float] = 0.0
    splits: ClassVar[bool] = False

    def explained(self, view: View, index: int) -> Explained:
        """Return the cost."""
        return Explained({"cost": self.scores(view)[index]})


class Lmetric(Formula, frozen=True, kw_only=True):
    """See the module."""

    name: ClassVar[str] = "lmetric"

    count_queued: bool = False

    def scores(self, view: View) -> list[float]:
        """Return the products."""
        tokens, cached = view.request.tokens, holders(view, "l0")
        return [
            float(
                (tokens - cached.get(engine.name, 0) + self.count_queued * engine.prefill_tokens)
                * (engine.requests + 1)
            )
            for engine in view.engines
        ]


class Llmd(Formula, frozen=True, kw_only=True):
    """See the module."""

    name: ClassVar[str] = "llmd"

    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    token_load_weight: float = 0.0
    queue_threshold_tokens: int = 4_194_304
    affinity_threshold: float = 0.0
    max_ttft_penalty_s: float = 18.0
    peak_prefill_tokens_s: float = 15_928.0
    """llm-d's default, measured with Qwen 32B on two H100."""

    def scores(self, view: View) -> list[float]:
        """Return the negative scores, with EXCLUDED added where the filter drops the engine."""
        cached, tokens = holders(view, "l0"), view.request.tokens
        waiting = [engine.waiting for engine in view.engines]
        most, range_ = max(waiting), max(waiting) - min(waiting)
        dropped = self._dropped(view, cached)
        costs = []
        for index, engine in enumerate(view.engines):
            held = cached.get(engine.name, 0)
            load = min(1.0, (engine.inflight_tokens + tokens - held) / self.queue_threshold_tokens)
            score = self.prefix_weight * held / tokens
            score += self.queue_weight * ((most - engine.waiting) / range_ if range_ else 1.0)
            score += self.token_load_weight * (1.0 - load)
            costs.append(EXCLUDED - score if index in dropped else -score)
        return costs

    def _dropped(self, view: View, cached: dict[str, int]) -> set[int]:
        if self.affinity_threshold <= 0.0:
            return set()
        enough = self.affinity_threshold * view.request.tokens
        warm: set[int] = set()
        cold: set[int] = set()
        for index, engine in enumerate(view.engines):
            (warm if cached.get(engine.name, 0) >= enough else cold).add(index)
        if not warm or not cold:
            return set()
        shortest = [min(view.engines[index].inflight_tokens for index in group) for group in (warm, cold)]
        late_s = (shortest[0] - shortest[1]) / self.peak_prefill_tokens_s
        return set() if late_s > self.max_ttft_penalty_s else cold


GUIDE = Llmd(prefix_weight=0.0, queue_weight=0.0, token_load_weight=1.0, affinity_threshold=0.8)
"""The profile of llm-d's guide to prefix-aware routing."""


class Smg(Formula, frozen=True, kw_only=True):
    """See the module."""

    name: ClassVar[str] = "smg"

    cache_threshold: float = 0.5
    balance_abs_threshold: float = 32.0
    balance_rel_threshold: float = 1.1
    throughput: float = 2_000.0
    """Tokens a second, SMG's default for an engine that tells no rate."""

    def scores(self, view: View) -> list[float]:
        """Return the expected waits, with EXCLUDED added to those of the engines that are not preferred."""
        preferred = self._preferred(view)
        waits = [
            engine.queue_s(view.now_s) * engine.prefill_tokens_s / self.throughput for engine in view.engines
        ]
        if not preferred:
            return waits
        return [wait if index in preferred else wait + EXCLUDED for index, wait in enumerate(waits)]

    def _preferred(self, view: View) -> set[int]:
        held = holders(view, "l0")
        cached = [held.get(engine.name, 0) for engine in view.engines]
        longest = max(cached)
        if longest <= self.cache_threshold * view.request.tokens:
            return set()
        mean = sum(engine.requests for engine in view.engines) / len(view.engines)
        limit = max(self.balance_rel_threshold * mean, mean + self.balance_abs_threshold)
        return {
            index
            for index, engine in enumerate(view.engines)
            if cached[index] == longest and engine.requests <= limit
        }


class MooncakeConductor(Formula, frozen=True, kw_only=True):
    """See the module."""

    name: ClassVar[str] = "mooncake_conductor"

    balancing_threshold: float = 1.0

    def scores(self, view: View) -> list[float]:
        """Return the estimated seconds."""
        held = holders(view, "l0", "l1")
        best = max((held.get(engine.name, 0) for engine in view.engines), default=0)
        return [self._way(view, engine, held.get(engine.name, 0), best, "").ttft_s for engine in view.engines]

    def explained(self, view: View, index: int) -> Explained:
        """Return the transfer, if there is one, and from whom: of equal holders the first by name."""
        held = holders(view, "l0", "l1")
        best, holder = min((-held.get(engine.name, 0), engine.name) for engine in view.engines)
        way = self._way(view, view.engines[index], held.get(view.engines[index].name, 0), -best, holder)
        return Explained({"cost": way.ttft_s}, way)

    def _way(self, view: View, engine: EngineState, own: int, best: int, holder: str) -> Way:
        tokens, queue_s = view.request.tokens, engine.queue_s(view.now_s)
        path = engine.paths.get("peer")
        if path is None or best <= own or best <= self.balancing_threshold * own:
            return Way(cached_tokens=own, ttft_s=queue_s + (tokens - own) / engine.prefill_tokens_s)
        transfer_s = max(0.0, path.free_s - view.now_s) + path.latency_s + (best - own) / path.tokens_s
        return Way(
            cached_tokens=best,
            tier="peer",
            source=holder,
            load_tokens=best - own,
            load_s=transfer_s,
            ttft_s=transfer_s + queue_s + (tokens - best) / engine.prefill_tokens_s,
        )
