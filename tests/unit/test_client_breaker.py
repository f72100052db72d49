"""When the client stops asking and when it asks again; time is a number here."""

from __future__ import annotations

import math

import pytest

from kvstrata.client.breaker import (
    BUSY_PING_S,
    IDLE_PING_S,
    LATE_S,
    OPEN_PING_S,
    PING_PATIENCE_S,
    SECOND_LOOK_S,
    Breaker,
)


@pytest.fixture
def closed() -> Breaker:
    breaker = Breaker()
    breaker.heard()
    return breaker


def test_it_is_open_until_something_is_heard():
    breaker = Breaker()
    assert breaker.is_open
    breaker.heard()
    assert not breaker.is_open
    assert breaker.trips == 0


def test_it_opens_when_a_ping_stays_unanswered(closed):
    closed.pinged(10.0)
    assert not closed.check(10.0 + PING_PATIENCE_S - 0.001)
    assert closed.check_due_s() == 10.0 + PING_PATIENCE_S
    assert closed.check(10.0 + PING_PATIENCE_S)
    assert closed.is_open
    assert closed.trips == 1


def test_later_pings_do_not_excuse_the_first(closed):
    for k in range(3):
        closed.pinged(10.0 + k * BUSY_PING_S)
    assert closed.check(10.0 + PING_PATIENCE_S)


def test_silence_without_a_ping_proves_nothing(closed):
    assert not closed.check(1e9)
    assert closed.check_due_s() == math.inf


def test_anything_heard_answers_all_pings(closed):
    closed.pinged(10.0)
    closed.heard()
    assert not closed.check(100.0)


def test_who_looks_late_looks_again_before_it_calls_the_server_silent(closed):
    late_s = 10.0 + PING_PATIENCE_S + 2 * LATE_S
    closed.pinged(10.0)
    assert not closed.check(late_s), "the answer may have come while this process did not run"
    assert closed.check_due_s() == late_s + SECOND_LOOK_S
    closed.heard()
    closed.pinged(20.0)
    assert not closed.check(30.0), "and so after each answer"


def test_a_process_that_is_always_late_notices_a_silent_server_at_its_second_look(closed):
    closed.pinged(10.0)
    assert not closed.check(15.0)
    closed.pinged(15.0)
    assert not closed.check(15.0 + SECOND_LOOK_S / 2)
    assert closed.check(20.0)
    assert closed.trips == 1


def test_it_opens_once_and_closes_when_the_server_speaks(closed):
    closed.pinged(10.0)
    assert closed.check(10.0 + PING_PATIENCE_S)
    assert not closed.check(12.0), "it opens only once"
    closed.heard()
    assert not closed.is_open
    assert not closed.check(13.0), "what went unanswered before is forgotten"


def test_pings_are_frequent_while_requests_are_outstanding(closed):
    closed.pinged(10.0)
    assert closed.ping_due_s(busy=True) == 10.0 + BUSY_PING_S
    assert closed.ping_due_s(busy=False) == 10.0 + IDLE_PING_S


def test_an_open_breaker_goes_on_pinging_less_than_a_second_apart(closed):
    closed.pinged(10.0)
    closed.check(10.0 + PING_PATIENCE_S)
    assert closed.ping_due_s(busy=False) == closed.ping_due_s(busy=True) == 10.0 + OPEN_PING_S
    assert OPEN_PING_S + PING_PATIENCE_S < 1.0


def test_a_lost_connection_opens_it_and_the_next_one_is_pinged_at_once(closed):
    closed.pinged(10.0)
    closed.trip()
    assert closed.is_open
    assert closed.trips == 1
    assert closed.ping_due_s(busy=False) == -math.inf
    closed.trip()
    assert closed.trips == 1
