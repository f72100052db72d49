"""The gateway's ASGI application: its own pages, and the paths that are passed on to engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import msgspec

from kvstrata import __version__
from kvstrata.errors import KvstrataError, NotFound
from kvstrata.gateway import headers as passing
from kvstrata.gateway.admin import find
from kvstrata.gateway.door import IN_FLIGHT, Headers
from kvstrata.gateway.errors import MAX_BODY_BYTES, TOO_LARGE, Failure
from kvstrata.gateway.forward import BrokenOff, Call, ClientGone, answer_failure
from kvstrata.gateway.metering import CANCELLED, OK
from kvstrata.gateway.parts import Parts
from kvstrata.gateway.routes import ROUTES, route_of
from kvstrata.observability.logging import EventLog
from kvstrata.process.operations import Operation, Reply, asked

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from kvstrata.observability.numbers import Pages

PROBES = frozenset(("/healthz", "/health", "/ping", "/readyz"))
UNREAD = frozenset((413, 503))
"""Statuses of answers that may come before the end of the request's body."""
SMALL_BYTES = 64 << 10
MAX_HELD_BYTES = 1 << 30
"""Bytes of all bodies that the gateway holds at a time."""


class App:
    """See the module. Belongs to the event loop."""

    def __init__(self, parts: Parts, status: Callable[[], dict[str, Any]], pages: Pages) -> None:
        self.parts = parts
        self.status = status
        self.page = pages.page
        self.in_flight = 0
        """Requests for engines that have not ended."""
        self.held_bytes = 0
        """Bytes of their bodies."""
        self.stopping = False
        self._idle = asyncio.Event()
        """Set when the last request under way has ended."""
        self._log = EventLog("gateway")

    async def idle(self) -> None:
        """Returns when no request is under way."""
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"not HTTP: {scope['type']}")  # uvicorn is told to serve nothing else
        path, headers = scope["path"], dict(scope["headers"])
        if path in PROBES:
            await self._probe(path, send)
            return
        own = find(path)
        failure = self.parts.door.knows_sender(headers, path, operators=own is not None)
        if failure is not None:
            await answer_failure(send, failure, path, close=_unread(headers))
        elif own is not None:
            await self._operators(*own, scope, headers, send)
        else:
            await self._request(scope, path, headers, receive, send)

    # -- our own pages ---------------------------------------------------------------------------------------

    async def _probe(self, path: str, send: Send) -> None:
        """`/healthz`: the process answers. The others, which engines have too: an engine serves."""
        why = ""
        if path != "/healthz":
            why = "stopping" if self.stopping else "" if self.parts.fleet.serving("") else "no engine serves"
        await _json(send, 503 if why else 200, {"ready": not why, "why": why})

    async def _operators(
        self, one: Operation, found: dict[str, str], scope: Scope, headers: Headers, send: Send
    ) -> None:
        path = scope["path"]
        if not self.parts.door.is_operator(headers, path):
            says = f"Authorization: {path} needs the operators' token, as `Bearer TOKEN`"
            await answer_failure(send, Failure(401, "operators_only", says), path)
            return
        try:
            query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
            value = await one.call(self, {"ask": await asked(one, found, query, b"")})
        except KvstrataError as error:
            status, code = (404, "unknown_request") if isinstance(error, NotFound) else (400, error.code)
            await answer_failure(send, Failure(status, code, error.message, error.field), path)
            return
        reply = value if isinstance(value, Reply) else Reply(value)
        await _answer(send, 200, reply.media_type, reply.body)

    async def _models(self, path: str, send: Send) -> None:
        models = self.parts.fleet.models()
        if path == "/v1/models":
            await _json(send, 200, {"object": "list", "data": list(models.values())})
            return
        name = path.removeprefix("/v1/models/")
        if name in models:
            await _json(send, 200, models[name])
        else:
            says = f"model: no engine here has {name!a:.200}"
            await answer_failure(send, Failure(404, "model_not_found", says, "model"), path)

    # -- requests for engines --------------------------------------------------------------------------------

    async def _request(self, scope: Scope, path: str, headers: Headers, receive: Receive, send: Send) -> None:
        parts = self.parts
        if parts.settings.picker.only:
            says = "this port answers probes and operators only; requests come through Envoy (picker.only)"
            await answer_failure(send, Failure(404, "picker_only", says), path, close=_unread(headers))
            return
        tenant = parts.door.tenant_of(headers)
        if isinstance(tenant, Failure):
            await answer_failure(send, tenant, path, close=_unread(headers))
            return
        get = scope["method"] == "GET"
        if get and (path == "/v1/models" or path.startswith("/v1/models/")):
            await self._models(path, send)
            return
        if get and path == "/version":
            await _json(send, 200, {"version": __version__, "gateway": "kvstrata"})
            return
        route = route_of(scope["method"], path)
        if isinstance(route, Failure):
            await answer_failure(send, route, path, close=_unread(headers))
            return
        meter = parts.meters.begin(tenant.name if tenant is not None else "")
        meter.slo = parts.reader.slo_of(headers, tenant, parts.meters.slo)
        word = passing.request_id(headers.get(b"x-request-id", b""))
        try:
            await self._admitted(Call(scope, path, headers, route, word, meter, tenant), receive, send)
        except Exception as error:  # the boundary of the port: a defect of ours ends one request
            meter.outcome = "defect"
            # Not the error's text, which may hold a piece of the prompt.
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(place.filename)}:{place.lineno}"
            self._log.error("request_crashed", path=path, error=type(error).__name__, at=where)
            with contextlib.suppress(RuntimeError):  # the answer has begun
                await answer_failure(
                    send, Failure(500, "defect", "a defect of the gateway; see its log"), path
                )
        finally:
            meter.outcome = meter.outcome or CANCELLED
            parts.meters.end(meter)

    async def _admitted(self, call: Call, receive: Receive, send: Send) -> None:
        """Let the request in, if it may come in, and forward it."""
        meter, tenant, settings = call.meter, call.tenant, self.parts.settings
        failure: Failure | None = None
        if self.in_flight >= settings.max_in_flight:
            says = f"{self.in_flight} requests are under way, of at most {settings.max_in_flight}"
            failure = Failure(503, "overloaded", says, retry_after_s=1)
        elif tenant is not None:
            failure = tenant.enter(meter.arrived_s)
            if failure is not None and failure.code == IN_FLIGHT:
                await tenant.leaving()
                failure = tenant.enter(meter.arrived_s)
        if failure is not None:
            meter.outcome = failure.code
            await answer_failure(send, failure, call.path, call.word, close=_unread(call.headers))
            return
        self.in_flight += 1
        try:
            failure = await self._read(call, receive)
            if failure is None:
                failure = await self._forward(call, send)
            if failure is not None:
                meter.outcome = failure.code
                await answer_failure(send, failure, call.path, call.word, close=failure.status in UNREAD)
        except ClientGone:
            meter.outcome = CANCELLED
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
            self.held_bytes -= meter.body_bytes
            if tenant is not None:
                tenant.leave()

    async def _read(self, call: Call, receive: Receive) -> Failure | None:
        """Read the body, and what the choice goes by. Raises ClientGone if the client goes before it has sent all."""
        parts, meter = self.parts, call.meter
        call.standing = parts.reader.standing_of(call.headers, call.tenant)
        body = await self._body(receive, call)
        if isinstance(body, Failure):
            return body
        call.body = body
        read = parts.reader.read(call.path, call.route, body, call.headers, call.word, meter.tenant)
        if isinstance(read, Failure):
            return read
        call.asked, wanted = read
        if wanted.prompt is None and parts.settings.predicts and call.path in ROUTES:
            known = await parts.tokens.of(call.path, body, call.asked.model, meter.tenant)
            call.passed, call.computed = known.body, known.ids is not None
            wanted = parts.reader.with_ids(call.asked, wanted, known.ids)
            meter.body_bytes += len(call.passed)
            self.held_bytes += len(call.passed)
        call.wanted = await parts.controllers.told(wanted)
        return None

    async def _body(self, receive: Receive, call: Call) -> bytes | Failure:
        """The whole body; raises ClientGone. `meter.body_bytes` is added to `held_bytes`."""
        meter = call.meter
        length = call.headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
            return TOO_LARGE
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            part = message.get("body", b"")
            meter.body_bytes += len(part)
            self.held_bytes += len(part)
            if meter.body_bytes > MAX_BODY_BYTES:
                return TOO_LARGE
            if self.held_bytes > MAX_HELD_BYTES:
                says = f"the bodies of all requests under way take {self.held_bytes} bytes"
                return Failure(503, "overloaded", says, retry_after_s=1)
            parts.append(part)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _forward(self, call: Call, send: Send) -> Failure | None:
        """Forward a request, unless its tenant may not use the tokens that it takes."""
        meter, wanted = call.meter, call.wanted
        tenant = call.tenant if call.asked.text else None
        taken = tenant.take(wanted.tokens, meter.arrived_s) if tenant is not None else 0.0
        if isinstance(taken, Failure):
            return taken
        try:
            await self.parts.forwarder.run(call, send)
        except BrokenOff as error:
            why = error.failure.message
            self._log.repeated(
                logging.WARNING, "broke_off", "answer_broke_off", request=call.word, reason=why
            )
            await call.scope["state"]["connection"].cut()
        finally:
            meter.outcome = meter.outcome or CANCELLED
            if tenant is not None:
                tenant.settle(taken, wanted.tokens, meter)
        reported = meter.tokens().get("prompt") if call.computed and meter.outcome == OK else None
        if reported and wanted.prompt is not None:
            self.parts.tokens.reported(call.asked.model, meter.engine, len(wanted.prompt.tokens), reported)
        return None


def _unread(headers: Headers) -> bool:
    """Whether much of a request's body may still arrive, so that the connection must end with the answer."""
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or int(length[:20]) > SMALL_BYTES


async def _json(send: Send, status: int, value: object) -> None:
    await _answer(send, status, "application/json", msgspec.json.encode(value))


async def _answer(send: Send, status: int, media_type: str, body: bytes) -> None:
    headers = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
