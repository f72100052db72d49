"""The cache-aware policy of SMG, the Shepherd Model Gateway (formerly sgl-model-gateway).

Source: smg-project/smg, model_gateway/src/policies (cache_aware.rs, least_load.rs), pull requests 2161 and 2341 of
August 2026; defaults of its `CacheAwareConfig`.  If the longest cached prefix of all engines is more than
`cache_threshold` of the prompt, the engines that hold it are preferred, each unless it is under pressure:

    load > balance_rel_threshold * mean  and  load > mean + balance_abs_threshold        (load: requests in flight)

Among the preferred ones, or among all if there are none, the least expected wait decides:

    wait = tokens queued / throughput + kv_pressure_weight * k / (1 - k)                 (k: used share of the KV cache)

Differences: SMG adds what it dispatched since its last poll to the polled queue; here the router's own estimate of the
queue stands for both.  Ties go by hash, not by chance.
"""

from __future__ import annotations

from kvstrata.policy.routing.interface import PlainPolicy, View
from kvstrata.policy.routing.model import EngineState

NOT_PREFERRED = 1e6
"""Added to the wait of engines that are not preferred, in seconds."""
FULLEST = 0.999
"""Highest used share that enters the formula."""


class Smg(PlainPolicy, frozen=True, kw_only=True, tag="smg", tag_field="policy"):
    """See the module."""

    cache_threshold: float = 0.5
    balance_abs_threshold: float = 32.0
    balance_rel_threshold: float = 1.1
    kv_pressure_weight: float = 0.15
    default_throughput: float = 2_000.0
    """Tokens a second of an engine that tells no rate."""

    def scores(self, view: View) -> list[float]:
        """Return the expected waits, with NOT_PREFERRED added to those of the engines that are not."""
        preferred = self._preferred(view)
        waits = [self._wait_s(view, engine) for engine in view.engines]
        if not preferred:
            return waits
        return [wait if index in preferred else wait + NOT_PREFERRED for index, wait in enumerate(waits)]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the wait, the cached tokens, and whether the engine is preferred for them."""
        engine = view.engines[index]
        return {
            "wait_s": self._wait_s(view, engine),
            "cached_tokens": view.cached(engine.name, "l0"),
            "preferred": float(index in self._preferred(view)),
        }

    def _wait_s(self, view: View, engine: EngineState) -> float:
        queued = engine.queue_s(view.now_s) * engine.prefill_tokens_s
        used = min(FULLEST, max(0.0, engine.kv_usage))
        throughput = engine.generated_tokens_s if engine.generated_tokens_s > 0 else self.default_throughput
        return queued / throughput + self.kv_pressure_weight * used / (1.0 - used)

    def _preferred(self, view: View) -> set[int]:
        holders = view.holders("l0")
        if not holders:
            return set()
        cached = [holders.get(engine.name, 0) for engine in view.engines]
        longest = max(cached, default=0)
        if longest <= self.cache_threshold * view.request.tokens:
            return set()
        mean = sum(engine.requests for engine in view.engines) / len(view.engines)
        limit = max(self.balance_rel_threshold * mean, mean + self.balance_abs_threshold)
        return {
            index
            for index, engine in enumerate(view.engines)
            if cached[index] == longest and engine.requests <= limit
        }
