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

    `choose` gets a request and its time when all engines stand at that time, and returns the engine that serves it.
    """
    for at_ps, request in arrivals:
        for engine in engines:
            engine.advance(at_ps)
        choose(request, at_ps).submit(request, at_ps)
    for engine in engines:
        engine.advance(FOREVER_PS)
