"""Adapters come and go while chunks move: nothing is lost, nothing waits for ever, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
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
from kvstrata.policy.store import RetryRule
from kvstrata.process.supervisor import PoolLane
from kvstrata.server.l2 import tier_control as adapter_control
from kvstrata.server.l2.prefetch import FetchOutcome, PrefetchController, PrefetchLimits
from kvstrata.server.l2.store import StoreController, StoreLimits
from kvstrata.server.l2.tier_control import SECRET_LEFT_OUT, AdapterControl, shown
from kvstrata.server.l2.tiers import AdapterSet
from kvstrata.storage.base import AdapterContext
from kvstrata.storage.registry import ConfiguredAdapter, configure_adapter
from kvstrata.storage.wrap.deadline import DeadlineAdapter, DeadlineLimits
from kvstrata.testing.strategies import IDENTITY
from tests.harness.l1 import CLOCK, L1, L1_BYTES, LATER_S, RECORD, chain
from tests.harness.shelf import SHELVES, entry, refuse_to_open


class Rig:
    """A pool, both controllers and the control, as the server has them."""

    def __init__(self, l1: L1, *, close_s: float = 0.05, open_s: float = 60.0) -> None:
        self.l1 = l1
        self.adapters = AdapterSet()
        self.skipped: list[tuple[bytes, str]] = []
        self.forgotten: list[str] = []
        self.lane = PoolLane(asyncio.get_running_loop())
        limits = DeadlineLimits(deadline_ms=600_000, max_stuck_bytes=1 << 30, close_s=close_s)

        def build(config: Any) -> ConfiguredAdapter:
            adapter = config.make()
            adapter.name = config.name
            guard = DeadlineAdapter(adapter, limits, CLOCK)
            return ConfiguredAdapter(config.name, guard, config.policy, guard)

        self.store = StoreController(
            l1.pool,
            self.adapters,
            StoreLimits(
                backlog_bytes=L1_BYTES // 4,
                batch_bytes=4 * RECORD,
                retry=RetryRule(retries=2, first_s=0.0, longest_s=0.0),
            ),
            lambda key, reason: self.skipped.append((key, reason)),
        )
        self.prefetch = PrefetchController(
            l1.pool,
            self.adapters,
            PrefetchLimits(in_flight_bytes=4 * RECORD, batch_bytes=2 * RECORD),
            CLOCK,
            lambda name, keys: None,
        )
        self.control = AdapterControl(
            self.adapters,
            l1.pool,
            self.lane,
            self.store,
            self.prefetch,
            build=build,
            context=lambda name: AdapterContext("test", CLOCK, 0, 0, lambda key: None),
            forget=self.forgotten.append,
            open_s=open_s,
        )
        self.store.start()

    async def add(
        self, shelf: str, *, position: int | None = None, backfill: bool = False, **common: Any
    ) -> str:
        """The new adapter's name."""
        row = await self.control.add(
            entry(shelf, **common), position=position, backfill=backfill, may_name_code=True
        )
        return str(row["name"])

    async def put(self, keys: list[bytes]) -> None:
        """Store chunks in L1 and wait until they went where the policies say."""
        assert self.l1.store(keys) == keys
        self.store.committed(keys)
        await self.store.idle()

    async def fetch(self, keys: list[bytes], within_s: float = LATER_S) -> FetchOutcome:
        return await self.prefetch.fetch(
            b"".join(keys), 1, identity=IDENTITY, tenant=1, deadline_s=CLOCK.monotonic_s() + within_s
        )

    def names(self) -> list[str]:
        return [member.name for member in self.adapters]

    def states(self) -> dict[str, str]:
        return {name: row["state"] for name, row in self.control.status().items()}

    async def close(self) -> None:
        for shelf in SHELVES.values():
            shelf.let_go()
        await self.prefetch.stop(LATER_S)
        await self.store.stop(LATER_S)
        await self.control.close()
        self.lane.close()


