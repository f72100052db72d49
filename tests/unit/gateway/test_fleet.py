"""Counts of engines and ranks come back to zero whatever happens to them, and what their times tell of their speed."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.config.gateway_model import HealthSettings
from kvstrata.gateway.choosing import ChoiceInputs, Choosing
from kvstrata.gateway.engine_http import Address, LinkBroken, Unreachable
from kvstrata.gateway.fleet import SLOW_START_S, EngineState, Fleet, Place, ServingEngine
from kvstrata.gateway.metering import Meters
from kvstrata.gateway.probing import MAX_MODELS_BYTES, Probing, models_in
from kvstrata.gateway.residency.knowledge import Residency
from kvstrata.gateway.routing.choose import POLICIES
from kvstrata.gateway.routing.queues import FIRST_TOKENS, Flight, Sending
from tests.harness.amount import amount


def place(name: str, port: int = 1, ranks: int = 0) -> Place:
    return Place(name, Address("h", port, False), ranks=ranks)


def check(fleet: Fleet, under_way: dict[str, ServingEngine]) -> None:
    """What holds at all times."""
    names = [target.name for target in fleet.targets("").targets]
    assert len(set(names)) == len(names)
    for engine in fleet.engines.values():
        assert len(engine.ranks) != 1
        assert engine.place.ranks in (0, max(1, len(engine.ranks)))
        for number, rank in enumerate(engine.ranks):
            assert (rank.rank, rank.process, rank.name) == (number, engine, f"{engine.name}@{number}")
            assert (rank.state, rank.models, rank.generation) == (
                engine.state,
                engine.models,
                engine.generation,
            )
            assert rank.place == engine.place._replace(name=rank.name)
    counted = sum(engine.in_flight for engine in fleet)
    assert counted == len(under_way)


@settings(max_examples=amount(60, 200), deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 60))
def test_counts_come_back_to_zero_however_engines_are_divided(seed: int, steps: int) -> None:
    draw = random.Random(seed)
    now_s = 0.0
    fleet = Fleet(lambda: now_s)
    under_way: dict[str, ServingEngine] = {}
    timed: dict[str, Flight] = {}
    for number in range(steps):
        now_s += draw.random()
        engines = list(fleet.engines.values())
        targets = fleet.targets("m").targets
        assert targets == [one for each in fleet.serving("m") for one in each.targets]
        what = draw.choice(("places", "ranks", "up", "down", "began", "began", "began", "first", "ended"))
        if what == "places":
            names = draw.sample("abc", draw.randrange(1, 4))
            fleet.set_places(place(name, draw.choice((1, 1, 2)), draw.choice((0, 0, 1, 3))) for name in names)
        elif what == "ranks" and engines:
            engine = draw.choice(engines)
            fleet.set_ranks(engine, engine.place.ranks or draw.randrange(5))
        elif what == "up" and engines:
            fleet.up(draw.choice(engines), {"m": {}})
        elif what == "down" and engines:
            fleet.down(draw.choice(engines), "told to")
        elif what == "began" and targets:
            under_way[str(number)] = target = draw.choice(targets)
            timed[str(number)] = target.queue.send(10, now_s)
        elif what == "first" and under_way:
            word = draw.choice(list(under_way))
            fleet.answers(timed[word])
        elif what == "ended" and under_way:
            word = draw.choice(list(under_way))
            under_way.pop(word).queue.end(timed[word], now_s)
        check(fleet, under_way)
    for word, target in under_way.items():
        target.queue.end(timed[word], now_s)
    assert list(fleet) == list(fleet.engines.values()), "nothing leaves any more"
    for engine in fleet:
        for each in (engine, *engine.ranks):
            load = each.load
            assert (load.requests, load.waiting, load.prefill_tokens, load.running) == (0, 0, 0, 0)
            assert each.queue.period is None


def test_an_engine_has_the_rate_of_the_load_with_which_its_prompts_began_to_wait() -> None:
    now_s = 0.0
    fleet = Fleet(lambda: now_s)
    a, b = fleet.set_places([place("a"), place("b")])
    for tokens in (100, 1_000, 10_000) * 8:
        for load in (0, 1, 2, 8):
            for name in ("a", "b"):
                fleet.rates.observe(name, tokens, tokens * (0.001 + 0.002 * load), load)
    usual = [fleet.rates.rate("a", load) for load in (0, 1, 2)]
    assert usual[0] > 1.5 * usual[1] > 2 * usual[2]
    first, second, third = (a.queue.send(1_000, now_s) for _ in range(3))
    now_s = 1.0
    fleet.answers(first)
    now_s = 2.0
    fleet.answers(second)
    assert a.load.running == 2, "one prompt still waits"
    assert (a.load.prefill_tokens_s, b.load.prefill_tokens_s) == (usual[0], usual[0])
    now_s = 3.0
    other = b.queue.send(10, now_s)
    a.queue.end(third, now_s)
    now_s = 3.001
    fleet.answers(other)
    assert a.load.prefill_tokens_s < usual[1] and b.load.prefill_tokens_s < usual[0]


def test_one_failed_probe_takes_nobody_and_an_answer_counts_as_one() -> None:
    class HttpClient:
        fails: type[Exception] | None = None

        async def ask(self, *_: Any, **__: Any) -> tuple[int, bytes]:
            if self.fails is not None:
                raise self.fails("a test")
            return 200, b'{"data": [{"id": "m"}]}'

    clock, asker = Clock(), HttpClient()
    fleet = Fleet(clock)
    probing = Probing(fleet, HealthSettings(), cast(Any, asker), cast(Any, None), clock, cast(Any, None))
    [engine] = fleet.set_places([place("a")])

    def probed(fails: type[Exception] | None) -> EngineState:
        asker.fails = fails
        asyncio.run(probing.probe(engine))
        return engine.state

    assert probed(None) is EngineState.UP
    for fails in (Unreachable, LinkBroken, TimeoutError):
        assert [probed(fails), probed(None), probed(fails)] == [EngineState.UP] * 3, "not two in a row"
        assert probed(fails) is EngineState.DOWN
        assert bool(fleet.serving("m")) == (fails is TimeoutError), "a busy engine is better than none"
        assert probed(None) is EngineState.UP
    engine.heard_s = clock.now_s - 1.0
    assert [probed(TimeoutError) for _ in range(4)] == [EngineState.UP] * 4, "it answers requests"
    assert [probed(Unreachable) for _ in range(2)][-1] is EngineState.DOWN


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_engine_that_returns_begins_with_a_quarter_of_its_share(policy: str) -> None:
    clock = Clock()
    fleet = Fleet(clock)
    engines = fleet.set_places([place("a"), place("b", 2)])
    for engine in engines:
        fleet.up(engine, {"m": {}})
    fleet.down(engines[0], "a test")
    fleet.up(engines[0], {"m": {}})
    choosing = Choosing(POLICIES[policy], fleet, Residency(clock), Meters({}), clock)

    def share() -> float:
        chosen = []
        for number in range(400):
            found = choosing.choose(ChoiceInputs(str(number), number, "m", 1_000, session=str(number)))
            assert found is not None
            chosen.append(found.engine.name)
            choosing.dispatched(found)
            choosing.ended(found, answered=False)
        return chosen.count("a") / 400

    early = share()
    clock.now_s += SLOW_START_S
    assert early < 0.7 * share()


def test_names_are_remembered_and_aliases_are_one_model() -> None:
    fleet = Fleet(Clock())
    [engine] = fleet.set_places([place("a")])
    fleet.up(engine, {"m": {"root": "r"}, "alias": {"root": "r"}, "lora": {"root": "l", "parent": "m"}})
    assert fleet.root("m") == fleet.root("alias") == "r" and not fleet.several()
    fleet.up(engine, {"m": {"root": "r"}, "other": {}})
    assert fleet.several()
    fleet.set_places([])
    assert {"m", "alias", "lora", "other"} <= fleet.served.keys() and not fleet.several()


def test_an_engine_may_have_2500_adapters() -> None:
    entry = {
        "object": "model",
        "created": 1,
        "owned_by": "vllm",
        "root": "/adapters/" + "x" * 60,
        "parent": "m",
    }
    more = {
        "max_model_len": None,
        "permission": [
            {"id": "modelperm-" + "0" * 32, "allow_sampling": True}
            | {
                f"allow_{word}": False
                for word in ("create_engine", "logprobs", "search_indices", "view", "fine_tuning")
            }
        ],
    }
    body = json.dumps({"data": [{"id": f"adapter-{number}", **entry, **more} for number in range(2_500)]})
    assert 1 << 20 < len(body) < MAX_MODELS_BYTES and len(models_in(body.encode())) == 2_500


def test_instances_that_cease_to_read_from_each_other_are_no_longer_loaded_from() -> None:
    fleet = Fleet(lambda: 0.0)
    [engine] = fleet.set_places([place("a")])
    fleet.attach(lambda engine: "i", peers=True)
    fleet.add_path_tiers({"l1", "peer"})
    engine.load.paths["l1"].free_s = 7.0
    fleet.attach(lambda engine: "i", peers=False)
    assert [(tier, path.free_s) for tier, path in engine.load.paths.items()] == [("l1", 7.0)]


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
        self.timed: dict[str, Flight] = {}
        [self.engine] = self.fleet.set_places([Place("a", Address("127.0.0.1", 1, False))])
        self.fleet.up(self.engine, {"m": {}})

    def begin(self, number: str, at_s: float, tokens: int = 1_000, *, streams: bool = True) -> Flight:
        self.clock.now_s = at_s
        self.timed[number] = self.engine.queue.send(tokens, self.clock.now_s, Sending(streams=streams))
        return self.timed[number]

    def answers(self, number: str, at_s: float) -> None:
        self.clock.now_s = at_s
        self.fleet.answers(self.timed[number])

    def ends(self, number: str) -> None:
        self.engine.queue.end(self.timed[number], self.clock.now_s)

    @property
    def known(self) -> list[tuple[float, float, float]]:
        """Tokens, seconds and running requests of the engine's samples."""
        own = self.fleet.rates._fit._samples.get("a", ())
        return [(one.row[2], one.seconds, one.row[1]) for one in own]


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
    served.ends("2")
    assert served.engine.queue.period is None
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
        """Of the samples."""
        return [round(tokens / seconds, 6) for tokens, seconds, _ in self.known]


