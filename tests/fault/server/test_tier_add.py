"""Adding a tier while the server serves: when it takes part, why it is refused, and that a refusal changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from kvstrata.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    NotPermitted,
    Refused,
    StorageError,
)
from kvstrata.server.l2 import tier_control
from kvstrata.server.l2.fetch import FetchOutcome
from kvstrata.storage.entry import configure_tier
from tests.fault.server.tier_rig import Start
from tests.harness.l1 import L1, LATER_S, chain
from tests.harness.shelf import SHELVES, entry
from tests.harness.waiting import until


async def test_an_added_adapter_gets_the_chunks_committed_from_then_on(start: Start, l1: L1) -> None:
    rig = start()
    before, after = chain("before", 3), chain("after", 3)
    await rig.put(before)
    assert not l1.pool.stats()["holds"]
    assert await rig.add("a") == "plugin-0"
    await rig.put(after)
    assert set(SHELVES["a"].records) == set(after)
    l1.lose(after)
    assert await rig.fetch(after) == FetchOutcome(3, 3, "")
    assert l1.has(*after)


async def test_with_backfill_an_added_adapter_is_offered_the_chunks_in_l1(start: Start, l1: L1) -> None:
    rig = start()
    keys = chain("a", 40)
    await rig.put(keys)
    name = await rig.add("a", backfill=True, policy="second_touch")
    await until(lambda: set(SHELVES["a"].records) == set(keys))
    await rig.store.idle()
    await until(lambda: not rig.control._backfills.left(name))
    assert rig.store.stats_of(name)["outcomes"] == {"stored": 40}, "the backfill never exceeds the backlog"


@pytest.mark.long
async def test_the_position_decides_who_is_asked_first(start: Start, l1: L1) -> None:
    rig = start()
    await rig.add("far")
    await rig.add("farthest")
    keys = chain("a", 2)
    await rig.put(keys)
    assert await rig.add("near", position=0) == "plugin-2"
    assert rig.names() == ["plugin-2", "plugin-0", "plugin-1"]
    assert [row["position"] for row in await rig.control.rows.all()] == [0, 1, 2]
    SHELVES["near"].records.update(SHELVES["far"].records)
    l1.lose(keys)
    assert (await rig.fetch(keys)).n_chunks == 2
    assert SHELVES["near"].asked["load"] == 1
    assert SHELVES["far"].asked["load"] == SHELVES["farthest"].asked["load"] == 0


async def test_a_wrong_entry_or_position_names_the_field_and_changes_nothing(start: Start) -> None:
    rig = start()
    await rig.add("there")
    with pytest.raises(ConfigError) as wrong:
        await rig.control.add({"type": "fs", "base_path": "/x", "polcy": ""}, position=None, backfill=False)
    assert wrong.value.field == "adapter.polcy" and "adapter.polcy" in wrong.value.message
    for position in (-1, 2):
        with pytest.raises(BadRequest, match=f"position: must be from 0 to 1, the end, found {position}"):
            await rig.add("a", position=position)
    assert rig.names() == ["plugin-0"] and not SHELVES["a"].opened
    assert len(rig.store.stats()["adapters"]) == len(rig.prefetch.stats()["adapters"]) == 1


async def test_an_adapter_that_cannot_be_opened_changes_nothing(start: Start) -> None:
    rig = start()
    SHELVES["a"].fails_to_open = StorageError("plugin-0: base_path: held by another server")
    with pytest.raises(StorageError, match="held by another server"):
        await rig.add("a")
    SHELVES["b"].fails_to_open = OSError("no bus")
    with pytest.raises(StorageError, match="plugin-1 could not be opened: OSError: no bus"):
        await rig.add("b")
    assert rig.names() == [] and not rig.adapters.take_loads


async def test_a_tier_of_the_settings_that_cannot_be_reached_stops_nothing_and_is_used_once_it_can_be(
    start: Start, l1: L1, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_control, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tier_control, "MAX_PAUSE_S", 0.001)
    rig = start()
    SHELVES["away"].fails_to_open = StorageError("plugin-0: nobody answers")
    SHELVES["slow"].shut("open")
    for number, (shelf, open_s) in enumerate((("away", LATER_S), ("slow", 0.0), ("well", LATER_S))):
        rig.control._open_s = open_s
        await rig.control.open(configure_tier(entry(shelf), number))
    assert rig.states() == {"plugin-0": "unreachable", "plugin-1": "unreachable", "plugin-2": "active"}
    rows = await rig.control.rows.all()
    assert [row["position"] for row in rows] == [0, 1, 2]
    assert [row.get("reason") for row in rows] == [
        "plugin-0: nobody answers",
        "plugin-1: it does not answer",
        None,
    ]
    assert [row.get("medium_well") for row in rows] == [False, False, None], "alerts see it"
    assert rig.control.rows.missing() == []
    with pytest.raises(BadRequest, match="plugin-0 cannot be reached"):
        await rig.control.drain("plugin-0", loads=True, wait_s=0)
    keys = chain("a", 3)
    await rig.put(keys)
    assert set(SHELVES["well"].records) == set(keys)
    l1.lose(keys)
    assert await rig.fetch(keys) == FetchOutcome(3, 3, "")
    SHELVES["away"].fails_to_open = OSError("a plugin may raise anything")
    await until(lambda: "OSError: a plugin may" in str(rig.control.rows.status()["plugin-0"]["reason"]))
    SHELVES["away"].fails_to_open = None
    SHELVES["slow"].let_go()
    await until(lambda: set(rig.states().values()) == {"active"})
    loads = SHELVES["well"].asked["load"]
    later = chain("b", 3)
    await rig.put(later)
    assert set(SHELVES["away"].records) == set(SHELVES["slow"].records) == set(later)
    l1.lose(later)
    assert await rig.fetch(later) == FetchOutcome(3, 3, "")
    assert SHELVES["away"].asked["load"] and SHELVES["well"].asked["load"] == loads, (
        "the nearest one is asked first"
    )


async def test_a_tier_that_cannot_be_reached_can_be_removed_and_ends_with_the_server(start: Start) -> None:
    rig = start()
    for number, shelf in enumerate(("a", "b")):
        SHELVES[shelf].fails_to_open = StorageError(f"plugin-{number}: nobody answers")
        await rig.control.open(configure_tier(entry(shelf), number))
    removed = await rig.control.remove("plugin-0", wait_s=0)
    assert removed is not None and removed["state"] == "removed" and rig.names() == ["plugin-1"]


async def test_a_tier_of_the_settings_that_is_wrong_stops_the_start(start: Start) -> None:
    rig = start()
    SHELVES["a"].fails_to_open = ConfigError("plugin-0: password: refused")
    with pytest.raises(ConfigError, match="password: refused"):
        await rig.control.open(configure_tier(entry("a"), 0))
    SHELVES["b"].fails_to_open = StorageError("plugin-0: away")
    with pytest.raises(StorageError, match="away"):
        await rig.control.open(configure_tier(entry("b"), 0), must=True)
    assert rig.names() == []


@pytest.mark.long
async def test_an_adapter_that_hangs_in_open_is_answered_and_closed_when_it_ends(start: Start) -> None:
    rig = start(open_s=0.02)
    SHELVES["a"].shut("open")
    with pytest.raises(DeadlineExceeded, match="was not open after"):
        await rig.add("a")
    assert rig.names() == []
    rig.control._open_s = LATER_S
    assert await rig.add("b") == "plugin-1", "others can be added meanwhile"
    SHELVES["a"].let_go()
    await until(lambda: SHELVES["a"].closed == 1)
    assert rig.names() == ["plugin-1"]


@pytest.mark.long
async def test_a_slow_constructor_keeps_no_other_request_waiting(start: Start) -> None:
    rig = start()
    SHELVES["a"].may_be_made.clear()
    adding = asyncio.create_task(rig.add("a"))
    await until(lambda: SHELVES["a"].making)
    assert await rig.add("b") == "plugin-1"
    SHELVES["a"].may_be_made.set()
    assert await adding == "plugin-0"


@pytest.mark.long
async def test_opened_and_opening_adapters_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_control, "MAX_L2_ADAPTERS", 2)
    rig = start(open_s=0.02)
    SHELVES["a"].shut("open")
    with pytest.raises(DeadlineExceeded):
        await rig.add("a")
    rig.control._open_s = LATER_S
    await rig.add("b")
    with pytest.raises(Refused, match="at most 2 L2 adapters"):
        await rig.add("c")
    SHELVES["a"].let_go()
    await until(lambda: SHELVES["a"].closed)
    await until(lambda: not rig.control._opening)
    await rig.add("c")


@pytest.mark.long
async def test_an_entry_that_is_not_admitted_is_neither_made_nor_opened(start: Start) -> None:
    rig = start()

    def admit(entry: Mapping[str, Any]) -> dict[str, Any]:
        raise NotPermitted("adapter.type: not here", field="adapter.type")

    rig.control._admit = admit
    with pytest.raises(NotPermitted, match="not here"):
        await rig.add("a")
    assert not SHELVES["a"].making and not SHELVES["a"].opened and rig.names() == []


@pytest.mark.long
async def test_an_adapter_of_the_settings_comes_back_by_its_name(start: Start) -> None:
    rig = start()
    rig.control.rows.of_settings("plugin-7", entry("a"))
    rig.control.rows.of_settings("plugin-8", entry("b"))

    def admit(entry: Mapping[str, Any]) -> dict[str, Any]:
        raise NotPermitted("not in the settings")

    rig.control._admit = admit
    row = await rig.control.add("plugin-7", position=None, backfill=False)
    assert row["in_settings"]
    for guess in (entry("a"), {**entry("a"), "deadline_ms": 7}):  # a right guess of a secret is not confirmed
        with pytest.raises(NotPermitted):
            await rig.control.add(guess, position=None, backfill=False)
    with pytest.raises(BadRequest, match=r"no adapter 'plugin-9' \(they have: plugin-7, plugin-8\)"):
        await rig.control.add("plugin-9", position=None, backfill=False)
