"""Counters of an engine's queue against a plain list of the requests in flight, for any order of the calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.gateway.routing.model import EngineState
from kvstrata.gateway.routing.queues import MOST_SHARE, UNMEASURED, Flight, Queue, Sending
from kvstrata.gateway.routing.rates import MOST_FACTOR, Line, PrefillRates

TOKENS = st.integers(0, 50_000)
STEPS = st.sampled_from([0.0, 0.001, 0.5, 7.0])
WHICH = st.integers(0, 19)


def queue_at(tokens_s: float) -> Queue:
    return Queue(EngineState(name="a", prefill_tokens_s=tokens_s), PrefillRates(tokens_s))


class Counters(RuleBasedStateMachine):
    """The model knows only which requests are in flight, and what each was said to need."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 50.0
        self.queue = queue_at(1_000.0)
        self.sent: list[Flight] = []
        self.flights: dict[Flight, dict[str, Any]] = {}
        self.full = False

    @rule(step=STEPS)
    def time_passes(self, step: float) -> None:
        self.now_s += step

    @rule(
        tokens=TOKENS,
        ours=st.booleans(),
        whole_s=st.none() | st.sampled_from([0.0, 0.2, 9.0]),
        held=st.booleans(),
        limit_s=st.sampled_from([0.0, 0.25]),
    )
    def send(self, tokens: int, ours: bool, whole_s: float | None, held: bool, limit_s: float) -> None:
        until_s = math.inf if whole_s is None else self.now_s + whole_s
        flight = self.queue.send(
            tokens, self.now_s, Sending(whole_s is None, ours, until_s, limit_s, held),
        )  # fmt: skip
        self.sent.append(flight)
        self.flights[flight] = {
            "tokens": tokens, "runs": False, "ours": ours, "until_s": until_s,
            "held": held, "limit_s": limit_s,
        }  # fmt: skip
        self._note_full()

    def _waiting(self) -> list[dict[str, Any]]:
        """In the order in which they began to wait."""
        waiting = [self.flights[one] for one in self.queue.waiting]
        assert all(one in waiting for one in self.flights.values() if not (one["runs"] or one["held"]))
        return waiting

    def _note_full(self) -> None:
        self.full |= sum(one["ours"] for one in self._waiting()) >= UNMEASURED

    @rule(which=WHICH, tokens=TOKENS)
    def begins(self, which: int, tokens: int) -> None:
        if which < len(self.sent):
            self.queue.begin(self.sent[which], tokens, self.now_s)
            known = self.flights.get(self.sent[which])
            if known is not None and known["held"]:
                known.update(held=False, tokens=tokens)
                self._note_full()

    @rule(which=WHICH)
    def first_token(self, which: int) -> None:
        if which < len(self.sent):
            flight = self.sent[which]
            known = self.flights.get(flight)
            if known is not None and known["held"]:
                known["held"] = False
                self.queue.begin(flight, flight.tokens, self.now_s)
                self._note_full()
            oldest = next(iter(self.queue.waiting), None)
            self.queue.first_token(flight, self.now_s)
            if flight is oldest:
                # A first token says that nothing but the others' tokens is left.
                backlog = self.queue.backlog_tokens(self.now_s)
                assert backlog == pytest.approx(self.queue.state.prefill_tokens)
            if flight in self.flights:
                self.flights[flight]["runs"] = True

    @rule(which=WHICH)
    def end(self, which: int) -> None:
        if which < len(self.sent):
            self.queue.end(self.sent[which], self.now_s)
            self.flights.pop(self.sent[which], None)

    @rule()
    def rate(self) -> None:
        self.queue.rate(Line(0.01, 0.001), 100.0, self.now_s)

    @invariant()
    def counters_are_sums(self) -> None:
        state, flights = self.queue.state, list(self.flights.values())
        waiting = self._waiting()
        held = [flight for flight in flights if flight["held"]]
        rate = state.prefill_tokens_s
        assert (state.requests, state.waiting) == (len(flights), len(waiting))
        assert state.running == len(flights) - len(waiting) - len(held)
        assert state.prefill_tokens == sum(flight["tokens"] for flight in waiting)
        assert state.behind_s * rate == pytest.approx(sum(flight["tokens"] for flight in waiting[1:]))
        assert state.inflight_tokens == sum(flight["tokens"] for flight in flights if not flight["held"])
        limits = [flight["limit_s"] for flight in flights if flight["limit_s"]]
        assert (state.limited, self.queue._limits_s) == (len(limits), sum(limits))
        assert 0 <= self.queue.prompt_share(self.now_s) <= MOST_SHARE
        assert 0 <= state.missed <= state.limited and state.pace_s >= state.token_s
        assert self.queue.ours == sum(flight["ours"] for flight in flights)
        assert 0 <= self.queue.backlog_tokens(self.now_s) <= state.prefill_tokens + 1e-6
        assert state.queue_s(self.now_s) >= 0.0
        assert (self.queue.period is not None) == bool(waiting)

    @invariant()
    def room_is_what_our_waiting_prompts_leave(self) -> None:
        before = [one for one in self._waiting() if one["ours"]]
        self.full &= bool(before)
        taking = [one["tokens"] for one in before if one["until_s"] > self.now_s]
        for most_s in (0.0, 0.5, 60.0):
            room = len(taking) < 2 or sum(taking) <= most_s * self.queue.state.prefill_tokens_s
            assert self.queue.has_room(most_s, self.now_s, measured=True) == room
        assert self.queue.has_room(0.5, self.now_s, measured=False) == (not taking or not self.full)
        alarms = [one["until_s"] for one in before if self.now_s < one["until_s"] < math.inf]
        assert self.queue.next_room_s(self.now_s) == min(alarms, default=math.inf)

    def teardown(self) -> None:
        for which in range(len(getattr(self, "sent", ()))):
            self.end(which)
            self.counters_are_sums()


