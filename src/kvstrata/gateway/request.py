"""One request, from the choice of its engine to the end of its answer; Envoy transports it.

    decide ─▶ CHOSEN ─▶ first token ─▶ end           reported by the watcher's pipe and Envoy's access log (marks.py)
       └────▶ refused                                Envoy answers the client with the refusal

1. A request's place at the engine, its place at its tenant and its estimated tokens are released exactly once.
2. Envoy may end a request without reporting its number (the client left before the choice reached Envoy, or the choice
   was late).  Such a request is found by Envoy's id, even if its end is reported before it arrives; otherwise because
   Envoy counts no requests, or because the log, which reports running requests repeatedly, is silent (`lost`).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstrata.gateway.choosing import Choice, ChoiceInputs
from kvstrata.gateway.door import IN_FLIGHT, Tenant
from kvstrata.gateway.errors import MAX_BODY_BYTES, TOO_LARGE, Failure
from kvstrata.gateway.fleet import ServingEngine, endpoint_of
from kvstrata.gateway.handover.contracts import Fields
from kvstrata.gateway.marks import CANCELLED, OK, Marks
from kvstrata.gateway.routes import ROUTES, BodyFields, Route, answer_id, route_of
from kvstrata.gateway.routing.price import may_hand_over

if TYPE_CHECKING:
    from kvstrata.gateway.parts import Parts

RANK = "x-data-parallel-rank"
"""Header for vLLM that selects a data-parallel rank; a client's own value is removed."""
MAX_ID_CHARS = 128
MAX_GONE = 4_096
MAX_OTHERS = 2
"""Maximum number of engines for retries that Envoy gets with a choice."""


class Head(NamedTuple):
    """A request's head."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[bytes, bytes]
    word: str
    """The request's id: the client's `X-Request-ID`, or a new one."""
    stream: str = ""
    """Id of the request in the gateway's own Envoy (configuration.STREAM_ID); empty: another Envoy's."""


class Chosen(NamedTuple):
    """The endpoints of a request, and the changes that Envoy makes to it."""

    number: int
    endpoints: Sequence[str]
    """`ip:port` of the chosen engine, then of the engines for retries."""
    headers: Mapping[str, str]
    """Headers to set."""
    removed: Sequence[str]
    """Headers to remove."""
    fragment: bytes
    """JSON to insert after the body's first brace."""


