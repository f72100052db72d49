"""A choice that knows everything: what each engine would do with a request, simulated before it is sent.

Each engine is copied as it is, with its caches, its scheduler's queue and the step in flight, and the copy serves until
the request's first token.  The engine whose copy is first gets it.  What comes later is not known, so the choice is the
best for this request, not for those after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.route_gateway import Outside
from kvstrata.gateway.routing.policies import ranked_first
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.requests import SimRequest


def first_token_ps(
    engine: SimEngine, request: SimRequest, at_ps: int, limit_ps: int | None = None
) -> int | None:
    """When the engine would give the first token if nothing came after the request; None if after `limit_ps`."""
    copied, own = engine.copy(), request.copy()
    copied.submit(own, at_ps)
    while not own.produced:
        next_ps = copied.next_ps()
        assert next_ps is not None, "a request that has no token is not over"
        if limit_ps is not None and next_ps > limit_ps:
            return None
        copied.advance(next_ps + 1)
        copied.take_changed()
    return own.first_token_ps


class Oracle(Outside):
    """Sends a request where its first token comes soonest; equal engines share requests by hash."""

    name = "oracle"

    def engine_for(self, engines: Mapping[str, SimEngine], request: SimRequest, at_ps: int) -> str:
        """See the module."""
        soonest_ps: int | None = None
        best: list[str] = []
        for name in sorted(engines, key=lambda one: (engines[one].waiting, engines[one].running)):
            found_ps = first_token_ps(engines[name], request, at_ps, soonest_ps)
            if found_ps is None:
                continue
            if soonest_ps is None or found_ps < soonest_ps:
                soonest_ps, best = found_ps, []
            best.append(name)
        return best[ranked_first(request.name, best)]
