"""The router of llm-d (its endpoint picker): an affinity filter, then a weighted sum of scores from 0 to 1.

Source: llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling: filter/prefixcacheaffinity and the scorers prefix,
queue, kvcacheutilization and tokenload; weights of its default profile.

    score = 3 * prefix + 2 * queue + 2 * kv + token_load_weight * token load;     the cost is its negative
    prefix      cached share of the prompt
    queue       (most waiting - waiting) / (most - least), 1 if all are equal
    kv          1 - used share of the KV cache
    token load  1 - min(1, (tokens in flight + the prompt's uncached ones) / queue_threshold_tokens)

The filter keeps the engines that have at least `affinity_threshold` of the prompt, if there are any, unless the
shortest of their queues, in tokens over `peak_prefill_tokens_s`, is more than `max_ttft_penalty_s` longer than the
shortest of the others.  A threshold of 0 switches it off, which is the default profile; `GUIDE` has the weights of
llm-d's guide, with the filter and the token load alone.

Tokens in flight are the uncached ones of all requests until they end.  The filter's exploration, off by default, is
left out.
"""

from __future__ import annotations

from kvstrata.policy.routing.interface import PlainPolicy, View
from kvstrata.policy.routing.model import EngineState

EXCLUDED = 1e6
"""Added to the cost of engines that a filter drops; no score comes near it."""


class Llmd(PlainPolicy, frozen=True, kw_only=True, tag="llmd", tag_field="policy"):
    """See the module."""

    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_weight: float = 2.0
    token_load_weight: float = 0.0
    queue_threshold_tokens: int = 4_194_304
    affinity_threshold: float = 0.0
    max_ttft_penalty_s: float = 18.0
    peak_prefill_tokens_s: float = 15_928.0
    """llm-d's default, measured with Qwen 32B on two H100."""

    def scores(self, view: View) -> list[float]:
        """Return the negative scores, with EXCLUDED added where the filter drops the engine."""
        holders = view.holders("l0")
        dropped = self._dropped(view, holders)
        least, most = self._waiting(view)
        costs = [
            -sum(self._terms(view, engine, holders.get(engine.name, 0), least, most))
            for engine in view.engines
        ]
        return [cost + EXCLUDED if index in dropped else cost for index, cost in enumerate(costs)]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the weighted scores, and whether the filter dropped the engine."""
        engine = view.engines[index]
        holders = view.holders("l0")
        prefix, queue, kv, load = self._terms(view, engine, holders.get(engine.name, 0), *self._waiting(view))
        return {
            "prefix": prefix,
            "queue": queue,
            "kv": kv,
            "token_load": load,
            "dropped": float(index in self._dropped(view, holders)),
        }

    @staticmethod
    def _waiting(view: View) -> tuple[int, int]:
        waiting = [engine.waiting for engine in view.engines]
        return min(waiting, default=0), max(waiting, default=0)

    def _terms(
        self, view: View, engine: EngineState, cached: int, least: int, most: int
    ) -> tuple[float, float, float, float]:
        tokens = view.request.tokens
        queue = (most - engine.waiting) / (most - least) if most > least else 1.0
        load = min(1.0, (engine.inflight_tokens + tokens - cached) / self.queue_threshold_tokens)
        return (
            self.prefix_weight * cached / tokens,
            self.queue_weight * queue,
            self.kv_weight * (1.0 - engine.kv_usage),
            self.token_load_weight * (1.0 - load),
        )

    def _dropped(self, view: View, holders: dict[str, int]) -> set[int]:
        if self.affinity_threshold <= 0.0 or not holders:
            return set()
        enough = self.affinity_threshold * view.request.tokens
        warm: set[int] = set()
        cold: set[int] = set()
        for index, engine in enumerate(view.engines):
            (warm if holders.get(engine.name, 0) >= enough else cold).add(index)
        if not warm or not cold:
            return set()
        if self.max_ttft_penalty_s > 0.0:
            shortest = [min(view.engines[index].inflight_tokens for index in group) for group in (warm, cold)]
            if (shortest[0] - shortest[1]) / self.peak_prefill_tokens_s > self.max_ttft_penalty_s:
                return set()
        return cold


GUIDE = Llmd(
    prefix_weight=0.0, queue_weight=0.0, kv_weight=0.0, token_load_weight=1.0, affinity_threshold=0.8
)
"""The profile of llm-d's guide to prefix-aware routing."""
