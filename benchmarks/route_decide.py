"""`route_decide`: the time of one routing decision, by our policy and, for comparison, by the others.

A prompt of 128k tokens; engines with queues, requests in flight and paths to tiers.  Knowledge is of four kinds: none,
8 engines that hold a prefix, a prefix in the cache of every engine, or a tier that every engine can load from beside
the 8.  A fifth case is an idle fleet, in which all engines tie.  The figure is the slowest case; `cases` has all, and
`classes`, `splits` and `both` the same where requests have classes of service, where another engine may compute the
prompt, and both.  What is timed is `choose` as a whole: the scores, the pick, the terms and the alternatives.

Sketch: ten fields of each engine at 5 ns.
"""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec

from benchmarks.common import compared, median_spread, sized
from kvstrata.config.gateway_model import Contract
from kvstrata.gateway.routing.choose import POLICIES, choose
from kvstrata.gateway.routing.model import Copy, EngineState, Knowledge, LoadPath, Request, Tier

TOKENS = 131_072
TARGETS_US = {64: 100.0, 1_000: 500.0}
HOLDERS = 8
PATHS: dict[Tier, LoadPath] = {
    "l1": LoadPath(latency_s=0.001, tokens_s=400_000.0),
    "l2": LoadPath(latency_s=0.01, tokens_s=100_000.0),
    "peer": LoadPath(latency_s=0.01, tokens_s=200_000.0),
}
DECISIONS = sized(400, 3)
REPEATS = sized(7, 1)
SKETCH_US = 0.05
"""For each engine."""


def fleet(n_engines: int) -> list[EngineState]:
    """Make engines that are busy to different degrees."""
    chance = random.Random(n_engines)
    made = [
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
            paths=PATHS,
        )
        for number in range(n_engines)
    ]
    for one in made:
        one.limited = one.running // 2
        one.expect(0.0003, chance.uniform(0, 1), 0.3, 0.015, 300.0)
    return made


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
    name: str, engines: list[EngineState], known: Knowledge, contract: Contract = "", limit_s: float = 0.0
) -> float:
    """Return the median over the repeats of the median time of a decision."""
    repeats, policy = [], POLICIES[name]
    for repeat in range(REPEATS):
        times = []
        for number in range(DECISIONS):
            request = Request(
                id=f"{repeat}/{number}", tokens=TOKENS, number=number, session=f"s{number % 50}",
                answer_tokens=300.0, sharing=number % 4, short_tokens=100.0,
                within_s=(0.5, 5.0, 15.0)[number % 3] if limit_s else 0.0, token_within_s=limit_s,
            )  # fmt: skip
            begun = time.perf_counter_ns()
            choose(request, engines, known, 10.0, policy=policy, contract=contract)
            times.append((time.perf_counter_ns() - begun) / 1e3)
        repeats.append(median_spread(times)[0])
    return median_spread(repeats)[0]


def run() -> list[dict[str, Any]]:
    """Measure our policy in each case, and the others with a few holders."""
    figures = []
    for n_engines, target_us in TARGETS_US.items():
        limited, known = fleet(n_engines), kinds(n_engines)
        engines = [msgspec.structs.replace(one, limited=0, missed=0.0, crowded=0.0) for one in limited]
        ours: dict[str, Any] = {
            what: {kind: decision_us("auto", of, one, contract, limit_s) for kind, one in known.items()}
            for what, of, contract, limit_s in (
                ("cases", engines, "", 0.0),
                ("classes", limited, "", 0.02),
                ("splits", engines, "kvstrata", 0.0),
                ("both", limited, "kvstrata", 0.02),
            )
        }
        ours["cases"]["idle"] = decision_us("auto", idle(n_engines), known["none"])
        name, value = f"route_decide_{n_engines}", max(ours["cases"].values())
        ours["others_with_holders"] = {
            one: decision_us(one, engines, known["holders"]) for one in POLICIES if one != "auto"
        }
        sketch_us = SKETCH_US * n_engines
        figures.append(compared(name, value, "µs", "the sketch", sketch_us, most_value=target_us, **ours))
    return figures
