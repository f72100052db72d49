"""What is counted of requests, and when a class of service is met."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.config.gateway_model import SloSettings
from kvstrata.gateway.metering import MAX_SERIES, OK, OTHER, Meters
from kvstrata.observability.numbers import Histogram

EVENT = b'data: {"choices":[]}\n\n'


class Now:
    """A clock that a test moves."""

    s = 100.0

    def __call__(self) -> float:
        return self.s


def finish(
    meters: Meters, now: Now, parts: list[bytes], step_s: float = 0.1, slo: str = "", stream: bool = True
) -> None:
    """A request whose parts come `step_s` apart, the first one `step_s` after its arrival."""
    meter = meters.begin("t")
    meter.model, meter.engine, meter.slo, meter.outcome = "m", "e", slo, OK
    now.s += step_s
    meter.begins(now.s, parts[0], stream=stream, itl=meters.of(meter).itl)
    for part in parts[1:]:
        now.s += step_s
        meter.part(now.s, part)
    meters.end(meter)


@given(st.integers(1, 40), st.floats(0.001, 1), st.floats(1, 5_000), st.floats(0.5, 500), st.floats(1, 9_000))
def test_a_class_of_service_is_met_if_each_of_its_times_is(events, step_s, ttft_ms, tpot_ms, e2e_ms):
    now = Now()
    slo = SloSettings(name="c", ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms)
    meters = Meters({"c": slo}, now)
    begun_s = now.s
    finish(meters, now, [EVENT] * events, step_s, "c")
    took_ms = 1000 * (now.s - begun_s)
    first_ms = took_ms / events
    near = any(abs(a - b) < 1e-6 for a, b in ((first_ms, ttft_ms), (first_ms, tpot_ms), (took_ms, e2e_ms)))
    expected = first_ms <= ttft_ms and (events == 1 or first_ms <= tpot_ms) and took_ms <= e2e_ms
    assert near or meters.met["t", "c"] == expected
    assert meters.received["t", "c"] == 1
    series = meters.series["t", "m", "e"]
    assert sum(series.itl.counts) == events - 1
    assert sum(series.tpot.counts) == (events > 1)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 6))
def test_tokens_are_those_of_the_usage_at_the_end(prompt, cached, completion, cuts):
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    text = 'she said: "completion_tokens": 999999'
    document = json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode()
    now = Now()
    meters = Meters({}, now)
    finish(meters, now, [document], stream=False)
    stream = [EVENT] * cuts + [
        b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n",
        b"data: [DONE]\n\n",
    ]
    finish(meters, now, stream)
    tokens = meters.series["t", "m", "e"].tokens
    assert dict(tokens) == {"prompt": 2 * prompt, "cached": 2 * cached, "completion": 2 * completion}


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.none() | st.integers(0, 10**9))
def test_prompts_of_messages_are_counted_with_what_was_cached(new, cached, made):
    usage = {
        "input_tokens": new,
        "output_tokens": 4,
        "cache_creation_input_tokens": made,
        "cache_read_input_tokens": cached,
    }
    now = Now()
    meters = Meters({}, now)
    finish(meters, now, [json.dumps({"content": [], "usage": usage}).encode()], stream=False)
    started = {"type": "message_start", "message": {"usage": {**usage, "output_tokens": 0}}}
    ended = {"type": "message_delta", "usage": usage}
    finish(meters, now, [b"data: " + json.dumps(one).encode() + b"\n\n" for one in (started, ended)])
    tokens = meters.series["t", "m", "e"].tokens
    whole = new + cached + (made or 0)
    assert dict(tokens) == {"prompt": 2 * whole, "cached": 2 * cached, "completion": 8}


class Passed(NamedTuple):
    """What a thread has measured."""

    events: int
    last_s: float
    gaps: list[int]
    gaps_s: float
    tail: bytes


def test_what_a_thread_has_passed_on_counts_as_if_it_had_come_part_by_part() -> None:
    now, usage = Now(), b'data: {"usage": {"prompt_tokens": 7, "completion_tokens": 4}}\n\n'
    meters, spliced = Meters({}, now), Meters({}, Now())
    finish(meters, now, [EVENT, EVENT, EVENT, usage])
    meter = spliced.begin("t")
    meter.model, meter.engine, meter.outcome = "m", "e", OK
    itl = spliced.of(meter).itl
    meter.begins(100.1, EVENT, stream=True, itl=itl)
    timed = Histogram(itl.bounds)
    for _ in range(3):
        timed.add(0.1)
    meter.spliced(Passed(3, 100.4, timed.counts, timed.sum_s, EVENT + EVENT + EVENT + usage))
    spliced.end(meter)
    one, other = meters.series["t", "m", "e"], spliced.series["t", "m", "e"]
    assert one.tokens == other.tokens and one.outcomes == other.outcomes
    assert other.itl.counts == timed.counts
    assert other.itl.sum_s == pytest.approx(one.itl.sum_s)
    for name in ("ttft", "tpot", "e2e"):
        assert getattr(one, name).sum_s == pytest.approx(getattr(other, name).sum_s), name


def test_the_number_of_series_is_bounded() -> None:
    now = Now()
    meters = Meters({}, now)
    for number in range(MAX_SERIES + 50):
        meter = meters.begin("t")
        meter.model, meter.outcome = str(number), "refused"
        meters.end(meter)
    assert len(meters.series) == MAX_SERIES + 1
    assert meters.series[OTHER, OTHER, OTHER].outcomes["refused"] == 50
