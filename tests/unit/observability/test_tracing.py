"""Spans for a collector: what a missing package costs. (tests/integration has the spans.)"""

from __future__ import annotations

import sys

import pytest

from kvstrata.errors import ConfigError
from kvstrata.observability.tracing import Tracer


def test_the_error_of_a_missing_extra_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"observability.otlp_endpoint: .*; pip install '\.\[otel\]'"):
        Tracer("http://127.0.0.1:4318", "one")
