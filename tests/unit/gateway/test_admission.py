"""When requests wait in the gateway, in which order they are sent on, and that nothing stays reserved."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.config.gateway_model import QueueSettings, SloSettings
from kvstrata.gateway.admission import GONE, Admission
from kvstrata.gateway.choosing import Choice, Choosing
from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.errors import Failure
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.request import Request
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.routing.choose import POLICIES
from kvstrata.gateway.routing.queues import UNMEASURED
from tests.harness.amount import amount
from tests.unit.gateway.requests import a_request

RATE = 10_000.0
"""Tokens that each engine computes a second."""
SLO = {
    "quick": SloSettings(name="quick", ttft_ms=1_000, shed=True),
    "strict": SloSettings(name="strict", ttft_ms=1_000),
    "slow": SloSettings(name="slow", ttft_ms=5_000),
}


class Alarm:
    """A timer of the scene's clock."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Scene:
    """Engines that do what a test says, before a clock that it moves."""

    def __init__(self, engines: int = 1, measured: bool = True, **settings: Any) -> None:
        self.now_s = 100.0
        self.alarms: list[tuple[float, int, Alarm]] = []
        self.numbers = itertools.count()
        self.fleet = Fleet(self.clock)
        self.set_engines(engines)
        if measured:
            for engine in self.fleet.engines.values():
                self.fleet.rates.observe(engine.name, 1_000, 1_000 / RATE, 0)
        self.meters = Meters(dict(SLO))
        self.choosing = Choosing(POLICIES["ttft"], self.fleet, Residency(self.clock), self.meters, self.clock)
        queue = QueueSettings(**{"max_requests": 1_024, "ahead_s": 0.0, **settings})
        self.admission = Admission(queue, self.choosing, self.fleet, self.clock, self.later)

    def clock(self) -> float:
        return self.now_s

    def later(self, delay_s: float, call: Callable[[], None]) -> Alarm:
        alarm = Alarm(call)
        heapq.heappush(self.alarms, (self.now_s + delay_s, next(self.numbers), alarm))
        return alarm

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and alarms ring."""
        until_s = self.now_s + seconds
        while self.alarms and self.alarms[0][0] <= until_s:
            at_s, _, alarm = heapq.heappop(self.alarms)
            self.now_s = max(self.now_s, at_s)
            if alarm.call is not None:
                alarm.call()
        self.now_s = until_s

    def set_engines(self, count: int) -> None:
        places = [Place(f"e{number}", Address("127.0.0.1", number + 1, False)) for number in range(count)]
        self.fleet.set_places(places)
        for engine in self.fleet.engines.values():
            self.fleet.up(engine, {"m": {}})

    def ask(
        self,
        tenant: str = "",
        slo: str = "",
        tokens: int = 1_000,
        weight: float = 1.0,
        priority: int = 0,
        **more: Any,
    ) -> Request:
        """A request arrives."""
        ask = a_request(self.clock(), tenant, tokens, next(self.numbers), weight, **more)
        ask.slo, ask.priority = slo, priority
        self.admission.enter(ask)
        return ask

    def fill(self) -> list[Request]:
        """Requests of a tenant of their own, until no engine has room."""
        asks = []
        while not asks or is_admitted(asks[-1]):
            asks.append(self.ask("filler"))
        self.admission.leave(asks.pop())
        return asks

    def answer(self, ask: Request) -> None:
        """The first token of a request comes, and its end."""
        choice = choice_of(ask)
        self.choosing.first_token(choice)
        self.choosing.ended(choice, answered=True)

    def order(self, under_way: list[Request], waiting: list[Request]) -> list[Request]:
        """The order in which requests are sent on as the engines answer one after the other."""
        order: list[Request] = []
        under_way = list(under_way)
        while under_way:
            self.answer(under_way.pop(0))
            fresh = [one for one in waiting if is_admitted(one) and one not in order]
            order += fresh
            under_way += fresh
        return order

    def assert_idle(self) -> None:
        """Nothing is held of any request."""
        assert (len(self.admission), self.admission.size_bytes) == (0, 0)
        for engine in self.fleet:
            load = engine.load
            assert (load.requests, load.waiting, load.prefill_tokens) == (0, 0, 0)


def is_admitted(ask: Request) -> bool:
    return isinstance(ask.found, Choice)


def choice_of(ask: Request) -> Choice:
    """The choice of a request that was admitted."""
    assert isinstance(ask.found, Choice)
    return ask.found


def refusal_of(ask: Request) -> str:
    assert isinstance(ask.found, Failure) and ask.found.status == 429 and ask.found.retry_after_s >= 1
    return ask.found.code


def test_nothing_waits_with_room_or_without_the_queue() -> None:
    for scene in (Scene(max_requests=0), Scene(ahead_s=60.0), Scene(engines=30)):
        assert all(is_admitted(scene.ask()) for _ in range(50))
    scene = Scene(engines=2)
    assert len(scene.fill()) == 4, "two prompts for each engine"


def test_an_engine_whose_rate_is_not_known_computes_all_that_it_has_before_it_gets_more() -> None:
    scene = Scene(measured=False)
    under_way = scene.fill()
    assert len(under_way) == UNMEASURED
    waiting = scene.ask()
    for ask in under_way[:-1]:
        scene.choosing.first_token(choice_of(ask))
        assert waiting.found is None
    scene.choosing.first_token(choice_of(under_way[-1]))
    assert is_admitted(waiting)


def test_an_answer_that_comes_whole_keeps_no_one_waiting_until_its_end() -> None:
    scene = Scene()
    for _ in range(2):
        assert is_admitted(scene.ask(streams=False))
    waiting = scene.ask()
    assert waiting.found is None
    scene.pass_s(0.1)
    assert is_admitted(waiting), "the first prompt was to take 0.1 s"


def test_the_earliest_deadline_is_next_and_requests_without_one_are_not_starved() -> None:
    scene = Scene()
    under_way = scene.fill()
    patient = scene.ask()
    slow = scene.ask(slo="slow")
    strict = scene.ask(slo="strict")
    assert scene.order(under_way, [patient, slow, strict]) == [strict, slow, patient]
    under_way = scene.fill()
    patient = scene.ask()
    scene.pass_s(9.5)  # of its 10 s
    stream = [scene.ask(slo="slow") for _ in range(8)]
    assert scene.order(under_way, [patient, *stream])[0] is patient
    scene.assert_idle()


def test_a_priority_counts_as_an_earlier_arrival() -> None:
    scene = Scene()
    under_way = scene.fill()
    plain = scene.ask()
    scene.pass_s(1.5)
    asks = [scene.ask(priority=priority) for priority in (0, 1, 2)]
    assert scene.order(under_way, [plain, *asks]) == [asks[2], plain, asks[1], asks[0]]


def test_a_class_that_sheds_is_refused_when_its_deadline_cannot_be_met() -> None:
    scene = Scene()
    under_way = scene.fill()
    waiting = scene.ask(slo="quick")
    assert waiting.found is None
    scene.pass_s(1.01)
    assert refusal_of(waiting) == "slo_unreachable"
    others = [scene.ask(slo="strict") for _ in range(12)]
    assert scene.order(under_way, others) == others
    scene.assert_idle()


def test_a_class_that_sheds_is_refused_at_once_behind_more_than_its_deadline_allows() -> None:
    scene = Scene(max_requests=0)
    assert is_admitted(scene.ask(slo="quick", tokens=30_000)), "nothing is refused by an idle engine"
    assert refusal_of(scene.ask(slo="quick")) == "slo_unreachable"
    assert is_admitted(scene.ask(slo="strict"))


def test_what_misses_its_deadline_without_shedding_lets_others_pass() -> None:
    scene = Scene()
    under_way = scene.fill()
    missed = scene.ask(slo="strict")
    scene.pass_s(1.5)
    assert missed.found is None and missed.late
    fresh = scene.ask(slo="slow")
    assert scene.order(under_way, [missed, fresh]) == [fresh, missed]


@pytest.mark.parametrize("bound", ["requests", "bytes"])
def test_a_full_queue_takes_its_place_from_the_tenant_that_has_most(bound, monkeypatch):
    scene = Scene(**({"max_requests": 6} if bound == "requests" else {}))
    if bound == "bytes":
        monkeypatch.setattr("kvstrata.gateway.admission.MAX_BYTES", 6 * 4_000)
    under_way = scene.fill()
    flood = [scene.ask("flood") for _ in range(9)]
    assert [one.found is None for one in flood] == [True] * 6 + [False] * 3
    assert refusal_of(flood[-1]) == "queue_full"
    light = scene.ask("light")
    assert light.found is None and refusal_of(flood[5]) == "queue_full"
    assert light in scene.order(under_way, [*flood, light])[:2]
    scene.assert_idle()


def test_tenants_are_served_by_weight_whatever_they_have_waiting() -> None:
    scene = Scene()
    under_way = scene.fill()
    flood = [scene.ask("flood") for _ in range(40)]
    heavy = [scene.ask("heavy", weight=3.0) for _ in range(20)]
    light = [scene.ask("light", tokens=250) for _ in range(20)]
    order = scene.order(under_way, [*flood, *heavy, *light])
    first = [one.sender for one in order[:40]]
    assert abs(first.count("heavy") - 3 * first.count("flood")) <= 3
    assert abs(first.count("light") - 4 * first.count("flood")) <= 4
    assert len(order) == 80
    scene.assert_idle()


def test_who_comes_late_to_a_flood_is_next_and_gets_nothing_for_the_time_before() -> None:
    scene = Scene()
    under_way = scene.fill()
    flood = [scene.ask("flood") for _ in range(30)]
    for _ in range(10):
        scene.answer(under_way.pop(0))
        under_way += [one for one in flood if is_admitted(one) and one not in under_way][-1:]
    late = [scene.ask("late") for _ in range(10)]
    rest = [one for one in flood if one.found is None]
    order = [one.sender for one in scene.order(under_way, [*late, *rest])]
    assert order[0] == "late" and order[:12].count("late") in (6, 7)


def test_models_wait_for_their_own_engines() -> None:
    scene = Scene(engines=2)
    one, other = scene.fleet.engines.values()
    one.models, other.models = {"m": {}}, {"n": {}}
    asks = [scene.ask(model="m") for _ in range(3)]
    assert [is_admitted(ask) for ask in asks] == [True, True, False]
    assert is_admitted(scene.ask(model="n"))
    scene.fleet.down(one, "a test")
    assert isinstance(asks[2].found, Failure) and asks[2].found.code == "no_engine"


class Anything(RuleBasedStateMachine):
    """Arrivals, first tokens, ends, failures, departures, engines that go and come, and settings, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene(engines=2, max_requests=6)
        self.asks: list[Request] = []
        self.begun: set[int] = set()

    @property
    def admitted(self) -> list[Request]:
        return [one for one in self.asks if is_admitted(one)]

    @property
    def waiting(self) -> list[Request]:
        return [one for one in self.asks if one.found is None]

    @rule(
        tenant=st.sampled_from(["", "a", "b"]),
        slo=st.sampled_from(["", *SLO]),
        tokens=st.integers(1, 9_000),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        priority=st.integers(0, 3),
        streams=st.booleans(),
    )
    def arrives(self, **values: Any) -> None:
        self.asks.append(self.scene.ask(**values))

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.scene.pass_s(seconds)

    @precondition(lambda self: self.admitted)
    @rule(draw=st.data(), how=st.sampled_from(["first", "answered", "failed", "untaken"]))
    def goes_on(self, draw: st.DataObject, how: str) -> None:
        ask = draw.draw(st.sampled_from(self.admitted))
        choosing, choice = self.scene.choosing, choice_of(ask)
        if how == "first":
            choosing.first_token(choice)
        elif how == "untaken":
            self.scene.admission.leave(ask)
        else:
            ask.found = GONE
            choosing.ended(choice, answered=how == "answered")
            if how == "answered":
                choosing.learn(choice, choice.wanted.tokens, 0)

    @precondition(lambda self: self.waiting)
    @rule(draw=st.data())
    def client_leaves(self, draw: st.DataObject) -> None:
        ask = draw.draw(st.sampled_from(self.waiting))
        self.scene.admission.leave(ask)

    @rule(name=st.sampled_from(["e0", "e1"]), up=st.booleans())
    def engine_changes(self, name: str, up: bool) -> None:
        engine = self.scene.fleet.engines.get(name)
        if engine is not None:
            self.scene.fleet.up(engine, {"m": {}}) if up else self.scene.fleet.down(engine, "a test")

    @rule(count=st.integers(1, 2))
    def engines_reload(self, count: int) -> None:
        self.scene.set_engines(count)

    @rule(most=st.integers(0, 8), ahead_s=st.sampled_from([0.0, 0.2]))
    def settings_reload(self, most: int, ahead_s: float) -> None:
        self.scene.admission.set(QueueSettings(max_requests=most, ahead_s=ahead_s))
        self.most = most

    most = 6

    @invariant()
    def bounds_hold_and_counts_are_those_of_what_waits(self) -> None:
        admission, waiting = self.scene.admission, self.waiting
        assert len(admission) == len(waiting) <= self.most
        assert admission.size_bytes == sum(one.body_bytes for one in waiting)
        # Of an engine that left and came again, the fleet has forgotten the requests.
        assert sum(engine.load.requests for engine in self.scene.fleet) <= len(self.admitted)

    @invariant()
    def nothing_waits_while_an_engine_is_free(self) -> None:
        if self.waiting:
            assert all(engine.load.waiting for engine in self.scene.fleet.serving("m"))

    def teardown(self) -> None:
        for ask in self.asks:
            self.scene.admission.leave(ask)
        while left := self.admitted:
            self.scene.admission.leave(left[0])
        self.scene.assert_idle()


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=amount(50, 100))
