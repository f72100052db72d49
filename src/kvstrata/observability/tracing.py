"""Spans of requests for an OpenTelemetry collector, by OTLP over HTTP (the extra `otel`).

A request gets spans if its engine names a sampled trace (`traceparent` of W3C Trace Context, as vLLM has it from the
client): `lookup` and `store` below the client's span, `prefetch` below the lookup, a `load` from a tier below that.

Beginning or ending a span takes some 15 µs of the event loop.  A thread of the SDK sends the spans; if the collector
does not answer, spans are lost and a thinned log line says so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.errors import ConfigError, install
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter

SAMPLED = "13579bdf"
"""Last hexadecimal digits of a `traceparent` that is sampled."""
MAX_WAITING = 4_096
EVERY_MS = 1_000
EXPORT_S = 5.0
STOP_S = 2.0


class Span:
    """A span that has begun."""

    __slots__ = ("_begin", "_span")

    def __init__(self, begin: Callable[[Any], Any], span: Any) -> None:
        """`begin` begins one of the SDK's spans within another."""
        self._begin, self._span = begin, span

    def child(self) -> Span:
        """Begin a span within this one."""
        return Span(self._begin, self._begin(self._span))

    def end(self, name: str, **attributes: str | int) -> None:
        """End the span now; it is named `kvstrata.NAME`."""
        self._span.update_name(f"kvstrata.{name}")
        self._span.set_attributes(attributes)
        self._span.end()


class _FirstWord(logging.Handler):
    """Keeps the SDK's first log line about a message and drops those about its retries."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = self.said or record.getMessage()


class Tracer(Numbers):
    """Makes spans and sends them. `begin` and spans belong to the event loop."""

    spans = counter("Spans for the OpenTelemetry collector: sent, or refused.", "outcome")

    def __init__(self, endpoint: str, instance_id: str) -> None:
        """`endpoint`: URL of a collector. Raises ConfigError if the SDK is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
            from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
            from opentelemetry.trace import set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            field = "observability.otlp_endpoint"
            raise ConfigError(f"{field}: {error}; {install('otel')}", field=field) from None
        if endpoint.count("/") == 2:
            endpoint += "/v1/traces"
        sdk, log, counts = _FirstWord(), EventLog("server"), self.spans
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [sdk], False

        class Exporter(OTLPSpanExporter):
            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                sdk.said = ""
                result = super().export(spans)
                sent = result is SpanExportResult.SUCCESS
                counts["sent" if sent else "refused"] += len(spans)
                if not sent:
                    log.repeated(
                        logging.WARNING, "otlp", "spans_not_sent", endpoint=endpoint, spans=len(spans),
                        reason=sdk.said, note="4318 is the usual port of OTLP over HTTP",
                    )  # fmt: skip
                return result

        # A trace that does not begin with the client is none; texts of another form are passed over.
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_OFF),
            resource=Resource({"service.name": "kvstrata", "service.instance.id": instance_id}),
            shutdown_on_exit=False,
        )
        exporter = Exporter(endpoint=endpoint, timeout=EXPORT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING, schedule_delay_millis=EVERY_MS)
        )
        tracer, self._client = self._provider.get_tracer("kvstrata"), TraceContextTextMapPropagator()
        self._start = tracer.start_span
        self._within = lambda span: tracer.start_span("kvstrata", set_span_in_context(span))

    def begin(self, traceparent: str) -> Span | None:
        """Begin a span below that of a client, if there is one and it is sampled."""
        if not traceparent or traceparent[-1] not in SAMPLED:
            return None
        span = self._start("kvstrata", self._client.extract({"traceparent": traceparent}))
        return Span(self._within, span) if span.is_recording() else None

    def close(self) -> None:
        """Send the waiting spans, for up to STOP_S. Blocks."""
        ends = threading.Thread(target=self._provider.shutdown, name="kv-otel", daemon=True)
        ends.start()
        ends.join(STOP_S)
