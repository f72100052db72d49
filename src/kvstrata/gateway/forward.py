"""One request on its way: choose an engine, send, pass the answer on.

    choose ─▶ send ─▶ first bytes of the body ─▶ pass on, part by part ─▶ end
      ▲         │ failed, or answered 429, 502, 503, 504
      └─────────┘ another engine, if the request may be repeated

Invariants
1. The client gets nothing before the first bytes of an answer's body are here, so until then another engine can answer.
   After that nothing is repeated: an answer that breaks off ends with an error event, if it is a stream of events, and
   with a cut connection.
2. When the client goes, the connection to the engine is closed at once, which makes the engine abort the request.
3. Only a few parts of an answer wait here: while the client does not read, nothing is read from the engine.
   Answers in chunked coding are passed on by a thread (splicing.py), others part by part.
4. Whatever happens, the engine's and the tenant's counts of requests under way go back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway import headers as passing
from kvstrata.gateway.admission import Admission, Ask, Standing
from kvstrata.gateway.choosing import Choice, Choosing, Wanted
from kvstrata.gateway.door import Headers, Tenant
from kvstrata.gateway.engine_link import Answer, LinkBroken, Links, Unreachable, request_bytes
from kvstrata.gateway.errors import Failure, error_body, error_event
from kvstrata.gateway.fleet import Fleet, ServingEngine
from kvstrata.gateway.metering import BROKE_OFF, CANCELLED, CLIENT_ERROR, OK, Meter, Meters
from kvstrata.gateway.reading import Reader
from kvstrata.gateway.routes import Asked, Route
from kvstrata.gateway.splicing import ENGINES_FAULT, SILENT, Splices
from kvstrata.observability.logging import EventLog

if TYPE_CHECKING:
    from starlette.types import Scope, Send

    from kvstrata.gateway.connections import GatewayConnection

ELSEWHERE = frozenset((429, 502, 503, 504))
"""Statuses of an engine that has not begun the request: another one may answer."""
WITHOUT_BODY = frozenset((204, 304))
"""Statuses of answers whose length is not that of a body that follows."""
ATTEMPTS = 3
"""Engines that a request is sent to at most, the first included."""
MAX_ERROR_BYTES = 64 << 10
RETRY_SHARE = 0.2
"""Retries that each request adds to the budget, which holds AT_ONCE at most: retries cannot add to an overload."""
AT_ONCE = 10.0
"""Retries that a gateway may make at once however few requests it has had."""


@dataclass(slots=True)
class Call:
    """One request, from its head to the end of its answer."""

    scope: Scope
    path: str
    headers: Headers
    """The client's, by name."""
    route: Route
    word: str
    """Its id."""
    meter: Meter
    tenant: Tenant | None
    standing: Standing = field(init=False)
    asked: Asked = field(init=False)
    wanted: Wanted = field(init=False)
    """These three are set once the body was read."""
    body: bytes = b""
    computed: bool = False
    """Whether the prompt's ids were computed here, or asked of an engine; otherwise the client gave them, or nobody."""
    passed: bytes = b""
    """The body with them beside the text, for engines that take them; empty: not wanted."""

    @property
    def target(self) -> str:
        """Path and query as the client sent them."""
        query = self.scope["query_string"].decode("latin-1")
        return str(self.scope["raw_path"].decode("ascii")) + (f"?{query}" if query else "")


class Refused(NamedTuple):
    """An engine's answer, or the lack of one, that another engine may mend."""

    failure: Failure
    begun: bool
    """Whether the engine may have begun the request."""
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    """With a status, the engine's own answer, which is passed on if no other engine answers."""