class Request:
    """The state of one request, changed by `Requests` and `Admission`."""

    def __init__(self, head: Head, arrived_s: float) -> None:
        self.head = head
        self.arrived_s = self.heard_s = arrived_s
        """Time of its arrival, and of Envoy's last report of it."""
        self.left = False
        """Whether Envoy ended it before the choice of its engine."""
        self.body_bytes = 0
        self.tenant: Tenant | None = None
        """The tenant that has sent it; None: clients need no key."""
        self.entered = False
        """Whether it counts among its tenant's requests under way."""
        self.taken: float | None = None
        """Estimated tokens charged to its tenant; None: none."""
        self.slo = ""
        self.priority = 0
        self.route: Route | None = None
        """None: not admitted by its head."""
        self.asked = BodyFields()
        self.wanted: ChoiceInputs | None = None
        self.computed = False
        """Whether the gateway computed the prompt's token ids or had an engine render them."""
        self.without: frozenset[ServingEngine] = frozenset()
        """Engines that may not serve it."""
        self.leg: asyncio.Task[Fields | None] | None = None
        """The task that has another engine compute its prompt; None: there is no split."""
        # While it waits (admission.py).
        self.order_s = 0.0
        """Its place in the queue's order; must not change while it is in the queue."""
        self.late = False
        """Whether it is known that it cannot meet its deadline."""
        self.timer: Any = None
        """Timer of its deadline; None: it has not waited."""
        self.found: Choice | Failure | None = None
        """The admission's decision; None: it waits."""
        self.decided: Callable[[], None] = lambda: None
        """Called when it is admitted or refused after it has waited."""
        # Its answer.
        self.choice: Choice | None = None
        """The choice whose reservation it holds; None: it holds none."""
        self.model = self.engine = ""
        """Labels for the metrics: a model that its engine serves, and the engine that has answered."""
        self.outcome = ""
        """`ok`, `client_error`, `cancelled` …, or the code of a Failure; empty: it has not ended."""
        self.has_first = False
        self.first_s = self.last_s = 0.0
        """Times of the first and last content; 0: none yet, or last not yet known."""
        self.events = 0
        """Number of a stream's events with content."""
        self.is_hinted = False
        """Whether the client itself announces its next request (`kvstrata.next`)."""
        self.failed_inside = False
        """Whether the answer is an error although its status is 200."""
        self.tokens: Mapping[str, int] = {}
        """Token counts in the answer's `usage`, by kind: `prompt`, `cached`, `completion`."""

    @property
    def sender(self) -> str:
        """The tenant's name; empty: none."""
        return self.tenant.name if self.tenant is not None else ""

    @property
    def number(self) -> int:
        """Its number; -1: its body has not been parsed."""
        return self.wanted.number if self.wanted is not None else -1

    @property
    def charged_tokens(self) -> int:
        """Tokens charged before the answer's usage is known: the prompt's, or a quarter of the body's bytes if more."""
        return max(self.wanted.tokens if self.wanted is not None else 1, self.body_bytes // 4)


class Requests:
    """All requests under way. Belongs to the event loop."""

    def __init__(self) -> None:
        self.parts: Parts
        """Set before the first request."""
        self._by_number: dict[int, Request] = {}
        self._by_stream: dict[str, Request] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Envoy's ids of the newest ended requests that were unknown: they may arrive after the report of their end."""
        self._deciding = 0
        self.idle: Callable[[], None] = lambda: None
        """Called when the last request under way has ended."""
        self.newest_arrival_s = 0.0
        """Time of the newest request's arrival."""

    @property
    def in_flight(self) -> int:
        """Number of requests under way."""
        return len(self._by_number) + self._deciding

    def on_body_begins(self, stream: str) -> None:
        """Stop counting a long body if Envoy has already reported the end of its request."""
        if stream in self._gone:
            self.parts.door.arriving.end(stream)

    def arrived(self, head: Head) -> Request:
        """Register a request that has arrived; the caller must call `decide` or `drop`."""
        self._deciding += 1
        self.newest_arrival_s = self.parts.now_s()
        request = Request(head, self.newest_arrival_s)
        if head.stream:
            self._by_stream[head.stream] = request
            request.left = head.stream in self._gone
            self.parts.door.arriving.end(head.stream)
        return request

    async def decide(
        self, request: Request, body: bytes, *, cut: bool = False, subset: Sequence[str] | None = None
    ) -> Chosen | Failure:
        """Choose a request's engine, or refuse it. `cut`: the body continues. `subset`: the allowed endpoints.

        After a refusal or a cancellation the request has ended.
        """
        decided: Chosen | Failure | None = None
        try:
            decided = await self._decided(request, body, cut, subset)
        finally:
            if isinstance(decided, Chosen) and not request.left:
                self._deciding -= 1
                self._by_number[request.number] = request
            else:
                self.drop(request, decided.code if isinstance(decided, Failure) else CANCELLED)
        return decided

    def drop(self, request: Request, outcome: str) -> None:
        """End a request that is not sent to an engine."""
        self._deciding -= 1
        self.end(request, outcome)

    async def admit(self, request: Request) -> Failure | None:
        """Check a request's head, and count the request at its tenant; None: admitted, else the refusal."""
        parts, head = self.parts, request.head
        tenant = parts.door.tenant_of(head.headers)
        if isinstance(tenant, Failure):
            return tenant
        request.tenant = tenant
        request.slo = parts.reader.slo_of(head.headers, tenant, parts.meters.slo)
        request.priority = parts.reader.priority_of(head.headers, tenant)
        route = route_of(head.method, head.path)
        if isinstance(route, Failure):
            return route
        under_way, most = self.in_flight, parts.settings.max_in_flight
        if under_way > most:
            says = f"{under_way - 1} requests are under way, of at most {most}; try again later"
            return Failure(503, "overloaded", says, retry_after_s=1)
        if tenant is not None:
            failure = tenant.enter(request.arrived_s)
            if failure is not None and failure.code == IN_FLIGHT:
                await tenant.leaving()
                failure = tenant.enter(request.arrived_s)
            if failure is not None:
                return failure
            request.entered = True
        request.route = route
        length = head.headers.get(b"content-length", b"")
        return TOO_LARGE if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES else None

    async def _decided(
        self, request: Request, body: bytes, cut: bool, subset: Sequence[str] | None
    ) -> Chosen | Failure:
        parts, path = self.parts, request.head.path
        if request.route is None and (failure := await self.admit(request)) is not None:
            return failure
        route, tenant = request.route, request.tenant
        assert route is not None
        request.body_bytes, request.is_hinted = len(body), b'"kvstrata.next"' in body
        if request.body_bytes > MAX_BODY_BYTES:
            return TOO_LARGE
        wanted = parts.reader.read(request, body, parts.meters.slo.get(request.slo), cut=cut)
        if isinstance(wanted, Failure):
            return wanted
        model, ids = request.asked.model, None
        if parts.settings.predicts and path in ROUTES and not cut and wanted.prompt is None:
            known = await parts.tokens.of(path, body, model, request.sender)
            request.computed, ids = known.ids is not None, known.ids if known.passes else None
            wanted = parts.reader.with_ids(request.asked, wanted, known.ids)
        request.wanted = await parts.controllers.with_copies(wanted)
        if subset is not None:  # Envoy would not use an endpoint outside of it
            request.without = frozenset(
                one for one in parts.fleet if endpoint_of(one.place.address) not in subset
            )
        choice = await parts.admission.admitted(request)
        if isinstance(choice, Failure):
            return choice
        request.choice, request.engine = choice, choice.engine.name
        if tenant is not None and route.computes:
            taken = tenant.take(request.charged_tokens, request.arrived_s)
            if isinstance(taken, Failure):
                return taken
            request.taken = taken
        fields = _fields(request)
        told: Fields = {}
        if choice.prefill is not None:
            told = await parts.legs.begin(request, choice, body, fields)
        if ids is not None and parts.tokens.takes_ids(choice.engine, model):
            told["prompt_token_ids"] = list(ids)
        if told:
            fields["kv_transfer_params"] = told | fields.get("kv_transfer_params", {})
        fragment = msgspec.json.encode(fields)[1:-1] + b"," if fields else b""
        return self._chosen(request, choice, fragment)

    def _chosen(self, request: Request, choice: Choice, fragment: bytes) -> Chosen:
        key = choice.engine.place.api_key
        drops = bool(key) or self.parts.door.needs_keys
        headers = {"x-request-id": request.head.word}
        if key:
            headers["authorization"] = f"Bearer {key}"
        removed = (["x-api-key"] if key else ["authorization", "x-api-key"]) if drops else []
        if choice.engine.rank is not None:
            headers[RANK] = str(choice.engine.rank)
        else:
            removed.append(RANK)
        if request.asked.repeatable:
            headers["x-envoy-retry-on"] = "reset"
        found = list(itertools.islice(self._endpoints(request, choice), MAX_OTHERS + 1))
        return Chosen(request.number, found, headers, removed, fragment)

    def _endpoints(self, request: Request, choice: Choice) -> Iterator[str]:
        """The endpoint of the chosen engine, then of the next best engines that accept the same headers."""
        first, fleet = choice.engine, self.parts.fleet
        helper = choice.prefill.engine.load if choice.prefill is not None else None
        yielded = {endpoint_of(first.place.address)}
        yield from yielded
        best = choice.decision.alternatives if choice.decision is not None else []
        next_best = filter(None, (fleet.target(one.engine) for one in best))
        targets = fleet.targets(request.asked.model, request.without).targets
        for target in itertools.chain(next_best, _least_loaded(targets)):
            process, endpoint = target.process, endpoint_of(target.place.address)
            if helper is not None and not may_hand_over(choice.wanted.contract, helper, target.load):
                continue  # this engine could not receive the helper's KV, and would wait in vain
            has_rank = first.rank is None or first.rank < len(process.ranks)
            if endpoint not in yielded and has_rank and process.place.api_key == first.place.api_key:
                yielded.add(endpoint)
                yield endpoint

    # -- the answer --------------------------------------------------------------------------------------------

    def on_watcher_report(self, number: int, at_s: float, response: str, *, first: bool) -> None:
        """Handle a report of the watcher's pipe: the first token (`first`), or the stored response's id, or both."""
        if (request := self._by_number.get(number)) is not None:
            if first:
                self._first(request, at_s)
            if response:
                self.parts.reader.answered(request, response)

    def on_log_line(self, marks: Marks, now_s: float) -> None:
        """Handle a line of the access log."""
        request = self._by_number.get(marks.number)
        if request is None:
            if marks.number < 0 and marks.is_end and marks.stream:
                self._unread(marks.stream)
            return
        request.heard_s = now_s
        if marks.is_end:
            self._ended(request, marks)
        elif marks.first_s:
            self._first(request, now_s)

    def _unread(self, stream: str) -> None:
        """End a request that Envoy has ended without a choice: its client left, or the choice was late."""
        request = self._by_stream.get(stream)
        self.parts.door.arriving.end(stream)
        if request is None:
            self._gone[stream] = None
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)
        elif request.number in self._by_number:
            self.end(request, CANCELLED)
        else:
            request.left = True

    def end_all_lost(self, before_s: float) -> int:
        """Take note that the gateway's own Envoy has no requests; returns the number of `lost` ones."""
        self.parts.door.arriving.clear()
        return self.lost(before_s)

    def lost(self, before_s: float) -> int:
        """End the requests that Envoy has last reported before `before_s`; returns their number."""
        old = [one for one in self._by_number.values() if one.heard_s < before_s]
        for one in old:
            self.end(one, CANCELLED)
        return len(old)

    def _first(self, request: Request, at_s: float) -> None:
        """Record the first token, once."""
        if not request.has_first and request.choice is not None:
            request.has_first, request.first_s = True, at_s
            request.choice.engine.process.heard_s = self.parts.now_s()
            self.parts.choosing.first_token(request.choice)

    def _ended(self, request: Request, marks: Marks) -> None:
        """Record a request's end as Envoy has reported it."""
        parts, choice, outcome = self.parts, request.choice, marks.outcome
        if choice is None:
            return
        own = endpoint_of(choice.engine.place.address)
        moved = bool(marks.served) and marks.served != own
        if moved or outcome in ("connect", "no_answer", "broke_off"):
            parts.suspect(choice.engine)
        if moved:
            other = (one.name for one in parts.fleet if endpoint_of(one.place.address) == marks.served)
            request.engine = next(other, "")
            parts.choosing.ended(choice, answered=False)
            request.choice = None
        parts.meters.retries[outcome] += max(0, marks.attempts - 1)
        first_s, last_s = marks.first_s, marks.last_s
        if outcome == OK and not (first_s or marks.failed):  # no content, but the prompt was computed
            first_s = last_s = time.time()
        if first_s:
            now_s = parts.now_s()
            walls_s = now_s - time.time()
            self._first(request, min(now_s, walls_s + first_s))
            request.first_s = request.first_s or min(now_s, walls_s + first_s)
            request.last_s = max(request.first_s, min(now_s, walls_s + last_s))
        if request.asked.model in choice.engine.models:
            request.model = request.asked.model
        request.events, request.failed_inside, request.tokens = marks.events, marks.failed, marks.tokens
        if request.choice is not None and outcome == OK and not request.is_hinted:
            word = answer_id(request.head.path, request.head.word, marks.response)
            parts.controllers.ended(choice.engine, word, marks.reason or ("stop" if marks.response else ""))
        if marks.response:
            parts.reader.answered(request, marks.response)
        self.end(request, outcome)

    def end(self, request: Request, outcome: str) -> None:
        """Release what the request occupies, and count it in the metrics. Idempotent."""
        if request.outcome:
            return
        parts, choice, tenant = self.parts, request.choice, request.tenant
        request.outcome = outcome
        if request.leg is not None:
            request.leg.cancel()
        self._by_number.pop(request.number, None)
        if self._by_stream.get(request.head.stream) is request:
            del self._by_stream[request.head.stream]
        if tenant is not None and request.entered:
            tenant.leave()
        if choice is not None:
            parts.choosing.ended(choice, answered=request.has_first)
            if outcome == OK:
                parts.choosing.answered(choice, request)
                prompt, reported = choice.wanted.prompt, request.tokens.get("prompt")
                if request.computed and prompt is not None and reported:
                    parts.tokens.reported(request.asked.model, request.engine, len(prompt.tokens), reported)
        if tenant is not None:
            tenant.settle(request)
        parts.meters.end(request)
        if not self.in_flight:
            self.idle()


def _least_loaded(targets: Iterable[ServingEngine]) -> Iterator[ServingEngine]:
    """The engines with the fewest requests first. Sorted on first use only: most decisions name the next best."""
    yield from sorted(targets, key=lambda one: one.load.requests)


def _fields(request: Request) -> Fields:
    """The fields that the gateway adds for the request's tenant; a body that has them itself was refused before."""
    tenant = request.tenant.settings.kv_tenant if request.tenant is not None else ""
    if not tenant or request.route is None or not request.route.salted:
        return {}
    return {"kv_transfer_params": {"kvstrata.tenant": tenant}, "cache_salt": tenant}


def request_id(given: bytes) -> str:
    """The client's id of its request; a new one if that is missing, too long, or not printable ASCII."""
    text = given.decode("latin-1")
    fits = 0 < len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable()
    return text if fits else secrets.token_hex(16)
