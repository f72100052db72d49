"""Plans the cluster's engine configuration from the gateways' measurements (controller/plan.py).

Each gateway reports totals since its start; their growth between two steps is the load.  The load is smoothed and
extrapolated to the next step (Holt's method).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata.controller.plan import Advice, Engine, Measured, Shape, advise
from kvstrata.rpc.cluster_wire import RatedEngine, ShapeCount

if TYPE_CHECKING:
    from kvstrata.controller.cluster import Cluster

STEP_S = 10.0
FEWEST = 20
"""Minimum number of requests in the last step for a measured share of requests in time."""
MAX_GROUPS, MAX_ENGINES = 64, 64
LEVEL, TREND = 0.3, 0.1
"""Weights of the newest value in the level and in the trend."""

Key = tuple[str, int, float, float]
"""Group, size, and both limits (ms) of a shape."""


class Forecast:
    """A rate's level and trend per step (Holt 1957)."""

    def __init__(self) -> None:
        self.level = self.trend = 0.0
        self.known = False

    def add(self, value: float) -> None:
        """Add the value of the next step."""
        before = self.level
        if not self.known:
            self.level, self.known = value, True
            return
        self.level = LEVEL * value + (1 - LEVEL) * (before + self.trend)
        self.trend = TREND * (self.level - before) + (1 - TREND) * self.trend

    @property
    def next(self) -> float:
        """The value expected at the next step; at least 0."""
        return max(0.0, self.level + self.trend)


class Loads:
    """The groups' loads, from the totals that gateways report."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, Key], ShapeCount] = {}
        self._grown: dict[Key, list[int]] = {}
        self._forecasts: dict[Key, Forecast] = {}

    def add(self, told: Iterable[tuple[str, ShapeCount]], step_s: float) -> None:
        """Add the gateways' totals (with the gateway's name) at the end of a step. Decreased totals are ignored."""
        now = {(gateway, _key(one)): one for gateway, one in told}
        grown: dict[Key, list[int]] = {}
        for (gateway, key), one in now.items():
            before = self._before.get((gateway, key))
            if before is None and not any(name == gateway for name, _ in self._before):
                continue
            was = _counts(before) if before is not None else [0] * 4
            more = [new - old for new, old in zip(_counts(one), was, strict=True)]
            if min(more) >= 0:
                grown[key] = [a + b for a, b in zip(grown.get(key, [0] * 4), more, strict=True)]
        self._before, self._grown = now, grown
        for key in {key for _, key in now} | self._forecasts.keys():
            forecast = self._forecasts.setdefault(key, Forecast())
            forecast.add(grown.get(key, [0])[0] / step_s)
        self._forecasts = {key: one for key, one in self._forecasts.items() if one.next > 1e-4}

    def shapes(self, group: str) -> list[Shape]:
        """The expected load of a group in the next step, the most frequent shapes first."""
        sums: dict[Key, list[int]] = defaultdict(lambda: [0] * 4)
        for (_, key), one in self._before.items():
            sums[key] = [a + b for a, b in zip(sums[key], _counts(one), strict=True)]
        found = []
        for key, forecast in self._forecasts.items():
            counts = self._grown.get(key) or [0]
            counts = counts if counts[0] else sums[key]
            if key[0] == group and counts[0] and forecast.next > 0:
                prompt, answer = counts[2] / counts[0], counts[3] / counts[0]
                found.append(
                    Shape(requests_s=forecast.next, prompt_tokens=prompt, answer_tokens=answer,
                          ttft_s=key[2] / 1000, tpot_s=key[3] / 1000)
                )  # fmt: skip
        return sorted(found, key=lambda one: -one.requests_s)[:MAX_SHAPES]

    def met_share(self, group: str) -> float | None:
        """The share of the last step's requests that were in time; None: there were too few."""
        rows = [counts for key, counts in self._grown.items() if key[0] == group]
        ended = sum(counts[0] for counts in rows)
        return sum(counts[1] for counts in rows) / ended if ended >= FEWEST else None


MAX_SHAPES = 16
"""Maximum number of a group's shapes; the most frequent are kept."""


class Planning:
    """Plans in steps. Belongs to the event loop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loads = Loads()
        self.groups: dict[str, tuple[Measured, Advice]] = {}
        """Measurements and advice of the last step."""

    async def keep(self) -> None:
        """Run a step every STEP_S, until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            await self.tick()

    async def tick(self) -> None:
        """Run one step."""
        loop, gateways = asyncio.get_running_loop(), [one.told for one in self._cluster.gateways]
        self._loads.add(((one.gateway, shape) for one in gateways for shape in one.shapes), STEP_S)
        engines: dict[str, dict[str, RatedEngine]] = {}
        splits: dict[str, bool] = {}
        for one in gateways:
            for rated in one.rated:
                engines.setdefault(rated.group, {}).setdefault(rated.url, rated)
                splits[rated.group] = splits.get(rated.group, True) and one.splits
        found = {}
        for group, rows in list(engines.items())[:MAX_GROUPS]:
            measured = Measured(
                engines=[_engine(one) for one in list(rows.values())[:MAX_ENGINES]],
                shapes=self._loads.shapes(group),
                met_share=self._loads.met_share(group),
                saved=self._saved(rows.keys()),
                splits=splits[group],
            )
            found[group] = measured, await loop.run_in_executor(None, advise, measured)
        self.groups = found

    def page(self) -> dict[str, Any]:
        """The plan for operators.

        `tiers`: by instance, the share of all looked-up chunks that came from its L2 tiers.
        """
        return {
            "groups": [
                {"group": group, **msgspec.to_builtins(advice), "measured": msgspec.to_builtins(measured)}
                for group, (measured, advice) in sorted(self.groups.items())
            ],
            "copies": self._cluster.copies.page(),
            "tiers": {
                one.id: round(hits.get("l2", 0) / max(1, sum(hits.values())), 4)
                for one in self._cluster.live()
                if len(one.told.tiers) > 1
                for hits in (one.condition.load.hits_total,)
            },
        }

    def _saved(self, urls: Iterable[str]) -> dict[str, float]:
        """Mean over the engines' instances of the share that a larger L1 would save, by size."""
        wanted = set(urls)
        told = [
            one.condition.load.saved
            for one in self._cluster.live()
            if one.condition.load.saved and wanted & set(one.condition.engines)
        ]
        sizes = set.intersection(*(set(one) for one in told)) if told else set()
        return {size: sum(one[size] for one in told) / len(told) for size in sizes}


def _engine(one: RatedEngine) -> Engine:
    return Engine(
        name=one.url, prefill_tokens_s=one.prefill_tokens_s, alone_s=one.alone_s, each_s=one.each_s, role=one.role
    )  # fmt: skip


def _key(one: ShapeCount) -> Key:
    return one.group, one.size, one.ttft_ms, one.tpot_ms


def _counts(one: ShapeCount) -> list[int]:
    return [one.requests, one.met, one.prompt_tokens, one.answer_tokens]
