"""Admission: decides when a request is sent to an engine, or refused.

    enter ─▶ waits ─▶ admitted        an engine was chosen, by its state at this moment, and reserved
       │       │
       └───────┴────▶ refused         or the client leaves

Requests wait here, not at the engines, once every engine that could serve them has enough queued work
(routing/queues.py).  So the engine is chosen as late as possible, and the order can still change: it is fair between
tenants, and within a tenant it follows `order_s`: the deadline of the class of service (PATIENCE_S after the arrival if
the class has none), less `PRIORITY_S` for each step of the request's priority.

    tag of a tenant = max(virtual time, tokens that it was served by, divided by its weight)

The tenant with the lowest tag is next; a request that is sent on sets the virtual time to its tenant's tag, and adds
its tokens by weight to that (start-time fair queueing, Goyal, Vin and Cheng 1996).  So tenants whose requests wait get
tokens in proportion to their weights, and a tenant without waiting requests for a while is next when one arrives, but
gets no credit for the time before.

1. No request waits while an engine that could serve it has room.  Requests whose engines have none are passed over.
2. A request whose class sheds is refused once it cannot meet its deadline any more: by the choice when it is its turn,
   and at the deadline.  If its class does not shed, it is then ordered as if it had no class, so that it does not delay
   requests that can still meet their deadlines.
3. Every `order_s` is fixed but for that one change, so each request's turn comes.
4. At most `max_requests` wait, with bodies of MAX_BYTES.  Beyond that the tenant that takes most by its weight loses
   the request that would be served last.
5. First tokens, ends of requests, changes of engines and new settings trigger the dequeue; nothing polls.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstrata.config.gateway_model import QueueSettings
from kvstrata.gateway.choosing import Choice, Choosing
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.observability.numbers import LONG_BUCKETS, Numbers, gauge, histogram

if TYPE_CHECKING:
    from kvstrata.gateway.request import Request

PATIENCE_S = 10.0
"""Requests without a class of service, and those that have missed its `ttft_ms`, are ordered as if their first token
were due so long after their arrival."""
PRIORITY_S = 1.0
"""A step of priority counts as an arrival so many seconds earlier."""
QUEUE_FULL = "queue_full"
GONE = Failure(499, "cancelled", "the client has gone")
MAX_BYTES = 256 << 20
"""Bodies of all waiting requests."""

Lane = tuple[str, frozenset[ServingEngine]]
"""A model, and the engines that may not serve the request."""


def _order(request: Request) -> tuple[float, int]:
    """The lowest of a lane is next."""
    return request.order_s, request.number


class Flow:
    """What waits of one tenant."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.lanes: dict[Lane, list[Request]] = {}
        """In order; none is empty."""
        self.count = self.size_bytes = self.tokens = 0

    def push(self, request: Request) -> None:
        """Add a request."""
        self.weight = _weight(request)
        bisect.insort(self.lanes.setdefault(_lane(request), []), request, key=_order)
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """Take a request out, which is here."""
        lane = self.lanes[_lane(request)]
        del lane[bisect.bisect_left(lane, _order(request), key=_order)]
        if not lane:
            del self.lanes[_lane(request)]
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        self.count += sign
        self.size_bytes += sign * request.body_bytes
        self.tokens += sign * request.charged_tokens


