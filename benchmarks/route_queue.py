"""`route_queue_*`: what the gateway's queue does to goodput, and to the tenants beside one that floods it.

The production `Admission` before `Choosing` and simulated engines in virtual time (benchmarks/route_gateway.py).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from benchmarks.route_gateway import MODEL, Heard, Run
from benchmarks.route_loads import Asked
from kvstrata.config.gateway_model import QueueSettings, SloSettings
from kvstrata.gateway.admission import Admission, Ask, Standing, State
from kvstrata.gateway.choosing import Choosing, Wanted
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.prefixes import keys_of
from kvstrata.gateway.residency.prompt import Prompt
from kvstrata.policy.routing.choose import POLICIES
from kvstrata.testing.engine_sim.engine_model import PS_PER_S, EngineModel
from kvstrata.testing.engine_sim.requests import SimRequest

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
            sender = Sender(ask.meter.slo, Standing(ask.tenant, ask.weight, ask.priority))
            found = self.admission.result(ask)
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
