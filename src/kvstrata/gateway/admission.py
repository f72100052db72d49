"""Admission: when a request is sent to an engine, or refused.

    enter ─▶ WAITING ─▶ ADMITTED        an engine was chosen, with the state of this moment, and reserved
       │        │
       └────────┴─────▶ REFUSED         or the client leaves

Requests wait here, not at the engines, once every engine that could serve them has enough before it
(gateway/routing/queues.py).  So the engine is chosen as late as possible, and the order can still change: it is fair
between tenants, and within a tenant by `order_s`: the deadline of the class of service, or PATIENCE_S after the
arrival where there is none, less `PRIORITY_S` for each step of the request's priority.

    tag of a tenant = max(virtual time, tokens that it was served by, divided by its weight)

The tenant with the lowest tag is next; a request that is sent on sets the virtual time to its tenant's tag, and adds
its tokens by weight to that (start-time fair queueing, Goyal, Vin and Cheng 1996).  So tenants whose requests wait get
tokens in proportion to their weights, and one that had none waiting for a while is next, but gets nothing for the time
before.

1. Nothing waits while an engine that could serve it has room.  Requests whose engines have none are passed over.
2. A request whose class sheds is refused once it cannot meet its deadline any more: by the choice when it is its turn,
   and at the deadline.  One whose class does not shed is then ordered as if it had no class, so it does not delay
   others that can still meet theirs.
3. Every `order_s` is fixed but for that one change, so each request's turn comes.
4. At most `max_requests` wait, with bodies of MAX_BYTES.  Beyond that the tenant that takes most by its weight loses
   the request that would be served last.
5. The dequeue is driven by first tokens, ends, engines that come and go, and settings; nothing polls.
"""

from __future__ import annotations

import asyncio
import bisect
import enum
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from kvstrata.config.gateway_model import QueueSettings
from kvstrata.gateway.choosing import Choice, Choosing, Wanted
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.metering import Meter
from kvstrata.observability.numbers import LONG_BUCKETS, Numbers, gauge, histogram

PATIENCE_S = 10.0
"""Requests without a class of service, and those that have missed its `ttft_ms`, are ordered as if their first token
were due so long after their arrival."""
PRIORITY_S = 1.0
"""A step of priority counts as an arrival so many seconds earlier."""
QUEUE_FULL = "queue_full"
MAX_BYTES = 256 << 20
"""Bodies of all waiting requests."""


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


class Ask:
    """One request. Whoever enters it must take its choice, or `leave`."""

    def __init__(
        self, wanted: Wanted, meter: Meter, standing: Standing, without: Iterable[ServingEngine] = ()
    ) -> None:
        """`without`: engines that may not serve it."""
        self.wanted = wanted
        self.meter = meter
        self.standing = standing
        self.lane: Lane = wanted.model, frozenset(without)
        self.order_s = 0.0
        """Must not change while it waits in a flow."""
        self.state = State.NEW
        self.choice: Choice | None = None
        self.failure: Failure | None = None
        self.timer: Timer | None = None
        """Rings at its deadline; None: it has not had to wait."""
        self.late = False
        """Whether it is known not to meet its deadline."""
        self.decided: Callable[[], None] = lambda: None
        """Called when it is admitted or refused after it has waited."""

    @property
    def order(self) -> tuple[float, int]:
        """The lowest is next."""
        return self.order_s, self.wanted.number

    @property
    def found(self) -> Choice | Failure:
        """What became of a request that waits no longer."""
        found = self.choice or self.failure
        assert found is not None
        return found


class Flow:
    """What waits of one tenant."""

    def __init__(self) -> None:
        self.weight = 1.0
        """Of the newest request."""
        self.lanes: dict[Lane, list[Ask]] = {}
        """In order; none is empty."""
        self.count = self.size_bytes = self.tokens = 0

    def push(self, ask: Ask) -> None:
        """Add a request."""
        self.weight = ask.standing.weight
        bisect.insort(self.lanes.setdefault(ask.lane, []), ask, key=lambda each: each.order)
        self._count(ask, 1)

    def remove(self, ask: Ask) -> None:
        """Take a request out, which is here."""
        lane = self.lanes[ask.lane]
        del lane[bisect.bisect_left(lane, ask.order, key=lambda each: each.order)]
        if not lane:
            del self.lanes[ask.lane]
        self._count(ask, -1)

    def _count(self, ask: Ask, sign: int) -> None:
        self.count += sign
        self.size_bytes += sign * ask.meter.body_bytes
        self.tokens += sign * ask.wanted.tokens


