"""`plan_*`: what the controller's plan gains on the simulated day of `pd_goodput`, and how often it turns back.

The day's hours last ten seconds, so the plan is made every second and holds its changes for four.  The plan gets what a
gateway tells: totals of answered requests by length, and the measured rates of the production fleet.  What it says, the
requests that an engine may have at a time, is carried out as the gateway's admission does: who waits there and cannot
be in time any more comes last.

    _goodput      requests within both times beside the best of all fixed configurations: never split, may split, always
                  split with 1 to 3 of 4 engines prefilling; and beside an oracle, the best of them in each hour
    _oscillation  a day of steady load with noise, at nine tenths of what the engines can do: changes of the bound that
                  take an earlier one back

Sketch: where more answers run than may, all are late; a bound serves what the engines can do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from benchmarks.common import figure, sized
from benchmarks.route_fleet import DAY_SLO, HOST, HOURS, MODEL, SEED, always_names, met_by_hour, one_day
from benchmarks.route_gateway import Run
from benchmarks.route_loads import Asked
from kvstrata.controller.plan import Engine, Measured, Plan, Shape, step
from kvstrata.controller.planning import HOLD_S as REAL_HOLD_S
from kvstrata.controller.planning import STEP_S as REAL_STEP_S
from kvstrata.controller.planning import Loads
from kvstrata.gateway.choosing import Choice, Wanted
from kvstrata.gateway.fleet import ServingEngine
from kvstrata.gateway.routing.choose import POLICIES
from kvstrata.rpc.cluster_wire import ShapeCount

LEVEL = sized(0.9, 0.6)
STEP_S, HOLD_S = 1.0, 4.0
TTFT_S, TPOT_S = DAY_SLO.ttft_ms / 1_000, DAY_SLO.tpot_ms / 1_000
PREFILL_S = MODEL.prefill_token_us * 1.25e-6
DAYS_STEPS = sized(8_640, 200)


class PlannedRun(Run):
    """One load, with the plan in force."""

    def __init__(self) -> None:
        names = [f"engine-{number}" for number in range(HOST)]
        super().__init__(
            POLICIES["auto"](), dict.fromkeys(names, MODEL), seed=SEED, contract="kvstrata", slo=DAY_SLO
        )
        self.plan: Plan | None = None
        self.bounds: list[int] = []
        self._step_s = STEP_S
        self._loads = Loads()
        self._totals: dict[int, list[int]] = {}
        self._counted = 0
        self._waiting: list[tuple[int, Asked]] = []
        choose = self.choosing.choose

        def among_free(wanted: Wanted, tried: Iterable[ServingEngine] = ()) -> Choice | None:
            full = [one for one in self.fleet.engines.values() if one.is_full]
            return choose(wanted, (*tried, *full)) or choose(wanted, tried)

        self.choosing.choose = among_free  # type: ignore[method-assign]

    def _send(self, number: int, asked: Asked, at_s: float, again: str = "") -> None:
        self._waiting.append((number, asked))
        self._admit(at_s)

    def _admit(self, at_s: float) -> None:
        while self._waiting and not all(one.is_full for one in self.fleet.engines.values()):
            in_time = (
                at
                for at, (_, one) in enumerate(self._waiting)
                if at_s - one.at + len(one.prompt) * PREFILL_S < TTFT_S
            )
            number, asked = self._waiting.pop(next(in_time, 0))
            super()._send(number, asked, at_s)

    def _hear(self, until_s: float) -> None:
        super()._hear(until_s)
        self._admit(until_s)
        if self.now_s >= self._step_s:
            self._step_s += STEP_S
            self._make_plan()

    def _make_plan(self) -> None:
        for one in self.results[self._counted :]:
            computed = max(1, one.tokens if one.prefill else one.tokens - one.cached)
            size = computed.bit_length() // 2 << 4 | one.answer.bit_length() // 2
            met = one.ttft_s <= TTFT_S and (one.whole_s - one.ttft_s) / max(1, one.answer - 1) <= TPOT_S
            total = self._totals.setdefault(size, [0, 0, 0, 0])
            for at, more in enumerate((1, met, computed, one.answer)):
                total[at] += more
        self._counted = len(self.results)
        told = [
            ShapeCount("m", size, DAY_SLO.ttft_ms, DAY_SLO.tpot_ms, *row)
            for size, row in self._totals.items()
        ]
        self._loads.add([("gw", one) for one in told], STEP_S)
        engines = []
        for name in self.fleet.engines:
            line, rate = self.fleet.decode_rates.line(name), self.fleet.rates.rate(name, 0.0)
            engines.append(Engine(name=name, prefill_tokens_s=rate, alone_s=line.alone_s, each_s=line.each_s))
        if not engines[0].alone_s + engines[0].each_s:
            return
        shapes, share = self._loads.shapes("m"), self._loads.met_share("m", fewest=5)
        self.plan = step(
            Measured(engines=engines, shapes=shapes, met_share=share), self.plan, self.now_s, HOLD_S
        )
        self.bounds.append(self.plan.in_flight)
        for one in self.fleet.engines.values():
            one.most = self.plan.in_flight


def by_hour(ran: PlannedRun, load: list[Asked]) -> list[int]:
    """Requests of each hour that were in time."""
    met, end_s = Counter[int](), load[-1].at
    for one in ran.serve(load):
        good = one.ttft_s <= TTFT_S and (one.whole_s - one.ttft_s) / max(1, one.answer - 1) <= TPOT_S
        met[min(HOURS - 1, int(one.at_s / end_s * HOURS))] += good
    return [met[hour] for hour in range(HOURS)]


def run_plan_goodput() -> list[dict[str, Any]]:
    """See the module."""
    load, ran = one_day(LEVEL), PlannedRun()
    planned = by_hour(ran, load)
    fixed = {name: met_by_hour(load, name) for name in ("may", "never", *always_names())}
    best = max(fixed, key=lambda name: sum(fixed[name]))
    oracle = sum(max(hours) for hours in zip(*fixed.values(), strict=True))
    ratio, beside = sum(planned) / max(1, sum(fixed[best])), sum(planned) / max(1, oracle)
    return [
        figure(
            "plan_goodput",
            value=ratio,
            unit="× the best fixed configuration",
            ratio=beside,
            ratio_to="the best fixed configuration of each hour",
            target="≥ 1.25; ≥ .9 × the oracle",
            ok=ratio >= 1.25 and beside >= 0.9,
            best=best,
            requests=len(load),
            by_hour={"planned": planned, **fixed},
            bounds=ran.bounds,
        )
    ]


def run_plan_oscillation() -> list[dict[str, Any]]:
    """See the module."""
    draw, plan, bounds = random.Random(SEED), None, [0]
    for number in range(DAYS_STEPS):
        noise = draw.gauss(1.0, 0.15)
        one = Engine(
            name="",
            prefill_tokens_s=22_000 * draw.gauss(1.0, 0.05),
            alone_s=0.0055,
            each_s=1e-4 * draw.gauss(1.0, 0.05),
        )
        engines = [msgspec.structs.replace(one, name=str(at)) for at in range(HOST)]
        shapes = [
            Shape(requests_s=rate * noise, prompt_tokens=prompt * draw.gauss(1.0, 0.1), answer_tokens=answer,
                  ttft_s=TTFT_S, tpot_s=TPOT_S)
            for rate, prompt, answer in ((4.0, 8_600, 125), (6.0, 430, 2_500))
        ]  # fmt: skip
        measured = Measured(
            engines=engines, shapes=shapes, met_share=min(1.0, max(0.0, draw.gauss(0.85, 0.08)))
        )
        plan = step(measured, plan, number * REAL_STEP_S, REAL_HOLD_S)
        if plan.in_flight != bounds[-1]:
            bounds.append(plan.in_flight)
    turns = [(b - a) * (c - b) < 0 for a, b, c in zip(bounds, bounds[1:], bounds[2:], strict=False)]
    return [
        figure(
            "plan_oscillation",
            value=sum(turns),
            unit="reversals a day",
            ratio=len(bounds) - 1,
            ratio_to="1, as changes in all",
            target="≤ 2",
            ok=sum(turns) <= 2,
            bounds=bounds,
        )
    ]
