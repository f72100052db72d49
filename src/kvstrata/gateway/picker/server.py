"""The picker's gRPC port for an operator's own Envoys: ext_proc, their access log, and gRPC's health checks.

    headers ─▶ body ─▶ choice ─▶ the body is forwarded ─▶ … the stream ends with the request

Each ext_proc stream carries one request.  Its response does not pass through this process: the access log reports the
response's tokens and end, and once a second that a request still runs.  If no Envoy sends an access log, a request
counts as ended UNLOGGED_S after its stream; the delay is there because Envoy opens the log only for its first line.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

# This process forks to start Envoy; gRPC's fork handlers would end the child.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import grpc

from kvstrata.config.gateway_model import PickerSettings
from kvstrata.errors import ConfigError
from kvstrata.gateway.errors import MAX_BODY_BYTES, TOO_LARGE, Failure
from kvstrata.gateway.parts import Parts
from kvstrata.gateway.picker import messages
from kvstrata.gateway.picker.messages import Message
from kvstrata.gateway.request import Head, Request, request_id
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience
from kvstrata.process.ports import host_and_port

PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
LOG = "envoy.service.accesslog.v3.AccessLogService"
HEALTH = "grpc.health.v1.Health"
LIVENESS = b"liveness"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""Encoded HealthCheckResponse messages; their only field is `status`."""
MAX_MESSAGE_BYTES = 16 << 20
MAX_HEADER_BYTES = 64 << 10
ARRIVAL_S = 60.0
"""Maximum time for a request's body to arrive."""
UNHEARD_S, LOOK_S = 60.0, 5.0
"""Time without an access log entry after which a request counts as ended; interval of the search for such requests."""
UNLOGGED_S = 2.0
MAX_HELD_BYTES = 1 << 30
"""Maximum total bytes of request bodies held in memory while they arrive."""
KEEPALIVE_MS = 10_000
"""Time without a frame after which Envoy is pinged, so that its streams end if its host has failed."""


class UnexpectedMessage(Exception):
    """Envoy sent a message that the protocol does not allow after the previous one."""


