"""Removing a tier while chunks move: which chunks it still gets, and what lookups find."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstrata.server.l2.fetch import FetchOutcome
from tests.fault.server.tier_rig import Start
from tests.harness.l1 import L1, LATER_S, RECORD, chain
from tests.harness.shelf import SHELVES
from tests.harness.waiting import until


async def test_a_removed_adapter_gets_the_waiting_chunks_and_keeps_its_records(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    SHELVES["a"].shut("put")
    keys = l1.store(chain("a", 10))
    rig.store.committed(keys)
    await until(lambda: SHELVES["a"].waiting["put"] == 2)
    removing = asyncio.create_task(rig.control.remove(name, wait_s=LATER_S))
    await until(lambda: rig.states() == {name: "removing"})
    SHELVES["a"].let_go()
    assert await removing == {"name": name, "state": "removed", "puts_skipped": 0, "stuck_bytes": 0}
    assert rig.names() == [] and rig.forgotten == [name] and not rig.adapters.take_loads
    assert set(SHELVES["a"].records) == set(keys) and SHELVES["a"].closed == 1
    assert rig.store.stats()["adapters"] == rig.prefetch.stats()["adapters"] == {}
    assert rig.store.stats()["backlog_bytes"] == 0
    assert await rig.add("a") == "plugin-1", "a name is never used again"
    l1.lose(keys)
    assert (await rig.fetch(keys)).n_chunks == 10, "added again, the tier still has its records"


@pytest.mark.long
async def test_chunks_not_put_by_the_deadline_of_a_removal_are_skipped_with_a_reason(
    start: Start, l1: L1
) -> None:
    rig = start()
    name = await rig.add("a")
    SHELVES["a"].shut("put")
    keys = l1.store(chain("a", 10))
    rig.store.committed(keys)
    await until(lambda: SHELVES["a"].waiting["put"] == 2)
    outcome = await rig.control.remove(name, wait_s=0.01)
    assert outcome is not None and outcome["puts_skipped"] == 10
    assert sorted(rig.skipped) == sorted((key, "removed") for key in keys)
    assert rig.store.stats()["backlog_bytes"] == 0
    assert l1.pool.stats()["holds"] == 8, "chunks that the medium still reads stay pinned"
    SHELVES["a"].let_go()
    await until(lambda: rig.names() == [])
    assert l1.pool.stats()["holds"] == 0


async def test_a_hung_adapter_is_removed_and_its_stuck_bytes_counted_until_it_drops_them(
    start: Start, l1: L1
) -> None:
    rig = start()
    near, far = await rig.add("a"), await rig.add("b")
    SHELVES["a"].shut("put", "load", "exists", "close")
    keys = l1.store(chain("a", 4))
    rig.store.committed(keys)
    await until(lambda: SHELVES["a"].waiting["put"] and set(SHELVES["b"].records) == set(keys))
    outcome = await rig.control.remove(near, wait_s=0.0)
    assert outcome == {"name": near, "state": "removing", "puts_skipped": 4, "stuck_bytes": 4 * RECORD}
    assert rig.states() == {near: "removing", far: "active"}
    [removing] = [row for row in await rig.control.rows.all() if row["name"] == near]
    assert (removing["position"], removing["stuck_bytes"], removing["usage"]) == (None, 4 * RECORD, None)
    again = await rig.control.remove(near, wait_s=0.0)
    assert again == outcome, "a second remove reports the same"
    drained = await rig.control.drain(near, loads=True, wait_s=LATER_S)
    assert drained is not None and drained["state"] == "removing"
    assert await rig.add("c", position=1) == "plugin-2"
    assert [row["position"] for row in await rig.control.rows.all()] == [None, 0, 1]
    SHELVES["a"].let_go()
    await until(lambda: rig.names() == [far, "plugin-2"])
    assert rig.forgotten == [near] and SHELVES["a"].closed == 1


@pytest.mark.long
async def test_a_chunk_found_in_a_removed_adapter_is_loaded_from_another_or_misses(
    start: Start, l1: L1
) -> None:
    rig = start()
    near, far = await rig.add("a"), await rig.add("b")
    keys = chain("a", 6)
    await rig.put(keys)
    for key in keys[4:]:
        del SHELVES["b"].records[key]
    l1.lose(keys)
    SHELVES["a"].shut("load")
    fetching = asyncio.create_task(rig.fetch(keys))
    await until(lambda: SHELVES["a"].waiting["load"] == 2)
    removing = asyncio.create_task(rig.control.remove(near, wait_s=0.0))
    found = await fetching
    assert (found.n_chunks, found.reason, found.detail) == (4, "breaker_open", "adapter_removed")
    assert l1.has(*keys[:4])
    SHELVES["a"].let_go()
    await removing
    await until(lambda: rig.names() == [far])
    await rig.prefetch.idle()


@pytest.mark.long
async def test_a_lookup_that_waits_for_exists_of_a_removed_adapter_misses(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    keys = chain("a", 3)
    await rig.put(keys)
    l1.lose(keys)
    SHELVES["a"].shut("exists")
    fetching = asyncio.create_task(rig.fetch(keys))
    await until(lambda: SHELVES["a"].waiting["exists"])
    removing = asyncio.create_task(rig.control.remove(name, wait_s=LATER_S))
    await until(lambda: rig.states() == {name: "removing"})
    SHELVES["a"].let_go()
    found = await fetching
    assert (found.n_chunks, found.detail) == (0, "adapter_removed")
    assert (await removing)["state"] == "removed"  # type: ignore[index]
    assert SHELVES["a"].asked["load"] == 0


@pytest.mark.long
async def test_a_lookup_does_not_ask_an_adapter_that_left_since_it_began(start: Start, l1: L1) -> None:
    rig = start()
    _, far = await rig.add("a"), await rig.add("b")
    keys = chain("a", 2)
    await rig.put(keys)
    l1.lose(keys)
    SHELVES["a"].records.clear()
    SHELVES["a"].shut("exists")
    fetching = asyncio.create_task(rig.fetch(keys))
    await until(lambda: SHELVES["a"].waiting["exists"])
    await rig.control.remove(far, wait_s=LATER_S)
    SHELVES["a"].let_go()
    assert (await fetching).detail == "adapter_removed"
    assert SHELVES["b"].asked["exists"] == 0


@pytest.mark.long
async def test_a_lookup_that_waits_at_the_gate_of_a_removed_adapter_goes_on(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    keys, more = chain("a", 4), chain("more", 2)
    await rig.put(keys)
    await rig.put(more)
    l1.lose([*keys, *more])
    SHELVES["a"].shut("load")
    loading = asyncio.create_task(rig.fetch(keys))
    await until(lambda: SHELVES["a"].waiting["load"] == 2)
    waiting = asyncio.create_task(rig.fetch(more))
    await until(lambda: rig.prefetch.stats_of(name)["waiting"] == 1)
    removing = asyncio.create_task(rig.control.remove(name, wait_s=LATER_S))
    assert (await waiting).detail == "adapter_removed"
    SHELVES["a"].let_go()
    assert (await loading).n_chunks == 4
    await removing


@pytest.mark.long
async def test_a_lookup_admitted_as_its_adapter_leaves_loads_nothing(
    start: Start, l1: L1, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()
    name = await rig.add("a")
    keys = chain("a", 2)
    await rig.put(keys)
    l1.lose(keys)
    gate, removals = rig.prefetch._loaders[name].gate, []
    enter = gate.enter

    async def enter_late(*arguments: Any) -> bool:
        entered = await enter(*arguments)
        removals.append(asyncio.create_task(rig.control.remove(name, wait_s=LATER_S)))
        await until(lambda: not rig.adapters.take_loads)
        return entered

    monkeypatch.setattr(gate, "enter", enter_late)
    assert (await rig.fetch(keys)).detail == "adapter_removed"
    await asyncio.gather(*removals)
    assert SHELVES["a"].asked["load"] == 0 and gate.loading_bytes == 0


@pytest.mark.long
async def test_loads_under_way_end_well_within_the_time_of_a_removal(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    keys = chain("a", 2)
    await rig.put(keys)
    l1.lose(keys)
    SHELVES["a"].shut("load")
    fetching = asyncio.create_task(rig.fetch(keys))
    await until(lambda: SHELVES["a"].waiting["load"])
    removing = asyncio.create_task(rig.control.remove(name, wait_s=LATER_S))
    await until(lambda: rig.states() == {name: "removing"})
    SHELVES["a"].let_go()
    assert await fetching == FetchOutcome(2, 2, "")
    assert (await removing)["state"] == "removed"  # type: ignore[index]


async def test_the_end_of_the_server_ends_additions_and_removals_under_way(start: Start, l1: L1) -> None:
    rig = start()
    await rig.put(chain("a", 20))
    draining, removing, opening = await rig.add("a"), await rig.add("b"), "c"
    SHELVES["a"].shut("put", "close")
    SHELVES["b"].shut("put", "close")
    SHELVES[opening].shut("open")
    keys = l1.store(chain("more", 4))
    rig.store.committed(keys)
    work = [
        asyncio.create_task(rig.control.drain(draining, loads=True, wait_s=LATER_S)),
        asyncio.create_task(rig.control.remove(removing, wait_s=LATER_S)),
        asyncio.create_task(rig.add(opening)),
    ]
    await until(lambda: rig.states() == {draining: "draining", removing: "removing"})
    await until(lambda: SHELVES[opening].waiting["open"])
    await rig.control.close()
    assert rig.names() == []
    with pytest.raises(Exception, match="stopping"):
        await rig.add("d")
    for shelf in SHELVES.values():
        shelf.let_go()
    await asyncio.gather(*work, return_exceptions=True)
    await until(lambda: l1.pool.stats()["holds"] == 0)
    SHELVES[opening].opened = 1  # the server's end cancelled its opening, and closed it
