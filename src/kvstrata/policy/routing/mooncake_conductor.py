"""Mooncake's Conductor: the least estimated time to the first token, a better copy elsewhere counted.

Source: Mooncake (FAST 2025), its KVCache-centric scheduling algorithm.  For each engine, with `own` the prefix in its
cache and host, and `best` the longest of all engines:

    best / own > balancing_threshold:   TTFT = transfer(best - own) + queue + prefill(prompt - best)
    else:                               TTFT = queue + prefill(prompt - own)

The paper gives no value of the threshold; 1 means that a transfer is taken whenever another engine has more.  The
times come from the measured rates: an engine without a path to peers computes.

Differences: the admission by SLO, and the copies that transfers leave behind, are the caller's.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstrata.policy.routing.interface import PlainPolicy, View
from kvstrata.policy.routing.model import EngineState, Way


class Estimate(NamedTuple):
    """Seconds of one engine's terms, and the tokens behind them."""

    transfer_s: float
    queue_s: float
    prefill_s: float
    cached_tokens: int
    transferred_tokens: int


class MooncakeConductor(PlainPolicy, frozen=True, kw_only=True, tag="mooncake_conductor", tag_field="policy"):
    """See the module."""

    balancing_threshold: float = 1.0

    def scores(self, view: View) -> list[float]:
        """Return the estimated seconds."""
        holders = view.holders("l0", "l1")
        if not holders:
            tokens, now_s = view.request.tokens, view.now_s
            return [engine.queue_s(now_s) + tokens / engine.prefill_tokens_s for engine in view.engines]
        best, _ = self._best(view, holders)
        return [
            sum(self._estimate(view, engine, holders.get(engine.name, 0), best)[:3])
            for engine in view.engines
        ]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the seconds of each term."""
        estimate, _ = self._planned(view, index)
        return {
            "transfer_s": estimate.transfer_s,
            "queue_s": estimate.queue_s,
            "prefill_s": estimate.prefill_s,
            "cached_tokens": estimate.cached_tokens,
        }

    def way(self, view: View, index: int) -> Way:
        """Return the transfer, if there is one, and from whom."""
        estimate, holder = self._planned(view, index)
        transfer = estimate.transferred_tokens > 0
        return Way(
            cached_tokens=estimate.cached_tokens,
            tier="peer" if transfer else "l0",
            source=holder if transfer else "",
            load_tokens=estimate.transferred_tokens,
            load_s=estimate.transfer_s,
            ttft_s=sum(estimate[:3]),
        )

    def _planned(self, view: View, index: int) -> tuple[Estimate, str]:
        engine, holders = view.engines[index], view.holders("l0", "l1")
        best, holder = self._best(view, holders)
        return self._estimate(view, engine, holders.get(engine.name, 0), best), holder

    @staticmethod
    def _best(view: View, holders: dict[str, int]) -> tuple[int, str]:
        """Return the longest prefix and the engine that holds it; of equal ones the first by name."""
        found = [(-holders[engine.name], engine.name) for engine in view.engines if engine.name in holders]
        tokens, name = min(found, default=(0, ""))
        return -tokens, name

    def _estimate(self, view: View, engine: EngineState, own: int, best: int) -> Estimate:
        tokens, queue_s = view.request.tokens, engine.queue_s(view.now_s)
        path = engine.paths.get("peer")
        if path is None or best <= own or best <= self.balancing_threshold * own:
            return Estimate(0.0, queue_s, (tokens - own) / engine.prefill_tokens_s, own, 0)
        moved = best - own
        transfer_s = path.latency_s + (path.queued_tokens + moved) / path.tokens_s
        return Estimate(transfer_s, queue_s, (tokens - best) / engine.prefill_tokens_s, best, moved)
