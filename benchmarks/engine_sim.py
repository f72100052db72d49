"""`sim_fleet`: how much faster than the engines' time a fleet of simulated engines runs, for two block sizes.

Load: 8 engines, 20 requests a second of 2,050 to 2,500 tokens of which 2,000 are one of 20 shared prefixes, answers of
50 to 300 tokens, with KV events. Requests of one prefix go to one engine.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

from benchmarks.common import figure, median_spread, sized
from kvstrata.testing.engine_sim import fleet
from kvstrata.testing.engine_sim.engine import SimEngine
from kvstrata.testing.engine_sim.engine_model import PS_PER_S, EngineModel
from kvstrata.testing.engine_sim.requests import SimRequest, answer_to

ENGINES = 8
REQUESTS = sized(4000, 50)
REPEATS = sized(5, 1)
A_SECOND = 20.0
PREFIXES, PREFIX_TOKENS = 20, 2000
KV_TOKENS = 320_000
TARGET = 1000
SEED = int(os.environ.get("BENCH_SEED", "2026"))


def load() -> list[tuple[int, int, SimRequest]]:
    """Arrivals: time, prefix, request."""
    source = random.Random(SEED)
    prefixes = [[source.randrange(100_000) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    arrivals, now = [], 0.0
    for number in range(REQUESTS):
        now += source.expovariate(A_SECOND)
        which = source.randrange(PREFIXES)
        prompt = prefixes[which] + [source.randrange(100_000) for _ in range(source.randrange(50, 500))]
        answer = answer_to(prompt, source.randrange(50, 300), 0)
        arrivals.append((int(now * PS_PER_S), which, SimRequest(str(number), prompt, answer=answer)))
    return arrivals


def measure(block_tokens: int) -> float:
    """Seconds of the fleet's time that a second computes."""
    model = EngineModel(block_tokens=block_tokens, kv_blocks=KV_TOKENS // block_tokens)
    engines = [SimEngine(model) for _ in range(ENGINES)]
    arrivals = load()
    of = {request.name: engines[which % ENGINES] for _, which, request in arrivals}

    def choose(request: SimRequest, at_ps: int) -> SimEngine:
        engine = of[request.name]
        engine.take_events()
        return engine

    started = time.perf_counter()
    fleet.run(engines, ((at, request) for at, _, request in arrivals), choose)
    took = time.perf_counter() - started
    return max(request.ended_ps for _, _, request in arrivals) / PS_PER_S / took


def run() -> list[dict[str, Any]]:
    """Measure the figures."""
    figures = []
    for block_tokens in (16, 512):
        value, spread = median_spread([measure(block_tokens) for _ in range(REPEATS)])
        figures.append(
            figure(
                f"sim_fleet_{block_tokens}",
                value=value,
                unit="× real time",
                ratio=value * ENGINES,
                target=f"≥ {TARGET} × real time",
                ok=value >= TARGET,
                spread=spread,
                ratio_to="one engine's time",
            )
        )
    return figures
