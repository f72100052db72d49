"""`plan_goodput`: what a day saves with quotas that protect half of L1 in all, beside the best quotas that cap.

The real pool in the time of a drawn day of two tenants' agents; 3/4 of the first one's sessions begin in its first
half, and of the other one's in its second.  Seconds of prefill are those of benchmarks/value.py.  A quota that caps is
a pool of the tenant's own that evicts by last use, as LMCache's IsolatedLRU does.  What is saved with pools of their
own that evict by value, with quotas that protect all of L1, and without any stands beside.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from benchmarks.common import figure, sized
from benchmarks.value import CHUNK_BYTES, DEPTH_COST, EXTENT_BYTES, Request, agents, pool_hits, saved
from kvstrata.native.core import Pool

DAY_S = 86_400.0
SIZE_GB = 128
SESSIONS = sized(500, 20)
SEEDS, FIXED = sized(((5, 6), (0.375, 0.5, 0.625)), ((5,), (0.5,)))
TENANTS = (1, 2)
PROTECTED = (0.0, 0.5, 1.0)


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


def shared(requests: list[Request], tenants: list[int], protected: float) -> list[int]:
    """Hits with equal quotas that protect this part of L1 together."""
    capacity, quotas = int(SIZE_GB * 1e9) // CHUNK_BYTES, dict.fromkeys(TENANTS, protected / len(TENANTS))

    def set_quotas(pool: Pool, now_s: float) -> None:
        while quotas:
            tenant, part = quotas.popitem()
            pool.set_quota(tenant, int(part * capacity * EXTENT_BYTES))

    return list(pool_hits(requests, capacity, "VALUE", DEPTH_COST, tenants=tenants, look=set_quotas))


def apart(requests: list[Request], tenants: list[int], first: float, policy: str) -> list[int]:
    """Hits with pools of their own, of which tenant 1 has this part of L1."""
    capacity, hits = int(SIZE_GB * 1e9) // CHUNK_BYTES, {}
    for tenant, part in zip(TENANTS, (first, 1 - first), strict=True):
        rows = [one for one, whose in zip(requests, tenants, strict=True) if whose == tenant]
        hits[tenant] = pool_hits(rows, int(part * capacity), policy, DEPTH_COST)
    return [next(hits[tenant]) for tenant in tenants]


def of_tenants(requests: list[Request], tenants: list[int], hits: list[int]) -> list[float]:
    """Saved of all seconds, and of each tenant's."""
    rows = list(zip(requests, tenants, hits, strict=True))
    of = [rows, *([row for row in rows if row[1] == tenant] for tenant in TENANTS)]
    return [
        saved([row[0] for row in some], iter([row[2] for row in some]), DEPTH_COST).seconds for some in of
    ]


def run_plan_goodput() -> list[dict[str, Any]]:
    """Measure the figure: the mean over days."""
    days = []
    for seed in SEEDS:
        one = turning(seed)
        arms = {f"protects {part:g}": of_tenants(*one, shared(*one, part)) for part in PROTECTED}
        for policy in ("LRU", "VALUE"):
            found = [of_tenants(*one, apart(*one, first, policy)) for first in FIXED]
            arms[f"apart, {policy}"] = max(found)
        days.append(arms)
    means = {arm: sum(one[arm][0] for one in days) / len(days) for arm in days[0]}
    ratios = [one["protects 0.5"][0] / max(one["apart, LRU"][0], 1e-9) for one in days]
    ratio = sum(ratios) / len(ratios)
    return [
        figure("plan_goodput", value=means["protects 0.5"], unit="of the seconds saved", ratio=ratio,
               ratio_to="the best fixed quotas that cap", target=">= 1.25 x", ok=ratio >= 1.25,
               spread=[min(ratios), max(ratios)], means=means, days=days)
    ]  # fmt: skip
