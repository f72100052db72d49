"""Many simulated engines in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.requests import SimRequest

FOREVER_PS = 1 << 100
"""After everything."""


def run(
    engines: Sequence[SimEngine],
    arrivals: Iterable[tuple[int, SimRequest]],
    choose: Callable[[SimRequest, int], SimEngine],
) -> None:
    """Serve requests that arrive at given times (picoseconds, never falling), until all have ended.

    `choose` gets a request and its time, and returns the engine that serves it.  It must `advance` an engine to that
    time before it looks at it; an engine that is not looked at is not advanced, since steps that are computed together
    cost far less than steps computed by themselves.
    """
    for at_ps, request in arrivals:
        choose(request, at_ps).submit(request, at_ps)
    for engine in engines:
        engine.advance(FOREVER_PS)
