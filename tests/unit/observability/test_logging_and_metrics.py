"""observability/logging.py and metrics.py."""

from __future__ import annotations

import json
import logging
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.observability.exposition import Pages, ServerCollector
from kvstrata.observability.logging import WINDOW_S, EventLog, _JsonFormatter
from kvstrata.observability.metrics import (
    MAX_OUTCOME_WORDS,
    SECONDS_BUCKETS,
    Histogram,
    ServerCounters,
)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)
    caplog.set_level(logging.DEBUG, logger="kvstrata")
    return caplog


def test_an_event_is_one_line_with_its_fields(lines: pytest.LogCaptureFixture) -> None:
    log = EventLog("part")
    log.info("attached", pid=12, name="two words", key=b"\x01\x02", empty="", quoted='a"b', broken="a\nb")
    [record] = lines.records
    assert record.getMessage() == (
        r'attached pid=12 name="two words" key=0102 empty="" quoted="a\"b" broken="a\nb"'
    )
    assert record.name == "kvstrata.part"


@given(st.text())
def test_a_line_of_json_is_one_object_with_event_and_fields(text: str) -> None:
    formatter = _JsonFormatter(None, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    seen: list[str] = []
    log = EventLog("part")
    log._logger = logging.Logger("kvstrata.part")
    log._logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: seen.append(formatter.format(record))  # type: ignore[method-assign]
    log.warning("tier_down", count=3, key=b"\x01\x02", well=False, text=text, url="redis://u:hunter2222@host")
    [line] = seen
    assert len(line.splitlines()) == 1
    told = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told.pop("time"))
    assert isinstance(told["fields"].pop("text"), str)
    assert "hunter2222" not in told["fields"].pop("url")
    assert told == {
        "level": "warning",
        "component": "kvstrata.part",
        "message": "tier_down",
        "fields": {"count": 3, "key": "0102", "well": False},
    }


@given(st.text())
def test_no_value_can_break_a_line(text: str) -> None:
    seen: list[str] = []
    log = EventLog("anything")
    log._logger = logging.Logger("captured")
    log._logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    log.error("event", value=text)
    assert len(seen[0].splitlines()) <= 1, repr(seen[0])
    assert len(seen[0]) < 2000


def test_repeated_events_are_thinned_and_counted(lines: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = EventLog("part", clock_s=lambda: now[0])
    for _ in range(5):
        log.repeated(logging.WARNING, "kind", "bad_message")
    log.repeated(logging.WARNING, "another kind", "bad_message")
    now[0] = WINDOW_S + 1
    log.repeated(logging.WARNING, "kind", "bad_message")
    assert [record.getMessage() for record in lines.records] == [
        "bad_message",
        "bad_message",
        "bad_message left_out=4",
    ]


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_every_duration_once(seconds: list[float]) -> None:
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    buckets = histogram.buckets()
    assert buckets[-1] == ("+Inf", len(seconds))
    for bound, count in zip(SECONDS_BUCKETS, (count for _, count in buckets), strict=False):
        assert count == sum(value <= bound for value in seconds)
    assert histogram.sum_s == pytest.approx(sum(seconds))


def scrape(counters: ServerCounters, numbers: dict[str, object]) -> str:
    return Pages(ServerCollector("i1", counters, lambda: numbers)).page().decode()


def test_metrics_are_valid_and_carry_what_was_counted() -> None:
    counters = ServerCounters()
    counters.requests["lookup"] = 3
    counters.errors["bad_request"] = 2
    counters.lookup.add(0.003)
    counters.l2_operation("fs-0", "put", 0.5, 4096, {"stored": 2, "failed:io": 1})
    numbers = {"pool": {"used_bytes": 5, "policy": "LRU", "classes": [1]}, "process": {"restarts": True}}
    text = scrape(counters, numbers)
    for line in (
        'kvstrata_instance{instance_id="i1"} 1.0',
        'kvstrata_requests_total{op="lookup"} 3.0',
        'kvstrata_errors_total{code="bad_request"} 2.0',
        'kvstrata_lookup_seconds_bucket{le="0.0025"} 0.0',
        'kvstrata_lookup_seconds_bucket{le="0.005"} 1.0',
        'kvstrata_l2_items_total{adapter="fs-0",operation="put",outcome="failed:io"} 1.0',
        'kvstrata_l2_bytes_total{adapter="fs-0",operation="put"} 4096.0',
        "kvstrata_pool_used_bytes 5.0",
        "kvstrata_process_restarts_total 1.0",
    ):
        assert line in text.splitlines(), line
    assert "LRU" not in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family twice"
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in names)


def test_words_of_a_plugin_cannot_make_labels_without_end() -> None:
    counters = ServerCounters()
    for number in range(1000):
        counters.l2_operation("plugin-0", "load", 0.1, 0, {f"failed:{number}": 1})
    [counted] = counters.l2.values()
    assert len(counted.outcomes) <= MAX_OUTCOME_WORDS + 1
    assert sum(counted.outcomes.values()) == 1000
