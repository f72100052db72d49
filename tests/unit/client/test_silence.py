"""When a client counts its server as silent and when as answering again; tests pass the time in."""

from __future__ import annotations

import math

import pytest

from kvstrata.client.silence import (
    BUSY_PING_S,
    IDLE_PING_S,
    LATE_S,
    PING_PATIENCE_S,
    SECOND_LOOK_S,
    SILENT_PING_S,
    Silence,
)

pytestmark = pytest.mark.usefixtures("patience_of_production")


@pytest.fixture
def answering() -> Silence:
    silence = Silence()
    silence.heard()
    return silence


def test_a_server_is_silent_until_something_is_heard():
    silence = Silence()
    assert silence.silent
    silence.heard()
    assert not silence.silent
    assert silence.spells == 0


def test_a_server_is_silent_once_a_ping_stays_unanswered(answering):
    answering.pinged(10.0)
    assert not answering.check(10.0 + PING_PATIENCE_S - 0.001)
    assert answering.check_due_s() == 10.0 + PING_PATIENCE_S
    assert answering.check(10.0 + PING_PATIENCE_S)
    assert answering.silent
    assert answering.spells == 1


def test_the_first_unanswered_ping_counts_and_anything_heard_answers_all(answering):
    assert not answering.check(1e9) and answering.check_due_s() == math.inf, (
        "without a ping silence proves nothing"
    )
    for k in range(3):
        answering.pinged(10.0 + k * BUSY_PING_S)
    answering.heard()
    assert not answering.check(100.0)
    for k in range(3):
        answering.pinged(110.0 + k * BUSY_PING_S)
    assert answering.check(110.0 + PING_PATIENCE_S)


def test_a_process_that_looks_late_looks_again_before_it_calls_the_server_silent(answering):
    late_s = 10.0 + PING_PATIENCE_S + 2 * LATE_S
    answering.pinged(10.0)
    assert not answering.check(late_s), "the answer may have come while this process did not run"
    assert answering.check_due_s() == late_s + SECOND_LOOK_S
    answering.heard()
    answering.pinged(20.0)
    assert not answering.check(30.0), "the same holds after each answer"


def test_a_process_that_is_always_late_notices_a_silent_server_at_its_second_look(answering):
    answering.pinged(10.0)
    assert not answering.check(15.0)
    answering.pinged(15.0)
    assert not answering.check(15.0 + SECOND_LOOK_S / 2)
    assert answering.check(20.0)
    assert answering.spells == 1


def test_a_server_falls_silent_once_and_answers_when_it_speaks(answering):
    answering.pinged(10.0)
    assert answering.check(10.0 + PING_PATIENCE_S)
    assert not answering.check(12.0), "the server is reported as silent only once"
    answering.heard()
    assert not answering.silent
    assert not answering.check(13.0), "what went unanswered before is forgotten"


def test_pings_are_frequent_while_requests_are_outstanding(answering):
    answering.pinged(10.0)
    assert answering.ping_due_s(busy=True) == 10.0 + BUSY_PING_S
    assert answering.ping_due_s(busy=False) == 10.0 + IDLE_PING_S


def test_a_silent_server_is_pinged_less_than_a_second_apart(answering):
    answering.pinged(10.0)
    answering.check(10.0 + PING_PATIENCE_S)
    assert answering.ping_due_s(busy=False) == answering.ping_due_s(busy=True) == 10.0 + SILENT_PING_S
    assert SILENT_PING_S + PING_PATIENCE_S < 1.0


def test_a_lost_connection_is_silence_and_the_next_one_is_pinged_at_once(answering):
    answering.pinged(10.0)
    answering.lost()
    assert answering.silent
    assert answering.spells == 1
    assert answering.ping_due_s(busy=False) == -math.inf
    answering.lost()
    assert answering.spells == 1
