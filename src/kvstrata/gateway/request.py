"""One request, from the question where it goes to the end of its answer; Envoy carries it.

    decide ─▶ CHOSEN ─▶ first token ─▶ end           told by the watcher's pipe and by Envoy's access log (marks.py)
       └────▶ refused                                Envoy answers the client with the refusal

1. Whatever comes of a request, what it holds goes back once: its place at the engine, its tenant's, its tokens.
2. A request that Envoy has ended without a word of its number (the client went while the answer was on its way to
   Envoy) is found by its id, and otherwise by Envoy's own count of requests, or since the log tells of each request
   again and again (`Requests.lost`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvstrata.gateway import headers as passing
from kvstrata.gateway.admission import Ask
from kvstrata.gateway.choosing import Choice, Wanted
from kvstrata.gateway.door import IN_FLIGHT, Tenant
from kvstrata.gateway.errors import MAX_BODY_BYTES, TOO_LARGE, Failure
from kvstrata.gateway.fleet import ServingEngine, endpoint_of
from kvstrata.gateway.marks import CANCELLED, OK, Marks
from kvstrata.gateway.metering import Meter
from kvstrata.gateway.parts import Parts
from kvstrata.gateway.reading import Sent
from kvstrata.gateway.routes import GENERATES, ROUTES, Asked, Route, route_of

RANK = passing.RANK.decode()
MAX_OTHERS = 2
"""Further engines that are named for a request."""


class Head(NamedTuple):
    """A request's head."""

    method: str
    path: str
    """Without query."""
    headers: Mapping[bytes, bytes]
    word: str
    """Its id."""


class Chosen(NamedTuple):
    """Where a request goes, and what changes of it."""

    number: int
    endpoints: Sequence[str]
    """`ip:port` of the engine, and of others if it cannot be reached."""
    headers: Mapping[str, str]
    """To be set."""
    removed: Sequence[str]
    """Headers to be removed."""
    fragment: bytes
    """JSON for behind the body's first brace."""


