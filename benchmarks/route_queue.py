"""`route_queue_*`: what the gateway's queue does to goodput when more comes than the engines can compute.

    _kept    with classes of service that never refuse: points of goodput more than without the queue
    _shed    with classes that refuse what cannot be in time

Half of the requests must have their first token within 1 s, the others within 5 s; goodput is the share of all requests
that have it.  The production `Admission` before `Choosing` and simulated engines in virtual time
(benchmarks/route_gateway.py).  Sketch: what is late anyway must not make others late; that gains what was lost to it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from benchmarks.common import figure, sized
from benchmarks.route_gateway import MODEL, Heard, Run
from benchmarks.route_loads import LOADS, Asked, at_rate
from kvstrata.config.gateway_model import QueueSettings, SloSettings
from kvstrata.gateway.admission import Admission, Ask, Standing, State
from kvstrata.gateway.choosing import Choosing, Wanted
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.prefixes import keys_of
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.gateway.routing.policies import POLICIES
from kvstrata.testing.engine_sim.engine_model import PS_PER_S, EngineModel
from kvstrata.testing.engine_sim.requests import SimRequest

ENGINE = EngineModel()
ENGINES = sized(4, 2)
REQUESTS = sized(400, 40)
SEED = 2026
SEEDS = sized(2, 1)
LEVELS = sized((1.6, 2.2), (2.2,))
"""Shares of the load that `at_rate` takes for the capacity.  Batches make the real one higher."""
SLO_S = {"quick": 1.0, "patient": 5.0}
"""Time to the first token of the classes of service."""
STEP_S = 0.004
"""The gateway hears of first tokens within this time, and sends what that makes room for."""


class Sender(NamedTuple):
    """Who sends a request, and in which class of service."""

    slo: str = ""
    standing: Standing = Standing()


class Outcome(NamedTuple):
    """What became of a request."""

    sender: Sender
    ttft_s: float
    """Infinite: it was refused."""
    waited_s: float
    """In the gateway."""
    refused: str = ""
    """The code of the refusal."""


class Alarm:
    """A timer in virtual time."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not ring."""
        self.call = None


class QueuedRun(Run):
    """One load through the policy `ttft`, with requests that may wait in the gateway."""

    def __init__(
        self,
        models: dict[str, EngineModel],
        queue: QueueSettings,
        slo: Iterable[SloSettings],
        sender: Callable[[Asked], Sender],
        seed: int = 0,
    ) -> None:
        """`sender`: who sends a request of the load."""
        super().__init__(POLICIES["ttft"](), models, seed=seed)
        self.meters = Meters({one.name: one for one in slo}, self.clock)
        self.choosing = Choosing(POLICIES["ttft"](), self.fleet, Heard(self.index), self.meters, self.clock)
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._order = itertools.count()
        self.admission = Admission(queue, self.choosing, self.fleet, self.clock, self.later)
        self._sender = sender
        self._waiting: dict[int, tuple[Asked, Ask]] = {}
        self._of: dict[str, tuple[Asked, Sender, float]] = {}
        """Requests at engines: with who sent them, and when they were sent on."""
        self.outcomes: list[Outcome] = []

    def later(self, delay_s: float, call: Callable[[], None]) -> Alarm:
        """Call something after a time."""
        alarm = Alarm(call)
        heapq.heappush(self._alarms, (self.now_s + delay_s, next(self._order), alarm))
        return alarm

    def _send(self, number: int, asked: Asked, *_: Any) -> None:
        prompt = Prompt(asked.prompt)
        wanted = Wanted(
            word=str(number),
            number=number,
            model=MODEL,
            tokens=len(asked.prompt),
            session=asked.session,
            keys=keys_of((), prompt.tokens.tobytes()),
            prompt=prompt,
        )
        sender = self._sender(asked)
        meter = self.meters.begin(sender.standing.tenant)
        meter.slo = sender.slo
        ask = Ask(wanted, meter, sender.standing)
        self._waiting[number] = asked, ask
        self.admission.enter(ask)
        self._settle()

    def _settle(self) -> None:
        """Send what was admitted to its engine, and note what was refused."""
        for number in [
            number for number, (_, ask) in self._waiting.items() if ask.state is not State.WAITING
        ]:
            asked, ask = self._waiting.pop(number)
            sender = Sender(ask.meter.slo, ask.standing)
            found = ask.found
            if isinstance(found, Failure):
                self.outcomes.append(Outcome(sender, math.inf, self.now_s - asked.at, found.code))
                continue
            request = SimRequest(str(number), asked.prompt, answer=asked.answer)
            self._under_way[request.name] = asked, found, request
            self._of[request.name] = asked, sender, self.now_s
            self.engines[found.engine.name].submit(request, int(self.now_s * PS_PER_S))

    def _hear(self, until_s: float) -> None:
        while self.now_s + STEP_S < until_s:
            super()._hear(self.now_s + STEP_S)
            self._settle()
        super()._hear(until_s)
        self._settle()

    def _apply_events(self, until_s: float) -> None:
        super()._apply_events(until_s)
        while self._alarms and self._alarms[0][0] <= until_s:
            at_s, _, alarm = heapq.heappop(self._alarms)
            self.now_s = max(self.now_s, at_s)
            if alarm.call is not None:
                alarm.call()

    def _ended(self, *args: Any, **more: Any) -> None:
        super()._ended(*args, **more)
        [request] = [one for one in args if isinstance(one, SimRequest)]
        asked, sender, sent_s = self._of.pop(request.name)
        ttft_s = request.first_token_ps / PS_PER_S - asked.at
        self.outcomes.append(Outcome(sender, ttft_s, sent_s - asked.at))


