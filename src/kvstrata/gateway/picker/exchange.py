"""One request that Envoy asks about, from its headers to the end of its answer.

    HEADERS ──▶ BODY ──▶ CHOSEN ──▶ ANSWER ──▶ DONE        each message of Envoy's stream moves on, or stays
       │  │       │  │   ▲  └──────────────────▲           an answer's head may end it
       │  └───────┴──┴─ READ                               what is known of its prompt is asked for (`told`)
       └──────────┴──▶ DONE                                refused, or Envoy itself answered

Envoy carries the request; the picker reads its body, names an engine and others in case it cannot be reached, and
watches the answer pass.

1. Nothing of a request goes on before its engine is chosen; the bytes then go on as they came.
2. Whatever ends the stream, `end` gives back what the request held: its place at the engine, its tenant's, its bytes.
3. An answer's last part goes on only after its request is counted as ended, so a client's next request finds room.
4. A message that the state does not allow ends the stream; the picker never guesses what Envoy meant.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from typing import NamedTuple

from kvstrata.gateway import headers as passing
from kvstrata.gateway.choosing import Choice, Wanted
from kvstrata.gateway.door import Tenant
from kvstrata.gateway.errors import MAX_BODY_BYTES, TOO_LARGE, Failure
from kvstrata.gateway.fleet import ServingEngine, endpoint_of
from kvstrata.gateway.forward import ELSEWHERE
from kvstrata.gateway.metering import CANCELLED, CLIENT_ERROR, OK, Meter
from kvstrata.gateway.parts import Parts
from kvstrata.gateway.picker import messages
from kvstrata.gateway.picker.messages import Message, Reply
from kvstrata.gateway.routes import ROUTES, Asked, Route, route_of

RANK = passing.RANK.decode()
MAX_HELD_BYTES = 1 << 30
"""Bytes of all bodies that wait for their choice."""
MAX_OTHERS = 2
"""Further engines that are named for a request."""


class OutOfTurn(Exception):
    """Envoy sent a message that the state of the exchange does not allow."""


class State(enum.Enum):
    """See the module."""

    HEADERS = "headers"
    BODY = "body"
    READ = "read"
    CHOSEN = "chosen"
    ANSWER = "answer"
    DONE = "done"


class Question(NamedTuple):
    """What a request's token ids are asked by: see Tokens.of."""

    path: str
    body: bytes
    model: str
    tenant: str


class Held:
    """What all exchanges hold together."""

    def __init__(self) -> None:
        self.exchanges = 0
        self.body_bytes = 0


