"""The picker's gRPC port: Envoy's ExternalProcessor, and gRPC's health checks.

A stream carries one request.  It ends with the answer, with Envoy, or with this process; each end gives back what the
request held (exchange.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc

from kvstrata.config.gateway_model import PickerSettings
from kvstrata.errors import ConfigError
from kvstrata.gateway.parts import Parts
from kvstrata.gateway.picker import messages
from kvstrata.gateway.picker.exchange import Exchange, Held, OutOfTurn
from kvstrata.observability.logging import EventLog
from kvstrata.patience import patience
from kvstrata.process.ports import host_and_port

PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
LIVENESS = b"liveness"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""HealthCheckResponse with its one field, `status`."""
MAX_MESSAGE_BYTES = 16 << 20
MAX_HEADER_BYTES = 64 << 10
KEEPALIVE_MS = 10_000
"""After so long without a frame Envoy is asked whether it is still there, so that its streams end with its host."""


class PickerServer:
    """Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self.held = Held()
        self.stopping = False
        self.port = 0
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
        check = grpc.unary_unary_rpc_method_handler(self._check)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(PROCESSOR, {"Process": process}),
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
                "certificate is not one",
                field="picker.listen",
            ) from None
        await self._server.start()

    async def drain(self, drain_s: float) -> None:
        """Take no new streams, and let those under way end within `drain_s`."""
        self.stopping = True
        await self._server.stop(drain_s)

    async def close(self) -> None:
        """End all streams."""
        await self._server.stop(0)

    async def _check(self, request: bytes, _: Any) -> bytes:
        """Whether the process answers (`liveness`), or an engine serves (any other service)."""
        # HealthCheckRequest has one field, 1: `service`.
        if request[2:] == LIVENESS:
            return SERVING
        serves = not self.stopping and bool(self._parts.fleet.serving(""))
        return SERVING if serves else NOT_SERVING

    async def _process(self, _: Any, context: Any) -> None:
        """One stream: its messages are answered in turn."""
        exchange = Exchange(self._parts, self.held)
        outcome = ""
        try:
            try:
                async with asyncio.timeout(self._parts.settings.http.stalled_s) as limit:
                    while exchange.arriving and await self._step(exchange, context):
                        pass
                    limit.reschedule(None)
                    while await self._step(exchange, context):
                        pass
            except TimeoutError:
                for reply in exchange.late():
                    await context.write(reply)
        except OutOfTurn as error:
            outcome = "out_of_turn"
            self._log.repeated(30, "out_of_turn", "out_of_turn", reason=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            exchange.end(outcome)

    async def _step(self, exchange: Exchange, context: Any) -> bool:
        """Answer the next message; False at the end of the stream."""
        message = await context.read()
        if message is grpc.aio.EOF:
            return False
        replies = exchange.take(message)
        if exchange.question is not None:
            known = await self._parts.tokens.of(*exchange.question)
            exchange.has_ids(known.ids)
        if exchange.wanted is not None:
            replies += exchange.told(await self._parts.controllers.told(exchange.wanted))
        for reply in replies:
            await context.write(reply)
        return True


def _credentials(settings: PickerSettings) -> Any:
    """The certificate, and with `tls_ca_file` whose certificates clients need. Raises ConfigError."""
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