def served(load: str, level: float, shed: bool, enabled: bool, seed: int) -> list[Outcome]:
    """Serve one draw of a load, half of it in each class of service."""
    draw = random.Random(seed)
    asked = at_rate(LOADS[load](draw, REQUESTS), ENGINE, ENGINES, level)
    classes = [SloSettings(name=name, ttft_ms=1_000 * seconds, shed=shed) for name, seconds in SLO_S.items()]
    names = list(SLO_S)
    run = QueuedRun(
        {f"engine-{number}": ENGINE for number in range(ENGINES)},
        QueueSettings(max_requests=1_024 if enabled else 0),
        classes,
        lambda _: Sender(draw.choice(names)),
        seed,
    )
    run.serve(asked)
    return run.outcomes


def good(outcomes: list[Outcome]) -> float:
    """The share of requests whose first token came in time, of all that were received."""
    return sum(one.ttft_s <= SLO_S[one.sender.slo] for one in outcomes) / len(outcomes)


def run() -> list[dict[str, Any]]:
    """Serve the loads with and without the queue, with classes that shed and with others."""
    rows: dict[str, dict[str, float]] = {}
    for load in ("none", "conversations"):
        for level in LEVELS:
            for shed in (False, True):
                row = rows[f"{load}, {level:g} ×, {'shed' if shed else 'kept'}"] = {}
                for enabled in (False, True):
                    drawn = [served(load, level, shed, enabled, SEED + seed) for seed in range(SEEDS)]
                    row["queue" if enabled else "none"] = statistics.fmean(map(good, drawn))
    return [
        _figure(kept, {name: row for name, row in rows.items() if name.endswith(kept)})
        for kept in ("kept", "shed")
    ]


def _figure(kept: str, rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    gains = [100 * (row["queue"] - row["none"]) for row in rows.values()]
    mean = {name: statistics.fmean(row[name] for row in rows.values()) for name in ("queue", "none")}
    return figure(
        f"route_queue_{kept}",
        value=statistics.fmean(gains),
        unit="points of goodput",
        ratio=mean["queue"] / mean["none"],
        ratio_to="goodput without the queue",
        target="> 0",
        ok=statistics.fmean(gains) > 0,
        spread=(min(gains), max(gains)),
        rows=rows,
    )
