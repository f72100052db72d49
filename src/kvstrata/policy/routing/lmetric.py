"""LMetric: the product of what is left to prefill and the size of the batch.

Source: "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling", arXiv 2603.15202,
by its abstract, and llm-d's lmetric-scorer (llm-d-router, pkg/epp/framework/plugins/scheduling/scorer/lmetric):

    cost = (uncached tokens of the prompt) * (requests in flight + 1)

The paper has no knobs.  `count_queued` adds the engine's own prefill tokens without a first token to the first factor,
as the cost `lmetric` of Dynamo's router does.
"""

from __future__ import annotations

from kvstrata.policy.routing.interface import PlainPolicy, View


class Lmetric(PlainPolicy, frozen=True, kw_only=True, tag="lmetric", tag_field="policy"):
    """See the module."""

    count_queued: bool = False

    def scores(self, view: View) -> list[float]:
        """Return the products."""
        tokens, queued, cached = view.request.tokens, self.count_queued, view.holders("l0").get
        return [
            float(
                (tokens - cached(engine.name, 0) + (engine.prefill_tokens if queued else 0))
                * (engine.requests + 1)
            )
            for engine in view.engines
        ]

    def terms(self, view: View, index: int) -> dict[str, float]:
        """Return both factors."""
        engine = view.engines[index]
        uncached = view.request.tokens - view.cached(engine.name, "l0")
        queued = engine.prefill_tokens if self.count_queued else 0
        return {"prefill_tokens": uncached + queued, "batch": engine.requests + 1}