class Admission(Numbers):
    """See the module. Belongs to the event loop."""

    queued = gauge(
        "Requests that wait in the gateway until an engine has room for them.",
        lambda self: {name: one.count for name, one in self.flows.items()},
        "tenant",
    )
    size_bytes = gauge(
        "Bytes of their bodies.",
        lambda self: sum(flow.size_bytes for flow in self.flows.values()),
        name="queued_bytes",
    )
    waited = histogram(
        "Time from arrival until an engine had room, or the request was refused or left, of requests that waited.",
        "tenant",
        name="queue_seconds",
        bounds=LONG_BUCKETS,
    )

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
        self.flows: dict[str, Flow] = {}
        """By tenant; none is empty."""
        self._virtual = 0.0
        self._served: dict[str, float] = {}
        """By tenant, where it is above the virtual time."""
        self._timer: Timer | None = None
        choosing.freed = fleet.changed = self.pump

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return sum(flow.count for flow in self.flows.values())

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
        return ask.found

    def page(self) -> dict[str, Any]:
        """What waits, for operators."""
        flows = self.flows.items()
        return {
            "enabled": bool(self._settings.max_requests),
            "requests": len(self),
            "bytes": self.size_bytes,
            "tenants": {name: {"requests": one.count, "tokens": one.tokens} for name, one in flows},
        }

    # -- what happens ------------------------------------------------------------------------------------------

    def enter(self, ask: Ask) -> None:
        """A request has arrived: it is decided at once, or waits."""
        if not self._settings.max_requests or ask.wanted.made_by:
            self._decide(ask)
            return
        if ask.meter.body_bytes > MAX_BYTES and not self._has_room(ask.lane):
            self._refuse(ask, self._full())
            return
        due_s = self.deadline_s(ask)
        ask.order_s = due_s - PRIORITY_S * ask.standing.priority
        ask.state = State.WAITING
        self._push(ask)
        self.pump()
        self._trim()
        if ask.state is State.WAITING:
            ask.timer = self._later(max(0.0, due_s - self._now_s()), lambda: self._expire(ask))
            self._set_timer()

    def leave(self, ask: Ask) -> None:
        """The client has gone, or nobody takes the choice."""
        if ask.state is State.WAITING:
            self._remove(ask)
            self._decided(ask, State.REFUSED)
        elif ask.choice is not None:
            choice, ask.choice = ask.choice, None
            self._choosing.ended(choice, answered=False)

    def pump(self) -> None:
        """Admit what there is room for."""
        while (ask := self._first()) is not None:
            self._remove(ask)
            self._decide(ask)
        self._set_timer()

    def deadline_s(self, ask: Ask) -> float:
        """When the first token of a request is due."""
        slo = self._choosing.slo_of(ask.meter)
        due_s = slo.ttft_ms / 1_000 if slo is not None and slo.ttft_ms else PATIENCE_S
        return ask.meter.arrived_s + due_s

    def _expire(self, ask: Ask) -> None:
        """The deadline of a request has passed."""
        if ask.state is State.WAITING and not ask.late:
            self._remove(ask)
            self._miss(ask, self._now_s() - self.deadline_s(ask))

    # -- the line ----------------------------------------------------------------------------------------------

    def _push(self, ask: Ask) -> None:
        self.flows.setdefault(ask.standing.tenant, Flow()).push(ask)

    def _remove(self, ask: Ask) -> None:
        flow = self.flows[ask.standing.tenant]
        flow.remove(ask)
        if not flow.count:
            del self.flows[ask.standing.tenant]

    def _tag(self, tenant: str) -> float:
        return max(self._virtual, self._served.get(tenant, 0.0))

    def _first(self) -> Ask | None:
        """The next request of those for which an engine has room; it stays where it is."""
        has_room: dict[Lane, bool] = {}
        heads: list[tuple[float, tuple[float, int], Ask]] = []
        for tenant, flow in self.flows.items():
            for lane, asks in flow.lanes.items():
                if lane not in has_room:
                    has_room[lane] = self._has_room(lane)
                if has_room[lane]:
                    heads.append((self._tag(tenant), asks[0].order, asks[0]))
        return min(heads, key=lambda one: one[:2])[2] if heads else None

    def _count_served(self, standing: Standing, tokens: int) -> None:
        self._virtual = self._tag(standing.tenant)
        self._served[standing.tenant] = self._virtual + tokens / standing.weight
        if len(self._served) > len(self.flows) + 64:
            self._served = {name: tag for name, tag in self._served.items() if tag > self._virtual}

    def _trim(self) -> None:
        """Refuse what waits beyond the bounds."""
        most = self._settings.max_requests or math.inf
        while len(self) > most or self.size_bytes > MAX_BYTES:
            heaviest = max(
                self.flows.values(),
                key=lambda one: max(one.count / most, one.size_bytes / MAX_BYTES) / one.weight,
            )
            last = max((lane[-1] for lane in heaviest.lanes.values()), key=lambda each: each.order)
            self._remove(last)
            self._refuse(last, self._full())

    # -- decisions ---------------------------------------------------------------------------------------------

    def _has_room(self, lane: Lane) -> bool:
        """Whether an engine of a lane has room, or none serves, which is an answer too."""
        serving = self._choosing.candidates(*lane)
        if not self._settings.max_requests or not serving:
            return True
        ahead_s, now_s = self._settings.ahead_s, self._now_s()
        measured = any(self._fleet.measured(one) for one in serving)
        return any(one.queue.has_room(ahead_s, now_s, measured=measured) for one in serving)

    def _decide(self, ask: Ask) -> None:
        """Admit a request that is not in the line, refuse it, or put it back as late."""
        choosing, (model, without) = self._choosing, ask.lane
        choice = choosing.choose(ask.wanted, without)
        if choice is None:
            self._refuse(ask, choosing.none_serves(model))
            return
        if (late_s := choosing.late_s(choice, ask.meter)) > 0:
            slo = choosing.slo_of(ask.meter)
            # It is put off only if a prompt is before it at the engine: otherwise it could not come sooner.
            put_off = ask.state is State.WAITING and not ask.late and bool(choice.engine.load.waiting)
            if put_off or (slo is not None and slo.shed):
                self._miss(ask, late_s)
                return
        self._count_served(ask.standing, max(1, ask.wanted.tokens - choice.cached_tokens))
        choosing.dispatched(choice)
        ask.choice = choice
        self._decided(ask, State.ADMITTED)

    def _miss(self, ask: Ask, late_s: float) -> None:
        """A request cannot meet its deadline: refuse it if its class sheds, else order it as if it had no class."""
        slo = self._choosing.slo_of(ask.meter)
        if slo is not None and slo.shed:
            self._refuse(ask, self._choosing.unreachable(slo, late_s))
            return
        ask.late = True
        patient_s = ask.meter.arrived_s + PATIENCE_S - PRIORITY_S * ask.standing.priority
        ask.order_s = max(ask.order_s, patient_s)
        self._push(ask)

    def _refuse(self, ask: Ask, failure: Failure) -> None:
        ask.failure = failure
        self._decided(ask, State.REFUSED)

    def _decided(self, ask: Ask, state: State) -> None:
        ask.state = state
        if ask.timer is not None:
            ask.timer.cancel()
            self.waited[ask.standing.tenant].add(max(0.0, self._now_s() - ask.meter.arrived_s))
            ask.decided()

    def _full(self) -> Failure:
        says = (
            f"as many requests wait as may (queue.max_requests: {self._settings.max_requests}, with "
            f"{MAX_BYTES >> 20} MiB of bodies); come again later"
        )
        return Failure(429, QUEUE_FULL, says, retry_after_s=1)

    def _set_timer(self) -> None:
        """Pump when the prompt of an answer that comes whole counts as computed: no first token tells of it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._now_s()
        next_s = self._fleet.next_room_s() if self.flows else math.inf
        if math.isfinite(next_s):
            self._timer = self._later(next_s - now_s, self.pump)
