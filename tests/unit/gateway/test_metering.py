"""What is counted of requests, and when a class of service is met."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.config.gateway_model import SloSettings
from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.marks import OK, Marks, marks_of
from kvstrata.gateway.metering import MAX_MODELS, MAX_SERIES, OTHER, Meters, measured
from kvstrata.gateway.routing.rates import Decoded
from tests.unit.gateway.requests import a_request


@given(st.integers(1, 40), st.floats(0.001, 1), st.floats(1, 5_000), st.floats(0.5, 500), st.floats(1, 9_000))
def test_a_class_of_service_is_met_if_each_of_its_times_is(events, step_s, ttft_ms, tpot_ms, e2e_ms):
    """A request whose events come `step_s` apart, the first one `step_s` after its arrival."""
    slo = SloSettings(name="c", ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms)
    meters, meter = Meters({"c": slo}), a_request(100.0, "t")
    meter.model, meter.engine, meter.slo, meter.outcome = "m", "e", "c", OK
    meter.events, meter.first_s, meter.last_s = events, 100.0 + step_s, 100.0 + events * step_s
    meters.end(meter)
    took_ms, first_ms = 1000 * (meter.last_s - 100.0), 1000 * (meter.first_s - 100.0)
    near = any(abs(a - b) < 1e-6 for a, b in ((first_ms, ttft_ms), (first_ms, tpot_ms), (took_ms, e2e_ms)))
    expected = first_ms <= ttft_ms and (events == 1 or first_ms <= tpot_ms) and took_ms <= e2e_ms
    assert near or meters.met["t", "c"] == expected
    assert meters.received["t", "c"] == 1
    assert sum(meters.times["m"].tpot.counts) == (events > 1)


def test_the_number_of_series_is_bounded() -> None:
    meters = Meters({})
    for number in range(MAX_SERIES + 50):
        meter = a_request(0.0, "t")
        meter.model, meter.outcome, meter.first_s, meter.last_s = str(number), OK, 1.0, 2.0
        meters.end(meter)
    assert len(meters.series) == MAX_SERIES + 1
    assert meters.series[OTHER, OTHER, OTHER].outcomes[OK] == 50
    assert len(meters.times) == MAX_MODELS + 1


def test_requests_of_alike_lengths_are_summed_for_the_plan_with_what_was_computed() -> None:
    meters = Meters({"c": SloSettings(name="c", ttft_ms=1_500)})
    for prompt, cached, first_s in ((4_000, 2_900, 1.0), (4_000, 2_800, 2.0), (4_000, 0, 1.0)):
        meter = a_request(0.0, "t")
        meter.model, meter.engine, meter.slo, meter.outcome = "m", "e", "c", OK
        meter.tokens = {"prompt": prompt, "cached": cached, "completion": 100}
        meter.first_s, meter.last_s = first_s, 5.0
        meters.end(meter)
    assert list(meters.shapes.values()) == [[2, 1, 2_300, 200], [1, 1, 4_000, 100]]
    fleet = Fleet(lambda: 0.0)
    fleet.set_places([Place("e", Address("10.0.0.1", 8_000, False), instance="i")])
    fleet.up(fleet.engines["e"], {"m": {}})
    told = asyncio.run(measured(fleet, meters, "kvstrata"))
    assert told.rated == [] and {one.group for one in told.shapes} == {"m i"}
    fleet.rates.observe("e", 1_000, 0.1, 0)
    for requests in range(1, 20):
        decoded = Decoded(2.0 + 0.1 * requests, float(requests), 0)
        fleet.decode_rates.observe("e", "m", decoded, 200)
    [rated] = asyncio.run(measured(fleet, meters, "kvstrata")).rated
    assert (rated.url, rated.role) == ("http://10.0.0.1:8000", "both")
    assert abs(rated.alone_s - 0.01) < 2e-3 and abs(rated.each_s - 5e-4) < 1e-4
    assert asyncio.run(measured(fleet, meters, "nixl")).rated[0].group == "m"
    fleet.peers = True
    assert asyncio.run(measured(fleet, meters, "kvstrata")).rated[0].group == "m"
    assert sum(one.requests for one in told.shapes) == 3 and sum(one.met for one in told.shapes) == 2


@given(st.binary(max_size=200) | st.lists(st.binary(max_size=20), min_size=8, max_size=8).map(b" ".join))
def test_any_line_is_read_or_passed_over(line: bytes) -> None:
    assert marks_of(line) is None or isinstance(marks_of(line), Marks)


def test_outcomes_tell_who_has_ended_a_request() -> None:
    told = "100.5,101.5,3,{whole},0,11,7,5,-1,-1,stop,"
    for line, outcome in (
        ("17 DownstreamEnd 200 1.2.3.4:80 - 1", "ok"),
        ("17 DownstreamEnd 200 1.2.3.4:80 UPE 1", "broke_off"),
        ("17 DownstreamEnd 200 1.2.3.4:80 DC 1", "cancelled"),
        ("17 DownstreamEnd 0 1.2.3.4:80 DC 1", "cancelled"),
        ("17 DownstreamEnd 503 1.2.3.4:80 UF,URX 3", "connect"),
        ("17 DownstreamEnd 503 - UH 0", "connect"),
        ("17 DownstreamEnd 502 1.2.3.4:80 UPE 1", "no_answer"),
        ("17 DownstreamEnd 504 1.2.3.4:80 SI 1", "no_answer"),
        ("17 DownstreamEnd 429 1.2.3.4:80 - 3", "engine_busy"),
        ("17 DownstreamEnd 404 1.2.3.4:80 - 1", "client_error"),
        ("17 DownstreamEnd 500 1.2.3.4:80 - 1", "engine_error"),
    ):
        marks = marks_of(f"{line} {told.format(whole=int(outcome == 'ok'))} 5.6".encode())
        assert marks is not None
        assert (marks.outcome, marks.number, marks.stream) == (outcome, 17, "5.6"), line
        assert marks.tokens == {"prompt": 11, "cached": 7, "completion": 5}
