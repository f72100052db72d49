"""Admission: decides when a request is sent to an engine, or refused.

    enter ─▶ waits ─▶ admitted        an engine was chosen, by its state at this moment, and reserved
       │       │
       └───────┴────▶ refused         or the client leaves

Requests wait here, not at the engines, once every engine that could serve them has enough queued work
(routing/queues.py).  So the engine is chosen as late as possible, and the order can still change: it is fair between
tenants, and within a tenant it follows `order_s`: the deadline of the class of service (PATIENCE_S after the arrival if
the class has none), less `PRIORITY_S` for each step of the request's priority.

    tag of a tenant = max(virtual time, the tenant's finish time);  finish time += tokens / weight at each dispatch

The tenant with the lowest tag is next; a dispatched request sets the virtual time to its tenant's tag, and the tenant's
finish time to that plus its tokens divided by the weight (start-time fair queueing, Goyal, Vin and Cheng 1996).  So
tenants whose requests wait get tokens in proportion to their weights, and a tenant that was idle for a while is next
when a request of it arrives, but gets no credit for the idle time.

1. No request waits while an engine that could serve it has room.  Requests whose engines have no room are passed over.
2. A request whose class sheds is refused as soon as it cannot meet its deadline any more: at its turn, by the predicted
   time, and at the deadline itself.  A request whose class does not shed is then ordered as if it had no class, so that
   it does not delay requests that can still meet their deadlines.
3. Every `order_s` is fixed but for that one change, so no request starves.
4. At most `max_requests` requests wait, with MAX_BYTES of bodies in total.  Beyond that the tenant with the largest
   share for its weight loses the request that would be served last.
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
"""Time from arrival to deadline, for the order only, of requests without a class of service or past its `ttft_ms`."""
PRIORITY_S = 1.0
"""Time by which each step of priority moves a request ahead in the order."""
QUEUE_FULL = "queue_full"
GONE = Failure(499, "cancelled", "the client has gone")
MAX_BYTES = 256 << 20
"""Maximum total bytes of waiting requests' bodies."""

Lane = tuple[str, frozenset[ServingEngine]]
"""Requests with the same candidates: the model's name, and the engines that may not serve the request."""


def _order(request: Request) -> tuple[float, int]:
    """Sort key of a lane; the request with the lowest key is next."""
    return request.order_s, request.number


class Flow:
    """The waiting requests of one tenant."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.lanes: dict[Lane, list[Request]] = {}
        """Each lane is sorted by `_order`, and not empty."""
        self.count = self.size_bytes = self.tokens = 0

    def push(self, request: Request) -> None:
        """Add a request."""
        self.weight = _weight(request)
        bisect.insort(self.lanes.setdefault(_lane(request), []), request, key=_order)
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """Remove a request that is in this flow."""
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
    """The queue of requests that wait for an engine. Belongs to the event loop.

    A caller of `enter` must take the decision from `request.found`, or call `leave`.
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
        """`later` calls a function after a number of seconds, and returns a handle with `cancel`."""
        self._settings = settings
        self._choosing = choosing
        self._fleet = fleet
        self._now_s = now_s
        self._later = later
        self.flows: dict[str, Flow] = {}
        """By tenant; no flow is empty."""
        self._virtual = 0.0
        self._served: dict[str, float] = {}
        """Finish time by tenant; missing: not above the virtual time."""
        self._timer: Any = None
        choosing.freed = fleet.changed = self.pump

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(flow.count for flow in self.flows.values())

    def set(self, settings: QueueSettings) -> None:
        """Apply new settings."""
        self._settings = settings
        self._trim()
        self.pump()

    async def admitted(self, request: Request) -> Choice | Failure:
        """Wait for the decision: a reserved choice, or the refusal. When cancelled, nothing stays reserved."""
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
        """The queue's state for the status page."""
        flows = self.flows.items()
        return {
            "enabled": bool(self._settings.max_requests),
            "requests": len(self),
            "bytes": self.size_bytes,
            "tenants": {name: {"requests": one.count, "tokens": one.tokens} for name, one in flows},
        }

    # -- what happens ------------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Decide a request that has arrived and was parsed, or queue it."""
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
        """Withdraw a request: its client has gone, or its choice is not used."""
        found = request.found
        if found is None:
            self._remove(request)
            self._settle(request, GONE)
        elif isinstance(found, Choice):
            request.found = GONE
            self._choosing.ended(found, answered=False)

    def pump(self) -> None:
        """Decide waiting requests, in order, while an engine has room for them."""
        while (request := self._first()) is not None:
            self._remove(request)
            self._decide(request, waited=True)
        self._set_timer()

    def deadline_s(self, request: Request) -> float:
        """Time at which the first token of a request is due."""
        slo = self._choosing.slo_of(request)
        due_s = slo.ttft_ms / 1_000 if slo is not None and slo.ttft_ms else PATIENCE_S
        return request.arrived_s + due_s

    def _expire(self, request: Request) -> None:
        """Handle the deadline of a request that still waits."""
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
        """The next request for which an engine has room, without removing it; None: there is none."""
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
        """Refuse requests until the queue is within its limits."""
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
        """Whether requests of a lane can be decided: an engine has room, or no engine serves (a refusal)."""
        serving = self._choosing.candidates(*lane)
        if not self._settings.max_requests or not serving:
            return True
        ahead_s, now_s = self._settings.ahead_s, self._now_s()
        measured = any(self._fleet.measured(one) for one in serving)
        return any(one.queue.has_room(ahead_s, now_s, measured=measured) for one in serving)

    def _decide(self, request: Request, *, waited: bool) -> None:
        """Admit a request that is not in the queue, refuse it, or queue it again as late."""
        choosing, wanted = self._choosing, request.wanted
        assert wanted is not None
        choice = choosing.choose(wanted, request.without)
        if choice is None:
            self._settle(request, choosing.no_engine_failure(wanted.model))
            return
        if (late_s := choosing.late_s(choice, request)) > 0:
            slo = choosing.slo_of(request)
            # It is put off only if the engine has prompts waiting: otherwise this moment is the best for it.
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
            f"the queue is full (queue.max_requests: {self._settings.max_requests}, at most "
            f"{MAX_BYTES >> 20} MiB of bodies); try again later"
        )
        return Failure(429, QUEUE_FULL, says, retry_after_s=1)

    def _set_timer(self) -> None:
        """Set a timer to pump when a non-streamed request's prompt counts as computed; no first token reports that."""
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