@pytest.fixture
def l1() -> Iterator[L1]:
    made = L1()
    yield made
    made.nothing_in_use()
    made.pool.close()


@pytest.fixture
async def start(l1: L1):
    """Makes rigs; closes them at the end."""
    SHELVES.clear()
    made: list[Rig] = []

    def starter(**limits: Any) -> Rig:
        made.append(Rig(l1, **limits))
        return made[-1]

    yield starter
    for rig in made:
        await rig.close()
    assert all(shelf.opened == shelf.closed for shelf in SHELVES.values()), "what was opened was closed"


Start = Callable[..., Rig]


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until something that must happen has happened."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for may be on a thread)
            await asyncio.sleep(0.001)


# -- add -------------------------------------------------------------------------------------------------------


async def test_an_added_adapter_gets_what_is_committed_from_now_on(start: Start, l1: L1) -> None:
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


async def test_with_backfill_it_is_offered_what_l1_has(start: Start, l1: L1) -> None:
    rig = start()
    keys = chain("a", 40)
    await rig.put(keys)
    name = await rig.add("a", backfill=True, policy="second_touch")
    await until(lambda: set(SHELVES["a"].records) == set(keys))
    await rig.store.idle()
    await until(lambda: not rig.control._backfill_left)
    assert rig.store.stats_of(name)["outcomes"] == {"stored": 40}, "and never more than the backlog holds"


@pytest.mark.parametrize("policy", ["through", "on_evict", "second_touch"])
async def test_the_policy_takes_effect_at_once(start: Start, l1: L1, policy: str) -> None:
    rig = start()
    keys = chain("a", 48)  # above the watermark at which on_evict begins
    await rig.put(keys[:40])
    await rig.add("a", policy=policy)
    await rig.put(keys[40:])
    if policy == "through":
        assert set(SHELVES["a"].records) == set(keys[40:])
    elif policy == "on_evict":
        assert (
            SHELVES["a"].records.keys()
            == set(l1.pool.victims_preview(L1_BYTES)) & SHELVES["a"].records.keys()
        )
        assert set(SHELVES["a"].records) & set(keys[:40]), "what is about to leave is from before"
    else:
        assert not rig.store.wants_touches or not SHELVES["a"].records
        rig.store.touched(keys[:2])
        rig.store.touched(keys[:2])
        await rig.store.idle()
        assert set(SHELVES["a"].records) == set(keys[:2])


async def test_the_position_decides_who_is_asked_first(start: Start, l1: L1) -> None:
    rig = start()
    await rig.add("far")
    await rig.add("farthest")
    keys = chain("a", 2)
    await rig.put(keys)
    assert await rig.add("near", position=0) == "plugin-2"
    assert rig.names() == ["plugin-2", "plugin-0", "plugin-1"]
    assert [row["position"] for row in await rig.control.rows()] == [0, 1, 2]
    SHELVES["near"].records.update(SHELVES["far"].records)
    l1.lose(keys)
    assert (await rig.fetch(keys)).n_chunks == 2
    assert SHELVES["near"].asked["load"] == 1
    assert SHELVES["far"].asked["load"] == SHELVES["farthest"].asked["load"] == 0