class BrokenOff(Exception):
    """An answer that broke off after its first part was passed on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ClientGone(Exception):
    """The client went, or was cut, while its answer was passed on."""


class RetryBudget:
    """What retries may add to the load of engines that already fail.

    Each request adds RETRY_SHARE of a retry, up to AT_ONCE; each retry takes one.
    """

    def __init__(self) -> None:
        self._left = AT_ONCE

    @property
    def left(self) -> float:
        """Retries that may be made now."""
        return self._left

    def request(self) -> None:
        """A request has come."""
        self._left = min(AT_ONCE, self._left + RETRY_SHARE)

    def take(self) -> bool:
        """Take one retry; False if none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Forwarder:
    """Sends requests to engines. Belongs to the event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        meters: Meters,
        links: Links,
        splices: Splices,
        choosing: Choosing,
        admission: Admission,
        reader: Reader,
        now_s: Callable[[], float],
        *,
        drop_keys: Callable[[], bool],
    ) -> None:
        """`drop_keys`: whether the client's key is for the gateway, so that no engine may see it."""
        self.settings = settings
        self._fleet = fleet
        self._meters = meters
        self._links = links
        self._splices = splices
        self.choosing = choosing
        self.admission = admission
        self._reader = reader
        self._now_s = now_s
        self._drop_keys = drop_keys
        self.budget = RetryBudget()
        self.suspect: Callable[[ServingEngine], None] = lambda _: None
        """Called with an engine whose connection failed, so that it is probed now."""
        self.takes_ids: Callable[[ServingEngine, str], bool] = lambda engine, model: False
        """Whether an engine takes the ids of a model's chats."""
        self._log = EventLog("gateway")

    async def run(self, call: Call, send: Send) -> None:
        """Answer a request, until the client goes."""
        client: GatewayConnection = call.scope["state"]["connection"]
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        try:
            with client.leaving(leave):
                await self._answer(call, send)
        except ClientGone:
            call.meter.outcome = CANCELLED
            await client.cut()
        except asyncio.CancelledError:
            call.meter.outcome = CANCELLED
            if not gone or task.uncancel():
                raise  # the process stops

    async def _answer(self, call: Call, send: Send) -> None:
        self.budget.request()
        tried: list[ServingEngine] = []
        last: Refused | None = None
        while True:
            choice = await self._engine(call, tried, last)
            if isinstance(choice, Refused):
                await self._refuse(call, send, choice)
                return
            tried.append(choice.engine)
            call.meter.engine = choice.engine.name
            try:
                last = await self._attempt(call, choice, send)
            finally:
                self.choosing.ended(choice, answered=bool(call.meter.first_s))
            if last is None:
                self.choosing.answered(choice, call.meter)
                return
            repeatable = not last.begun or call.asked.repeatable
            if not repeatable or len(tried) >= ATTEMPTS:
                await self._refuse(call, send, last)
                return

    async def _engine(self, call: Call, tried: list[ServingEngine], last: Refused | None) -> Choice | Refused:
        """The engine to send the request to, which is reserved for it; `last`: why the one before did not answer."""
        if last is None:
            found = await self.admission.admitted(Ask(call.wanted, call.meter, call.standing))
            return Refused(found, begun=False) if isinstance(found, Failure) else found
        choice = self.choosing.choose(call.wanted, tried)
        if choice is None or not self.budget.take():
            return last
        self._meters.retries[last.failure.code] += 1
        self.choosing.dispatched(choice)
        return choice

    async def _attempt(self, call: Call, choice: Choice, send: Send) -> Refused | None:
        """Send the request to an engine and pass its answer on; None once an answer was passed on."""
        engine = choice.engine
        answer: Answer | None = None
        begun_s = self._now_s()
        try:
            try:
                async with _FirstByte(engine, self.settings.timeouts.first_byte_s):
                    answer = await self._send(call, engine)
                    await answer.head()
                    if answer.status in ELSEWHERE:
                        return await self._elsewhere(engine, answer)
                    first = await answer.begun()
            except Unreachable as error:
                self._failed(engine, f"no connection: {error}")
                return Refused(
                    Failure(502, "connect", f"engine {engine.name} cannot be reached"), begun=False
                )
            except TimeoutError:
                waited_s = self._now_s() - begun_s
                says = f"engine {engine.name} has not answered for {waited_s:.0f} s"
                return Refused(Failure(504, "first_byte", says), begun=True)
            except LinkBroken as error:
                self._failed(engine, f"no answer: {error}")
                says = f"engine {engine.name} closed the connection, or its answer is not HTTP"
                return Refused(Failure(502, "no_answer", says), begun=True)
            await self._pass_on(call, choice, answer, first, send)
            return None
        finally:
            if answer is not None:
                answer.end()

    async def _send(self, call: Call, engine: ServingEngine) -> Answer:
        place, raw = engine.place, call.scope["headers"]
        headers = passing.to_engine(
            raw, call.wanted.word, place.api_key, drop_keys=self._drop_keys(), rank=engine.rank
        )
        method = call.scope["method"]
        body = call.body
        if call.passed and self.takes_ids(engine, call.asked.model):
            body = call.passed
        return await self._links.send(
            place.address, request_bytes(method, call.target, place.address, headers, body)
        )

    async def _elsewhere(self, engine: ServingEngine, answer: Answer) -> Refused:
        """What an engine says that cannot take the request now."""
        body = await answer.whole(MAX_ERROR_BYTES)
        failure = Failure(answer.status, "engine_busy", f"engine {engine.name} answered {answer.status}")
        return Refused(failure, False, answer.status, tuple(answer.headers), body)

    def _failed(self, engine: ServingEngine, reason: str) -> None:
        self._log.repeated(30, engine.name, "engine_failed", engine=engine.name, reason=reason)
        self.suspect(engine)

    # -- the answer ------------------------------------------------------------------------------------------

    async def _pass_on(self, call: Call, choice: Choice, answer: Answer, first: bytes, send: Send) -> None:
        meter, engine = call.meter, choice.engine
        meter.model = call.asked.model if call.asked.model in engine.models else ""
        names = dict(answer.headers)
        stream = names.get(b"content-type", b"").startswith(b"text/event-stream")
        meter.begins(self._now_s(), first, stream=stream, itl=self._meters.of(meter).itl)
        self.choosing.first_token(choice)
        self._reader.answered(call.path, engine.name, first)
        meter.outcome = OK if answer.status < 400 else CLIENT_ERROR if answer.status < 500 else "engine_error"
        headers = passing.to_client(answer.headers, call.wanted.word)
        if answer.status in WITHOUT_BODY:
            headers = [one for one in headers if one[0] != b"content-length"]
        client: GatewayConnection = call.scope["state"]["connection"]
        silence_s = self.settings.timeouts.silence_s
        splice = await self._splices.pass_on(
            answer, client, answer.status, headers, silence_s=silence_s, events=stream
        )
        if splice is None:
            await self._in_turn(call, engine, answer, headers, send, stream=stream)
            return
        meter.spliced(splice)
        if splice.end in ENGINES_FAULT:
            await self._broke_off(call, engine, splice.end, send, stream=stream)
        elif splice.end != "done":
            raise ClientGone

    async def _in_turn(
        self,
        call: Call,
        engine: ServingEngine,
        answer: Answer,
        headers: passing.Raw,
        send: Send,
        *,
        stream: bool,
    ) -> None:
        """Pass on an answer that no thread can: its length is known, or it is whole already, or comes over TLS.

        A part is read when the client has taken the one before.
        """
        meter = call.meter
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        watch = _Silence(answer, self.settings.timeouts.silence_s)
        try:
            part = await answer.part()
            while part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                if part := await answer.part():
                    meter.part(self._now_s(), part)
        except LinkBroken as error:
            await self._broke_off(call, engine, SILENT if watch.silent else str(error), send, stream=stream)
        finally:
            watch.end()
        await send({"type": "http.response.body", "body": b""})

    async def _broke_off(
        self, call: Call, engine: ServingEngine, why: str, send: Send, *, stream: bool
    ) -> None:
        """An answer whose first part was passed on goes no further. Raises BrokenOff."""
        call.meter.outcome = BROKE_OFF
        says = f"engine {engine.name} broke its answer off"
        if why == SILENT:
            says = f"engine {engine.name} was silent for {self.settings.timeouts.silence_s:g} s"
        else:
            self._failed(engine, f"answer broke off: {why}")
        failure = Failure(502, BROKE_OFF, says)
        if stream:
            event = error_event(failure, call.path)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        raise BrokenOff(failure)

    async def _refuse(self, call: Call, send: Send, refused: Refused) -> None:
        """Pass an engine's refusal on, or answer with a failure of our own."""
        call.meter.outcome = refused.failure.code
        if refused.status:
            headers = passing.to_client(refused.headers, call.wanted.word)
            headers = [one for one in headers if one[0] != b"content-length"]
            headers.append((b"content-length", str(len(refused.body)).encode()))
            await send({"type": "http.response.start", "status": refused.status, "headers": headers})
            await send({"type": "http.response.body", "body": refused.body})
        else:
            await answer_failure(send, refused.failure, call.path, call.wanted.word)