class PickerServer:
    """Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self.held_bytes = 0
        self.port = 0
        self._logs = 0
        """Number of open access log streams."""
        self._parts = parts
        self._log = EventLog("picker")
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.max_concurrent_streams", parts.settings.max_in_flight),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", round(patience(KEEPALIVE_MS))),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            )
        )
        process = grpc.stream_stream_rpc_method_handler(self._process, messages.parse, messages.encode)
        log = grpc.stream_unary_rpc_method_handler(self._hear, messages.parse_log)
        check = grpc.unary_unary_rpc_method_handler(self._check)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(PROCESSOR, {"Process": process}),
                grpc.method_handlers_generic_handler(LOG, {"StreamAccessLogs": log}),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
            )
        )

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        settings = self._parts.settings.picker
        host, port = host_and_port(settings.listen)
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if settings.tls_cert_file:
                self.port = self._server.add_secure_port(place, _credentials(settings))
            else:
                self.port = self._server.add_insecure_port(place)
        except RuntimeError:
            raise ConfigError(
                f"picker.listen: cannot listen on {place}: the port is taken, the address is not this host's, or the "
                "certificate is invalid",
                field="picker.listen",
            ) from None
        await self._server.start()

    async def drain(self, drain_s: float) -> None:
        """Accept no new streams, and give those under way `drain_s` to end."""
        await self._server.stop(drain_s)

    async def close(self) -> None:
        """End all streams."""
        await self._server.stop(0)

    async def _check(self, request: bytes, _: Any) -> bytes:
        """Answer a health check: `liveness` is always SERVING, any other service only while an engine serves."""
        # A HealthCheckRequest has one field, the string `service`; two bytes (tag and length) precede its text.
        if request[2:] == LIVENESS:
            return SERVING
        return SERVING if self._parts.readiness()[0] else NOT_SERVING

    async def _hear(self, stream: Any, _: Any) -> bytes:
        """Receive an Envoy's access log."""
        self._logs += 1
        try:
            async for message in stream:
                for marks in messages.marks_in(message):
                    self._parts.requests.on_log_line(marks, self._parts.now_s())
        finally:
            self._logs -= 1
        return b""

    async def find_lost(self) -> None:
        """Every LOOK_S, end the requests whose last log entry was lost; runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if count := self._parts.requests.lost(self._parts.now_s() - UNHEARD_S):
                self._log.warning("requests_lost", count=count, note="Envoy did not report their end")

    async def _process(self, _: Any, context: Any) -> None:
        """Serve one ext_proc stream."""
        message = await context.read()
        if message is grpc.aio.EOF:
            return
        request: Request | None = None
        try:
            request = self._parts.requests.arrived(_head_of(message))
            await self._answer(request, message, context)
        except UnexpectedMessage as error:
            self._log.repeated(30, "out_of_turn", "out_of_turn", reason=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            if request is not None and request.number >= 0 and not self._logs:
                asyncio.get_running_loop().call_later(patience(UNLOGGED_S), self._end_unlogged, request)

    def _end_unlogged(self, request: Request) -> None:
        if not self._logs:
            self._parts.requests.end(request, "untold")

    async def _answer(self, request: Request, message: Message, context: Any) -> None:
        subset = messages.metadata(message, messages.SUBSET_NAMESPACE, messages.SUBSET)
        requests = self._parts.requests
        body: bytes | Failure = b""
        trails = False
        decides = False
        try:
            failure = _wrong_mode(message) or await requests.admit(request)
            if failure is None and not message.request_headers.end_of_stream:
                body, trails = await self._body(context)
                failure = body if isinstance(body, Failure) else None
            decides = failure is None
        finally:
            if not decides:
                requests.drop(request, failure.code if failure is not None else "cancelled")
        if failure is None and isinstance(body, bytes):
            decided = await requests.decide(request, body, subset=subset)
            if not isinstance(decided, Failure):
                await context.write(messages.chosen(decided))
                if decided.fragment:
                    at = body.index(b"{") + 1
                    body = b"".join((body[:at], decided.fragment, body[at:]))
                if not message.request_headers.end_of_stream:
                    for part in messages.parts(body, ends=not trails):
                        await context.write(part)
                    if trails:
                        await context.write(messages.request_trailers())
                del body
                while (message := await context.read()) is not grpc.aio.EOF:
                    await context.write(messages.answer_passes(message))
                return
            failure = decided
        if failure is not None:
            await context.write(messages.refused(failure, request.head.path, request.head.word))

    async def _body(self, context: Any) -> tuple[bytes | Failure, bool]:
        """Read the whole body; returns it, or a refusal, and whether trailers follow. Raises UnexpectedMessage."""
        body, held = bytearray(), 0
        try:
            async with asyncio.timeout(ARRIVAL_S):
                while True:
                    message = await context.read()
                    kind = message.WhichOneof("request") if message is not grpc.aio.EOF else "the end"
                    if kind == "request_trailers":
                        return bytes(body), True
                    if kind != "request_body":
                        raise UnexpectedMessage(
                            f"expected a part of the body, received {kind or 'a message without content'}"
                        )
                    body += message.request_body.body
                    self.held_bytes += len(body) - held
                    held = len(body)
                    if held > MAX_BODY_BYTES:
                        return TOO_LARGE, False
                    if self.held_bytes > MAX_HELD_BYTES:
                        says = f"the bodies of all arriving requests take {self.held_bytes} bytes; try again later"
                        return Failure(503, "overloaded", says, retry_after_s=1), False
                    if message.request_body.end_of_stream:
                        return bytes(body), False
        except TimeoutError:
            return Failure(408, "late", f"body: did not arrive within {ARRIVAL_S:g} s"), False
        finally:
            self.held_bytes -= held


def _head_of(message: Message) -> Head:
    """The head in a stream's first message. Raises UnexpectedMessage."""
    kind = message.WhichOneof("request")
    if kind != "request_headers":
        raise UnexpectedMessage(
            f"expected a request's headers, received {kind or 'a message without content'}"
        )
    headers = messages.headers_of(message.request_headers)
    path = headers.get(b":path", b"").decode("latin-1").partition("?")[0]
    word = request_id(headers.get(b"x-request-id", b""))
    return Head(headers.get(b":method", b"").decode("latin-1"), path, headers, word)


def _wrong_mode(message: Message) -> Failure | None:
    """The refusal if Envoy's processing mode does not send the body as needed; None: the mode is right."""
    sends_body = not message.request_headers.end_of_stream
    duplex = message.protocol_config.request_body_mode == messages.FULL_DUPLEX
    if message.HasField("protocol_config") and sends_body and not duplex:
        says = "ext_proc: set processing_mode.request_body_mode of Envoy to FULL_DUPLEX_STREAMED"
        return Failure(500, "wrong_mode", says)
    return None


def _credentials(settings: PickerSettings) -> Any:
    """The port's TLS credentials; with `tls_ca_file`, clients need a certificate of that CA. Raises ConfigError."""
    cert, key = _read(settings, "tls_cert_file"), _read(settings, "tls_key_file")
    ca = _read(settings, "tls_ca_file") if settings.tls_ca_file else None
    return grpc.ssl_server_credentials([(key, cert)], ca, ca is not None)


def _read(settings: PickerSettings, name: str) -> bytes:
    path = getattr(settings, name)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"picker.{name}: cannot read {path!r}: {error.strerror}", field=f"picker.{name}"
        ) from None
