"""`plan_goodput`: what a day saves with the plan that acts, beside the best fixed quotas.
`plan_oscillation`: how often a day the plan turns back, under a steady load with noise in all that is told.

The first is the real pool in the time of a drawn day of two tenants' agents; 3/4 of the first one's sessions begin in
its first half, and of the other one's in its second.  Seconds of prefill are those of benchmarks/value.py.  What is
saved without quotas stands beside.  The second is the plan's function alone, at instances that lie at its bounds.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

from benchmarks.common import figure, sized
from benchmarks.value import CHUNK_BYTES, DEPTH_COST, EXTENT_BYTES, Request, agents, pool_hits, saved
from kvstrata.controller.lending import LEAST, LOSS, Lending, Step
from kvstrata.native.core import Pool
from kvstrata.rpc.cluster_wire import Shares, TenantShare

DAY_S, STEP_S = 86_400.0, 10.0
SIZE_GB = 128
SESSIONS = sized(500, 20)
SEEDS, FIXED = sized(((5, 6), (0.375, 0.5, 0.625)), ((5,), (0.5,)))
NOISY_DAYS = sized(200, 5)
TENANTS = (1, 2)


def turning(seed: int) -> tuple[list[Request], list[int]]:
    """A day's requests, and whose each is."""
    chance, rows = random.Random(seed), []
    for tenant, session in zip(itertools.cycle(TENANTS), agents(seed, SESSIONS)):
        late = (chance.random() < 0.25) ^ (tenant == 2)
        begin_s = chance.uniform(0, DAY_S / 2) + late * DAY_S / 2
        rows += [(one._replace(at_s=begin_s + one.at_s, chunks=[tenant << 56 | c for c in one.chunks]), tenant)
                 for one in session if begin_s + one.at_s < DAY_S]  # fmt: skip
    rows.sort(key=lambda row: row[0].at_s)
    return [row[0] for row in rows], [row[1] for row in rows]


class Day(NamedTuple):
    """What became of a day."""

    seconds: float
    """Share of the prefill seconds that was saved."""
    hits: list[float]
    """By tenant."""
    steps: list[Step]


class Leader:
    """Looks at a pool every STEP_S as a leader does, or sets quotas once."""

    def __init__(self, capacity: int, first: float | None, *, acts: bool) -> None:
        self.total = capacity * EXTENT_BYTES
        self.quotas = {} if first is None else {1: int(first * self.total), 2: int((1 - first) * self.total)}
        self.lending = Lending() if acts else None
        self.next_s, self.lent, self.steps = 0.0, -1.0, list[Step]()
        self.totals = {1: [0, 0], 2: [0, 0]}

    def lend(self, pool: Pool, lent: float) -> None:
        self.lent = lent
        for tenant, quota in self.quotas.items():
            pool.set_quota(tenant, quota + int(lent * (self.total - quota)))

    def look(self, pool: Pool, now_s: float) -> None:
        """Called before each request."""
        if self.lent < 0:
            self.lend(pool, 0.0)
        while self.lending is not None and now_s >= self.next_s:
            self.next_s += STEP_S
            whole, tenants = pool.forecasts()
            told = [
                TenantShare(str(tenant), used, self.quotas[tenant], part, {f"{size:g}": s for size, _, s in sizes},
                            *self.totals[tenant])
                for tenant, used, part, sizes in tenants if tenant is not None
            ]  # fmt: skip
            if whole and (step := self.lending.step(self.next_s, Shares(self.lent, told), whole[1][2])):
                self.steps.append(step)
                self.lend(pool, step.lent)


def day(requests: list[Request], tenants: list[int], first: float | None, *, acts: bool = False) -> Day:
    """A day with quotas of which tenant 1 has this part; None: without."""
    capacity = int(SIZE_GB * 1e9) // CHUNK_BYTES
    leader, hits = Leader(capacity, first, acts=acts), []
    found = pool_hits(requests, capacity, "VALUE", DEPTH_COST, tenants=tenants, look=leader.look)
    for request, tenant, n in zip(requests, tenants, found, strict=True):
        hits.append(n)
        leader.totals[tenant] = [
            a + b for a, b in zip(leader.totals[tenant], (len(request.chunks), n), strict=True)
        ]
    of = [found / asked for asked, found in leader.totals.values()]
    return Day(saved(requests, iter(hits), DEPTH_COST).seconds, of, leader.steps)


def run_plan_goodput() -> list[dict[str, Any]]:
    """Measure the figure: the mean over days."""
    ratios, beside = [], []
    for seed in SEEDS:
        requests, tenants = turning(seed)
        best = max(day(requests, tenants, first).seconds for first in FIXED)
        acts, none = (day(requests, tenants, first, acts=bool(first)) for first in (0.5, None))
        ratios.append(acts.seconds / best if best else 1.0)
        beside.append({"fixed": best, "acts": acts.seconds, "none": none.seconds, "hits": [acts.hits, none.hits],
                       "steps": [(one.lent, one.why) for one in acts.steps]})  # fmt: skip
    ratio = sum(ratios) / len(ratios)
    return [
        figure("plan_goodput", value=sum(one["acts"] for one in beside) / len(beside), unit="of the seconds saved",
               ratio=ratio, ratio_to="the best fixed quotas", target=">= 1.25 x", ok=ratio >= 1.25,
               spread=[min(ratios), max(ratios)], days=beside)
    ]  # fmt: skip


def run_plan_oscillation() -> list[dict[str, Any]]:
    """Measure the figure."""
    back = [turns(random.Random(seed)) for seed in range(NOISY_DAYS)]
    return [
        figure("plan_oscillation", value=max(back), unit="reversals in the worst day", ratio=sum(back) / len(back),
               ratio_to="mean of the days", target="<= 2 a day", ok=max(back) <= 2)
    ]  # fmt: skip


def turns(chance: random.Random) -> int:
    """Changes of direction in a day, at an instance whose gains and losses lie near the bounds."""
    lending, lent, totals, changes = Lending(), 0.0, [0, 0], list[bool]()
    gain, lost = LEAST * chance.uniform(0, 3), LOSS * chance.uniform(0.5, 1.5)
    for number in range(int(DAY_S / STEP_S)):
        totals = [totals[0] + 100, totals[1] + round(100 * (0.7 + chance.gauss(0, 0.1)))]
        half = lost / 2 + chance.gauss(0, 0.01)
        curve = {"1": 0.7 - half * (lent > 0), "2": 0.7 + half}
        used = 1_000 if not lent else 500
        rows = [TenantShare(name, used, 1_000, 0.5, curve, *totals) for name in ("red", "blue")]
        whole = (curve["1"] if not lent else curve["2"]) + gain + chance.gauss(0, 0.005)
        step = lending.step(number * STEP_S, Shares(lent, rows), whole)
        if step is not None:
            changes.append(step.lent > lent)
            lent = step.lent
    return sum(one != other for one, other in itertools.pairwise(changes))
