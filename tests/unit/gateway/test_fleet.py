"""Whatever happens to engines and their ranks, each has the state of its engine, and counts come back to zero."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gateway.busy_periods import TimedPrompt
from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Fleet, Place, ServingEngine
from tests.harness.amount import amount


def place(name: str, port: int = 1, ranks: int = 0) -> Place:
    return Place(name, Address("h", port, False), ranks=ranks)


def check(fleet: Fleet, under_way: dict[str, ServingEngine]) -> None:
    """What holds at all times."""
    names = [target.name for target in fleet.targets("")]
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
    assert counted == len(under_way) >= len(fleet.queues)


@settings(max_examples=amount(60, 200), deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 60))
def test_counts_come_back_to_zero_however_engines_are_divided(seed: int, steps: int) -> None:
    draw = random.Random(seed)
    now_s = 0.0
    fleet = Fleet(lambda: now_s)
    under_way: dict[str, ServingEngine] = {}
    timed: dict[str, TimedPrompt] = {}
    for number in range(steps):
        now_s += draw.random()
        engines = list(fleet.engines.values())
        targets = fleet.targets("m")
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
            timed[str(number)] = fleet.began(target, str(number), 10, 20)
        elif what == "first" and under_way:
            word = draw.choice(list(under_way))
            fleet.answers(under_way[word], word, timed[word])
        elif what == "ended" and under_way:
            word = draw.choice(list(under_way))
            fleet.ended(under_way.pop(word), word)
        check(fleet, under_way)
    for word, target in under_way.items():
        fleet.ended(target, word)
    assert not len(fleet.queues)
    assert list(fleet) == list(fleet.engines.values()), "nothing leaves any more"
    for engine in fleet:
        for each in (engine, *engine.ranks):
            load = each.load
            assert (load.requests, load.waiting, load.prefill_tokens, load.backlog_tokens) == (0, 0, 0, 0)
            assert each.busy is None


async def test_a_limit_that_runs_out_just_now_hinders_no_other() -> None:
    fleet = Fleet(lambda: 0.0)
    [engine] = fleet.set_places([place("a")])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0) as over:
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3_600) as limit:
            engine.waiting = {over, limit}
            fleet.abandon(engine)
            await asyncio.Event().wait()


def test_an_engine_has_the_rate_of_the_load_with_which_its_busy_period_began() -> None:
    now_s = 0.0
    fleet = Fleet(lambda: now_s)
    a, b = fleet.set_places([place("a"), place("b")])
    for load, tokens_s in ((0, 1_000), (1, 500), (2, 100)):
        for tokens in (100, 1_000, 10_000):
            for name in ("a", "b"):
                for _ in range(4):
                    fleet.rates.observe(name, tokens, tokens / tokens_s, load)
    usual = [fleet.rates.rate("a", load) for load in (0, 1, 2)]
    assert usual[0] > 1.5 * usual[1] > 1.5 * usual[2]
    first, second, _ = (fleet.began(a, word, 10, 20) for word in ("1", "2", "3"))
    now_s = 1.0
    fleet.answers(a, "1", first)
    now_s = 2.0
    fleet.answers(a, "2", second)
    assert a.load.running == 2, "one prompt still waits"
    assert (a.load.prefill_tokens_s, b.load.prefill_tokens_s) == (usual[0], usual[0])
    now_s = 3.0
    other = fleet.began(b, "4", 10, 20)
    fleet.ended(a, "3")
    now_s = 3.001
    fleet.answers(b, "4", other)
    assert (a.load.prefill_tokens_s, b.load.prefill_tokens_s) == (usual[2], fleet.rates.rate("b", 1))
