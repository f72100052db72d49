"""Counters of the engines' queues against a plain list of the requests in flight, for any order of the calls."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.gateway.routing.model import EngineState
from kvstrata.gateway.routing.queues import UNMEASURED, Queues

NAMES = ["a", "b", "c"]
REQUESTS = st.integers(0, 19).map(str)
TOKENS = st.integers(0, 50_000)
STEPS = st.sampled_from([0.0, 0.001, 0.5, 7.0, -1.0])


class Counters(RuleBasedStateMachine):
    """The model knows only which requests are in flight, and what each was said to need."""

    @initialize(limit=st.sampled_from([4, 100]))
    def begin(self, limit: int) -> None:
        self.limit = limit
        self.now_s = 50.0
        self.queues = Queues(limit)
        self.states = {name: EngineState(name=name, prefill_tokens_s=1_000.0) for name in NAMES}
        self.known = {"a", "b"}
        self.flights: dict[str, dict[str, Any]] = {}
        self.full: set[str] = set()
        for name in sorted(self.known):
            self.queues.add(self.states[name])

    @rule(step=STEPS)
    def time_passes(self, step: float) -> None:
        self.now_s += step

    @rule(
        request=REQUESTS,
        engine=st.sampled_from(NAMES),
        tokens=TOKENS,
        more=TOKENS,
        ours=st.booleans(),
        whole_s=st.none() | st.sampled_from([0.0, 0.2, 9.0]),
    )
    def dispatched(
        self, request: str, engine: str, tokens: int, more: int, ours: bool, whole_s: float | None
    ) -> None:
        free = engine in self.known and request not in self.flights and len(self.flights) < self.limit
        until_s = math.inf if whole_s is None else self.now_s + whole_s
        assert free == self.queues.dispatched(
            request,
            engine,
            tokens,
            tokens + more,
            self.now_s,
            streams=whole_s is None,
            ours=ours,
            until_s=until_s,
        )
        if free:
            self.flights[request] = {
                "engine": engine, "tokens": tokens, "context": tokens + more, "runs": False,
                "ours": ours, "until_s": until_s,
            }  # fmt: skip
            if sum(1 for flight in self.flights.values() if self.is_before(flight, engine)) >= UNMEASURED:
                self.full.add(engine)

    def is_before(self, flight: dict[str, Any], engine: str) -> bool:
        return flight["engine"] == engine and flight["ours"] and not flight["runs"]

    @rule(request=REQUESTS)
    def first_token(self, request: str) -> None:
        flight = self.flights.get(request)
        said = flight is not None and not flight["runs"]
        oldest = next((other for other in self.flights if self.waits_beside(other, request)), None)
        assert self.queues.first_token(request, self.now_s) == said
        if flight is not None and said:
            flight["runs"] = True
            if oldest == request:
                # A first token says that nothing but the others' tokens is left.
                state = self.states[flight["engine"]]
                assert state.backlog_tokens == state.prefill_tokens

    def waits_beside(self, other: str, request: str) -> bool:
        """Whether `other` waits at the engine of a request in flight."""
        if request not in self.flights:
            return False
        return (
            not self.flights[other]["runs"]
            and self.flights[other]["engine"] == self.flights[request]["engine"]
        )

    @rule(request=REQUESTS)
    def ended(self, request: str) -> None:
        assert self.queues.ended(request, self.now_s) == (request in self.flights)
        self.flights.pop(request, None)

    @rule(engine=st.sampled_from(NAMES))
    def gone(self, engine: str) -> None:
        lost = [request for request, flight in self.flights.items() if flight["engine"] == engine]
        assert self.queues.gone(engine) == sorted(lost)
        for request in lost:
            del self.flights[request]
        self.known.discard(engine)

    @rule(engine=st.sampled_from(NAMES))
    def added(self, engine: str) -> None:
        for request in [each for each, flight in self.flights.items() if flight["engine"] == engine]:
            del self.flights[request]
        self.queues.add(self.states[engine])
        self.known.add(engine)

    @rule(engine=st.sampled_from(NAMES), rate=st.sampled_from([1.0, 500.0, 1e6]))
    def rate(self, engine: str, rate: float) -> None:
        assert self.queues.rate(engine, rate, self.now_s) == (engine in self.known)

    @invariant()
    def counters_are_sums(self) -> None:
        assert len(self.queues) == len(self.flights)
        for name, state in self.states.items():
            flights = [flight for flight in self.flights.values() if flight["engine"] == name]
            waiting = [flight for flight in flights if not flight["runs"]]
            assert state.requests == len(flights)
            assert state.waiting == len(waiting)
            assert state.prefill_tokens == sum(flight["tokens"] for flight in waiting)
            assert state.behind_tokens == sum(flight["tokens"] for flight in waiting[1:])
            assert state.inflight_tokens == sum(flight["tokens"] for flight in flights)
            assert state.context_tokens == sum(flight["context"] for flight in flights)
            assert state.running == sum(flight["runs"] for flight in flights)
            assert 0.0 <= state.backlog_tokens <= state.prefill_tokens
            assert state.queue_s(self.now_s) >= 0.0

    @invariant()
    def room_is_what_our_waiting_prompts_leave(self) -> None:
        alarms = []
        for name, state in self.states.items():
            before = [flight for flight in self.flights.values() if self.is_before(flight, name)]
            if not before:
                self.full.discard(name)
            taking = [flight["tokens"] for flight in before if flight["until_s"] > self.now_s]
            alarms += [flight["until_s"] for flight in before if self.now_s < flight["until_s"] < math.inf]
            for most_s in (0.0, 0.5, 60.0):
                room = len(taking) < 2 or sum(taking) <= most_s * state.prefill_tokens_s
                known = name in self.known
                assert self.queues.has_room(name, most_s, self.now_s, measured=True) == (known and room)
            room = not taking or name not in self.full
            assert self.queues.has_room(name, 0.5, self.now_s, measured=False) == (
                name in self.known and room
            )
        assert self.queues.next_room_s(self.now_s) == min(alarms, default=math.inf)

    def teardown(self) -> None:
        for request in list(getattr(self, "flights", ())):
            self.ended(request)
            self.counters_are_sums()


TestCounters = Counters.TestCase


def queue_of(*tokens: int) -> tuple[Queues, EngineState]:
    """An engine of 1,000 tokens a second with requests 0, 1, … dispatched at second 10."""
    state = EngineState(name="a", prefill_tokens_s=1_000.0)
    queues = Queues()
    queues.add(state)
    for number, each in enumerate(tokens):
        assert queues.dispatched(str(number), "a", each, each, 10.0)
    return queues, state


def test_a_queue_drains_at_the_measured_rate_but_not_past_its_oldest_request() -> None:
    queues, state = queue_of(2_000, 3_000)
    assert [state.queue_s(now_s) for now_s in (10.0, 11.5, 14.0, 15.0)] == [5.0, 3.5, 3.0, 3.0]
    queues.first_token("0", 99.0)
    assert [state.queue_s(now_s) for now_s in (99.0, 100.5, 102.0)] == [3.0, 1.5, 0.0]


def test_an_engine_that_is_late_is_expected_to_take_as_long_again() -> None:
    queues, state = queue_of(2_000, 3_000)
    assert [state.queue_s(now_s) for now_s in (15.0, 16.0, 75.0)] == [3.0, 4.0, 63.0]
    queues.dispatched("2", "a", 10_000, 10_000, 75.0)
    assert state.queue_s(75.0) == 13.0 + 50.0
    queues.first_token("0", 75.0)
    assert state.queue_s(75.0) == 13.0
    for request in "012":
        queues.ended(request, 75.0)
    assert state.queue_s(999.0) == 0.0
    queues.dispatched("3", "a", 1_000, 1_000, 1_000.0)
    assert [state.queue_s(now_s) for now_s in (1_000.0, 1_001.0, 1_003.0)] == [1.0, 0.0, 2.0]


def test_nobody_is_late_with_an_answer_that_comes_whole() -> None:
    queues, state = queue_of(2_000)
    queues.dispatched("whole", "a", 1_000, 1_000, 10.0, streams=False)
    assert state.queue_s(99.0) == 1.0, "what is behind the oldest"
    queues.first_token("0", 99.0)
    assert state.queue_s(199.0) == 0.0
    queues.first_token("whole", 200.0)
    queues.dispatched("1", "a", 1_000, 1_000, 300.0)
    assert state.queue_s(303.0) == 2.0


def test_a_first_token_that_comes_early_or_late_corrects_the_backlog() -> None:
    queues, state = queue_of(2_000, 3_000)
    queues.first_token("0", 10.5)  # Thought to need 2 s.
    assert state.queue_s(10.5) == 3.0
    queues, state = queue_of(2_000, 3_000)
    queues.first_token("0", 14.0)
    assert state.queue_s(14.0) == 3.0


def test_the_first_token_of_a_younger_request_takes_only_its_own_tokens() -> None:
    queues, state = queue_of(2_000, 500)
    queues.first_token("1", 11.0)
    assert state.queue_s(11.0) == 1.5  # 1,000 done, 500 of them for this request.
