"""`route_e2e`: what routing policies cost everybody until the last token, before a fleet in virtual time.

Four engines (benchmarks/route_fleet.py) at 85 % of their capacity: loads with long answers (a hot prefix, documents,
reasoning, chats, agents that write, a mix of all) and with short ones (conversations, shared system prompts, agents,
one engine four times slower, events late by 2 s, a tenth of the events lost, one engine killed, nothing in common; with
`KVSTRATA_TRACE=FILE` a published trace), and the hot prefix at 50, 70 and 95 % too.  Rivals have the knobs that were
best for the time to the last token on another seed.

    _mean       mean time to the last token beside the best rival's of each load, geometric mean over the loads
    _both       share of requests whose first token came within a second, and whose tokens took at most twice a lone
                request's, beside the best rival's, mean over the loads
    _hot        a hot prefix at all levels: requests of the busiest engine beside the mean, and the mean time to the
                last token beside `least_loaded`
    _classes    `_both` and the mean time of `auto` if every request's class of service says so, beside `auto` untold
    _first      99th percentile of the time to the first token beside the best rival's of each load, geometric mean:
                `ttft` on the loads with short answers; `ratio` has `auto` on all
    _no_reuse   prompts without anything in common: the same beside `least_loaded`

Sketch: with the queues, the caches and the costs of a step known, the sum over all requests is a sum of known terms."""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any

from benchmarks.common import compared, figure, sized
from benchmarks.route_dynamo import grid as dynamo_grid
from benchmarks.route_fleet import (
    GRIDS,
    MODEL,
    OTHERS,
    REUSE,
    SEED,
    SEEDS,
    Case,
    Contender,
    p99,
    served,
)
from benchmarks.route_gateway import Result
from kvstrata.config.gateway_model import SloSettings
from kvstrata.gateway.routing.choose import POLICIES

ENGINES = sized(4, 2)
REQUESTS = sized(500, 40)
TRAINED = sized(300, 20)
TUNES = sized(full=True, small=False)
LONG = {
    load: Case(load)
    for load in sized(("hot", "retrieved", "reasoning", "chats", "long agents", "mixed"), ("hot",))
}
SHORT = sized({**REUSE, "none": OTHERS["none"]}, {"none": OTHERS["none"]})
LEVELS = sized((0.5, 0.7, 0.95), (0.7,))
GOOD_S, SLOWER = 1.0, 2.0
ALONE_S = (MODEL.step_us + MODEL.decode_sequence_us) * 1e-6
"""Seconds of a token of a request that is alone."""
BOTH = SloSettings(name="both", ttft_ms=1_000 * GOOD_S, tpot_ms=1_000 * SLOWER * ALONE_S)


