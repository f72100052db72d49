"""`route_matrix_*`: the comparison of `route_fleet` at other loads of the engines, and in bigger fleets.

`BENCH_LEVELS` lists shares of what the engines could serve if every prefix that was seen were cached, `BENCH_ENGINES`
numbers of engines, `BENCH_SEEDS` how many draws are served in each cell.  By default these are two levels of eight
engines.  All that is asked for, in some hours:

    BENCH_LEVELS="0.5 0.7 0.85 0.95" BENCH_ENGINES="8 16 32 64" BENCH_SEEDS=3 make bench BENCH=route_matrix

Each engine gets as many requests in each cell.  Rivals have the knobs that were best with eight engines at 85 %.

    _p99     99th percentile of the time to the first token of `ttft`, beside the best rival's of each cell, geometric
             mean over the cells; `cells` has all policies
    _regret  mean time to the first token of `ttft` beside the oracle's, likewise
"""

from __future__ import annotations

import math
import os
import statistics
import time
from typing import Any

from benchmarks.common import figure, sized
from benchmarks.route_cases import OTHERS, REQUESTS, REUSE, SEED, Contender, name_of, row, served, tuned
from benchmarks.route_oracle import Oracle
from kvstrata.gateway.routing.policies import POLICIES

LEVELS = [float(word) for word in os.environ.get("BENCH_LEVELS", sized("0.5 0.95", "0.5")).split()]
FLEETS = [int(word) for word in os.environ.get("BENCH_ENGINES", sized("8", "4")).split()]
SEEDS = int(os.environ.get("BENCH_SEEDS", "1"))
CASES = {
    name: case
    for name, case in (REUSE | OTHERS).items()
    if name in ("conversations", "shared", "agents", "engine killed", "trace", "none")
}
EACH = REQUESTS / 8
"""Requests for each engine."""


def cell(policies: list[Contender], name: str, engines: int, level: float) -> dict[str, dict[str, float]]:
    """One load at one level in one fleet, by policy."""
    begun_s = time.monotonic()
    count = round(EACH * engines)
    results = {
        name_of(policy): [
            one
            for seed in range(SEEDS)
            for one in served(policy, CASES[name], SEED + seed, count, engines, level)
        ]
        for policy in policies
    }
    if sized(full=True, small=False):
        print(f"   {name}, {engines} engines at {level:.0%}: {time.monotonic() - begun_s:.0f} s", flush=True)
    return {policy: row(found) for policy, found in results.items()}


def run() -> list[dict[str, Any]]:
    """Serve all cells."""
    policies: list[Contender] = [POLICIES["ttft"](), *tuned(), Oracle()]
    cells = {
        f"{name}, {engines} engines, {level:.0%}": cell(policies, name, engines, level)
        for engines in FLEETS
        for level in LEVELS
        for name in CASES
    }
    best = {
        name: min(
            (found for policy, found in rows.items() if policy not in ("ttft", Oracle.name)),
            key=lambda one: one["p99_s"],
        )
        for name, rows in cells.items()
    }
    tails = {name: rows["ttft"]["p99_s"] / best[name]["p99_s"] for name, rows in cells.items()}
    regrets = {name: rows["ttft"]["mean_s"] / rows[Oracle.name]["mean_s"] for name, rows in cells.items()}
    return [
        beside("route_matrix_p99", tails, "the best rival's p99", 0.8, cells),
        beside("route_matrix_regret", regrets, "the oracle's mean time to the first token", 1.1, cells),
    ]


def beside(
    name: str, ratios: dict[str, float], to: str, most: float, cells: dict[str, Any]
) -> dict[str, Any]:
    """A figure over all cells."""
    value = math.exp(statistics.fmean(math.log(one) for one in ratios.values()))
    return figure(
        name,
        value=value,
        unit=f"× {to}",
        ratio=value,
        ratio_to=to,
        target=f"≤ {most:g}",
        ok=value <= most,
        spread=(min(ratios.values()), max(ratios.values())),
        by_cell=ratios,
        cells=cells,
    )
