"""A client that looks late for an answer looks again before it counts its server as silent; tests pass the time in."""

from __future__ import annotations

import pytest

from kvstrata.client.link import LATE_S, PING_PATIENCE_S, SECOND_LOOK_S, Silence

pytestmark = pytest.mark.usefixtures("patience_of_production")


@pytest.fixture
def answering() -> Silence:
    silence = Silence()
    silence.heard()
    return silence


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
