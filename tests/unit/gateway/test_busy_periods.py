"""What busy periods tell of an engine's speed."""

from __future__ import annotations

from kvstrata.gateway.busy_periods import BusyPeriod
from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Fleet, Place, ServingEngine


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Served:
    """A fleet of one engine."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fleet = Fleet(self.clock, 0.0)
        self.engine: ServingEngine
        [self.engine] = self.fleet.set_places([Place("a", Address("127.0.0.1", 1, False))])
        self.fleet.up(self.engine, {"m": {}})

    def begin(self, number: str, at_s: float) -> BusyPeriod:
        self.clock.now_s = at_s
        return self.fleet.began(self.engine, number, 1_000, 1_000)

    def answers(self, number: str, at_s: float) -> None:
        self.clock.now_s = at_s
        self.fleet.answers(self.engine, number)

    @property
    def known(self) -> list[tuple[int, float, int]]:
        """Tokens, seconds and class of load of the engine's samples."""
        own = self.fleet.rates._engines.get("a")
        if own is None:
            return []
        return [(one.tokens, one.seconds, one.load) for one in own.samples[self.fleet.rates._by_whole]]


def test_prompts_that_share_steps_are_timed_together() -> None:
    served = Served()
    first = served.begin("1", 100.0)
    assert served.begin("2", 100.5) is first
    served.answers("1", 101.0)
    assert served.known == []
    served.answers("2", 103.0)
    assert served.known == [(2_000, 3.0, 0)], "as expected, until the answers tell more"
    assert served.begin("3", 103.5) is not first
    first.report(300)
    assert served.known == [(2_000, 3.0, 0)], "the other's answer has not ended"
    first.report(500)
    assert served.known == [(800, 3.0, 0)]
    served.answers("3", 104.0)
    assert served.known == [(800, 3.0, 0), (1_000, 0.5, 2)]


def test_a_report_that_agrees_changes_nothing() -> None:
    served = Served()
    period = served.begin("1", 100.0)
    served.answers("1", 101.0)
    [before] = served.fleet.rates._engines["a"].samples[False]
    period.report(1_001)
    assert list(served.fleet.rates._engines["a"].samples[False]) == [before]


def test_a_period_with_a_prompt_that_failed_tells_nothing_and_ends_all_the_same() -> None:
    served = Served()
    period = served.begin("1", 100.0)
    served.begin("2", 100.0)
    served.answers("1", 101.0)
    period.spoil()
    served.fleet.ended(served.engine, "2")
    assert served.engine.busy is None
    period.report(10)
    period.report(10)
    assert served.known == []


def test_what_was_expected_of_a_prompt_that_was_loaded_is_taken_back() -> None:
    served = Served()
    period = served.begin("1", 100.0)
    served.answers("1", 101.0)
    assert len(served.known) == 1
    period.spoil()
    assert served.known == []


def test_answers_that_come_whole_tell_rates_as_long_as_none_streams() -> None:
    served = Served()
    served.fleet.began(served.engine, "1", 1_000, 1_000, streams=False)
    served.answers("1", 102.0)
    assert served.known == [(1_000, 2.0, 0)] and served.fleet.measured(served.engine)
    served.begin("2", 103.0)
    assert served.known == [(1_000, 2.0, 0)], "an answer that has only begun tells nothing yet"
    served.answers("2", 103.5)
    assert served.known == [(1_000, 0.5, 1)]
    served.fleet.began(served.engine, "3", 1_000, 1_000, streams=False)
    served.answers("3", 110.0)
    assert served.known == [(1_000, 0.5, 1)]


def test_an_answer_that_comes_whole_times_nothing_beside_those_that_stream() -> None:
    served = Served()
    served.begin("0", 90.0)
    served.answers("0", 91.0)
    period = served.begin("1", 100.0)
    served.fleet.began(served.engine, "2", 1_000, 1_000, streams=False)
    served.answers("1", 101.0)
    served.answers("2", 109.0)
    period.report(1_000)
    period.report(1_000)
    assert served.known == [(1_000, 1.0, 0)]


def test_an_engine_that_leaves_has_no_period() -> None:
    served = Served()
    served.begin("1", 100.0)
    served.fleet.set_places([])
    served.fleet.ended(served.engine, "1")
    assert served.engine.busy is None and not served.fleet.queues
