"""`route_*`: routing policies before a fleet of simulated engines in virtual time.

Eight engines (an 8B model on an H100, by computed times) at 85 % of what they could serve if every prefix that was seen
were cached.  The walk is the gateway's own code (benchmarks/route_gateway.py).  The rivals are our versions of their
published formulas, each with the knobs that were best on loads of other seeds; `ttft` has no knobs, and was not changed
after it had seen these seeds.

    _p99_ttft   99th percentile of the time to the first token, beside the best rival's, geometric mean over the loads
                with reuse: conversations, shared system prompts, agents, one engine four times slower, events late by
                2 s, a tenth of the events lost; with `KVSTRATA_TRACE=FILE` also a published trace
    _goodput    share of the requests whose first token came within a second, beside the best rival's, mean over them
    _no_reuse   prompts without anything in common: 99th percentile beside `least_loaded`
    _burst      many siblings of one new prefix within a second: how often an engine computed the prefix, and the
                siblings of the busiest engine beside the mean

Sketch: a queue that is known and a cache that is known leave nothing to a formula but how it adds them up.
"""

from __future__ import annotations

import collections
import math
import os
import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.common import figure, percentile, sized
from benchmarks.route_gateway import Result, Run
from benchmarks.route_loads import BURST_PREFIX, LOADS, Asked, at_rate, trace
from kvstrata.policy.routing.choose import POLICIES, AnyPolicy, policy_name
from kvstrata.policy.routing.dynamo import Dynamo
from kvstrata.policy.routing.llmd import GUIDE, Llmd
from kvstrata.policy.routing.lmetric import Lmetric
from kvstrata.policy.routing.mooncake_conductor import MooncakeConductor
from kvstrata.policy.routing.smg import Smg
from kvstrata.testing.engine_sim.engine_model import EngineModel

ENGINES = sized(8, 3)
REQUESTS = sized(500, 40)
TRAINED = sized(300, 20)
SEED = int(os.environ.get("BENCH_SEED", "2026"))
SEEDS = sized(3, 1)
TUNES = sized(full=True, small=False)
LEVEL = 0.85
GOOD_S = 1.0
"""A request whose first token comes later is not good."""
TRACE = os.environ.get("KVSTRATA_TRACE", "")
MODEL = EngineModel()
GRIDS: dict[str, list[AnyPolicy]] = {
    "least_loaded": [POLICIES["least_loaded"]()],
    "session": [POLICIES["session"]()],
    "dynamo": [
        Dynamo(
            overlap_score_credit=credit, overlap_score_credit_decay=decay, decode_active_request_weight=weight
        )
        for credit, decay, weight in ((1, 0, 0), (2, 0, 0), (2, 1, 0), (1, 0, 8))
    ],
    "lmetric": [Lmetric(), Lmetric(count_queued=True)],
    "llmd": [Llmd(), GUIDE, Llmd(prefix_weight=5), Llmd(prefix_weight=2, token_load_weight=2)],
    "smg": [Smg(), Smg(cache_threshold=0.3), Smg(balance_abs_threshold=8), Smg(balance_rel_threshold=1.5)],
    "mooncake_conductor": [MooncakeConductor(), MooncakeConductor(balancing_threshold=1.5)],
}
"""The rivals' knobs that are tried."""


class Case(NamedTuple):
    """A load, and what its fleet is like."""

    load: str
    slow: float = 1.0
    """How many times slower the first engine is."""
    lag_s: float = 0.005
    lost: float = 0.0


REUSE = {
    "conversations": Case("conversations"),
    "shared": Case("shared"),
    "agents": Case("agents"),
    "one slow engine": Case("shared", slow=4.0),
    "events late": Case("conversations", lag_s=2.0),
    "events lost": Case("agents", lost=0.1),
    **({"trace": Case("trace")} if TRACE else {}),
}
OTHERS = {"none": Case("none"), "burst": Case("burst")}


def served(policy: AnyPolicy, case: Case, seed: int, requests: int) -> list[Result]:
    """Serve one draw of a load."""
    draw = random.Random(seed)
    asked: list[Asked]
    asked = trace(Path(TRACE), draw, requests) if case.load == "trace" else LOADS[case.load](draw, requests)
    models = {f"engine-{number}": MODEL for number in range(ENGINES)}
    if case.slow != 1.0:
        slower = {
            name: getattr(MODEL, name) * case.slow for name in MODEL.__struct_fields__ if name.endswith("_us")
        }
        models["engine-0"] = msgspec.structs.replace(MODEL, **slower)
    capacity = ENGINES - 1 + 1 / case.slow
    load = at_rate(asked, MODEL, capacity, LEVEL)
    return Run(policy, models, lag_s=case.lag_s, lost=case.lost, seed=seed).serve(load)


def p99(results: list[Result]) -> float:
    """Seconds."""
    return percentile([one.ttft_s for one in results], 0.99)


