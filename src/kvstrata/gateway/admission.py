"""Admission: when a request is sent to an engine, or refused.

    enter ─▶ WAITING ─▶ ADMITTED        an engine was chosen, with the state of this moment, and reserved
       │        │
       └────────┴─────▶ REFUSED         or the client leaves

Requests wait here, not at the engines, once every engine that could serve them has enough before it
(policy/routing/queues.py).  So the engine is chosen as late as possible, and the order can still change: it is
line.py's, fair between tenants, and within a tenant by `order_s`: the deadline of the class of service, or `patience_s`
after the arrival where there is none, less `PRIORITY_S` for each step of the request's priority.

1. Nothing waits while an engine that could serve it has room.
2. A request whose class sheds is refused once it cannot meet its deadline any more: by the tokens before it when it
   comes, by the choice when it is its turn, and at the deadline.  One whose class does not shed is then ordered as if
   it had no class, so it does not delay others that can still meet theirs.
3. Every `order_s` is fixed but for that one change, so each request's turn comes.
4. At most `max_requests` wait, with bodies of `max_mb`.  Beyond that the tenant that takes most by its weight loses the
   request that would be served last.
5. The dequeue is driven by first tokens, ends, engines that come and go, and settings; nothing polls.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol, cast

from kvstrata.config.gateway_model import QueueSettings
from kvstrata.gateway.choosing import Choice, Choosing, Wanted
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.line import Line, Waiter
from kvstrata.gateway.metering import Meter
from kvstrata.observability.metrics import LONG_BUCKETS, Histogram

PRIORITY_S = 1.0
"""A step of priority counts as an arrival so many seconds earlier."""
QUEUE_FULL = "queue_full"
NEWEST = 0.05
"""Weight of the newest request in the share of prompts that is computed."""


class State(enum.Enum):
    """See the module."""

    NEW = "new"
    WAITING = "waiting"
    ADMITTED = "admitted"
    REFUSED = "refused"


class Standing(NamedTuple):
    """What decides a request's place beside its deadline."""

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


class Timer(Protocol):
    """Of an event loop."""

    def cancel(self) -> None: ...


Lane = tuple[str, frozenset[ServingEngine]]
"""A model, and the engines that may not serve the request."""
Later = Callable[[float, Callable[[], None]], Timer]
"""Calls something after so many seconds."""


class Ask(Waiter):
    """One request. Whoever enters it must take its choice, or `leave`."""

    def __init__(
        self, wanted: Wanted, meter: Meter, standing: Standing, without: Iterable[ServingEngine] = ()
    ) -> None:
        """`without`: engines that may not serve it."""
        self.without = frozenset(without)
        super().__init__(
            wanted.number,
            tenant=standing.tenant,
            weight=standing.weight,
            lane=(wanted.model, self.without),
            tokens=wanted.tokens,
            size_bytes=meter.body_bytes,
        )
        self.wanted = wanted
        self.meter = meter
        self.priority = standing.priority
        self.state = State.NEW
        self.choice: Choice | None = None
        self.failure: Failure | None = None
        self.defect: Exception | None = None
        """What its decision has raised."""
        self.timer: Timer | None = None
        """Rings at its deadline; None: it has not had to wait."""
        self.late = False
        """Whether it is known not to meet its deadline."""
        self.decided: Callable[[], None] = lambda: None
        """Called when it is admitted or refused after it has waited."""