class Admission(Numbers):
    """See the module. Belongs to the event loop.

    Whoever enters a request must take what it `found`, or `leave`.
    """

    queued = gauge(
        "Requests waiting in the gateway until an engine can take them.",
        lambda self: {name: one.count for name, one in self.flows.items()},
        "tenant",
    )
    size_bytes = gauge(
        "Bytes of the bodies of queued requests.",
        lambda self: sum(flow.size_bytes for flow in self.flows.values()),
        name="queued_bytes",
    )
    waited = histogram(
        "Time that queued requests waited until an engine could take them, they were refused, or their client left.",
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
        later: Callable[[float, Callable[[], None]], Any],
    ) -> None:
        """`later` calls something after so many seconds, and returns what can `cancel` that."""
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
        self._timer: Any = None
        choosing.freed = fleet.changed = self.pump

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return sum(flow.count for flow in self.flows.values())

    def set(self, settings: QueueSettings) -> None:
        """Go by other settings."""
        self._settings = settings
        self._trim()
        self.pump()

    async def admitted(self, request: Request) -> Choice | Failure:
        """The engine for a request, reserved for it, or why there is none. When cancelled, nothing stays reserved."""
        self.enter(request)
        if request.found is None:
            told = asyncio.Event()
            request.decided = told.set
            try:
                await told.wait()
            except BaseException:  # cancelled, or closed
                self.leave(request)
                raise
        assert request.found is not None
        return request.found

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

    def enter(self, request: Request) -> None:
        """A request has arrived, and was read: it is decided at once, or waits."""
        if not self._settings.max_requests or (request.wanted is not None and request.wanted.made_by):
            self._decide(request, waited=False)
            return
        if request.body_bytes > MAX_BYTES and not self._has_room(_lane(request)):
            self._settle(request, self._full())
            return
        due_s = self.deadline_s(request)
        request.order_s = due_s - PRIORITY_S * request.priority
        self._push(request)
        self.pump()
        self._trim()
        if request.found is None:
            request.timer = self._later(max(0.0, due_s - self._now_s()), lambda: self._expire(request))
            self._set_timer()

    def leave(self, request: Request) -> None:
        """The client has gone, or nobody takes the choice."""
        found = request.found
        if found is None:
            self._remove(request)
            self._settle(request, GONE)
        elif isinstance(found, Choice):
            request.found = GONE
            self._choosing.ended(found, answered=False)

    def pump(self) -> None:
        """Admit what there is room for."""
        while (request := self._first()) is not None:
            self._remove(request)
            self._decide(request, waited=True)
        self._set_timer()

    def deadline_s(self, request: Request) -> float:
        """When the first token of a request is due."""
        slo = self._choosing.slo_of(request)
        due_s = slo.ttft_ms / 1_000 if slo is not None and slo.ttft_ms else PATIENCE_S
        return request.arrived_s + due_s

    def _expire(self, request: Request) -> None:
        """The deadline of a request has passed."""
        if request.found is None and not request.late:
            self._remove(request)
            self._miss(request, self._now_s() - self.deadline_s(request))

    # -- the line ----------------------------------------------------------------------------------------------

    def _push(self, request: Request) -> None:
        self.flows.setdefault(request.sender, Flow()).push(request)

    def _remove(self, request: Request) -> None:
        flow = self.flows[request.sender]
        flow.remove(request)
        if not flow.count:
            del self.flows[request.sender]

    def _tag(self, tenant: str) -> float:
        return max(self._virtual, self._served.get(tenant, 0.0))

    def _first(self) -> Request | None:
        """The next request of those for which an engine has room; it stays where it is."""
        has_room: dict[Lane, bool] = {}
        heads: list[tuple[float, tuple[float, int], Request]] = []
        for tenant, flow in self.flows.items():
            for lane, requests in flow.lanes.items():
                if lane not in has_room:
                    has_room[lane] = self._has_room(lane)
                if has_room[lane]:
                    heads.append((self._tag(tenant), _order(requests[0]), requests[0]))
        return min(heads, key=lambda one: one[:2])[2] if heads else None

    def _count_served(self, request: Request, tokens: int) -> None:
        self._virtual = self._tag(request.sender)
        self._served[request.sender] = self._virtual + tokens / _weight(request)
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
            last = max((lane[-1] for lane in heaviest.lanes.values()), key=_order)
            self._remove(last)
            self._settle(last, self._full())

    # -- decisions ---------------------------------------------------------------------------------------------

    def _has_room(self, lane: Lane) -> bool:
        """Whether an engine of a lane has room, or none serves, which is an answer too."""
        serving = self._choosing.candidates(*lane)
        if not self._settings.max_requests or not serving:
            return True
        ahead_s, now_s = self._settings.ahead_s, self._now_s()
        measured = any(self._fleet.measured(one) for one in serving)
        return any(one.queue.has_room(ahead_s, now_s, measured=measured) for one in serving)

    def _decide(self, request: Request, *, waited: bool) -> None:
        """Admit a request that is not in the line, refuse it, or put it back as late."""
        choosing, wanted = self._choosing, request.wanted
        assert wanted is not None
        choice = choosing.choose(wanted, request.without)
        if choice is None:
            self._settle(request, choosing.none_serves(wanted.model))
            return
        if (late_s := choosing.late_s(choice, request)) > 0:
            slo = choosing.slo_of(request)
            # It is put off only if a prompt is before it at the engine: otherwise it could not come sooner.
            put_off = waited and not request.late and bool(choice.engine.load.waiting)
            if put_off or (slo is not None and slo.shed):
                self._miss(request, late_s)
                return
        if self._settings.max_requests:
            self._count_served(request, max(1, request.charged_tokens - choice.cached_tokens))
        choosing.dispatched(choice)
        self._settle(request, choice)

    def _miss(self, request: Request, late_s: float) -> None:
        """A request cannot meet its deadline: refuse it if its class sheds, else order it as if it had no class."""
        slo = self._choosing.slo_of(request)
        if slo is not None and slo.shed:
            self._settle(request, self._choosing.unreachable(slo, late_s))
            return
        request.late = True
        patient_s = request.arrived_s + PATIENCE_S - PRIORITY_S * request.priority
        request.order_s = max(request.order_s, patient_s)
        self._push(request)

    def _settle(self, request: Request, found: Choice | Failure) -> None:
        request.found = found
        if request.timer is not None:
            request.timer.cancel()
            self.waited[request.sender].add(max(0.0, self._now_s() - request.arrived_s))
            request.decided()

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


def _lane(request: Request) -> Lane:
    return request.asked.model, request.without


def _weight(request: Request) -> float:
    return request.tenant.settings.weight if request.tenant is not None else 1.0
