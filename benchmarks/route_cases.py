"""What `route_fleet` and `route_matrix` compare: loads, fleets, policies and the knobs that rivals are tried with."""

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

from benchmarks.common import percentile, sized
from benchmarks.route_dynamo import grid as dynamo_grid
from benchmarks.route_formulas import GUIDE, Llmd, Lmetric, MooncakeConductor, Smg
from benchmarks.route_gateway import Death, Outside, Result, Run
from benchmarks.route_loads import LOADS, Asked, at_rate, trace
from kvstrata.gateway.routing.choose import policy_name
from kvstrata.gateway.routing.policies import POLICIES, Policy
from kvstrata.testing.engine_sim.engine_model import EngineModel

Contender = Policy | Outside

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
    "least_loaded": [POLICIES["least_loaded"]()],
    "session": [POLICIES["session"]()],
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


def knobs_of(policy: Contender) -> dict[str, Any]:
    """The knobs that a policy has."""
    knobs: dict[str, Any]
    knobs = dict(policy.knobs) if isinstance(policy, Outside) else msgspec.to_builtins(policy)
    return knobs


def name_of(policy: Contender) -> str:
    """The name under which results are shown."""
    return policy.name if isinstance(policy, Outside) else policy_name(policy)


@functools.lru_cache(4)
def drawn(case: Case, seed: int, requests: int, engines: int, level: float) -> list[Asked]:
    """The requests of one draw, at a share of what the engines could serve."""
    draw = random.Random(seed)
    asked: list[Asked]
    asked = trace(Path(TRACE), draw, requests) if case.load == "trace" else LOADS[case.load](draw, requests)
    return at_rate(asked, MODEL, engines - 1 + 1 / case.slow, level)


def served(
    policy: Contender, case: Case, seed: int, requests: int, engines: int = ENGINES, level: float = LEVEL
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
    return Run(policy, models, lag_s=case.lag_s, lost=case.lost, seed=seed, deaths=deaths).serve(load)


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
