"""What benchmarks of routing share, fleets and rivals with their knobs, and `pd_goodput`, a day of one host.

Engines are simulated in virtual time (an 8B model on an H100, by computed times) at a share of what they could serve if
every prefix that was seen were cached.  The walk is the gateway's own code (benchmarks/route_gateway.py).  The rivals
are our versions of their published formulas, and Dynamo itself (benchmarks/route_dynamo.py).
"""

from __future__ import annotations

import functools
import math
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.common import figure, percentile, sized
from benchmarks.route_formulas import GUIDE, Formula, Llmd, Lmetric, MooncakeConductor, Smg
from benchmarks.route_gateway import Death, Outside, Result, Run
from benchmarks.route_loads import LOADS, Asked, at_rate, day, trace
from kvstrata.config.gateway_model import SloSettings
from kvstrata.gateway.routing.choose import POLICIES, Policy
from kvstrata.gateway.routing.model import Role
from kvstrata.testing.engine_sim.engine_model import EngineModel

Contender = Policy | Formula | Outside

ENGINES = sized(8, 3)
REQUESTS = sized(500, 40)
KILLED, BACK = 0.4, 0.6
"""When an engine is killed and when it is back, as shares of the time in which requests come."""
SEED = int(os.environ.get("BENCH_SEED", "2026"))
SEEDS = int(os.environ.get("BENCH_SEEDS", sized("3", "1")))
LEVEL = 0.85
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
