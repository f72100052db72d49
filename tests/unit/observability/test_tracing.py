"""Spans for a collector: what is dropped, and what a missing package costs. (tests/integration has the spans.)"""

from __future__ import annotations

import sys
import threading

import pytest

from kvstrata.errors import ConfigError
from kvstrata.observability.tracing import MAX_WAITING, Tracer

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_error_of_a_missing_extra_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"observability.otlp_endpoint: .*; pip install '\.\[otel\]'"):
        Tracer("http://127.0.0.1:4318", "one")


def test_spans_that_wait_for_the_collector_are_bounded(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    tracer = Tracer("http://127.0.0.1:4318", "one")
    for _ in range(MAX_WAITING + 3):
        span = tracer.begin(SAMPLED)
        assert span is not None
        span.end("lookup")
    assert tracer.spans == {"dropped": 3}