class Exchange:
    """See the module. Belongs to the event loop; `end` must be called."""

    def __init__(self, parts: Parts, held: Held) -> None:
        self.state = State.HEADERS
        self._parts = parts
        self._held = held
        self._meter = Meter(parts.now_s(), "")
        self._tenant: Tenant | None = None
        self._entered = False
        self._headers: dict[bytes, bytes] = {}
        self._path = ""
        self._word = ""
        self._route = Route()
        self._body: list[bytes] = []
        self._subset: list[str] | None = None
        self._duplex = True
        """Whether Envoy waits for the answer's bytes from here."""
        self._asked = Asked()
        self._wanted: Wanted
        self._whole = b""
        """The body, from when it is read until the choice."""
        self._trails = False
        """Whether trailers follow it."""
        self._computed = False
        """Whether the prompt's ids were computed here or asked of an engine."""
        self.question: Question | None = None
        """Asks for the token ids of a prompt of text; `has_ids` takes the answer."""
        self._choice: Choice | None = None
        self._taken: float | None = None
        """Tokens of its tenant; None: it takes none."""
        self._tokens = 0
        """Of the prompt."""
        self._status = 0
        self._stream = False
        self._counted = False
        held.exchanges += 1

    def take(self, message: Message) -> list[Reply]:
        """What to answer to Envoy's next message. Raises OutOfTurn."""
        kind = message.WhichOneof("request")
        if self.state is State.DONE and self._choice is None:
            return []  # refused: what was already on its way
        move = _MOVES.get((self.state, kind))
        if move is None:
            raise OutOfTurn(
                f"{kind or 'a message without content'} while the exchange is at {self.state.value}"
            )
        return move(self, message)

    def late(self) -> list[Reply]:
        """The body has not come in time."""
        waited_s = self._parts.settings.http.stalled_s
        return self._refuse(Failure(408, "late", f"body: did not arrive within {waited_s:g} s"))

    @property
    def arriving(self) -> bool:
        """Whether the request has not come whole."""
        return self.state in (State.HEADERS, State.BODY)

    def end(self, outcome: str = "") -> None:
        """Give everything back, and count the request. Idempotent."""
        if self._counted:
            return
        self._counted = True
        self._held.exchanges -= 1
        self._drop_body()
        if self._entered and self._tenant is not None:
            self._tenant.leave()
        choice, meter = self._choice, self._meter
        if choice is not None:
            self._parts.choosing.ended(choice, answered=bool(meter.first_s))
        meter.outcome = meter.outcome or outcome or CANCELLED
        if choice is not None and meter.outcome == OK:
            self._parts.choosing.answered(choice, meter)
            self._compare(choice)
        if self._tenant is not None and self._taken is not None:
            self._tenant.settle(self._taken, self._tokens, meter)
        self._parts.meters.end(meter)

    def _compare(self, choice: Choice) -> None:
        """Compare the ids of a prompt with their number in the answer's `usage`."""
        prompt, reported = choice.wanted.prompt, self._meter.tokens().get("prompt")
        if self._computed and prompt is not None and reported:
            self._parts.tokens.reported(self._asked.model, self._meter.engine, len(prompt.tokens), reported)

    # -- the request -------------------------------------------------------------------------------------------

    def _head(self, message: Message) -> list[Reply]:
        head = message.request_headers
        self._headers = messages.headers_of(head)
        self._path = self._headers.get(b":path", b"").decode("latin-1").partition("?")[0]
        self._word = passing.request_id(self._headers.get(b"x-request-id", b""))
        self._subset = messages.metadata(message, messages.SUBSET_NAMESPACE, messages.SUBSET)
        failure = self._admit(message)
        if failure is not None:
            return self._refuse(failure)
        if head.end_of_stream:
            return self._read()
        self.state = State.BODY
        return []

    def _admit(self, message: Message) -> Failure | None:
        """The reason why the request is refused by its headers alone; None: there is none."""
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._duplex = modes.response_body_mode == messages.FULL_DUPLEX
            if modes.request_body_mode != messages.FULL_DUPLEX and not message.request_headers.end_of_stream:
                says = "ext_proc: set processing_mode.request_body_mode of Envoy to FULL_DUPLEX_STREAMED"
                return Failure(500, "wrong_mode", says)
        parts, settings, meter = self._parts, self._parts.settings, self._meter
        tenant = parts.door.tenant_of(self._headers)
        if isinstance(tenant, Failure):
            return tenant
        self._tenant, meter.tenant = tenant, tenant.name if tenant is not None else ""
        meter.slo = parts.reader.slo_of(self._headers, tenant, parts.meters.slo)
        method = self._headers.get(b":method", b"").decode("latin-1")
        route = Route() if method == "GET" and _is_any(self._path) else route_of(method, self._path)
        if isinstance(route, Failure):
            return route
        self._route = route
        if self._held.exchanges > settings.max_in_flight:
            says = f"{self._held.exchanges - 1} requests are under way, of at most {settings.max_in_flight}"
            return Failure(503, "overloaded", says, retry_after_s=1)
        if tenant is not None:
            failure = tenant.enter(meter.arrived_s)
            self._entered = failure is None
            if failure is not None:
                return failure
        length = self._headers.get(b"content-length", b"")
        return TOO_LARGE if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES else None

    def _part(self, message: Message) -> list[Reply]:
        part = message.request_body
        size = len(part.body)
        self._meter.body_bytes += size
        self._held.body_bytes += size
        if self._meter.body_bytes > MAX_BODY_BYTES:
            return self._refuse(TOO_LARGE)
        if self._held.body_bytes > MAX_HELD_BYTES:
            says = f"the bodies of all requests under way take {self._held.body_bytes} bytes"
            return self._refuse(Failure(503, "overloaded", says, retry_after_s=1))
        self._body.append(part.body)
        return self._read() if part.end_of_stream else []

    def _trailers(self, _: Message) -> list[Reply]:
        self._trails = True
        return self._read()

    def _read(self) -> list[Reply]:
        """Read the whole request, and choose; or ask for the prompt's token ids first."""
        self._whole = b"".join(self._body)
        read_from = b"{}" if _is_any(self._path) else self._whole
        read = self._parts.reader.read(
            self._path, self._route, read_from, self._headers, self._word, self._meter.tenant
        )
        if isinstance(read, Failure):
            return self._refuse(read)
        self._asked, self._wanted = read
        if not self._parts.settings.predicts or self._path not in ROUTES:
            return self._choose()
        self.state = State.READ
        if self._wanted.prompt is None:
            self.question = Question(self._path, self._whole, self._asked.model, self._meter.tenant)
        return []

    def has_ids(self, ids: array[int] | None) -> None:
        """The answer to `question`; None: the ids are not known."""
        self.question = None
        self._computed = ids is not None
        self._wanted = self._parts.reader.with_ids(self._asked, self._wanted, ids)

    @property
    def wanted(self) -> Wanted | None:
        """What the choice goes by, while the exchange waits for `told`."""
        return self._wanted if self.state is State.READ else None

    def told(self, wanted: Wanted) -> list[Reply]:
        """Choose by `wanted`, which may tell more of the prompt. Must come before the next message is taken."""
        self._wanted = wanted
        return self._choose()

    def _choose(self) -> list[Reply]:
        """Name engines, and let the body go on."""
        body, wanted, self._whole, empty = self._whole, self._wanted, b"", not self._body
        self._drop_body()
        choice = self._parts.choosing.choose(wanted, self._not_allowed())
        if choice is None:
            return self._refuse(self._parts.choosing.none_serves(wanted.model))
        hopeless = self._parts.choosing.hopeless(choice, self._meter)
        if hopeless is not None:
            return self._refuse(hopeless)
        if self._tenant is not None and self._asked.text:
            taken = self._tenant.take(wanted.tokens, self._meter.arrived_s)
            if isinstance(taken, Failure):
                return self._refuse(taken)
            self._taken, self._tokens = taken, wanted.tokens
        self._choice, self._meter.engine = choice, choice.engine.name
        self._parts.choosing.dispatched(choice)
        self.state = State.CHOSEN
        key = choice.engine.place.api_key
        drops = bool(key) or self._parts.door.knows_tenants
        headers = {"x-request-id": self._word}
        if key:
            headers["authorization"] = f"Bearer {key}"
        removed = (["x-api-key"] if key else ["authorization", "x-api-key"]) if drops else []
        if choice.engine.rank is not None:
            headers[RANK] = str(choice.engine.rank)
        else:
            removed.append(RANK)
        replies = [messages.chosen(self._endpoints(choice), headers, removed)]
        if not empty:
            replies += messages.parts(body, ends=not self._trails)
        return [*replies, messages.request_trailers()] if self._trails else replies

    def _endpoints(self, choice: Choice) -> list[str]:
        """The chosen engine's place, and those of the next best, which must understand the same headers."""
        first = choice.engine
        found = [endpoint_of(first.place.address)]
        targets = self._parts.fleet.targets(self._asked.model, self._not_allowed())
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

    def _not_allowed(self) -> list[ServingEngine]:
        """Engines that Envoy does not let the picker choose, or that are known by a name only."""
        subset = self._subset
        return [
            one
            for one in self._parts.fleet
            if not (endpoint := endpoint_of(one.place.address))
            or (subset is not None and endpoint not in subset)
        ]

    def _refuse(self, failure: Failure) -> list[Reply]:
        self._meter.outcome = failure.code
        self.state = State.DONE
        self.end()
        return [messages.refused(failure, self._path, self._word)]

    def _drop_body(self) -> None:
        self._held.body_bytes -= sum(map(len, self._body))
        self._body.clear()

    # -- the answer --------------------------------------------------------------------------------------------

    def _answer_head(self, message: Message) -> list[Reply]:
        head = message.response_headers
        headers = messages.headers_of(head)
        status = headers.get(b":status", b"")
        self._status = int(status) if status.isdigit() else 0
        self._stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._moved(messages.served(message))
        choice = self._choice
        if choice is not None and self._status in ELSEWHERE:
            self._parts.forwarder.suspect(choice.engine)
        self.state = State.ANSWER
        if head.end_of_stream:
            self._ends()
        return [messages.response_headers()]

    def _moved(self, served: str) -> None:
        """Envoy tells that another engine than the chosen one has answered: the request is counted there."""
        choice = self._choice
        if not served or choice is None or endpoint_of(choice.engine.place.address) == served:
            return
        for process in self._parts.fleet:
            if endpoint_of(process.place.address) == served:
                self._parts.forwarder.suspect(choice.engine)
                # The header that names a rank went along.
                rank = min(choice.engine.rank or 0, len(process.targets) - 1)
                engine = process.targets[rank]
                choosing = self._parts.choosing
                choosing.ended(choice, answered=False)
                self._choice = choice._replace(
                    engine=engine,
                    cached_tokens=0,
                    cached_exact=0,
                    loadable=0,
                    decision=None,
                    kept=None,
                )
                self._meter.engine = engine.name
                choosing.dispatched(self._choice)
                self._choice.turn.spoil()  # It was sent there before.
                return

    def _answer_part(self, message: Message) -> list[Reply]:
        part = message.response_body
        now_s, meter = self._parts.now_s(), self._meter
        if part.body and not meter.first_s and self._choice is not None and self._status not in ELSEWHERE:
            self._first(self._choice, now_s, part.body)
        elif part.body and meter.first_s:
            meter.part(now_s, part.body)
        if part.end_of_stream:
            self._ends()
        return [messages.response_body(part.body, ends=part.end_of_stream, duplex=self._duplex)]

    def _first(self, choice: Choice, now_s: float, part: bytes) -> None:
        meter, model = self._meter, self._asked.model
        meter.model = model if model in choice.engine.models else ""
        meter.begins(now_s, part, stream=self._stream, itl=self._parts.meters.of(meter).itl)
        self._parts.choosing.first_token(choice)
        self._parts.reader.answered(self._path, choice.engine.name, part)

    def _answer_trailers(self, _: Message) -> list[Reply]:
        self._ends()
        return [messages.response_trailers()]

    def _ends(self) -> None:
        """The answer is whole."""
        self.state = State.DONE
        if self._choice is None:
            self._meter.outcome = "not_chosen"
        elif self._status in ELSEWHERE:
            self._meter.outcome = "engine_busy"
        else:
            words = {2: OK, 3: OK, 4: CLIENT_ERROR}
            self._meter.outcome = words.get(self._status // 100, "engine_error")
        self.end()


_MOVES: dict[tuple[State, str | None], Callable[[Exchange, Message], list[Reply]]] = {
    (State.HEADERS, "request_headers"): Exchange._head,
    (State.BODY, "request_body"): Exchange._part,
    (State.BODY, "request_trailers"): Exchange._trailers,
    # Envoy answers by itself, for example because the client's body came too slowly.
    (State.BODY, "response_headers"): Exchange._answer_head,
    (State.CHOSEN, "response_headers"): Exchange._answer_head,
    (State.ANSWER, "response_body"): Exchange._answer_part,
    (State.ANSWER, "response_trailers"): Exchange._answer_trailers,
}


def _is_any(path: str) -> bool:
    """Whether a GET of this path may go to any engine."""
    return path in ("/v1/models", "/version", "/health", "/ping") or path.startswith("/v1/models/")