class Request:
    """See the module. Belongs to the event loop; `decide` comes once, and `end` must follow it."""

    def __init__(self, parts: Parts, head: Head) -> None:
        self.head = head
        self.meter = Meter(parts.now_s(), "")
        self.number = -1
        self._parts = parts
        self._tenant: Tenant | None = None
        self._entered = False
        self._route: Route | None = None
        """None: not admitted."""
        self._asked = Asked()
        self._choice: Choice | None = None
        self._taken: float | None = None
        """Tokens of its tenant; None: it takes none."""
        self._tokens = 0
        self._computed = False
        """Whether the prompt's ids were computed here or asked of an engine."""
        self.has_first = False
        self.heard_s = self.meter.arrived_s
        """When something was heard of it for the last time."""
        self._is_over = False
        parts.requests.deciding += 1

    async def decide(
        self, body: bytes, *, cut: bool = False, subset: Sequence[str] | None = None
    ) -> Chosen | Failure:
        """Where the request goes, or why it is refused. `cut`: the body goes on. `subset`: places that are allowed.

        When cancelled, or with a refusal, the request has ended.
        """
        decided: Chosen | Failure | None = None
        try:
            decided = await self._decided(body, cut, subset)
        finally:
            self._parts.requests.deciding -= 1
            if isinstance(decided, Chosen):
                self._parts.requests.add(self)
            else:
                self.end(decided.code if decided is not None else CANCELLED)
        return decided

    def drop(self, outcome: str) -> None:
        """The request ends before `decide`."""
        self._parts.requests.deciding -= 1
        self.end(outcome)

    async def admit(self) -> Failure | None:
        """The reason why the request is refused by its head alone; None: there is none."""
        parts, head, meter = self._parts, self.head, self.meter
        tenant = parts.door.tenant_of(head.headers)
        if isinstance(tenant, Failure):
            return tenant
        self._tenant, meter.tenant = tenant, tenant.name if tenant is not None else ""
        meter.slo = parts.reader.slo_of(head.headers, tenant, parts.meters.slo)
        route = route_of(head.method, head.path)
        if isinstance(route, Failure):
            return route
        under_way, most = parts.requests.in_flight, parts.settings.max_in_flight
        if under_way > most:
            says = f"{under_way - 1} requests are under way, of at most {most}"
            return Failure(503, "overloaded", says, retry_after_s=1)
        if tenant is not None:
            failure = tenant.enter(meter.arrived_s)
            if failure is not None and failure.code == IN_FLIGHT:
                await tenant.leaving()
                failure = tenant.enter(meter.arrived_s)
            if failure is not None:
                return failure
            self._entered = True
        self._route = route
        length = head.headers.get(b"content-length", b"")
        return TOO_LARGE if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES else None

    async def _decided(self, body: bytes, cut: bool, subset: Sequence[str] | None) -> Chosen | Failure:
        parts, head, meter = self._parts, self.head, self.meter
        if self._route is None and (failure := await self.admit()) is not None:
            return failure
        assert self._route is not None
        meter.body_bytes = len(body)
        if meter.body_bytes > MAX_BODY_BYTES:
            return TOO_LARGE
        kv_tenant = self._tenant.settings.kv_tenant if self._tenant is not None else ""
        sent = Sent(head.path, self._route, body, head.headers, head.word, meter.tenant, kv_tenant, cut)
        read = parts.reader.read(sent)
        if isinstance(read, Failure):
            return read
        self._asked, wanted = read
        ids = None
        if parts.settings.predicts and head.path in ROUTES and not cut and wanted.prompt is None:
            known = await parts.tokens.of(head.path, body, self._asked.model, meter.tenant)
            self._computed, ids = known.ids is not None, known.ids if known.passes else None
            wanted = parts.reader.with_ids(self._asked, wanted, known.ids)
        wanted = await parts.controllers.told(wanted)
        choice = await self._admitted(wanted, subset)
        if isinstance(choice, Failure):
            return choice
        self._choice, self.number, meter.engine = choice, wanted.number, choice.engine.name
        if self._tenant is not None and self._asked.text:
            taken = self._tenant.take(wanted.tokens, meter.arrived_s)
            if isinstance(taken, Failure):
                return taken
            self._taken, self._tokens = taken, wanted.tokens
        passes = ids is not None and parts.tokens.takes_ids(choice.engine, self._asked.model)
        return self._chosen(choice, self._fragment(kv_tenant, ids if passes else None), subset)

    async def _admitted(self, wanted: Wanted, subset: Sequence[str] | None) -> Choice | Failure:
        parts = self._parts
        standing = parts.reader.standing_of(self.head.headers, self._tenant)
        return await parts.admission.admitted(Ask(wanted, self.meter, standing, self._not_allowed(subset)))

    def _fragment(self, kv_tenant: str, ids: Sequence[int] | None) -> bytes:
        """What goes into the body; the request's own fields of these names were refused, or `ids` is None."""
        params: dict[str, object] = {}
        if kv_tenant and self.head.path in GENERATES:
            params["kvstrata.tenant"] = kv_tenant
        if ids is not None:
            params["prompt_token_ids"] = list(ids)
        fields: dict[str, object] = {"kv_transfer_params": params} if params else {}
        if kv_tenant and self.head.path in GENERATES:
            fields["cache_salt"] = kv_tenant
        return msgspec.json.encode(fields)[1:-1] + b"," if fields else b""

    def _chosen(self, choice: Choice, fragment: bytes, subset: Sequence[str] | None) -> Chosen:
        key = choice.engine.place.api_key
        drops = bool(key) or self._parts.door.knows_tenants
        headers = {"x-request-id": self.head.word}
        if key:
            headers["authorization"] = f"Bearer {key}"
        removed = (["x-api-key"] if key else ["authorization", "x-api-key"]) if drops else []
        if choice.engine.rank is not None:
            headers[RANK] = str(choice.engine.rank)
        else:
            removed.append(RANK)
        if self._asked.repeatable:
            headers["x-envoy-retry-on"] = "reset"
        return Chosen(self.number, self._endpoints(choice, subset), headers, removed, fragment)

    def _endpoints(self, choice: Choice, subset: Sequence[str] | None) -> list[str]:
        """The chosen engine's place, and those of the next best, which must understand the same headers."""
        first = choice.engine
        found = [endpoint_of(first.place.address)]
        targets = self._parts.fleet.targets(self._asked.model, self._not_allowed(subset))
        best = choice.decision.alternatives if choice.decision is not None else []
        order = {other.engine: number for number, other in enumerate(best)}
        targets.sort(key=lambda one: (order.get(one.name, len(order)), one.load.requests))
        for target in targets:
            process, endpoint = target.process, endpoint_of(target.place.address)
            has_rank = first.rank is None or first.rank < len(process.ranks)
            if endpoint not in found and has_rank and process.place.api_key == first.place.api_key:
                found.append(endpoint)
            if len(found) > MAX_OTHERS:
                break
        return found

    def _not_allowed(self, subset: Sequence[str] | None) -> list[ServingEngine]:
        """Engines that Envoy does not let the picker choose, or that are known by a name only."""
        return [
            one
            for one in self._parts.fleet
            if not (endpoint := endpoint_of(one.place.address))
            or (subset is not None and endpoint not in subset)
        ]

    # -- the answer --------------------------------------------------------------------------------------------

    def first(self, at_s: float) -> None:
        """The first token has come."""
        if self.has_first or self._choice is None or self._is_over:
            return
        self.has_first, self.meter.first_s = True, at_s
        self._parts.choosing.first_token(self._choice)

    def stored(self, response: str) -> None:
        """The answer names the response that its engine has stored."""
        if self.meter.engine:
            self._parts.reader.answered(self.meter.engine, response)

    def ended(self, marks: Marks) -> None:
        """Envoy tells how the request has ended."""
        parts, meter, choice = self._parts, self.meter, self._choice
        if choice is None or self._is_over:
            return
        outcome = marks.outcome
        served = marks.served or endpoint_of(choice.engine.place.address)
        moved = served != endpoint_of(choice.engine.place.address)
        if moved or outcome in ("connect", "no_answer", "broke_off"):
            parts.suspect(choice.engine)
        if moved:
            other = next((one for one in parts.fleet if endpoint_of(one.place.address) == served), None)
            meter.engine = other.name if other is not None else ""
            parts.choosing.ended(choice, answered=False)
            self._choice = None
        parts.meters.retries[outcome] += max(0, marks.attempts - 1)
        now_s, wall_s = parts.now_s(), time.time()
        if marks.first_s:
            self.first(min(now_s, now_s - wall_s + marks.first_s))
            meter.first_s = meter.first_s or now_s - wall_s + marks.first_s
            meter.last_s = max(meter.first_s, now_s - wall_s + marks.last_s)
        if self._asked.model in choice.engine.models:
            meter.model = self._asked.model
        meter.events, meter.failed_inside, meter.tokens = marks.events, marks.failed, marks.tokens
        if marks.response:
            self.stored(marks.response)
        self.end(outcome)

    def end(self, outcome: str) -> None:
        """Give everything back, and count the request. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        parts, meter, choice = self._parts, self.meter, self._choice
        meter.outcome = outcome
        parts.requests.remove(self)
        if self._entered and self._tenant is not None:
            self._tenant.leave()
        if choice is not None:
            parts.choosing.ended(choice, answered=self.has_first)
            if outcome == OK:
                parts.choosing.answered(choice, meter)
                prompt, reported = choice.wanted.prompt, meter.tokens.get("prompt")
                if self._computed and prompt is not None and reported:
                    parts.tokens.reported(self._asked.model, meter.engine, len(prompt.tokens), reported)
        if self._tenant is not None and self._taken is not None:
            self._tenant.settle(self._taken, self._tokens, meter)
        parts.meters.end(meter)


class Requests:
    """All requests under way. Belongs to the event loop."""

    def __init__(self) -> None:
        self._by_number: dict[int, Request] = {}
        self._by_word: dict[str, Request] = {}
        self.deciding = 0
        self.idle: Callable[[], None] = lambda: None
        """Called when the last has ended."""

    @property
    def in_flight(self) -> int:
        """How many are under way."""
        return len(self._by_number) + self.deciding

    def add(self, request: Request) -> None:
        """A request goes to its engine."""
        self._by_number[request.number] = self._by_word[request.head.word] = request

    def remove(self, request: Request) -> None:
        """A request has ended."""
        self._by_number.pop(request.number, None)
        if self._by_word.get(request.head.word) is request:
            del self._by_word[request.head.word]
        if not self.in_flight:
            self.idle()

    def early(self, number: int, at_s: float, response: str, *, first: bool) -> None:
        """The first token of a request has come (`first`), or the id of the response that it stores."""
        if (request := self._by_number.get(number)) is not None:
            if first:
                request.first(at_s)
            if response:
                request.stored(response)

    def told(self, marks: Marks, now_s: float) -> None:
        """Envoy tells of a request."""
        request = self._by_number.get(marks.number)
        if request is None and marks.number < 0 and marks.outcome == CANCELLED:
            # The client went while the choice was on its way to Envoy.
            request = self._by_word.get(marks.word)
        if request is None:
            return
        request.heard_s = now_s
        if marks.is_end:
            request.ended(marks)
        elif marks.first_s:
            request.first(now_s)

    def lost(self, before_s: float) -> int:
        """Those of which nothing was heard since then have ended unnoticed. Returns how many there were."""
        old = [one for one in self._by_number.values() if one.heard_s < before_s]
        for one in old:
            one.end(CANCELLED)
        return len(old)
