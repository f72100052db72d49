"""Tiers of the settings that cannot be reached, and tiers that an admin pauses and resumes while chunks move."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvstrata.errors import BadRequest, ConfigError, StorageError
from kvstrata.server.l2 import tier_control
from kvstrata.server.l2.fetch import FetchOutcome
from kvstrata.storage.entry import configure_tier
from tests.fault.server.tier_rig import Start
from tests.harness.amount import amount
from tests.harness.l1 import L1, LATER_S, chain
from tests.harness.shelf import SHELVES, entry
from tests.harness.waiting import until


async def test_a_tier_that_cannot_be_reached_stops_nothing_and_is_used_once_it_can_be(start, l1, monkeypatch):
    monkeypatch.setattr(tier_control, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tier_control, "MAX_PAUSE_S", 0.001)
    rig = start()
    SHELVES["away"].fails_to_open = StorageError("plugin-0: nobody answers")
    SHELVES["slow"].shut("open")
    for shelf, open_s in (("away", LATER_S), ("slow", 0.0), ("well", LATER_S)):
        rig.control._open_s = open_s
        await rig.open(shelf)
    assert rig.states() == {"plugin-0": "unreachable", "plugin-1": "unreachable", "plugin-2": "active"}
    rows = await rig.control.rows()
    assert [row.get("reason") for row in rows] == [
        "plugin-0: nobody answers",
        "plugin-1: it does not answer",
        None,
    ]
    assert [row.get("medium_well") for row in rows] == [False, False, None], "alerts see it"
    with pytest.raises(BadRequest, match="plugin-0 cannot be reached"):
        rig.control.pause("plugin-0")
    keys = chain("a", 3)
    await rig.put(keys)
    assert set(SHELVES["well"].records) == set(keys)
    l1.lose(keys)
    assert await rig.fetch(keys) == FetchOutcome(3, 3, "")
    SHELVES["away"].fails_to_open = OSError("a plugin may raise anything")
    await until(lambda: "OSError: a plugin may" in str(rig.control.status()["plugin-0"]["reason"]))
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


async def test_a_tier_that_is_wrong_stops_the_start(start: Start) -> None:
    rig = start()
    SHELVES["a"].fails_to_open = ConfigError("plugin-0: password: refused")
    with pytest.raises(ConfigError, match="password: refused"):
        await rig.open("a")
    SHELVES["b"].fails_to_open = StorageError("plugin-0: away")
    with pytest.raises(StorageError, match="away"):
        await rig.control.open(configure_tier(entry("b"), 0), must=True)
    assert rig.states() == {}


async def test_the_end_of_the_server_ends_an_opening(start: Start) -> None:
    rig = start(open_s=0.0)
    SHELVES["a"].shut("open", "close")
    name = await rig.open("a")
    assert rig.states() == {name: "unreachable"}
    await until(lambda: SHELVES["a"].waiting["open"])
    closing = asyncio.create_task(rig.control.close())
    await until(lambda: SHELVES["a"].waiting["close"])
    SHELVES["a"].let_go()
    await closing
    SHELVES["a"].opened = SHELVES["a"].closed  # its opening was cancelled, and it was closed


async def test_a_paused_tier_is_asked_nothing_until_it_is_resumed(start: Start, l1: L1) -> None:
    rig = start()
    one, other = await rig.open("a"), await rig.open("b")
    before, meanwhile, after = chain("before", 3), chain("meanwhile", 3), chain("after", 3)
    await rig.put(before)
    row = rig.control.pause(one)
    assert row is not None and (row["state"], row["takes_loads"], row["under_way"]) == ("paused", False, 0)
    asked = SHELVES["a"].asked.copy()
    await rig.put(meanwhile)
    assert rig.skipped == [(key, "paused") for key in meanwhile]
    l1.lose(before)
    assert await rig.fetch(before) == FetchOutcome(3, 3, "") and SHELVES["b"].asked["load"]
    rig.control.pause(other)
    assert not rig.adapters.take_loads
    l1.lose(before)
    assert (await rig.fetch(before)).n_chunks == 0
    assert [row["usage"] for row in await rig.control.rows()] == [None, None]
    with pytest.raises(StorageError, match="plugin-0: not cleared: it is paused"):
        await rig.store.clear()
    assert SHELVES["a"].asked == asked
    for name in (one, other):
        row = rig.control.resume(name)
        assert row is not None and (row["state"], row["takes_loads"]) == ("active", True)
    await rig.put(after)
    assert set(SHELVES["a"].records) == {*before, *after}, "chunks that were skipped meanwhile stay skipped"
    assert (await rig.fetch(before)).n_chunks == 3
    assert rig.control.pause("nobody") is None


async def test_operations_under_way_end_well_in_a_pause_and_waiting_chunks_are_skipped(start, l1):
    rig = start()
    name = await rig.open("a")
    loaded, waited = chain("loaded", 2), chain("waited", 10)
    await rig.put(loaded)
    l1.lose(loaded)
    SHELVES["a"].shut("put", "load")
    l1.store(waited)
    rig.store.committed(waited)
    fetching = asyncio.create_task(rig.fetch(loaded))
    await until(lambda: SHELVES["a"].waiting["put"] == 2 and SHELVES["a"].waiting["load"] == 1)
    row = rig.control.pause(name)
    assert row is not None and row["under_way"] == 3
    SHELVES["a"].let_go()
    assert await fetching == FetchOutcome(2, 2, "")
    await rig.store.idle()
    assert len(SHELVES["a"].records) == 10 and [reason for _, reason in rig.skipped] == ["paused"] * 2


@pytest.mark.parametrize("seed", range(amount(2, 8)))
async def test_whatever_is_paused_every_chunk_is_put_or_skipped_and_nothing_is_left(start, l1, seed):
    rng = random.Random(seed)
    rig = start()
    names = [await rig.open(f"shelf {number}") for number in range(3)]
    stored: list[list[bytes]] = []

    async def storing() -> None:
        for n in range(30):
            keys = l1.store(chain(f"{seed} {n}", rng.randrange(1, 5)))
            rig.store.committed(keys)
            if keys:
                stored.append(keys)
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
            if rng.random() < 0.3:
                await rig.store.idle()

    async def looking_up() -> None:
        for _ in range(30):
            if stored:
                keys = rng.choice(stored)
                if not l1.pool.stats()["pinned_bytes"]:
                    for key in reversed(keys):
                        l1.pool.remove(key)
                found = await rig.fetch(keys, within_s=rng.choice([0.0, 0.01, LATER_S]))
                assert 0 <= found.n_chunks <= len(keys)
            await asyncio.sleep(0)

    async def changing() -> None:
        for n in range(30):
            shelf = SHELVES[f"shelf {n % 3}"]
            if rng.random() < 0.2:
                shelf.shut(rng.choice(["put", "load", "exists"]))
                asyncio.get_running_loop().call_later(0.01, shelf.let_go)
            rng.choice([rig.control.pause, rig.control.resume])(rng.choice(names))
            await asyncio.sleep(0.001)

    await asyncio.gather(storing(), looking_up(), changing())
    for shelf in SHELVES.values():
        shelf.let_go()
    await rig.prefetch.idle()
    await rig.store.idle()
    skipped = {key for key, _ in rig.skipped}
    for number, name in enumerate(names):
        records = SHELVES[f"shelf {number}"].records
        assert all(key in records or key in skipped for keys in stored for key in keys)
        assert rig.store.stats_of(name)["outcomes"].get("stored", 0) == len(records)
    assert rig.store.stats()["backlog_bytes"] == 0