TestCounters = Counters.TestCase


def queue_of(*tokens: int) -> tuple[Queue, list[Flight]]:
    """An engine of 1,000 tokens a second with requests sent at second 10."""
    queue = queue_at(1_000.0)
    return queue, [queue.send(each, 10.0) for each in tokens]


def waits(queue: Queue, *times_s: float) -> Any:
    return pytest.approx([queue.state.queue_s(now_s) for now_s in times_s])


def test_a_queue_drains_at_the_measured_rate_but_not_past_its_oldest_request() -> None:
    queue, (first, _) = queue_of(2_000, 3_000)
    assert waits(queue, 10.0, 11.5, 14.0, 15.0) == [5.0, 3.5, 3.0, 3.0]
    queue.first_token(first, 15.0)
    assert waits(queue, 15.0, 16.5, 18.0) == [3.0, 1.5, 0.0]


def test_an_engine_that_is_late_is_expected_to_take_as_long_again() -> None:
    queue, (first, second) = queue_of(2_000, 3_000)
    assert waits(queue, 15.0, 16.0, 75.0) == [3.0, 4.0, 63.0]
    third = queue.send(10_000, 75.0)
    assert waits(queue, 75.0) == [13.0 + 50.0]
    queue.first_token(first, 75.0)
    assert waits(queue, 75.0) == [13.0]
    for flight in (first, second, third):
        queue.end(flight, 75.0)
    assert waits(queue, 999.0) == [0.0]
    queue.send(1_000, 1_000.0)
    assert waits(queue, 1_000.0, 1_001.0, 1_003.0) == [1.0, 0.0, 2.0]


def test_an_engine_that_takes_twice_as_long_for_its_first_prompts_counts_as_slow_before_they_are_a_sample() -> (
    None
):
    rates = PrefillRates(1_000.0)
    for tokens in range(1_000, 3_000, 100):
        rates.observe("other", tokens, tokens / 1_000, 0)
    queue = Queue(EngineState(name="a", prefill_tokens_s=1_000.0), rates)
    first, _, _ = (queue.send(1_000, 0.0) for _ in range(3))

    def rate(now_s: float) -> float:
        queue.rate(None, 0.0, now_s)
        return queue.state.prefill_tokens_s

    assert rate(5.5) == pytest.approx(1_000, rel=0.05), "it may have begun with a long step"
    queue.first_token(first, 8.0)
    assert rate(12.0) == pytest.approx(250, rel=0.05)
    queue.state.prefill_tokens_s = 1.0
    assert rate(12.0) == pytest.approx(250, rel=0.05), "it is found anew each time"
    assert rate(1e6) == pytest.approx(1_000 / MOST_FACTOR, rel=0.05)
    spoiled = queue.send(1, 1e6)
    spoiled.exclude_sample()
    assert rate(1e6) == pytest.approx(1_000, rel=0.05), "a load takes its own time"


def test_nobody_is_late_with_an_answer_that_comes_whole() -> None:
    queue, (first,) = queue_of(2_000)
    whole = queue.send(1_000, 10.0, Sending(streams=False))
    assert waits(queue, 99.0) == [1.0], "what is behind the oldest"
    queue.first_token(first, 99.0)
    assert waits(queue, 199.0) == [0.0]
    queue.first_token(whole, 200.0)
    queue.send(1_000, 300.0)
    assert waits(queue, 303.0) == [2.0]


def test_a_first_token_that_comes_early_or_late_corrects_the_backlog() -> None:
    for at_s in (10.5, 14.0):  # Thought to need 2 s.
        queue, (first, _) = queue_of(2_000, 3_000)
        queue.first_token(first, at_s)
        assert waits(queue, at_s) == [3.0]


def test_the_first_token_of_a_younger_request_takes_only_its_own_tokens() -> None:
    queue, (_, second) = queue_of(2_000, 500)
    queue.first_token(second, 11.0)
    assert waits(queue, 11.0) == [1.5]  # 1,000 done, 500 of them for this request.


def test_an_answer_is_told_with_the_requests_and_prompts_beside_it() -> None:
    queue = queue_at(1_000.0)
    one, failed = queue.send(500, 0.0), queue.send(5, 0.0)
    assert queue.end(failed, 0.5) is None
    queue.first_token(one, 1.0)
    two = queue.send(700, 3.0)
    queue.first_token(two, 4.0)
    queue.end(two, 7.0)
    assert queue.end(one, 11.0) == (10.0, pytest.approx(1.4), 700)
