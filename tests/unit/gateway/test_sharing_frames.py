"""What one gateway tells another: whatever is lost on the way, the next full account mends the other's queues."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gateway.engine_http import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.prefixes import KEY_BYTES, Prefixes
from kvstrata.gateway.sharing.others import Others
from kvstrata.gateway.sharing.telling import MAX_EVENTS, MAX_FRAME_BYTES, EventSender, Sent, frame_of

ENGINES = ("a", "b")


def sent(number: int, engine: str, keys: bytes = b"", *, streams: bool = True, loads: bool = False) -> Sent:
    return Sent(
        number=number, engine=engine, uncached=10, keys=keys, ready_in_s=0.5, streams=streams, loads=loads
    )  # fmt: skip


class Pair:
    """A gateway that tells, and one that hears."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.teller = EventSender()
        self.fleet = Fleet(lambda: self.now_s)
        places = [Place(name, Address("h", number, False)) for number, name in enumerate(ENGINES)]
        for engine in self.fleet.set_places(places):
            self.fleet.up(engine, {"m": {}})
        self.others = Others(self.fleet, Prefixes(), lambda: self.now_s)

    def hear(self, frame: bytes) -> None:
        assert len(frame) <= MAX_FRAME_BYTES
        self.others.hear(frame_of(frame))

    def counts(self) -> dict[str, tuple[int, int]]:
        """Requests and waiting ones at each engine, as the other gateway counts them."""
        return {name: (one.load.requests, one.load.waiting) for name, one in self.fleet.engines.items()}

    def told(self) -> dict[str, tuple[int, int]]:
        """The same as they are."""
        flights = list(self.teller._flights.values())
        return {
            name: (
                sum(one.engine == name for one in flights),
                sum(one.engine == name and one.state == "sent" for one in flights),
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
        what = draw.choice(("sent", "sent", "first", "ended", "take", "all"))
        if what == "sent":
            number += 1
            under_way.append(number)
            keys = draw.randbytes(KEY_BYTES * draw.randrange(4))
            streams, loads = draw.random() < 0.7, draw.random() < 0.2
            teller.sent(sent(number, draw.choice(ENGINES), keys, streams=streams, loads=loads))
        elif under_way and what == "first":
            teller.first(draw.choice(under_way))
        elif under_way and what == "ended":
            teller.ended(under_way.pop(draw.randrange(len(under_way))), answered=draw.random() < 0.7)
        elif what in ("take", "all"):
            for frame in [*teller.take(), *(teller.under_way() if what == "all" else ())]:
                if draw.random() >= lost:
                    pair.hear(frame)
    for frame in [*teller.take(), *teller.under_way()]:
        pair.hear(frame)
    assert pair.counts() == pair.told() and pair.others.in_flight == len(under_way)
    pair.now_s += 60.0
    pair.others.forget_silent()
    assert pair.counts() == dict.fromkeys(ENGINES, (0, 0)) and len(pair.others) == 0
    assert all(one.queue.period is None and one.in_flight == 0 for one in pair.fleet)


def test_what_is_not_taken_is_dropped_and_counted_and_no_frame_is_too_long() -> None:
    pair = Pair()
    for number in range(MAX_EVENTS + 5):
        pair.teller.sent(sent(number, "a", bytes(64 * KEY_BYTES)))
    assert pair.teller.dropped == 5
    frames = list(pair.teller.take())
    assert len(frames) > 1
    for frame in [*frames, *pair.teller.under_way()]:
        pair.hear(frame)
    assert pair.counts()["a"] == (MAX_EVENTS + 5, MAX_EVENTS + 5)


def test_engines_that_are_not_known_here_are_passed_over() -> None:
    pair = Pair()
    pair.teller.sent(sent(1, "elsewhere"))
    for frame in pair.teller.take():
        pair.hear(frame)
    assert pair.others.ignored == 1 and pair.counts() == dict.fromkeys(ENGINES, (0, 0))