def run() -> list[dict[str, Any]]:
    """Serve all loads by all policies."""
    ours: list[Contender] = [POLICIES["auto"], POLICIES["ttft"]]
    policies = [*ours, *tuned()]
    rivals = [policy.name for policy in policies[len(ours) :]]
    loads = {name: (case, 0.85) for name, case in {**LONG, **SHORT}.items()}
    loads |= {f"hot {level:.0%}": (LONG["hot"], level) for level in LEVELS}
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for load, (case, level) in loads.items():
        rows[load] = {
            policy.name: row(
                [
                    one
                    for seed in range(SEEDS)
                    for one in served(policy, case, SEED + seed, REQUESTS, ENGINES, level)
                ]
            )
            for policy in policies
        }
        told = (served(ours[0], case, SEED + seed, REQUESTS, ENGINES, level, BOTH) for seed in range(SEEDS))
        rows[load]["classes"] = row([one for each in told for one in each])
        shown = ", ".join(f"{name} {one['mean_s']:.2f}" for name, one in rows[load].items())
        print(f"   {load:20} {shown}", flush=True)

    def ratios(what: str, policy: str = "auto") -> dict[str, float]:
        return {load: by[policy][what] / min(by[name][what] for name in rivals) for load, by in rows.items()}

    means, firsts = ratios("mean_s"), ratios("p99_s")
    short = {load: ratio for load, ratio in ratios("p99_s", "ttft").items() if load in SHORT}
    goods = {name: statistics.fmean(by[name]["both"] for by in rows.values()) for name in ("auto", *rivals)}
    best = max(rivals, key=lambda name: goods[name])
    hot = [by for load, by in rows.items() if load.startswith("hot")]
    slower = max(by["auto"]["mean_s"] / by["least_loaded"]["mean_s"] for by in hot)
    busiest = max(by["auto"]["busiest"] for by in hot)
    classes = {
        name: statistics.fmean(by[name]["both"] for by in rows.values()) for name in ("auto", "classes")
    }
    slower_told = geometric(
        {load: by["classes"]["mean_s"] / by["auto"]["mean_s"] for load, by in rows.items()}
    )
    no_reuse = rows["none"]["auto"]["mean_s"] / rows["none"]["least_loaded"]["mean_s"]
    return [
        figure(
            "route_e2e_mean",
            value=geometric(means),
            unit="× the best rival of each load",
            ratio=geometric(means),
            ratio_to="the best rival's mean time to the last token",
            target="≤ 0.98, on no load > 1.02",
            ok=geometric(means) <= 0.98 and max(means.values()) <= 1.02,
            spread=(min(means.values()), max(means.values())),
            by_load=means,
            by_policy={name: geometric(ratios("mean_s", name)) for name in ("ttft", *rivals)},
            loads=rows,
        ),
        figure(
            "route_e2e_first",
            value=geometric(short),
            unit="× the best rival of each load",
            ratio=geometric(firsts),
            ratio_to="the best rival's p99, for `auto`",
            target="≤ 0.92 with `ttft` on short answers, ≤ 1.2 with `auto`",
            ok=geometric(short) <= 0.92 and geometric(firsts) <= 1.2,
            spread=(min(short.values()), max(short.values())),
            by_load=firsts,
        ),
        figure(
            "route_e2e_both",
            value=100 * (goods["auto"] - goods[best]),
            unit="points",
            ratio=goods["auto"] / goods[best],
            ratio_to=f"the best rival, {best}",
            target="≥ 5 points more than the best rival",
            ok=goods["auto"] >= goods[best] + 0.05,
            by_policy=goods,
        ),
        figure(
            "route_e2e_hot",
            value=busiest,
            unit="× the mean load of an engine",
            ratio=slower,
            ratio_to="least_loaded's mean time to the last token, at the worst level",
            target="≤ 1.25, ≤ 1.01 × least_loaded",
            ok=busiest <= 1.25 and slower <= 1.01,
        ),
        figure(
            "route_e2e_classes",
            value=100 * (classes["classes"] - classes["auto"]),
            unit="points",
            ratio=slower_told,
            ratio_to="the mean time to the last token of `auto` that is told no classes",
            target="≥ 0 points",
            ok=classes["classes"] >= classes["auto"],
        ),
        compared("route_e2e_no_reuse", no_reuse, "× least_loaded", "least_loaded's mean", 1.0, most=0.98),
    ]


def tuned() -> list[Contender]:
    """Each rival with the knobs that were best on the training seed."""
    cases = [Case(load) for load in ("hot", "retrieved", "long agents", "conversations", "shared")]

    def loss(policy: Contender) -> float:
        return sum(math.log(mean_s(served(policy, case, SEED + 1_000, TRAINED, ENGINES))) for case in cases)

    grids = [grid for grid in (*GRIDS.values(), dynamo_grid()) if grid]
    return [grid[0] if len(grid) == 1 or not TUNES else min(grid, key=loss) for grid in grids]


def geometric(by: dict[str, float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(one) for one in by.values()))


def mean_s(results: list[Result]) -> float:
    """Mean time to the last token."""
    return statistics.fmean(one.whole_s for one in results)


def row(results: list[Result]) -> dict[str, float]:
    """What is shown of a policy's results."""
    engines = collections.Counter(one.engine for one in results)
    token_s = [(one.whole_s - one.ttft_s) / max(1, one.answer - 1) for one in results]
    both = sum(
        one.ttft_s <= GOOD_S and each <= SLOWER * ALONE_S for one, each in zip(results, token_s, strict=True)
    )
    return {
        "mean_s": round(mean_s(results), 4),
        "p99_s": round(p99(results), 4),
        "token_ms": round(1_000 * statistics.fmean(token_s), 3),
        "both": both / len(results),
        "busiest": max(engines.values()) / (len(results) / ENGINES),
    }