def good(results: list[Result]) -> float:
    """The share of good requests."""
    return sum(one.ttft_s <= GOOD_S for one in results) / len(results)


def tuned() -> list[AnyPolicy]:
    """Each rival with the knobs that were best on the training seed."""
    cases = [REUSE["conversations"], REUSE["shared"], REUSE["agents"], OTHERS["none"]]

    def loss(policy: AnyPolicy) -> float:
        return sum(math.log(p99(served(policy, case, SEED + 1_000, TRAINED))) for case in cases)

    return [grid[0] if len(grid) == 1 or not TUNES else min(grid, key=loss) for grid in GRIDS.values()]


def run() -> list[dict[str, Any]]:
    """Serve all loads by all policies."""
    ours = POLICIES["ttft"]()
    policies = [ours, *tuned()]
    found: dict[str, dict[str, list[Result]]] = {}
    for name, case in {**REUSE, **OTHERS}.items():
        found[name] = {
            policy_name(policy): [
                one for seed in range(SEEDS) for one in served(policy, case, SEED + seed, REQUESTS)
            ]
            for policy in policies
        }
    knobs = {policy_name(policy): msgspec.to_builtins(policy) for policy in policies}
    rows = {
        load: {
            name: {
                "p50_s": round(statistics.median(one.ttft_s for one in results), 4),
                "p99_s": round(p99(results), 4),
                "mean_s": round(statistics.fmean(one.ttft_s for one in results), 4),
                "good": round(good(results), 4),
                "hit": round(sum(one.cached for one in results) / sum(one.tokens for one in results), 4),
            }
            for name, results in by.items()
        }
        for load, by in found.items()
    }
    return [*reuse_figures(rows, knobs), no_reuse_figure(rows), burst_figure(found["burst"])]


def reuse_figures(
    rows: dict[str, dict[str, dict[str, float]]], knobs: dict[str, Any]
) -> list[dict[str, Any]]:
    """The two figures over all loads with reuse."""

    def ratio(load: str) -> float:
        mine = rows[load]["ttft"]["p99_s"]
        return mine / min(row["p99_s"] for name, row in rows[load].items() if name != "ttft")

    ratios = {load: ratio(load) for load in REUSE}
    mean = math.exp(statistics.fmean(math.log(one) for one in ratios.values()))
    rivals = [name for name in next(iter(rows.values())) if name != "ttft"]
    goods = {name: statistics.fmean(rows[load][name]["good"] for load in REUSE) for name in ("ttft", *rivals)}
    best = max(rivals, key=lambda name: goods[name])
    points = 100 * (goods["ttft"] - goods[best])
    return [
        figure(
            "route_p99_ttft",
            value=mean,
            unit="× the best rival of each load",
            ratio=mean,
            target="≤ 0.8, on no load > 1.05",
            ok=mean <= 0.8 and max(ratios.values()) <= 1.05,
            ratio_to="the best rival's p99",
            spread=(min(ratios.values()), max(ratios.values())),
            by_load=ratios,
            loads=rows,
            knobs=knobs,
        ),
        figure(
            "route_goodput",
            value=points,
            unit="points",
            ratio=goods["ttft"] / goods[best],
            ratio_to=f"the best rival, {best}",
            target="≥ 5 points more than the best rival",
            ok=points >= 5,
            by_policy=goods,
        ),
    ]


def no_reuse_figure(rows: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Prompts without anything in common."""
    ratio = rows["none"]["ttft"]["p99_s"] / rows["none"]["least_loaded"]["p99_s"]
    return figure(
        "route_no_reuse",
        value=ratio,
        unit="× least_loaded",
        ratio=ratio,
        target="≤ 1.02 × its p99",
        ok=ratio <= 1.02,
        ratio_to="least_loaded's p99",
    )


def burst_figure(by: dict[str, list[Result]]) -> dict[str, Any]:
    """Siblings of one new prefix."""
    computed, engines_of, loads = {}, {}, {}
    for name, results in by.items():
        size = len(results) // SEEDS
        prefills, got, busiest = 0, 0, []
        for seed in range(SEEDS):
            hot = [one for one in results[seed * size : (seed + 1) * size] if one.hot]
            engines = collections.Counter(one.engine for one in hot)
            prefills += sum(one.cached < BURST_PREFIX // 16 * 16 for one in hot)
            got += len(engines)
            busiest.append(max(engines.values()) / (len(hot) / ENGINES))
        computed[name], engines_of[name] = prefills / got, got / SEEDS
        loads[name] = statistics.fmean(busiest)
    return figure(
        "route_burst",
        value=computed["ttft"],
        unit="times that an engine computed the prefix",
        ratio=loads["ttft"],
        ratio_to="the mean load of all engines, for the busiest one",
        target="≤ 1 for each engine that got it, no engine > 1.5 × the mean",
        ok=computed["ttft"] <= 1 and loads["ttft"] <= 1.5,
        computed_by_policy=computed,
        engines_by_policy=engines_of,
        busiest_by_policy=loads,
    )
