"""The live feed: whole states and changes lead every reader to the state of the last look."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.controller.feed import FORGET_S, LOOK_S, MAX_CHANGES, MAX_CHANGES_BYTES, MAX_EVENTS, Feed, State
from tests.harness.amount import amount
from tests.oracles.live import apply

ROW = st.fixed_dictionaries(
    {
        "state": st.sampled_from(["live", "dead"]),
        "sessions": st.integers(0, 2),
        "keys": st.dictionaries(st.sampled_from(["l1", "disk-0", "__proto__"]), st.integers(0, 3)),
        "zone": st.none() | st.sampled_from(["", "ä", "</script>"]),
    }
)
STATES = st.builds(
    lambda cluster, rows, removed: State(cluster, rows, {"drained": [], "removed": removed}, 0),
    st.fixed_dictionaries({"up_s": st.integers(0, 3), "hits": st.dictionaries(st.text(max_size=2), st.integers())}),
    st.dictionaries(st.sampled_from(["a-0", "b-1", "c-2", "__proto__"]), ROW),
    st.lists(st.sampled_from(["x", "y"]), unique=True),
)  # fmt: skip


class World:
    """A clock set by hand, and the state that a look sees."""

    def __init__(self, state: State) -> None:
        self.now_s = 1_000.0
        self.state = state
        self.looks = 0
        self.happened: list[dict[str, Any]] = []
        self.feed = Feed(
            7, lambda: self.now_s, self._see, lambda number: self.happened[number:][-MAX_EVENTS:]
        )

    def _see(self) -> State:
        self.looks += 1
        return self.state._replace(last_event=len(self.happened))

    def after(self, state: State, pause_s: float = LOOK_S) -> None:
        self.state = state
        self.now_s += pause_s
        self.feed.look()


class Reader:
    """Applies the whole states and changes that it reads."""

    def __init__(self) -> None:
        self.shown: dict[str, Any] = {}
        self.number = 0
        self.wholes = 0

    def read(self, feed: Feed) -> None:
        while change := feed.after(self.number):
            told = json.loads(change.body)
            self.shown = apply(self.shown, told)
            self.number = change.number
            self.wholes += told["after"] is None

    def has(self, state: State) -> bool:
        wanted = {"cluster": state.cluster, "instances": state.instances, **state.lists}
        return {name: self.shown[name] for name in wanted} == wanted


@settings(max_examples=amount(60, 200), deadline=None)
@given(
    st.lists(st.tuples(STATES, st.sets(st.integers(0, 2)), st.sampled_from([LOOK_S, FORGET_S + 1])), min_size=1)
)  # fmt: skip
def test_every_reader_that_reads_has_the_state_of_the_last_look(
    steps: list[tuple[State, set[int], float]],
) -> None:
    world, readers = World(steps[0][0]), [Reader() for _ in range(3)]
    for state, reading, pause_s in steps:
        world.after(state, pause_s)
        for number in reading:
            readers[number].read(world.feed)
            assert readers[number].has(state)
    for reader in readers:
        reader.read(world.feed)
        assert reader.has(steps[-1][0])


def rows(count: int, value: int) -> State:
    """Make a state of `count` instances, which differ from those of another `value`."""
    return State(
        {"up_s": value},
        {f"a-{n}": {"sessions": value, "host": "h" * 200} for n in range(count)},
        {"drained": [], "removed": []},
        0,
    )


def test_a_reader_that_missed_more_than_is_kept_gets_one_whole_state() -> None:
    world, reader = World(rows(3, 0)), Reader()
    world.after(rows(3, 1))
    reader.read(world.feed)
    for value in range(MAX_CHANGES):
        world.after(rows(3, value + 2))
    late = Reader()
    late.number, late.shown = reader.number, reader.shown
    reader.read(world.feed)
    assert (reader.wholes, reader.has(world.state)) == (1, True), "all changes that it missed are still kept"
    world.after(rows(3, 99))
    late.read(world.feed)
    assert (late.wholes, late.has(world.state)) == (1, True), "it missed one change more than is kept"


def test_a_reader_that_does_not_read_costs_only_the_kept_changes() -> None:
    world, frozen = World(rows(2_000, 0)), Reader()
    world.after(rows(2_000, 1))
    frozen.read(world.feed)
    for value in range(200):
        state = rows(2_000, value + 2)
        for row in state.instances.values():
            row["host"] = f"{value:03}" * 100
        world.after(state)
        whole = world.feed.after(0)
        assert whole is not None
        assert world.feed.kept_bytes <= MAX_CHANGES_BYTES + len(whole.body)
    frozen.read(world.feed)
    assert frozen.has(world.state)


def test_sixteen_readers_share_one_look_and_its_bytes() -> None:
    world = World(rows(3, 0))
    world.after(rows(3, 1))
    number = world.looks
    world.after(rows(3, 2))
    found = []
    for _ in range(16):
        world.feed.look()
        found.append((world.feed.after(1), world.feed.after(0)))
    assert world.looks == number + 1
    assert len({(id(change and change.body), id(whole and whole.body)) for change, whole in found}) == 1


def test_unchanged_fields_are_not_sent() -> None:
    world = World(rows(3, 0))
    world.after(rows(3, 1))
    state = rows(3, 1)
    state.instances["a-1"]["sessions"] = 9
    world.after(state)
    change = world.feed.after(1)
    assert change is not None
    assert json.loads(change.body) == {
        "look": "7-2",
        "after": "7-1",
        "cluster": {},
        "instances": {"a-1": {"sessions": 9}},
        "gone": [],
        "events": [],
    }


def test_events_come_once_with_the_look_after_them() -> None:
    world = World(rows(1, 0))
    world.happened.append({"number": 1})
    world.after(rows(1, 0))
    world.happened.append({"number": 2})
    world.after(rows(1, 0))
    world.after(rows(1, 0))
    told = [change for number in (1, 2) if (change := world.feed.after(number))]
    assert [json.loads(change.body)["events"] for change in told] == [[{"number": 2}], []]


def test_a_reader_that_names_an_unknown_look_gets_the_whole_state() -> None:
    for name in ("", "7", "8-1", "7-x", "7-١", "7--1", "-", "7-" + "9" * 40):
        world = World(rows(1, 0))
        world.after(rows(1, 1))
        world.after(rows(1, 2))
        assert world.feed.number_of("7-1") == 1
        change = world.feed.after(world.feed.number_of(name))
        assert change is not None
        assert json.loads(change.body)["after"] is None


def test_a_reader_that_names_a_future_look_gets_the_whole_state() -> None:
    for number in (3, 4_000):
        world = World(rows(1, 0))
        world.after(rows(1, 1))
        world.after(rows(1, 2))
        change = world.feed.after(world.feed.number_of(f"7-{number}"))
        assert change is not None
        assert json.loads(change.body)["after"] is None


def test_a_change_that_does_not_follow_is_refused() -> None:
    reader, world = Reader(), World(rows(1, 0))
    world.after(rows(1, 1))
    reader.read(world.feed)
    with pytest.raises(ValueError, match="7-5 does not follow 7-1"):
        apply(reader.shown, {"after": "7-5", "look": "7-6", "cluster": {}, "instances": {}, "gone": []})
