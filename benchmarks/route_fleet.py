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
                simulates each engine as it really is before each choice (benchmarks/route_gateway.py)
    _no_reuse   prompts without anything in common: 99th percentile beside `least_loaded`
    _burst      many siblings of one new prefix within a second: how often an engine computed the prefix, and the
                siblings of the busiest engine beside the mean

Sketch: a queue that is known and a cache that is known leave nothing to a formula but how it adds them up.
"""

from __future__ import annotations

import collections
import functools
import math
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.common import compared, figure, percentile, sized
from benchmarks.route_dynamo import grid as dynamo_grid
from benchmarks.route_formulas import GUIDE, Formula, Llmd, Lmetric, MooncakeConductor, Smg
from benchmarks.route_gateway import Death, Oracle, Outside, Result, Run
from benchmarks.route_loads import BURST_PREFIX, LOADS, Asked, at_rate, day, trace
from kvstrata.config.gateway_model import SloSettings
from kvstrata.gateway.routing.choose import POLICIES, Policy
from kvstrata.gateway.routing.model import Role
from kvstrata.testing.engine_sim.engine_model import EngineModel

Rows = dict[str, dict[str, dict[str, float]]]
"""By load and policy."""
ORACLE = Oracle.name


def run() -> list[dict[str, Any]]:
    """Serve all loads by all policies."""
    policies: list[Contender] = [POLICIES["ttft"], *tuned(), Oracle()]
    found: dict[str, dict[str, list[Result]]] = {}
    for name, case in {**REUSE, **OTHERS}.items():
        found[name] = {
            policy.name: [one for seed in range(SEEDS) for one in served(policy, case, SEED + seed, REQUESTS)]
            for policy in policies
        }
    knobs = {policy.name: knobs_of(policy) for policy in policies}
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
    return compared(
        "route_regret",
        mean(mine),
        "× the oracle's mean",
        "the oracle's mean time to the first token",
        1.0,
        most=1.10,
        by_load=mine,
        by_policy={name: mean(regrets(name)) for name in ("ttft", *rivals_in(rows))},
    )


def no_reuse_figure(rows: Rows) -> dict[str, Any]:
    """Prompts without anything in common."""
    ratio = rows["none"]["ttft"]["p99_s"] / rows["none"]["least_loaded"]["p99_s"]
    return compared("route_no_reuse", ratio, "× least_loaded", "least_loaded's p99", 1.0, most=1.02)


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


Contender = Policy | Formula | Outside

ENGINES = sized(8, 3)
REQUESTS = sized(500, 40)
TRAINED = sized(300, 20)
KILLED, BACK = 0.4, 0.6
"""When an engine is killed and when it is back, as shares of the time in which requests come."""
SEED = int(os.environ.get("BENCH_SEED", "2026"))
SEEDS = int(os.environ.get("BENCH_SEEDS", sized("3", "1")))
TUNES = sized(full=True, small=False)
LEVEL = 0.85
GOOD_S = 1.0
"""A request whose first token comes later is not good."""
TRACE = os.environ.get("KVSTRATA_TRACE", "")
MODEL = EngineModel()
GRIDS: dict[str, Sequence[Contender]] = {
    "least_loaded": [POLICIES["least_loaded"]],
    "session": [POLICIES["session"]],
    "lmetric": [Lmetric(), Lmetric(count_queued=True)],
    "llmd": [Llmd(), GUIDE, Llmd(prefix_weight=5), Llmd(prefix_weight=2, token_load_weight=2)],
    "smg": [Smg(), Smg(cache_threshold=0.3), Smg(balance_abs_threshold=8), Smg(balance_rel_threshold=1.5)],
    "mooncake_conductor": [MooncakeConductor(), MooncakeConductor(balancing_threshold=1.5)],
}
"""The knobs that are tried of our versions of rivals."""


class Case(NamedTuple):
    """A load, and what its fleet is like."""

    load: str
    slow: float = 1.0
    """How many times slower the first engine is."""
    lag_s: float = 0.005
    lost: float = 0.0
    killed: bool = False
    """Whether the first engine is killed, and comes back with an empty cache."""


REUSE = {
    "conversations": Case("conversations"),
    "shared": Case("shared"),
    "agents": Case("agents"),
    "one slow engine": Case("shared", slow=4.0),
    "events late": Case("conversations", lag_s=2.0),
    "events lost": Case("agents", lost=0.1),
    "engine killed": Case("conversations", killed=True),
    **({"trace": Case("trace")} if TRACE else {}),
}
OTHERS = {"none": Case("none"), "burst": Case("burst")}


HOST, HOURS = 4, 24
DAY_S = sized(240.0, 8.0)
DAY_SLO = SloSettings(name="day", ttft_ms=2_000, tpot_ms=15)
DAY_LEVELS = sized((0.6, 0.7, 0.8), (0.6,))


def run_pd_goodput() -> list[dict[str, Any]]:
    """A day of one host by `auto`, which may split, never splits, or always does in the best of all proportions."""
    by_level: dict[float, dict[str, list[int]]] = {}
    for level in DAY_LEVELS:
        load = one_day(level)
        by_level[level] = {name: met_by_hour(load, name) for name in ("may", "never", *always_names())}
    ratios, worst = {}, {}
    for level, rows in by_level.items():
        rivals = [name for name in rows if name != "may"]
        best = max(rivals, key=lambda name: sum(rows[name]))
        ratios[level] = sum(rows["may"]) / sum(rows[best])
        quarters = [slice(at, at + HOURS // 4) for at in range(0, HOURS, HOURS // 4)]
        worst[level] = min(
            sum(rows["may"][one]) / max(1, *(sum(rows[name][one]) for name in rivals)) for one in quarters
        )
    value = math.exp(statistics.fmean(math.log(one) for one in ratios.values()))
    return [
        figure(
            "pd_goodput",
            value=value,
            unit="× the better of always and never",
            ratio=value,
            ratio_to="requests within both times of the better of always and never splitting",
            target="≥ 1.3, on no day < 1",
            ok=value >= 1.3 and min(ratios.values()) >= 1.0,
            spread=(min(ratios.values()), max(ratios.values())),
            worst_quarter=worst,
            by_level=by_level,
        )
    ]


def one_day(level: float) -> list[Asked]:
    """The requests of a day at a share of what the engines can do."""
    work = HOST * level
    return [one._replace(at=one.at / work) for one in day(random.Random(SEED), DAY_S * work)]


def always_names() -> list[str]:
    """Fixed splits: how many engines prefill."""
    return [f"always, {number} of {HOST}" for number in range(1, HOST)]


def met_by_hour(load: list[Asked], name: str) -> list[int]:
    """Requests of each hour that were served within both times."""
    names = [f"engine-{number}" for number in range(HOST)]
    fixed = int(name.split()[1]) if name.startswith("always") else 0
    roles: dict[str, Role] = {one: "prefill" if at < fixed else "decode" for at, one in enumerate(names)}
    ran = Run(
        POLICIES["auto"], dict.fromkeys(names, MODEL), seed=SEED, roles=roles if fixed else None,
        contract="kvstrata" if name == "may" else "", always=bool(fixed), slo=DAY_SLO,
    )  # fmt: skip
    met, end_s = [0] * HOURS, load[-1].at
    for one in ran.serve(load):
        tpot_s = (one.whole_s - one.ttft_s) / max(1, one.answer - 1)
        good = one.ttft_s <= DAY_SLO.ttft_ms / 1_000 and tpot_s <= DAY_SLO.tpot_ms / 1_000
        met[min(HOURS - 1, int(one.at_s / end_s * HOURS))] += good
    return met


def knobs_of(policy: Contender) -> dict[str, Any]:
    """The knobs that a policy has."""
    if isinstance(policy, Policy):
        return {}
    return dict(policy.knobs) if isinstance(policy, Outside) else msgspec.to_builtins(policy)


@functools.lru_cache(4)
def drawn(case: Case, seed: int, requests: int, engines: int, level: float) -> list[Asked]:
    """The requests of one draw, at a share of what the engines could serve."""
    draw = random.Random(seed)
    asked: list[Asked]
    asked = trace(Path(TRACE), draw, requests) if case.load == "trace" else LOADS[case.load](draw, requests)
    return at_rate(asked, MODEL, engines - 1 + 1 / case.slow, level)


def served(
    policy: Contender,
    case: Case,
    seed: int,
    requests: int,
    engines: int = ENGINES,
    level: float = LEVEL,
    slo: SloSettings | None = None,
) -> list[Result]:
    """Serve one draw of a load."""
    load = drawn(case, seed, requests, engines, level)
    models = {f"engine-{number}": MODEL for number in range(engines)}
    if case.slow != 1.0:
        slower = {
            name: getattr(MODEL, name) * case.slow for name in MODEL.__struct_fields__ if name.endswith("_us")
        }
        models["engine-0"] = msgspec.structs.replace(MODEL, **slower)
    end_s = load[-1].at
    deaths = [Death("engine-0", KILLED * end_s, BACK * end_s)] if case.killed else []
    return Run(policy, models, lag_s=case.lag_s, lost=case.lost, seed=seed, deaths=deaths, slo=slo).serve(
        load
    )


def p99(results: list[Result]) -> float:
    """Seconds."""
    return percentile([one.ttft_s for one in results], 0.99)


def good(results: list[Result]) -> float:
    """The share of good requests."""
    return sum(one.ttft_s <= GOOD_S for one in results) / len(results)


def tuned() -> list[Contender]:
    """Each rival with the knobs that were best on the training seed."""
    cases = [REUSE["conversations"], REUSE["shared"], REUSE["agents"], OTHERS["none"]]

    def loss(policy: Contender) -> float:
        return sum(math.log(p99(served(policy, case, SEED + 1_000, TRAINED))) for case in cases)

    grids = [grid for grid in (*GRIDS.values(), dynamo_grid()) if grid]
    return [grid[0] if len(grid) == 1 or not TUNES else min(grid, key=loss) for grid in grids]


def row(results: list[Result]) -> dict[str, float]:
    """What is shown of a policy's results."""
    return {
        "p50_s": round(statistics.median(one.ttft_s for one in results), 4),
        "p99_s": round(p99(results), 4),
        "mean_s": round(statistics.fmean(one.ttft_s for one in results), 4),
        "good": round(good(results), 4),
        "hit": round(sum(one.cached for one in results) / sum(one.tokens for one in results), 4),
    }
