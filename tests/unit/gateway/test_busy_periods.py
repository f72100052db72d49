"""What busy periods tell of an engine's speed."""

from __future__ import annotations

from kvstrata.gateway.busy_periods import Busy, BusyPeriod
from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Fleet, Place, ServingEngine


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def served() -> tuple[Clock, Fleet, ServingEngine]:
    clock = Clock()
    fleet = Fleet(clock, 0.0)
    [engine] = fleet.set_places([Place("a", Address("127.0.0.1", 1, False))])
    fleet.up(engine, {"m": {}})
    return clock, fleet, engine


def begin(clock: Clock, fleet: Fleet, engine: ServingEngine, number: str, at_s: float) -> BusyPeriod:
    clock.now_s = at_s
    return fleet.began(engine, number, 1_000, 1_000)


def test_prompts_that_share_steps_are_timed_together() -> None:
    clock, fleet, engine = served()
    first = begin(clock, fleet, engine, "1", 100.0)
    assert begin(clock, fleet, engine, "2", 100.5) is first
    clock.now_s = 101.0
    fleet.answers(engine, "1")
    clock.now_s = 103.0
    fleet.answers(engine, "2")
    assert begin(clock, fleet, engine, "3", 103.5) is not first
    assert first.report(500) is None, "the other's answer has not ended"
    assert first.report(1_500) == Busy(2_000, 3.0, 0)


def test_requests_that_run_are_counted_where_a_period_begins() -> None:
    clock, fleet, engine = served()
    begin(clock, fleet, engine, "1", 100.0)
    fleet.answers(engine, "1")
    period = begin(clock, fleet, engine, "2", 105.0)
    clock.now_s = 106.0
    fleet.answers(engine, "2")
    assert period.report(10) == Busy(10, 1.0, 1)


def test_a_period_with_a_prompt_that_failed_tells_nothing_and_ends_all_the_same() -> None:
    clock, fleet, engine = served()
    period = begin(clock, fleet, engine, "1", 100.0)
    begin(clock, fleet, engine, "2", 100.0)
    fleet.answers(engine, "1")
    period.spoil()
    fleet.ended(engine, "2")
    assert engine.busy is None
    assert period.report(10) is None and period.report(10) is None


def test_an_engine_that_leaves_has_no_period() -> None:
    clock, fleet, engine = served()
    begin(clock, fleet, engine, "1", 100.0)
    fleet.set_places([])
    fleet.ended(engine, "1")
    assert engine.busy is None and not fleet.queues
