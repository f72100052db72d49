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

The formula itself is in native code (native/routing.pyi), since it is computed for each engine of a large fleet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvstrata.policy.routing.interface import PlainPolicy, View
from kvstrata.policy.routing.model import COSTS, Copy, EngineState, Way

if TYPE_CHECKING:
    from kvstrata.native.routing import Moment


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


class Ttft(PlainPolicy, frozen=True, kw_only=True, tag="ttft", tag_field="policy"):
    """See the module."""

    near_share: ClassVar[float] = 0.01
    """Rates are not known to within one per cent."""

    def scores(self, view: View) -> list[float]:
        """Return the cost in seconds at each engine."""
        cached = view.knowledge.cached
        return COSTS.scores(view.engines, _moment(view), cached=cached, own=view.own, shared=view.shared)

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
        cached = view.knowledge.cached
        return Estimate(
            *COSTS.estimate(engine, _moment(view), cached=cached, own=view.own, shared=view.shared)
        )


def _moment(view: View) -> Moment:
    """Return what the engines have in common."""
    knowledge = view.knowledge
    return view.request.tokens, view.now_s, knowledge.block_life_s, knowledge.event_lag_s
