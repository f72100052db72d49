"""Spans of requests for an OpenTelemetry collector, by OTLP over HTTP (the extra `otel`).

A request gets spans if its engine names a sampled trace (`traceparent` of W3C Trace Context, as vLLM has it from the
client): `lookup` and `store` below the client's span, `prefetch` below the lookup, a `load` from a tier below that.

The event loop only notes when a span began and ended.  The thread `kv-otel` makes the SDK's spans of these notes and
sends them.  A collector that does not answer costs its spans, and a line in the log once in a while: beyond MAX_WAITING
new ones are dropped.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstrata.errors import ConfigError, install
from kvstrata.naming import name_thread
from kvstrata.observability.logging import EventLog
from kvstrata.observability.numbers import Numbers, counter

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")
"""Trace and span. A request whose text has another form is not traced, as the standard wants it."""
SAMPLED = "13579bdf"
"""The last digits of texts whose trace is sampled."""
MAX_WAITING = 4_096
BATCH = 512
EVERY_S = 1.0
EXPORT_S = 5.0
STOP_S = 2.0


class Span:
    """A span that has begun."""

    __slots__ = ("_tracer", "attributes", "begun_ns", "ended_ns", "name", "number", "parent")

    def __init__(self, tracer: Tracer, parent: Span | str) -> None:
        """`parent`: the span around it, or the text that names the client's."""
        self._tracer, self.parent = tracer, parent
        self.number = 0
        """For the thread, which gives it a number when it is first named."""
        self.begun_ns = time.time_ns()

    def child(self) -> Span:
        """Begin a span within this one."""
        return Span(self._tracer, self)

    def end(self, name: str, **attributes: str | int) -> None:
        """End the span now; it is named `kvstrata.NAME`."""
        self.name, self.ended_ns, self.attributes = name, time.time_ns(), attributes
        self._tracer.add(self)


class _FirstWord(logging.Handler):
    """Keeps what the SDK says first of a message; what follows are its further tries."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = self.said or record.getMessage()


class Tracer(Numbers):
    """Makes spans and sends them, see the module. `begin` and spans belong to the event loop."""

    spans = counter(
        "Spans for the OpenTelemetry collector: sent, dropped (too many waited) or refused.", "outcome"
    )

    def __init__(self, endpoint: str, instance_id: str) -> None:
        """`endpoint`: URL of a collector. Raises ConfigError if the SDK is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.sdk.trace.export import SpanExportResult
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
            from opentelemetry.trace import SpanContext, TraceFlags
        except ImportError as error:
            field = "observability.otlp_endpoint"
            raise ConfigError(f"{field}: {error}; {install('otel')}", field=field) from None
        if endpoint.count("/") == 2:
            endpoint += "/v1/traces"
        self._endpoint = endpoint
        self._sdk = _FirstWord()
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self._sdk], False
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        resource = Resource({"service.name": "kvstrata", "service.instance.id": instance_id})
        scope = InstrumentationScope("kvstrata")

        sampled = TraceFlags(TraceFlags.SAMPLED)

        def context(of: Span | str) -> SpanContext | None:
            if isinstance(of, str):
                found = TRACEPARENT.fullmatch(of)
                return SpanContext(int(found[1], 16), int(found[2], 16), True, sampled) if found else None
            of.number = of.number or random.getrandbits(64) or 1
            above = context(of.parent)
            return above and SpanContext(above.trace_id, of.number, False, sampled)

        def send(spans: list[Span]) -> bool:
            made = [
                ReadableSpan(
                    f"kvstrata.{span.name}", of, context(span.parent), resource, span.attributes,
                    start_time=span.begun_ns, end_time=span.ended_ns, instrumentation_scope=scope,
                )
                for span in spans if (of := context(span))
            ]  # fmt: skip
            return not made or exporter.export(made) is SpanExportResult.SUCCESS

        self._send = send
        self._shut_down: Callable[[], object] = exporter.shutdown
        self._log = EventLog("server")
        self._waiting: deque[Span] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-otel", daemon=True)
        self._thread.start()

    def begin(self, traceparent: str) -> Span | None:
        """Begin a span below that of a client, if there is one and it is sampled."""
        return Span(self, traceparent) if traceparent[-1:] in SAMPLED and traceparent else None

    def add(self, span: Span) -> None:
        """Take a span that has ended. Never waits."""
        if len(self._waiting) >= MAX_WAITING:
            self.spans["dropped"] += 1
        else:
            self._waiting.append(span)

    def close(self) -> None:
        """Send what waits, for up to STOP_S. Blocks."""
        self._stop.set()
        self._thread.join(STOP_S)
        self._shut_down()

    def _run(self) -> None:
        name_thread()
        last = False
        while not last:
            last = self._stop.wait(EVERY_S)
            while spans := [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]:
                self._sdk.said = ""
                sent = self._send(spans)
                self.spans["sent" if sent else "refused"] += len(spans)
                if not sent:
                    self._log.repeated(
                        logging.WARNING, "otlp", "spans_not_sent", endpoint=self._endpoint, spans=len(spans),
                        reason=self._sdk.said, note="4318 is the usual port of OTLP over HTTP",
                    )  # fmt: skip