async def test_l1_without_l2_answers_for_itself(start: Start, l1: L1) -> None:
    rig = start()
    assert not rig.adapters.take_loads
    name = await rig.add("a")
    assert rig.adapters.take_loads
    await rig.control.drain(name, loads=True, wait_s=LATER_S)
    assert rig.adapters.take_loads
    await rig.control.drain(name, loads=False, wait_s=LATER_S)
    assert not rig.adapters.take_loads


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"type": "fs"}, "adapter.base_path"),
        ({"type": "fs", "base_path": "/x", "polcy": "through"}, "adapter.polcy"),
        ({"type": "sf", "base_path": "/x"}, "adapter.type"),
        ({}, "adapter.type"),
        ({"type": "plugin", "module_path": "no.such", "class_name": "X"}, "adapter"),
        ({**entry("a"), "policy": "thru"}, "adapter.policy"),
        ({**entry("a"), "deadline_ms": 0}, "adapter.deadline_ms"),
    ],
)
async def test_a_wrong_entry_names_the_field_and_changes_nothing(
    start: Start, wrong: dict[str, Any], field: str
) -> None:
    rig = start()
    await rig.add("there")
    with pytest.raises(ConfigError) as raised:
        await rig.control.add(wrong, position=None, backfill=False, may_name_code=True)
    assert raised.value.field == field and field in raised.value.message
    assert rig.names() == ["plugin-0"]
    assert len(rig.store.stats()["adapters"]) == len(rig.prefetch.stats()["adapters"]) == 1


@pytest.mark.parametrize("position", [-1, 2, 1 << 40])
async def test_a_position_that_is_none_is_refused(start: Start, position: int) -> None:
    rig = start()
    await rig.add("there")
    with pytest.raises(BadRequest, match=f"position: must be from 0 to 1, the end, found {position}"):
        await rig.add("a", position=position)
    assert rig.names() == ["plugin-0"] and not SHELVES["a"].opened


async def test_an_adapter_that_cannot_be_opened_changes_nothing(start: Start) -> None:
    rig = start()
    refuse_to_open("a", "plugin-0: base_path: held by another server")
    with pytest.raises(StorageError, match="held by another server"):
        await rig.add("a")
    SHELVES["b"].fails_to_open = OSError("no bus")
    with pytest.raises(StorageError, match="plugin-1 could not be opened: OSError: no bus"):
        await rig.add("b")
    assert rig.names() == [] and not rig.adapters.take_loads


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


async def test_a_constructor_that_takes_its_time_keeps_nobody_waiting(start: Start) -> None:
    rig = start()
    SHELVES["a"].may_be_made.clear()
    adding = asyncio.create_task(rig.add("a"))
    await until(lambda: SHELVES["a"].making)
    assert await rig.add("b") == "plugin-1"
    SHELVES["a"].may_be_made.set()
    assert await adding == "plugin-0"


async def test_opened_and_opening_adapters_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_control, "MAX_L2_ADAPTERS", 2)
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


@pytest.mark.parametrize(
    "named", [entry("a"), {"type": "fault_inject", "inner": {"type": "fault_inject", "inner": entry("a")}}]
)
async def test_without_a_token_no_request_names_code(start: Start, named: dict[str, Any]) -> None:
    rig = start()
    with pytest.raises(NotPermitted, match=r"http\.token_file"):
        await rig.control.add(named, position=None, backfill=False, may_name_code=False)
    assert not SHELVES["a"].opened


# -- drain -----------------------------------------------------------------------------------------------------


async def test_a_drained_adapter_has_what_waited_and_gets_nothing_new(start: Start, l1: L1) -> None:
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
    assert (await rig.fetch(waited)).n_chunks == 10, "it still answers lookups"