class Admission:
    """See the module. Belongs to the event loop."""

    def __init__(
        self,
        settings: QueueSettings,
        choosing: Choosing,
        fleet: Fleet,
        now_s: Callable[[], float],
        later: Later,
    ) -> None:
        self._settings = settings
        self._choosing = choosing
        self._fleet = fleet
        self._now_s = now_s
        self._later = later
        self.line = Line()
        self.waited: dict[str, Histogram] = {}
        """Seconds of the requests that had to wait, by tenant."""
        self._computed = 1.0
        """The share of prompts that was not cached, lately."""
        self._timer: Timer | None = None
        choosing.freed = fleet.changed = self.pump

    def set(self, settings: QueueSettings) -> None:
        """Go by other settings."""
        self._settings = settings
        self._trim()
        self.pump()

    async def admitted(self, ask: Ask) -> Choice | Failure:
        """The engine for a request, reserved for it, or why there is none. When cancelled, nothing stays reserved."""
        self.enter(ask)
        if ask.state is State.WAITING:
            told = asyncio.Event()
            ask.decided = told.set
            try:
                await told.wait()
            except asyncio.CancelledError:
                self.leave(ask)
                raise
        return self.result(ask)

    def result(self, ask: Ask) -> Choice | Failure:
        """What became of a request that waits no longer. Raises what its decision has raised."""
        if ask.defect is not None:
            raise ask.defect
        found = ask.choice or ask.failure
        assert found is not None
        return found

    def page(self) -> dict[str, Any]:
        """What waits, for operators."""
        flows = self.line.flows
        return {
            "enabled": self._settings.enabled,
            "requests": len(self.line),
            "bytes": self.line.size_bytes,
            "tenants": {name: {"requests": one.count, "tokens": one.tokens} for name, one in flows.items()},
        }

    # -- what happens ------------------------------------------------------------------------------------------

    def enter(self, ask: Ask) -> None:
        """A request has arrived: it is decided at once, or waits."""
        if not self._settings.enabled or ask.wanted.made_by:
            self._decide(ask)
            return
        due_s = self.deadline_s(ask)
        ask.order_s = due_s - PRIORITY_S * ask.priority
        refusal = self._too_late(ask) or self._too_large(ask)
        if refusal is not None:
            self._refuse(ask, refusal)
            return
        ask.state = State.WAITING
        self.line.push(ask)
        self.pump()
        self._trim()
        if ask.state is State.WAITING:
            ask.timer = self._later(max(0.0, due_s - self._now_s()), lambda: self._expire(ask))
            self._set_timer()

    def leave(self, ask: Ask) -> None:
        """The client has gone, or nobody takes the choice."""
        if ask.state is State.WAITING:
            self.line.remove(ask)
            self._decided(ask, State.REFUSED)
        elif ask.choice is not None:
            choice, ask.choice = ask.choice, None
            self._choosing.ended(choice, answered=False)

    def pump(self) -> None:
        """Admit what there is room for."""
        while (ask := self.line.first(self._rooms())) is not None:
            assert isinstance(ask, Ask)
            self.line.remove(ask)
            try:
                self._decide(ask)
            except Exception as error:  # a defect of one request's choice, which must end no other request
                ask.defect = error
                self._decided(ask, State.REFUSED)
        self._set_timer()

    def deadline_s(self, ask: Ask) -> float:
        """When the first token of a request is due."""
        slo = self._choosing.slo_of(ask.meter)
        due_s = slo.ttft_ms / 1_000 if slo is not None and slo.ttft_ms else self._settings.patience_s
        return ask.meter.arrived_s + due_s

    def _expire(self, ask: Ask) -> None:
        """The deadline of a request has passed."""
        if ask.state is not State.WAITING or ask.late:
            return
        slo = self._choosing.slo_of(ask.meter)
        self.line.remove(ask)
        if slo is not None and slo.shed:
            self._refuse(ask, self._choosing.unreachable(slo, self._now_s() - self.deadline_s(ask)))
        else:
            self._postpone(ask)

    # -- decisions ---------------------------------------------------------------------------------------------

    def _rooms(self) -> Callable[[Hashable], bool]:
        """Whether an engine of a lane has room, or none serves, which is an answer too. Valid for one decision."""
        known: dict[Hashable, bool] = {}

        def may(lane: Hashable) -> bool:
            if lane not in known:
                model, without = cast("Lane", lane)
                known[lane] = self._has_room(self._choosing.candidates(model, without))
            return known[lane]

        return may

    def _has_room(self, serving: list[ServingEngine]) -> bool:
        if not self._settings.enabled or not serving:
            return True
        queues, ahead_s, now_s = self._fleet.queues, self._settings.ahead_s, self._now_s()
        measured = any(self._fleet.measured(one) for one in serving)
        return any(queues.has_room(one.name, ahead_s, now_s, measured=measured) for one in serving)

    def _decide(self, ask: Ask) -> None:
        """Admit a request that is not in the line, refuse it, or put it back as late."""
        choosing = self._choosing
        choice = choosing.choose(ask.wanted, ask.without)
        if choice is None:
            self._refuse(ask, choosing.none_serves(ask.wanted.model))
        elif (hopeless := choosing.hopeless(choice, ask.meter)) is not None:
            self._refuse(ask, hopeless)
        elif ask.state is State.WAITING and not ask.late and self._will_be_late(ask, choice):
            slo = choosing.slo_of(ask.meter)
            if slo is not None and slo.shed:
                self._refuse(ask, choosing.unreachable(slo, choosing.margin_s))
            else:
                self._postpone(ask)
        else:
            uncached = max(1, ask.wanted.tokens - choice.cached_tokens)
            self._computed += NEWEST * (uncached / ask.wanted.tokens - self._computed)
            self.line.served(ask.tenant, ask.weight, uncached)
            choosing.dispatched(choice)
            ask.choice = choice
            self._decided(ask, State.ADMITTED)

    def _will_be_late(self, ask: Ask, choice: Choice) -> bool:
        """Whether its first token is expected too late, by what first tokens were later than expected lately.

        Not if no prompt is before it at the engine: it could not come sooner, and how late it is must be measured.
        """
        choosing = self._choosing
        slo, way = choosing.slo_of(ask.meter), choice.decision.way if choice.decision is not None else None
        if slo is None or not slo.ttft_ms or way is None or not choice.engine.load.waiting:
            return False
        return self._now_s() + way.ttft_s + choosing.margin_s > self.deadline_s(ask)

    def _refuse(self, ask: Ask, failure: Failure) -> None:
        ask.failure = failure
        self._decided(ask, State.REFUSED)

    def _decided(self, ask: Ask, state: State) -> None:
        ask.state = state
        if ask.timer is not None:
            ask.timer.cancel()
            waited = self.waited.setdefault(ask.tenant, Histogram(LONG_BUCKETS))
            waited.add(max(0.0, self._now_s() - ask.meter.arrived_s))
            ask.decided()

    def _postpone(self, ask: Ask) -> None:
        """A request that misses its deadline is ordered as if it had no class of service."""
        ask.late = True
        patient_s = ask.meter.arrived_s + self._settings.patience_s - PRIORITY_S * ask.priority
        ask.order_s = max(ask.order_s, patient_s)
        self.line.push(ask)

    def _too_late(self, ask: Ask) -> Failure | None:
        """The refusal of a request that sheds, if what is served before it takes until after its deadline."""
        slo = self._choosing.slo_of(ask.meter)
        if slo is None or not slo.shed or not len(self.line):
            return None
        serving = self._choosing.candidates(ask.wanted.model, ask.without)
        rate = sum(one.load.prefill_tokens_s for one in serving)
        if not rate:
            return None
        wait_s = self._computed * self.line.tokens_before(ask) / rate
        late_s = self._now_s() + wait_s - self.deadline_s(ask)
        return self._choosing.unreachable(slo, late_s) if late_s > 0 else None

    def _full(self) -> Failure:
        settings = self._settings
        says = (
            f"as many requests wait as may (queue.max_requests: {settings.max_requests}, "
            f"queue.max_mb: {settings.max_mb:g}); come again later"
        )
        return Failure(429, QUEUE_FULL, says, retry_after_s=1)

    @property
    def _most_bytes(self) -> int:
        return max(1, int(self._settings.max_mb * (1 << 20)))

    def _too_large(self, ask: Ask) -> Failure | None:
        return self._full() if ask.size_bytes > self._most_bytes and not self._rooms()(ask.lane) else None

    def _trim(self) -> None:
        """Refuse what waits beyond the bounds."""
        line, most = self.line, self._settings.max_requests
        while len(line) > most or line.size_bytes > self._most_bytes:
            last = line.last(line.heaviest(most, self._most_bytes))
            assert isinstance(last, Ask)
            line.remove(last)
            self._refuse(last, self._full())

    # -- answers that come whole -------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        """Pump when a prompt counts as computed of which no first token tells."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._now_s()
        next_s = self._fleet.queues.next_room_s(now_s) if len(self.line) else math.inf
        if math.isfinite(next_s):
            self._timer = self._later(next_s - now_s, self.pump)
