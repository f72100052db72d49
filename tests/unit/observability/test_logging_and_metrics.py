"""Lines of the log, metrics, the line of loads, and what spans cost where a package is missing."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError
from kvstrata.observability.explain import ServerNumbers
from kvstrata.observability.load_line import LEAST_BATCHES, LoadLine
from kvstrata.observability.logging import WINDOW_S, EventLog, LogWriter, _JsonFormatter
from kvstrata.observability.numbers import (
    FRESH_S,
    MAX_WORDS,
    SECONDS_BUCKETS,
    Histogram,
    Numbers,
    Pages,
    Words,
    counter,
    gauge,
    histogram,
    parts_by,
)
from kvstrata.observability.tracing import Tracer


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


def test_words_of_a_plugin_cannot_make_labels_without_end() -> None:
    counted = Words()
    for number in range(1000):
        counted.add_foreign(f"failed:{number}")
    counted.add_foreign("no label", 7)
    assert len(counted) == MAX_WORDS + 1 and counted["other"] == 1000 - MAX_WORDS + 7


def test_the_example_of_contributing_counts_and_is_shown_as_it_says():
    page = (Path(__file__).parents[3] / "docs/contributing.md").read_text()
    _, _, example = page.partition("### A number")
    names: dict[str, Any] = {"Numbers": Numbers, "counter": counter}
    exec(example.split("```python")[1].split("```")[0], names)
    assert json.dumps(names["doors"].document()) in example
    metrics = Pages(lambda: [("doors", names["doors"])]).page().decode()
    (sample,) = [line for line in metrics.splitlines() if not line.startswith("#")]
    assert sample in example


def test_a_number_is_shown_at_its_key_and_under_its_labels() -> None:
    class Tier(Numbers):
        bytes = counter("Bytes.", name="tier_bytes")

    class Store(Numbers):
        took = histogram("Time.", "op", bounds=(1.0,), name="seconds")
        pairs = counter("Pairs.", "a", "b")
        waiting = gauge("Waiting.", lambda store: len(store.tiers), key="queue.waiting")
        age = gauge("Age.", lambda store: None)
        tiers_by_name = parts_by("tier", Tier, lambda store: store.tiers, key="tiers")

        def __init__(self) -> None:
            self.tiers = {"fs": Tier()}

    store, other = Store(), Store()
    store.tiers["fs"].bytes += 5
    store.pairs["x", "y"] += 2
    store.took["put"].add(0.5)
    assert store.document() == {
        "pairs": {"x/y": 2}, "queue": {"waiting": 1}, "tiers": {"fs": {"bytes": 5}},
    }  # fmt: skip
    assert other.document()["pairs"] == {}
    assert Pages(lambda: [("s", store)]).page().decode().splitlines() == [
        "# HELP kvstrata_s_seconds Time.",
        "# TYPE kvstrata_s_seconds histogram",
        'kvstrata_s_seconds_bucket{le="1.0",op="put"} 1.0',
        'kvstrata_s_seconds_bucket{le="+Inf",op="put"} 1.0',
        'kvstrata_s_seconds_count{op="put"} 1.0',
        'kvstrata_s_seconds_sum{op="put"} 0.5',
        "# HELP kvstrata_s_pairs_total Pairs.",
        "# TYPE kvstrata_s_pairs_total counter",
        'kvstrata_s_pairs_total{a="x",b="y"} 2.0',
        "# HELP kvstrata_s_waiting Waiting.",
        "# TYPE kvstrata_s_waiting gauge",
        "kvstrata_s_waiting 1.0",
        "# HELP kvstrata_s_age Age.",
        "# TYPE kvstrata_s_age gauge",
        "# HELP kvstrata_s_tier_bytes_total Bytes.",
        "# TYPE kvstrata_s_tier_bytes_total counter",
        'kvstrata_s_tier_bytes_total{tier="fs"} 5.0',
    ]


def test_further_readers_get_the_same_page_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTRATA_TESTING")
    counters, now_s = ServerNumbers(), [100.0]
    made = Pages(lambda: [("", counters)], lambda: now_s[0])
    first = made.page()
    counters.lookup_chunks = 7
    assert made.page() is first
    now_s[0] += FRESH_S
    assert b"kvstrata_lookup_chunks_total 7.0" in made.page()


def test_a_descriptor_that_others_made_non_blocking_loses_nothing_and_a_line_without_a_format_fails_nobody():
    reader, fd = os.pipe()  # the writer's thread never ends, so `fd` stays its own
    writer, logger = LogWriter(fd), logging.Logger("scene")
    logger.addHandler(writer)
    os.set_blocking(fd, False)
    for number in range(2000):
        logger.warning("%099d", number)
    logger.warning("%d", "no number")
    with os.fdopen(reader) as lines:
        assert [int(lines.readline()) for _ in range(2000)] == list(range(2000))
        assert lines.readline().startswith("scene: log line cannot be formatted: TypeError(")
    assert writer.flush_within(60) and writer.dropped_lines == 0


def test_latency_and_rate_are_told_apart_by_batches_of_several_sizes() -> None:
    line = LoadLine()
    for n in range(1, LEAST_BATCHES + 1):
        assert line.fitted() is None
        line.add(n * 1_000_000, 0.004 + n * 0.001)
    latency_s, bytes_s = line.fitted() or (0.0, 0.0)
    assert latency_s == pytest.approx(0.004) and bytes_s == pytest.approx(1e9)


def test_what_became_slower_is_told_soon() -> None:
    line = LoadLine()
    for _ in range(1_000):
        line.add(1_000_000, 0.001)
    for _ in range(200):
        line.add(1_000_000, 0.01)
    assert line.fitted() == (0.0, pytest.approx(1e8, rel=0.1))


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-9, 1e6)), min_size=LEAST_BATCHES))
def test_any_batches_give_what_a_load_can_follow(batches: list[tuple[int, float]]) -> None:
    line = LoadLine()
    for n_bytes, seconds in batches:
        line.add(n_bytes, seconds)
    found = line.fitted()
    assert found is not None
    latency_s, bytes_s = found
    assert math.isfinite(latency_s) and latency_s >= 0 and math.isfinite(bytes_s) and bytes_s > 0


def test_the_error_of_a_missing_extra_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"observability.otlp_endpoint: .*; pip install '\.\[otel\]'"):
        Tracer("http://127.0.0.1:4318", "one")
