"""NVIDIA Dynamo's KV router.

Source: ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs (`worker_logit`) and config.rs, as of the
release 1.6.1.  In blocks:

    cost   = prefill_load_scale * max(0, raw - credit) + D + decode_active_request_weight * requests
    raw    = (prefill tokens of the engine without a first token + the prompt) / block
    credit = overlap_score_credit * decay * device + 0.75 * host + 0.25 * disk + shared_cache_multiplier * shared
    decay  = 1 / (1 + overlap_score_credit_decay * (prefill tokens - least of all engines) / the prompt)
    D      = KV of the requests in flight and of this one / block

Host, disk and shared count what lies beyond the nearer ones.  With a temperature, an engine is drawn by a softmax of
-cost / (range of the costs * temperature).

Differences: D does not know which blocks two running requests share, so it counts them twice; workers' taints, pinned
workers and the router's queue are left out.
"""

from __future__ import annotations

from kvstrata.policy.routing.interface import PlainPolicy, View
from kvstrata.policy.routing.model import EngineState


class Dynamo(PlainPolicy, frozen=True, kw_only=True, tag="dynamo", tag_field="policy"):
    """See the module. Knobs have Dynamo's names and defaults, the temperature without `router_`."""

    block_tokens: int = 16
    """Tokens of a block of the engines (`kv_cache_block_size`)."""
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    router_temperature: float = 0.0

    @property
    def temperature(self) -> float:
        """`router_temperature`."""
        return self.router_temperature

    def scores(self, view: View) -> list[float]:
        """Return the costs in blocks."""
        least = min((engine.prefill_tokens for engine in view.engines), default=0)
        shared = view.shared_tokens()
        known = bool(view.own or view.knowledge.cached)
        if not shared and not known and not self.decode_active_request_weight:
            # Without credit the formula is linear in the tokens.
            scale, prompt, block = self.prefill_load_scale, view.request.tokens, self.block_tokens
            return [
                (scale * (engine.prefill_tokens + prompt) + (engine.context_tokens + prompt)) / block
                for engine in view.engines
            ]
        return [sum(self._terms(view, engine, least, shared)) for engine in view.engines]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return the prefill, decode and request terms in blocks."""
        least = min(engine.prefill_tokens for engine in view.engines)
        prefill, decode, requests = self._terms(view, view.engines[index], least, view.shared_tokens())
        return {"prefill_blocks": prefill, "decode_blocks": decode, "request_blocks": requests}

    def _terms(
        self, view: View, engine: EngineState, least_tokens: int, shared_tokens: int
    ) -> tuple[float, float, float]:
        prompt, block = view.request.tokens, self.block_tokens
        credit_tokens = 0.0
        device = 0
        if engine.name in view.own or engine.name in view.knowledge.cached:
            device = view.cached(engine.name, "l0")
            host = view.cached(engine.name, "l1")
            disk = view.cached(engine.name, "l2", "peer")
            decay = 1.0 / (
                1.0 + self.overlap_score_credit_decay * (engine.prefill_tokens - least_tokens) / prompt
            )
            credit_tokens = (
                self.overlap_score_credit * decay * device
                + self.host_cache_hit_weight * max(0, host - device)
                + self.disk_cache_hit_weight * max(0, disk - max(device, host))
            )
        credit_tokens += self.shared_cache_multiplier * max(0, shared_tokens - device)
        prefill = max(0.0, engine.prefill_tokens + prompt - credit_tokens) / block
        return (
            self.prefill_load_scale * prefill,
            (engine.context_tokens + prompt) / block,
            self.decode_active_request_weight * engine.requests,
        )
