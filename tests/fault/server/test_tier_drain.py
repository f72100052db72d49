"""Draining a tier and resuming it while chunks move."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstrata.errors import (
    BadRequest,
    Refused,
)
from kvstrata.server.l2.backfill import BACKFILL_KEYS
from tests.fault.server.tier_rig import Start
from tests.harness.l1 import L1, LATER_S, chain
from tests.harness.shelf import SHELVES
from tests.harness.waiting import until


async def test_a_drained_adapter_gets_the_waiting_chunks_and_no_new_ones(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    SHELVES["a"].shut("put")
    waited, late = chain("waited", 10), chain("late", 4)
    l1.store(waited)
    rig.store.committed(waited)
    await until(lambda: SHELVES["a"].waiting["put"] == 2)
    row = await rig.control.drain(name, loads=True, wait_s=0.01)
    assert row is not None and row["state"] == "draining" and row["puts"]["in_flight"] == 8
    l1.store(late)
    rig.store.committed(late)
    SHELVES["a"].let_go()
    row = await rig.control.drain(name, loads=True, wait_s=LATER_S)
    assert row is not None and row["state"] == "drained"
    assert set(SHELVES["a"].records) == set(waited)
    assert rig.skipped == [(key, "draining") for key in late]
    assert row["puts"]["outcomes"] == {"stored": 10, "skipped:draining": 4}
    l1.lose(waited)
    assert (await rig.fetch(waited)).n_chunks == 10, "a drained tier still answers lookups"


@pytest.mark.long
async def test_chunks_that_the_full_backlog_skipped_are_not_put_to_a_draining_adapter(
    start: Start, l1: L1
) -> None:
    rig = start()
    name = await rig.add("a")
    SHELVES["a"].shut("put")
    keys = l1.store(chain("a", 40))
    rig.store.committed(keys)
    await until(lambda: SHELVES["a"].waiting["put"] == 2)
    await rig.control.drain(name, loads=True, wait_s=0.0)
    SHELVES["a"].let_go()
    row = await rig.control.drain(name, loads=True, wait_s=LATER_S)
    assert row is not None and row["state"] == "drained"
    stored = set(SHELVES["a"].records)
    assert stored | {key for key, _ in rig.skipped} == set(keys), (
        "every chunk was put or skipped with a reason"
    )
    assert stored.isdisjoint(key for key, _ in rig.skipped)


@pytest.mark.long
async def test_an_adapter_drained_without_loads_is_asked_for_nothing(start: Start, l1: L1) -> None:
    rig = start()
    one, other = await rig.add("a"), await rig.add("b")
    keys = chain("a", 3)
    await rig.put(keys)
    await rig.control.drain(one, loads=True, wait_s=LATER_S)
    row = await rig.control.drain(one, loads=False, wait_s=LATER_S)
    assert row is not None and (row["state"], row["takes_loads"]) == ("drained", False)
    asked = SHELVES["a"].asked["exists"]
    l1.lose(keys)
    assert (await rig.fetch(keys)).n_chunks == 3
    assert SHELVES["a"].asked["exists"] == asked and SHELVES["b"].asked["load"]
    assert rig.states() == {one: "drained", other: "active"}


@pytest.mark.long
async def test_draining_ends_by_itself_without_a_waiting_request(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    SHELVES["a"].shut("put")
    keys = l1.store(chain("a", 2))
    rig.store.committed(keys)
    await rig.control.drain(name, loads=True, wait_s=0.0)
    assert rig.states() == {name: "draining"}
    SHELVES["a"].let_go()
    await until(lambda: rig.states() == {name: "drained"})


@pytest.mark.long
async def test_a_backfill_that_cannot_begin_is_logged(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()

    def refuse(*work: Any) -> None:
        raise Refused("too much waits")

    monkeypatch.setattr(rig.lane, "run", refuse)
    await rig.add("a", backfill=True)
    await until(lambda: "adapter_task_failed" in caplog.text)


@pytest.mark.long
async def test_draining_ends_a_backfill(start: Start, l1: L1) -> None:
    rig = start()
    await rig.put(chain("a", 40))
    SHELVES["a"].shut("put")
    name = await rig.add("a", backfill=True)
    await until(lambda: SHELVES["a"].waiting["put"])
    await rig.control.drain(name, loads=True, wait_s=0.0)
    SHELVES["a"].let_go()
    row = await rig.control.drain(name, loads=True, wait_s=LATER_S)
    assert row is not None and (row["state"], row["backfill_left"]) == ("drained", 0)
    assert len(SHELVES["a"].records) == BACKFILL_KEYS


@pytest.mark.parametrize("loads", [False, True])
async def test_a_resumed_adapter_is_used_as_before(start: Start, l1: L1, loads: bool) -> None:
    rig = start()
    name = await rig.add("a")
    before, meanwhile, after = chain("before", 3), chain("meanwhile", 3), chain("after", 3)
    await rig.put(before)
    await rig.control.drain(name, loads=loads, wait_s=LATER_S)
    await rig.put(meanwhile)
    assert rig.adapters.take_loads == loads
    row = await rig.control.resume(name, backfill=False)
    assert row is not None and (row["state"], row["takes_loads"]) == ("active", True)
    await rig.put(after)
    assert set(SHELVES["a"].records) == {*before, *after}, "chunks skipped while it drained stay skipped"
    assert rig.skipped == [(key, "draining") for key in meanwhile]
    l1.lose(before + meanwhile + after)
    assert (await rig.fetch(before)).n_chunks == 3
    assert (await rig.fetch(meanwhile)).n_chunks == 0
    row = await rig.control.drain(name, loads=True, wait_s=LATER_S)
    assert row is not None and row["state"] == "drained", "a resumed tier can be drained again"


@pytest.mark.long
async def test_a_resume_ends_a_drain_for_which_a_request_waits(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    SHELVES["a"].shut("put")
    first, second = l1.store(chain("first", 4)), chain("second", 4)
    rig.store.committed(first)
    await until(lambda: SHELVES["a"].waiting["put"])
    draining = asyncio.create_task(rig.control.drain(name, loads=True, wait_s=LATER_S))
    await until(lambda: rig.states() == {name: "draining"})
    row = await rig.control.resume(name, backfill=False)
    assert row is not None and row["state"] == "active"
    row = await draining
    assert row is not None and row["state"] == "active", "the ended drain reports the new state"
    l1.store(second)
    rig.store.committed(second)
    SHELVES["a"].let_go()
    await rig.store.idle()
    assert set(SHELVES["a"].records) == {*first, *second}
    assert rig.states() == {name: "active"}, "the ended drain changes nothing later"


@pytest.mark.long
async def test_an_adapter_resumed_with_backfill_is_offered_the_chunks_in_l1(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    await rig.control.drain(name, loads=True, wait_s=LATER_S)
    keys = chain("meanwhile", 20)
    await rig.put(keys)
    assert await rig.control.resume(name, backfill=True) is not None
    await until(lambda: len(SHELVES["a"].records) == 20)
    await until(lambda: rig.control.rows.row(rig.adapters.get(name))["backfill_left"] == 0)
    await rig.control.resume(name, backfill=True)
    await until(lambda: rig.store.stats_of(name)["outcomes"].get("exists") == 20)


@pytest.mark.long
async def test_an_unknown_adapter_or_one_being_removed_is_not_resumed(start: Start) -> None:
    rig = start(close_s=60.0)
    name = await rig.add("a")
    row = await rig.control.resume(name, backfill=False)
    assert row is not None and row["state"] == "active", "an active tier stays active"
    assert await rig.control.resume("plugin-9", backfill=False) is None
    SHELVES["a"].shut("close")
    removing = asyncio.create_task(rig.control.remove(name, wait_s=0.0))
    await until(lambda: rig.states() == {name: "removing"})
    with pytest.raises(BadRequest, match="name: plugin-0 is being removed; add it again once it has left"):
        await rig.control.resume(name, backfill=False)
    SHELVES["a"].let_go()
    assert (await removing or {})["state"] == "removed"
