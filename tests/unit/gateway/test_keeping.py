"""What is kept over restarts: every change of it is saved, nothing else, and again after a failure."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.config.gateway_model import GatewaySettings
from kvstrata.gateway.engine_link import Address
from kvstrata.gateway.fleet import Fleet, Place
from kvstrata.gateway.keeping import Keeper, Mirror
from kvstrata.gateway.prefixes import KEY_BYTES, MAX_TOUCHED, Prefixes
from kvstrata.gateway.reading import Reader
from kvstrata.gateway.residency.knowledge import BLOCK_LIFE_S, Index
from kvstrata.gateway.state_file import NAME, State, read_state

KEY = bytes(KEY_BYTES)


class Paces:
    """The part of Residency that is kept."""

    def __init__(self) -> None:
        self.index = Index(lambda: 0.0)

    def paces(self) -> list[tuple[str, float, float]]:
        return [(name, *self.index.pace(name)) for name in self.index.kept]

    def restore(self, paces: list[tuple[str, float, float]]) -> None:
        self.index.kept = {name: (life_s, lag_s) for name, life_s, lag_s in paces}


class Gateway:
    """The parts that learn, and their keeper."""

    def __init__(self, folder: Path) -> None:
        self.fleet = Fleet(lambda: 100.0, 0.0)
        for engine in self.fleet.set_places([Place("a", Address("h", 1, False))]):
            self.fleet.up(engine, {"m": {}})
        self.prefixes = Prefixes()
        self.reader = Reader(GatewaySettings(), self.fleet)
        self.residency: Any = Paces()
        self.keeper = Keeper(
            str(folder), self.fleet, self.prefixes, self.reader, self.residency, lambda: 100.0
        )
        self.folder = folder

    @property
    def saves(self) -> int:
        return int(self.keeper.page()["saves"])

    def state(self) -> State:
        state = read_state(self.folder)
        assert state is not None
        return state


CHANGES: dict[str, tuple[Callable[[Gateway], object], Callable[[State], object]]] = {
    "a prefix": (
        lambda one: one.prefixes.note([KEY], "a", 0, 99.0, computed=True),
        lambda state: (
            [(one.key, [name for name, _ in one.engines]) for one in state.pieces] == [(KEY, ["a"])]
        ),
    ),
    "a rate": (
        lambda one: one.fleet.rates.observe("a", 10, 0.5, 0, whole=True),
        lambda state: state.rates == [("a", 10, 0.5, 0, True)],
    ),
    "a load's rate": (
        lambda one: one.fleet.load_rates.observe("a", "l1", 10, 0.5),
        lambda state: state.load_rates == [("a", "l1", 10, 0.5)],
    ),
    "a response": (
        lambda one: one.reader.responses.note("resp_1", "a"),
        lambda state: state.responses == [("resp_1", "a")],
    ),
    "an engine's pace": (
        lambda one: one.residency.restore([("a", 30.0, 0.25)]),
        lambda state: state.paces == [("a", 30.0, 0.25)],
    ),
}


@pytest.mark.parametrize("what", CHANGES)
async def test_each_change_is_saved_once_and_given_back(what: str, tmp_path: Path) -> None:
    change, there = CHANGES[what]
    gateway = Gateway(tmp_path / "state")
    await gateway.keeper.save()
    saves = gateway.saves
    change(gateway)
    await gateway.keeper.save()
    assert there(gateway.state())
    await gateway.keeper.save()
    assert gateway.saves == saves + 1, "nothing has changed since"
    await gateway.keeper.close()

    again = Gateway(tmp_path / "state")
    again.keeper.restore()
    await again.keeper.save()
    assert there(again.state()), "what was restored is kept on"
    await again.keeper.close()


async def test_what_could_not_be_saved_is_saved_later_without_a_further_change(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "state")
    gateway.prefixes.note([KEY], "a", 0, 99.0, computed=True)
    shutil.move(gateway.folder, tmp_path / "away")
    await gateway.keeper.save()
    assert gateway.keeper.failing and "No such file" in gateway.keeper.page()["error"]
    shutil.move(tmp_path / "away", gateway.folder)
    await gateway.keeper.save()
    assert not gateway.keeper.failing and [piece.key for piece in gateway.state().pieces] == [KEY]
    await gateway.keeper.close()


@pytest.mark.parametrize("content", [b"", b"kvgw", b"garbage" * 100, bytes(1 << 16)])
async def test_a_file_of_garbage_is_replaced(content: bytes, tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "state")
    (gateway.folder / NAME).write_bytes(content)
    (gateway.folder / NAME).chmod(0o600)
    gateway.keeper.restore()
    gateway.fleet.rates.observe("a", 10, 0.5, 0)
    await gateway.keeper.save()
    assert len(gateway.state().rates) == 1
    await gateway.keeper.close()


@given(seed=st.integers(0, 1 << 32))
def test_the_mirror_has_what_the_memory_has(seed: int) -> None:
    draw = random.Random(seed)
    prefixes, mirror = Prefixes(most=12), Mirror()
    keys = [bytes([number]) * KEY_BYTES for number in range(20)]
    for _ in range(draw.randrange(60)):
        some, engine = draw.sample(keys, draw.randrange(6)), draw.choice("ab")
        what = draw.choice(("sent", "computed", "computed", "forget", "back", "taken"))
        if what in ("sent", "computed"):
            prefixes.note(some, engine, draw.randrange(2), 1.0, computed=what == "computed")
        elif what == "forget":
            prefixes.forget(some, engine)
        elif what == "back":
            prefixes.take_back(some, engine)
        else:
            mirror.apply(prefixes.take_touched(), [])
            list(mirror.known(prefixes, {"a": 0}, 1.0))
    mirror.apply(prefixes.take_touched(), [])
    generations = {"a": 0, "b": 1}
    found = {piece.key for piece in mirror.known(prefixes, generations, 1.0)}
    assert found == {key for key in keys if prefixes.computed_by(key, generations)}


def test_what_was_touched_is_bounded() -> None:
    prefixes = Prefixes(most=10)
    for number in range(3 * MAX_TOUCHED // 1_000):
        keys = [number.to_bytes(8, "big") + place.to_bytes(8, "big") for place in range(1_000)]
        prefixes.note(keys, "a", 0, 1.0, computed=True)
    touched = list(prefixes.take_touched())
    assert MAX_TOUCHED <= sum(map(len, touched)) < MAX_TOUCHED + 1_000
    assert touched[-1][-1] == keys[-1] and not prefixes.take_touched()


def test_each_engine_has_its_own_pace_until_it_is_measured() -> None:
    index = Index(lambda: 0.0)
    assert index.block_life_s == BLOCK_LIFE_S
    index.kept = {"a": (10.0, 0.25), "gone": (1.0, 9.0)}
    index.add("a")
    index.add("b")
    assert (index.block_life_s, index.event_lag_s) == (10.0, 0.25), "one that is not there counts for nothing"
    index.remove("a")
    assert index.block_life_s == BLOCK_LIFE_S
