"""`route_*`: routing policies before a fleet of simulated engines in virtual time.

Eight engines (an 8B model on an H100, by computed times) at 85 % of what they could serve if every prefix that was seen
were cached.  The walk is the gateway's own code (benchmarks/route_gateway.py).  The rivals are our versions of their
published formulas, and Dynamo itself (benchmarks/route_dynamo.py), each with the knobs that were best on loads of other
seeds; `ttft` has no knobs, and was not changed after it had seen these seeds.

    _p99_ttft   99th percentile of the time to the first token, beside the best rival's, geometric mean over the loads
                with reuse: conversations, shared system prompts, agents, one engine four times slower, events late by
                2 s, a tenth of the events lost, one engine killed; with `KVSTRATA_TRACE=FILE` also a published trace;
                `oracle` is what a choice that knows everything reaches
    _goodput    share of the requests whose first token came within a second, beside the best rival's, mean over them
    _regret     mean time to the first token beside an oracle's, geometric mean over all loads but the burst: the oracle
                simulates each engine as it really is before each choice (benchmarks/route_oracle.py)
    _no_reuse   prompts without anything in common: 99th percentile beside `least_loaded`
    _burst      many siblings of one new prefix within a second: how often an engine computed the prefix, and the
                siblings of the busiest engine beside the mean

Sketch: a queue that is known and a cache that is known leave nothing to a formula but how it adds them up.
"""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any

from benchmarks.common import figure
from benchmarks.route_cases import (
    ENGINES,
    OTHERS,
    REQUESTS,
    REUSE,
    SEED,
    SEEDS,
    Contender,
    knobs_of,
    name_of,
    row,
    served,
    tuned,
)
from benchmarks.route_gateway import Result
from benchmarks.route_loads import BURST_PREFIX
from benchmarks.route_oracle import Oracle
from kvstrata.gateway.routing.policies import POLICIES

Rows = dict[str, dict[str, dict[str, float]]]
"""By load and policy."""
ORACLE = Oracle.name


def run() -> list[dict[str, Any]]:
    """Serve all loads by all policies."""
    policies: list[Contender] = [POLICIES["ttft"](), *tuned(), Oracle()]
    found: dict[str, dict[str, list[Result]]] = {}
    for name, case in {**REUSE, **OTHERS}.items():
        found[name] = {
            name_of(policy): [
                one for seed in range(SEEDS) for one in served(policy, case, SEED + seed, REQUESTS)
            ]
            for policy in policies
        }
    knobs = {name_of(policy): knobs_of(policy) for policy in policies}
    rows = {load: {name: row(results) for name, results in by.items()} for load, by in found.items()}
    return [
        *reuse_figures(rows, knobs),
        regret_figure(rows),
        no_reuse_figure(rows),
        burst_figure(found["burst"]),
    ]


def rivals_in(rows: Rows) -> list[str]:
    """The names of the rivals."""
    return [name for name in next(iter(rows.values())) if name not in ("ttft", ORACLE)]


def reuse_figures(rows: Rows, knobs: dict[str, Any]) -> list[dict[str, Any]]:
    """The two figures over all loads with reuse."""
    rivals = rivals_in(rows)

    def ratio(load: str, policy: str) -> float:
        return rows[load][policy]["p99_s"] / min(rows[load][name]["p99_s"] for name in rivals)

    ratios = {load: ratio(load, "ttft") for load in REUSE}
    oracles = {load: ratio(load, ORACLE) for load in REUSE}
    mean, least = (
        math.exp(statistics.fmean(math.log(one) for one in each.values())) for each in (ratios, oracles)
    )
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
            oracle=least,
            oracle_by_load=oracles,
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


def regret_figure(rows: Rows) -> dict[str, Any]:
    """What knowing everything would save."""

    def regrets(name: str) -> dict[str, float]:
        loads = [load for load in rows if load != "burst"]
        return {load: rows[load][name]["mean_s"] / rows[load][ORACLE]["mean_s"] for load in loads}

    def mean(by: dict[str, float]) -> float:
        return math.exp(statistics.fmean(math.log(one) for one in by.values()))

    mine = regrets("ttft")
    value = mean(mine)
    return figure(
        "route_regret",
        value=value,
        unit="× the oracle's mean",
        ratio=value,
        ratio_to="the oracle's mean time to the first token",
        target="≤ 1.10",
        ok=value <= 1.10,
        spread=(min(mine.values()), max(mine.values())),
        by_load=mine,
        by_policy={name: mean(regrets(name)) for name in ("ttft", *rivals_in(rows))},
    )


def no_reuse_figure(rows: Rows) -> dict[str, Any]:
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
