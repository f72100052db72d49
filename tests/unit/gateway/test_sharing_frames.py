"""What one gateway tells another: whatever is lost on the way, the next full account mends the other's queues."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.prefixes import KEY_BYTES, Prefixes
from kvstrata.gateway.sharing.catching_up import SLICE, slices, tells
from kvstrata.gateway.sharing.messages import FRAMES, MAX_EVENTS, MAX_FRAME_BYTES
from kvstrata.gateway.sharing.others import Others
from kvstrata.gateway.sharing.telling import Teller
from kvstrata.gateway.stored_responses import StoredResponses

ENGINES = ("a", "b")


class Pair:
    """A gateway that tells, and one that hears."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.teller = Teller()
        self.fleet = Fleet(lambda: self.now_s, 0.0)
        places = [Place(name, Address("h", number, False)) for number, name in enumerate(ENGINES)]
        for engine in self.fleet.set_places(places):
            self.fleet.up(engine, {"m": {}})
        self.prefixes, self.responses = Prefixes(), StoredResponses()
        self.others = Others(self.fleet, self.prefixes, self.responses, lambda: self.now_s)

    def hear(self, frame: bytes) -> None:
        assert len(frame) <= MAX_FRAME_BYTES
        self.others.hear(FRAMES.decode(frame))

    def counts(self) -> dict[str, tuple[int, int]]:
        """Requests and waiting ones at each engine, as the other gateway counts them."""
        return {name: (one.load.requests, one.load.waiting) for name, one in self.fleet.engines.items()}

    def told(self) -> dict[str, tuple[int, int]]:
        """The same as they are."""
        flights = list(self.teller._flights.values())
        return {
            name: (
                sum(one.engine == name for one in flights),
                sum(one.engine == name and not one.running for one in flights),
            )
            for name in ENGINES
        }


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 80), lost=st.sampled_from([0.0, 0.3, 1.0]))
def test_queues_are_mended_whatever_was_lost(seed: int, steps: int, lost: float) -> None:
    draw, pair = random.Random(seed), Pair()
    teller, under_way, number = pair.teller, list[int](), 0
    for _ in range(steps):
        pair.now_s += draw.random()
        what = draw.choice(("sent", "sent", "first", "ended", "computed", "take", "all"))
        if what == "sent":
            number += 1
            under_way.append(number)
            keys = [draw.randbytes(KEY_BYTES) for _ in range(draw.randrange(4))]
            teller.sent(number, draw.choice(ENGINES), 10, 20, keys, 0.5, streams=draw.random() < 0.7)
        elif under_way and what == "first":
            teller.first(draw.choice(under_way))
        elif under_way and what == "ended":
            teller.ended(under_way.pop(draw.randrange(len(under_way))), answered=draw.random() < 0.7)
        elif number and what == "computed":
            teller.computed(draw.randrange(1, number + 1), 10, timed=draw.random() < 0.5)
        elif what in ("take", "all"):
            for frame in [*teller.take(), *(teller.under_way() if what == "all" else ())]:
                if draw.random() >= lost:
                    pair.hear(frame)
    for frame in [*teller.take(), *teller.under_way()]:
        pair.hear(frame)
    assert pair.counts() == pair.told() and pair.others.in_flight == len(under_way)
    pair.now_s += 60.0
    pair.others.forget_silent(10.0)
    assert pair.counts() == dict.fromkeys(ENGINES, (0, 0)) and len(pair.others) == 0
    assert all(one.busy is None and one.in_flight == 0 for one in pair.fleet)


def test_what_is_not_taken_is_dropped_and_counted_and_no_frame_is_too_long() -> None:
    pair = Pair()
    for number in range(MAX_EVENTS + 5):
        pair.teller.sent(number, "a", 1, 1, [bytes(KEY_BYTES)] * 64, 0.0, streams=True)
    assert pair.teller.dropped == 5
    frames = list(pair.teller.take())
    assert len(frames) > 1
    for frame in [*frames, *pair.teller.under_way()]:
        pair.hear(frame)
    assert pair.counts()["a"] == (MAX_EVENTS + 5, MAX_EVENTS + 5)


@given(st.binary(max_size=300))
def test_garbage_is_no_frame(frame: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        FRAMES.decode(frame)


def test_engines_that_are_not_known_here_are_passed_over() -> None:
    pair = Pair()
    pair.teller.sent(1, "elsewhere", 1, 1, [], 0.0, streams=True)
    for frame in pair.teller.take():
        pair.hear(frame)
    assert pair.others.ignored == 1 and pair.counts() == dict.fromkeys(ENGINES, (0, 0))


def test_stored_responses_are_told_with_their_engines() -> None:
    pair = Pair()
    pair.teller.made("resp_1", "a")
    pair.teller.made("resp_2", "elsewhere")
    for frame in pair.teller.take():
        pair.hear(frame)
    assert (pair.responses.engine_of("resp_1"), pair.responses.engine_of("resp_2")) == ("a", "")


def test_a_gateway_that_joins_is_told_what_engines_have_and_keeps_what_it_knows_better() -> None:
    old, new = Pair(), Pair()
    keys = [number.to_bytes(KEY_BYTES, "big") for number in range(3 * SLICE)]
    old.prefixes.note(keys, "a", 0, 40.0, computed=True)
    old.prefixes.note(keys[:5], "b", 0, 90.0, computed=True)
    old.prefixes.note([bytes([9]) * KEY_BYTES], "a", 0, 95.0, computed=False)
    old.responses.note("resp", "b")
    new.prefixes.note(keys[:1], "a", 0, 99.0, computed=True)
    parts = list(slices(old.prefixes, old.fleet, old.responses, old.now_s))
    assert len(parts) == 4 and sum(len(part) for part in parts) == 5
    for part in parts:
        new.hear(old.teller.told(part))
    generations = dict.fromkeys(ENGINES, 0)
    assert new.prefixes.computed_by(keys[0], generations) == [("a", 99.0), ("b", 90.0)]
    assert all(new.prefixes.computed_by(key, generations) == [("a", 40.0)] for key in keys[5:])
    assert len(new.prefixes) == len(keys), "what nobody has computed is not told"
    assert new.responses.engine_of("resp") == "b"


@given(st.sets(st.text("abc", min_size=1, max_size=3), min_size=2, max_size=6), st.data())
def test_one_of_those_that_were_there_tells(names: set[str], data: st.DataObject) -> None:
    joined = data.draw(st.sampled_from(sorted(names)))
    there = names - {joined}
    assert sum(tells(own, sorted(names - {own}), joined) for own in there) == 1


def test_it_is_noticed_once_that_a_gateway_joins() -> None:
    pair, joined = Pair(), list[str]()
    pair.others.joined = joined.append
    for _ in range(2):
        for frame in pair.teller.under_way():
            pair.hear(frame)
    assert joined == [pair.teller.name] == pair.others.names
    pair.now_s += 10.0
    pair.others.forget_silent(1.0)
    for frame in pair.teller.under_way():
        pair.hear(frame)
    assert joined == 2 * [pair.teller.name], "after a silence it begins anew"
