"""`route_decide`: the time of one routing decision, by our policy and, for comparison, by the others.

A prompt of 128k tokens; engines with queues, requests in flight and paths to tiers.  Knowledge is of four kinds: none,
8 engines that hold a prefix, a prefix in the cache of every engine, or a tier that every engine can load from beside
the 8.  A fifth case is an idle fleet, in which all engines tie.  The figure is the slowest case; `cases` has all, and
`splits` the same where another engine may compute the prompt.  What is timed is `choose` as a whole: the scores, the
pick, the terms and the alternatives.

Sketch: ten fields of each engine at 5 ns.
"""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.common import compared, median_spread, sized
from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.choose import POLICIES, Policy, choose
from kvstrata.gateway.routing.model import Copy, EngineState, Knowledge, LoadPath, Request

TOKENS = 131_072
TARGETS_US = {64: 100.0, 1_000: 500.0}
HOLDERS = 8
DECISIONS = sized(400, 3)
REPEATS = sized(7, 1)
SKETCH_US = 0.05
"""For each engine."""


def fleet(n_engines: int) -> list[EngineState]:
    """Make engines that are busy to different degrees."""
    chance = random.Random(n_engines)
    return [
        EngineState(
            name=f"engine-{number}",
            prefill_tokens_s=chance.uniform(12_000, 18_000),
            token_s=0.006 + 0.0003 * chance.randrange(40),
            instance=f"host-{number // 4}",
            drained_s=chance.uniform(9.0, 12.0),
            late_s=chance.uniform(9.9, 12.0),
            prefill_tokens=chance.randrange(40_000),
            inflight_tokens=chance.randrange(200_000),
            requests=chance.randrange(40),
            waiting=chance.randrange(4),
            running=chance.randrange(36),
            context_tokens=chance.randrange(500_000),
            paths={
                "l1": LoadPath(latency_s=0.001, tokens_s=400_000.0),
                "l2": LoadPath(latency_s=0.01, tokens_s=100_000.0),
                "peer": LoadPath(latency_s=0.01, tokens_s=200_000.0),
            },
        )
        for number in range(n_engines)
    ]


def idle(n_engines: int) -> list[EngineState]:
    """Make engines that are all alike and do nothing."""
    return [EngineState(name=f"engine-{number}", prefill_tokens_s=15_000.0) for number in range(n_engines)]


def kinds(n_engines: int) -> dict[str, Knowledge]:
    """Make what may be known of the prompt."""
    step = n_engines // HOLDERS
    holders = {f"engine-{number * step}": TOKENS - 4_096 for number in range(HOLDERS)}
    everywhere = {f"engine-{number}": number * TOKENS // n_engines for number in range(n_engines)}
    shared = Copy(engine="", tier="l2", tokens=TOKENS - 8_192, source="disk")
    return {
        "none": Knowledge(),
        "holders": Knowledge(cached=holders),
        "everywhere": Knowledge(cached=everywhere),
        "shared": Knowledge(cached=holders, copies=[shared]),
    }


def decision_us(
    policy: Policy, engines: list[EngineState], knowledge: Knowledge, contract: Contract = ""
) -> float:
    """Return the median over the repeats of the median time of a decision."""
    repeats = []
    for repeat in range(REPEATS):
        times = []
        for number in range(DECISIONS):
            request = Request(
                id=f"{repeat}/{number}",
                tokens=TOKENS,
                number=number,
                session=f"s{number % 50}",
                answer_tokens=300.0,
                sharing=number % 4,
            )
            begun = time.perf_counter_ns()
            choose(request, engines, knowledge, 10.0, policy=policy, contract=contract)
            times.append((time.perf_counter_ns() - begun) / 1e3)
        repeats.append(median_spread(times)[0])
    return median_spread(repeats)[0]


def run() -> list[dict[str, Any]]:
    """Measure our policy in each case, and the others with a few holders."""
    figures = []
    for n_engines, target_us in TARGETS_US.items():
        engines, known = fleet(n_engines), kinds(n_engines)
        ours = {
            kind: decision_us(POLICIES["auto"](), engines, knowledge) for kind, knowledge in known.items()
        }
        ours["idle"] = decision_us(POLICIES["auto"](), idle(n_engines), known["none"])
        splits = {
            kind: decision_us(POLICIES["auto"](), engines, knowledge, "kvstrata")
            for kind, knowledge in known.items()
        }
        others = {
            name: decision_us(make(), engines, known["holders"])
            for name, make in POLICIES.items()
            if name != "auto"
        }
        figures.append(
            compared(
                f"route_decide_{n_engines}",
                max(ours.values()),
                "µs",
                "the sketch",
                SKETCH_US * n_engines,
                most_value=target_us,
                cases=ours,
                splits=splits,
                others_with_holders=others,
            )
        )
    return figures