def test_a_period_that_never_ends_is_timed_between_cuts() -> None:
    busy = Busy()
    busy.serve(FIRST_TOKENS - 1)
    assert busy.known == []
    busy.serve(1)
    assert busy.rates == [1_000.0] and busy.fleet.measured(busy.engine)
    busy.serve(FIRST_TOKENS)
    assert [running for _, _, running in busy.known] == [0, FIRST_TOKENS], "as many run as did at the cut"
    for number in range(FIRST_TOKENS - 1):
        busy.timed[str(number)].report(500)
    assert busy.rates == [1_000.0, 1_000.0], "an answer has not ended"
    busy.timed[str(FIRST_TOKENS - 1)].report(500)
    assert sorted(busy.rates) == [500.0, 1_000.0]
    assert not busy.known[-1][2], "it was corrected"
    busy.begin("last", busy.clock())
    busy.answers(str(2 * FIRST_TOKENS), busy.clock() + 0.1)
    busy.answers("last", busy.clock() + 0.1)
    assert busy.engine.queue.period is None and len(busy.known) == 2, "the rest was partly computed before"


def test_a_prompt_that_fails_spoils_its_period_and_no_other() -> None:
    busy = Busy()
    busy.serve(FIRST_TOKENS + 1)
    busy.begin("failed", busy.clock())
    busy.ends("failed")
    busy.serve(FIRST_TOKENS - 1)
    assert busy.rates == [1_000.0]
    busy.serve(FIRST_TOKENS)
    assert busy.rates == [1_000.0, 1_000.0]
    busy.timed[str(2 * FIRST_TOKENS)].exclude_sample()
    assert busy.rates == [1_000.0]


def test_a_prompt_that_was_loaded_spoils_the_period_of_its_first_token() -> None:
    busy = Busy()
    busy.serve(FIRST_TOKENS - 1)
    busy.begin("loaded", busy.clock()).exclude_sample()
    busy.serve(1)  # a cut
    busy.answers("loaded", busy.clock())
    busy.serve(FIRST_TOKENS)  # another one
    assert busy.rates == []
    busy.serve(FIRST_TOKENS)
    assert busy.rates == [1_000.0]