class _FirstByte:
    """Bounds the wait for an engine's first byte; raises TimeoutError also if the engine is given up meanwhile."""

    __slots__ = ("_engine", "_limit")

    def __init__(self, engine: ServingEngine, first_byte_s: float) -> None:
        self._engine = engine
        self._limit = asyncio.timeout(first_byte_s)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._engine.waiting.add(self._limit)

    async def __aexit__(self, *error: Any) -> None:
        self._engine.waiting.discard(self._limit)
        await self._limit.__aexit__(*error)


class _Silence:
    """Closes an answer whose engine says nothing for `silence_s`; one timer that is set again only when it rings."""

    def __init__(self, answer: Answer, silence_s: float) -> None:
        self.silent = False
        self.silence_s = silence_s
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(silence_s, self._ring)

    def end(self) -> None:
        """The answer has ended."""
        self._timer.cancel()

    def _ring(self) -> None:
        waited_s = self._loop.time() - self._answer.heard_s if self._answer.awaited else 0.0
        if waited_s >= self.silence_s:
            self.silent = True
            self._answer.close()
        else:
            self._timer = self._loop.call_later(self.silence_s - waited_s, self._ring)


async def answer_failure(
    send: Send, failure: Failure, path: str, word: str = "", *, close: bool = False
) -> None:
    """Answer with an error of the gateway's own, and with `close` end the connection after it."""
    body = error_body(failure, path)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if failure.retry_after_s:
        headers.append((b"retry-after", str(failure.retry_after_s).encode()))
    if word:
        headers.append((b"x-request-id", word.encode()))
    if close:
        headers.append((b"connection", b"close"))
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": failure.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
