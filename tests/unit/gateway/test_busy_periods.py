"""What busy periods tell of an engine's speed."""

from __future__ import annotations

from kvstrata.gateway.busy_periods import FIRST_TOKENS, PIECE_TOKENS, TimedPrompt
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
        self.fleet = Fleet(self.clock)
        self.engine: ServingEngine
        self.timed: dict[str, TimedPrompt] = {}
        [self.engine] = self.fleet.set_places([Place("a", Address("127.0.0.1", 1, False))])
        self.fleet.up(self.engine, {"m": {}})

    def begin(self, number: str, at_s: float, tokens: int = 1_000, *, streams: bool = True) -> TimedPrompt:
        self.clock.now_s = at_s
        self.timed[number] = self.fleet.began(self.engine, number, tokens, tokens, streams=streams)
        return self.timed[number]

    def answers(self, number: str, at_s: float) -> None:
        self.clock.now_s = at_s
        self.fleet.answers(self.engine, number, self.timed[number])

    def ends(self, number: str, *, answered: bool = True) -> None:
        if not answered:
            self.timed[number].spoil()
        self.fleet.ended(self.engine, number)

    @property
    def known(self) -> list[tuple[int, float, int]]:
        """Tokens, seconds and class of load of the engine's samples."""
        own = self.fleet.rates._engines.get("a")
        if own is None:
            return []
        return [(one.tokens, one.seconds, one.load) for one in own.samples[self.fleet.rates._by_whole]]


def test_prompts_that_share_steps_are_timed_together() -> None:
    served = Served()
    first, second = served.begin("1", 100.0), served.begin("2", 100.5)
    served.answers("1", 101.0)
    assert served.known == []
    served.answers("2", 103.0)
    assert served.known == [(2_000, 3.0, 0)], "as expected, until the answers tell more"
    served.begin("3", 103.5)
    first.report(300)
    assert served.known == [(2_000, 3.0, 0)], "the other's answer has not ended"
    second.report(500)
    assert served.known == [(800, 3.0, 0)]
    served.answers("3", 104.0)
    assert served.known == [(800, 3.0, 0), (1_000, 0.5, 2)]


def test_a_period_with_a_prompt_that_failed_tells_nothing_and_ends_all_the_same() -> None:
    served = Served()
    timed = served.begin("1", 100.0)
    served.begin("2", 100.0)
    served.answers("1", 101.0)
    served.ends("2", answered=False)
    assert served.engine.busy is None
    timed.report(10)
    assert served.known == []


def test_answers_that_come_whole_tell_rates_as_long_as_none_streams() -> None:
    served = Served()
    served.begin("1", served.clock(), streams=False)
    served.answers("1", 102.0)
    assert served.known == [(1_000, 2.0, 0)] and served.fleet.measured(served.engine)
    served.begin("2", 103.0)
    assert served.known == [(1_000, 2.0, 0)], "an answer that has only begun tells nothing yet"
    served.answers("2", 103.5)
    assert served.known == [(1_000, 0.5, 1)]
    served.begin("3", served.clock(), streams=False)
    served.answers("3", 110.0)
    assert served.known == [(1_000, 0.5, 1)]


class Busy(Served):
    """An engine at which a prompt waits all the time: first tokens come each second, of the prompt before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        self.begin("0", 100.0)

    def serve(self, count: int) -> None:
        """The next first tokens."""
        for _ in range(count):
            self.sent += 1
            self.begin(str(self.sent), 100.0 + self.sent - 0.5)
            self.answers(str(self.sent - 1), 100.0 + self.sent)

    @property
    def rates(self) -> list[float]:
        """Of the samples, which are all of pieces."""
        assert all(tokens == PIECE_TOKENS for tokens, _, _ in self.known)
        return [round(tokens / seconds, 6) for tokens, seconds, _ in self.known]


def test_a_period_that_never_ends_is_timed_in_pieces_between_cuts() -> None:
    busy = Busy()
    busy.serve(2 * FIRST_TOKENS - 1)
    assert busy.known == [], "what was computed at the first cut of the prompts that wait is not known"
    busy.serve(1)
    assert busy.rates == [1_000.0] and busy.fleet.measured(busy.engine)
    assert [load for _, _, load in busy.known] == [5], "as many run as did at the first cut"
    for number in range(FIRST_TOKENS):
        busy.timed[str(number)].report(1)
    for number in range(FIRST_TOKENS, 2 * FIRST_TOKENS - 1):
        busy.timed[str(number)].report(500)
    assert busy.rates == [1_000.0], "an answer has not ended"
    busy.timed[str(2 * FIRST_TOKENS - 1)].report(500)
    assert busy.rates == [500.0]
    busy.serve(3 * FIRST_TOKENS)
    assert busy.rates == [500.0, 1_000.0, 1_000.0, 1_000.0]


def test_a_prompt_that_fails_spoils_its_piece_and_no_other() -> None:
    busy = Busy()
    busy.serve(2 * FIRST_TOKENS + 1)
    busy.begin("failed", busy.clock())
    busy.ends("failed", answered=False)
    busy.serve(2 * FIRST_TOKENS)
    assert busy.rates == [1_000.0, 1_000.0], "of three pieces between cuts"
    busy.timed[str(3 * FIRST_TOKENS)].spoil()
    assert busy.rates == [1_000.0]