async def test_what_the_backlog_had_no_room_for_is_not_put_to_a_draining_adapter(
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


async def test_drained_without_loads_it_is_asked_for_nothing(start: Start, l1: L1) -> None:
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


async def test_draining_ends_by_itself_when_nobody_waits_for_it(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    SHELVES["a"].shut("put")
    keys = l1.store(chain("a", 2))
    rig.store.committed(keys)
    await rig.control.drain(name, loads=True, wait_s=0.0)
    assert rig.states() == {name: "draining"}
    SHELVES["a"].let_go()
    await until(lambda: rig.states() == {name: "drained"})


async def test_a_backfill_that_cannot_begin_is_logged(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()

    def refuse(*work: Any) -> None:
        raise Refused("too much waits")

    monkeypatch.setattr(rig.lane, "run", refuse)
    await rig.add("a", backfill=True)
    await until(lambda: "adapter_task_failed" in caplog.text)


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
    assert len(SHELVES["a"].records) == adapter_control.BACKFILL_KEYS


# -- resume -----------------------------------------------------------------------------------------------------


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
    assert set(SHELVES["a"].records) == {*before, *after}, "what was skipped meanwhile stays skipped"
    assert rig.skipped == [(key, "draining") for key in meanwhile]
    l1.lose(before + meanwhile + after)
    assert (await rig.fetch(before)).n_chunks == 3
    assert (await rig.fetch(meanwhile)).n_chunks == 0
    row = await rig.control.drain(name, loads=True, wait_s=LATER_S)
    assert row is not None and row["state"] == "drained", "and can be drained again"


async def test_a_resume_ends_the_drain_that_others_wait_for(start: Start, l1: L1) -> None:
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
    assert row is not None and row["state"] == "active", "it says what became of it"
    l1.store(second)
    rig.store.committed(second)
    SHELVES["a"].let_go()
    await rig.store.idle()
    assert set(SHELVES["a"].records) == {*first, *second}
    assert rig.states() == {name: "active"}, "the drain that was ended ends nothing later"


async def test_resumed_with_backfill_it_is_offered_what_l1_has(start: Start, l1: L1) -> None:
    rig = start()
    name = await rig.add("a")
    await rig.control.drain(name, loads=True, wait_s=LATER_S)
    keys = chain("meanwhile", 20)
    await rig.put(keys)
    assert await rig.control.resume(name, backfill=True) is not None
    await until(lambda: len(SHELVES["a"].records) == 20)
    await until(lambda: rig.control._row(rig.adapters.get(name))["backfill_left"] == 0)
    await rig.control.resume(name, backfill=True)
    await until(lambda: rig.store.stats_of(name)["outcomes"].get("exists") == 20)


async def test_what_is_not_there_or_being_removed_is_not_resumed(start: Start) -> None:
    rig = start(close_s=60.0)
    name = await rig.add("a")
    row = await rig.control.resume(name, backfill=False)
    assert row is not None and row["state"] == "active", "one that is active stays it"
    assert await rig.control.resume("plugin-9", backfill=False) is None
    SHELVES["a"].shut("close")
    removing = asyncio.create_task(rig.control.remove(name, wait_s=0.0))
    await until(lambda: rig.states() == {name: "removing"})
    with pytest.raises(BadRequest, match="name: plugin-0 is being removed; add it again once it has left"):
        await rig.control.resume(name, backfill=False)
    SHELVES["a"].let_go()
    assert (await removing or {})["state"] == "removed"


# -- remove ----------------------------------------------------------------------------------------------------


async def test_a_removed_adapter_has_what_was_on_its_way_and_keeps_its_records(start: Start, l1: L1) -> None:
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
    assert await rig.add("a") == "plugin-1", "its name is never given again"
    l1.lose(keys)
    assert (await rig.fetch(keys)).n_chunks == 10, "added again it has them"


async def test_what_could_not_be_put_by_the_deadline_is_skipped_with_a_reason(start: Start, l1: L1) -> None:
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
    assert l1.pool.stats()["holds"] == 8, "what the medium still reads stays pinned"
    SHELVES["a"].let_go()
    await until(lambda: rig.names() == [])
    assert l1.pool.stats()["holds"] == 0


async def test_a_hung_adapter_is_removed_and_its_stuck_bytes_counted_until_it_lets_go(
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
    [removing] = [row for row in await rig.control.rows() if row["name"] == near]
    assert (removing["position"], removing["stuck_bytes"], removing["usage"]) == (None, 4 * RECORD, None)
    again = await rig.control.remove(near, wait_s=0.0)
    assert again == outcome, "a second remove tells the same"
    drained = await rig.control.drain(near, loads=True, wait_s=LATER_S)
    assert drained is not None and drained["state"] == "removing"
    assert await rig.add("c", position=1) == "plugin-2"
    assert [row["position"] for row in await rig.control.rows()] == [None, 0, 1]
    SHELVES["a"].let_go()
    await until(lambda: rig.names() == [far, "plugin-2"])
    assert rig.forgotten == [near] and SHELVES["a"].closed == 1


async def test_a_lookup_that_was_told_of_a_chunk_finds_it_elsewhere_or_misses(start: Start, l1: L1) -> None:
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


async def test_a_lookup_that_is_being_told_of_a_chunk_misses(start: Start, l1: L1) -> None:
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


async def test_a_lookup_asks_nobody_that_has_left_since_it_began(start: Start, l1: L1) -> None:
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


async def test_a_lookup_that_waits_for_its_turn_waits_no_more(start: Start, l1: L1) -> None:
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


async def test_a_lookup_whose_turn_comes_as_the_adapter_leaves_loads_nothing(
    start: Start, l1: L1, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()
    name = await rig.add("a")
    keys = chain("a", 2)
    await rig.put(keys)
    l1.lose(keys)
    gate, removals = rig.prefetch._of[name].gate, []
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


async def test_loads_under_way_end_well_within_the_time_given(start: Start, l1: L1) -> None:
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


async def test_the_end_of_the_server_ends_everything_here(start: Start, l1: L1) -> None:
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
    SHELVES[opening].opened = 0  # its task ended with the server, between opened and taken in


def test_entries_are_numbered_and_named_by_the_caller() -> None:
    with pytest.raises(ConfigError, match=r"^here\.base_path: "):
        configure_adapter({"type": "fs"}, 3, path="here")
    assert configure_adapter({"type": "fs", "base_path": "/x"}, 3, path="here").name == "fs-3"


# -- what a restart has ------------------------------------------------------------------------------------------


async def test_rows_tell_what_a_restart_has_and_what_it_brings_back(start: Start) -> None:
    rig = start()
    for number, shelf in enumerate(("a", "b")):
        await rig.control.open(configure_adapter(entry(shelf), number))
    added = await rig.add("c", position=0)

    async def in_settings() -> dict[str, bool]:
        return {row["name"]: row["in_settings"] for row in await rig.control.rows()}

    assert await in_settings() == {added: False, "plugin-0": True, "plugin-1": True}
    assert rig.control.missing() == []
    assert (await rig.control.rows())[0]["entry"] == entry("c")
    await rig.control.remove("plugin-0", wait_s=LATER_S)
    assert rig.control.missing() == ["plugin-0"]
    again = await rig.add("a")
    assert rig.control.missing() == [], "by another name it is there"
    assert await in_settings() == {added: False, "plugin-1": True, again: True}
    SHELVES["b"].shut("close")
    removing = asyncio.create_task(rig.control.remove("plugin-1", wait_s=0.0))
    await until(lambda: rig.states()["plugin-1"] == "removing")
    assert rig.control.missing() == ["plugin-1"]
    SHELVES["b"].let_go()
    await removing


async def test_a_row_of_one_that_leaves_while_others_are_asked_is_told_all_the_same(start: Start) -> None:
    rig = start()
    gone, other = await rig.add("a"), await rig.add("b")
    asked, answer = asyncio.Event(), asyncio.Event()
    usage = rig.adapters.get(other).adapter.usage

    async def slow() -> Any:
        asked.set()
        await answer.wait()
        return await usage()

    rig.adapters.get(other).adapter.usage = slow
    listing = asyncio.create_task(rig.control.rows())
    await asked.wait()
    await rig.control.remove(gone, wait_s=LATER_S)
    answer.set()
    assert [(row["name"], row["state"]) for row in await listing] == [(gone, "removing"), (other, "active")]
    assert [row["name"] for row in await rig.control.rows()] == [other]


def test_an_entry_is_shown_without_the_secrets_that_it_spells_out() -> None:
    given = {
        "type": "any",
        "password": "hunter2",
        "token_file": "/run/token",
        "codec": [{"name": "aes-gcm", "key_file": "/run/key"}],
        "adapter_params": {"Secret_Access_Key": "x", "bucket": "b", "password": ""},
        "chunk_tokens": 256,
        "auth": [{"apikey": "x"}, "y"],
    }
    public, left_out = shown(given)
    assert left_out == ["password", "adapter_params.Secret_Access_Key", "auth[0].apikey"]
    assert public == {
        **given,
        "password": SECRET_LEFT_OUT,
        "adapter_params": {"Secret_Access_Key": SECRET_LEFT_OUT, "bucket": "b", "password": ""},
        "auth": [{"apikey": SECRET_LEFT_OUT}, "y"],
    }
    assert given["password"] == "hunter2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, "hunter2") for name in (
            "secret_access_key", "aws_session_token", "sse_customer_key_base64", "account_key", "sas_key",
            "azure_storage_account_key", "azure_storage_sas_key", "client_secret", "service_account_key",
            "google_service_account_key", "bearer_token",
        )],
        ("proxy_url", "http://me:hunter2@proxy:3128"),
        ("endpoint", "https://:hunter2@host"),
    ],
)  # fmt: skip
def test_no_secret_of_an_object_store_is_shown(name: str, value: str) -> None:
    public, left_out = shown({"type": "object_store", "url": "s3://bucket/kv", name: value, "max_retries": 3})
    assert left_out == [name] and "hunter2" not in str(public)
    for url in ("http://proxy:3128", "s3://bucket/a:b@c", "https://me@host"):
        assert shown({"proxy_url": url, "key_prefix": "kv:"}) == ({"proxy_url": url, "key_prefix": "kv:"}, [])


# -- all at the same time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_comes_and_goes_every_chunk_is_put_or_skipped_and_nothing_is_left(
    start: Start, l1: L1, seed: int
) -> None:
    rng = random.Random(seed)
    rig = start()
    anchor = await rig.add("anchor")
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
        for n in range(20):
            names = [name for name in rig.names() if name != anchor]
            shelf = SHELVES[f"shelf {n % 4}"]
            match rng.randrange(6):
                case 0 | 1:
                    position = rng.choice([None, 0, len(rig.adapters.placed)])
                    await rig.add(f"shelf {n % 4}", position=position, backfill=rng.random() < 0.3)
                case 2 if names:
                    await rig.control.drain(rng.choice(names), loads=rng.random() < 0.5, wait_s=0.001)
                case 5 if names:
                    with contextlib.suppress(BadRequest):  # it is being removed
                        await rig.control.resume(rng.choice(names), backfill=rng.random() < 0.3)
                case 3 if names:
                    if rng.random() < 0.5:
                        shelf.shut(rng.choice(["put", "load", "exists"]))
                    asyncio.get_running_loop().call_later(0.01, shelf.let_go)
                    await rig.control.remove(rng.choice(names), wait_s=rng.choice([0.0, 0.002, 1.0]))
            await asyncio.sleep(0.001)

    work: list[Awaitable[None]] = [storing(), looking_up(), changing()]
    await asyncio.gather(*work)
    for shelf in SHELVES.values():
        shelf.let_go()
    await rig.prefetch.idle()
    await rig.store.idle()
    skipped = {key for key, _ in rig.skipped}
    for keys in stored:
        for key in keys:
            assert key in SHELVES["anchor"].records or key in skipped, "what the policy acknowledged is there"
    outcomes = rig.store.stats_of(anchor)["outcomes"]
    assert outcomes.get("stored", 0) == len(SHELVES["anchor"].records)
    for name in [name for name in rig.names() if name != anchor]:
        await rig.control.remove(name, wait_s=LATER_S)
    await until(lambda: rig.names() == [anchor])
    assert rig.store.stats()["backlog_bytes"] == 0
