"""Store to L2 through the server's real parts: what is put, when, and tiers that are added or taken away."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvstrata import failpoints
from kvstrata.errors import BadRequest, ConfigError, StorageError
from kvstrata.tiers import tier as tier_module
from kvstrata.tiers.config import StorePolicy
from kvstrata.tiers.fetch import FetchOutcome
from kvstrata.tiers.puts import KEYS_PER_TURN
from kvstrata.types import KEY_BYTES
from tests.fault.server.conftest import OpenTier, Puts, Start
from tests.harness.amount import amount
from tests.harness.l1 import L1, LATER_S, chain
from tests.harness.shelf import SHELVES, Fault
from tests.harness.waiting import until


async def test_chunks_that_the_full_backlog_skipped_are_put_once_it_is_empty(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 40))
    await puts.put(keys)
    n_skipped = puts.counts()["skipped:backlog"]
    assert n_skipped > 0
    assert puts.counts()["taken_up"] == n_skipped and one.records == set(keys)
    assert puts.backlog_bytes == 0


async def test_no_turn_of_the_loop_looks_at_all_skipped_chunks(l1: L1, tier: OpenTier) -> None:
    """Tens of thousands of skipped chunks may have left the pool since."""
    holds: collections.Counter[int] = collections.Counter()
    turn = 0

    class Counting:
        def hold_batch(self, keys: bytes, limit_bytes: int) -> object:
            holds[turn] += len(keys) // KEY_BYTES
            return l1.pool.hold_batch(keys, limit_bytes)

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        ticking[0] = asyncio.get_running_loop().call_soon(next_turn)

    one = await tier()
    puts = Puts(l1, one)
    of_tier = puts.controller._puts["shelf-0"]
    pool: Any = Counting()
    of_tier._pool = pool
    of_tier.unpinned.update(dict.fromkeys(chain("lost", 1000)))
    ticking = [asyncio.get_running_loop().call_soon(next_turn)]
    await puts.put(l1.store(chain("a", 1)))
    ticking[0].cancel()
    assert holds.total() == 1001
    assert max(holds.values()) <= KEYS_PER_TURN


@pytest.fixture
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm({})


async def test_puts_go_on_after_one_crashed(l1, tier, caplog, disarmed):
    """The chunks of its batch are skipped and unpinned."""
    one = await tier()
    puts = Puts(l1, one, batches_in_flight=1)
    failpoints.arm({"KVSTRATA_TESTING": "1", "KVSTRATA_FAILPOINTS": "put.started=crash"})
    lost = l1.store(chain("a", 2))
    puts.controller.committed(lost)
    await puts.controller.idle()
    assert "put-shelf-0 crashed" in caplog.text and "failpoint put.started" in caplog.text
    assert sorted(puts.skipped) == sorted((key, "crashed") for key in lost)
    assert puts.backlog_bytes == 0
    kept = l1.store(chain("b", 2))
    await puts.put(kept)
    assert one.records == set(kept)
    assert puts.counts() == {"crashed": 1, "skipped:crashed": 2, "stored": 2}
    await puts.put(lost)
    assert one.records == {*kept, *lost}


async def test_a_put_in_flight_keeps_its_pin_after_its_deadline(l1: L1, tier: OpenTier) -> None:
    one = await tier(deadline_ms=1)
    one.shelf.schedule(Fault.HANG)
    puts = Puts(l1, one)
    [key] = l1.store(chain("a", 1))
    await puts.put([key])
    assert puts.skipped == [(key, "deadline")]
    assert puts.backlog_bytes == 0
    assert l1.pool.stats()["holds"] == 1
    for n in range(12):
        l1.store(chain(f"new {n}", 8))
    assert l1.has(key)
    one.shelf.release()
    await until(lambda: one.records == {key})
    await until(lambda: l1.pool.stats()["holds"] == 0)


async def test_a_throttled_put_is_repeated_and_at_last_skipped(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one)
    first, second = l1.store(chain("a", 2))
    one.shelf.schedule(Fault.THROTTLED, Fault.THROTTLED)
    await puts.put([first])
    assert one.records == {first}
    one.shelf.schedule(*[Fault.THROTTLED] * 3)
    await puts.put([second])
    assert puts.skipped == [(second, "injected")]
    assert puts.counts() == {"throttled": 4, "stored": 1, "skipped:injected": 1}
    assert puts.backlog_bytes == 0


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.RAISE, Fault.LOST_ACK])
async def test_a_failed_put_is_skipped_with_its_reason_and_later_ones_go_on(l1, tier, fault):
    one = await tier()
    puts = Puts(l1, one)
    first, second = l1.store(chain("a", 2))
    one.shelf.schedule(fault)
    await puts.put([first])
    assert puts.skipped == [(first, "adapter_error" if fault is Fault.RAISE else "injected")]
    await puts.put([first, second])
    assert one.records == {first, second}
    await until(lambda: l1.pool.stats()["holds"] == 0)


async def test_stop_is_bounded_and_reports_the_chunks_it_did_not_put(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    one.shelf.later = Fault.HANG
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 14))
    puts.controller.committed(keys)
    await until(lambda: one.shelf.hanging == 2)
    await puts.controller.stop(0)
    assert sorted(puts.skipped) == sorted((key, "stopping") for key in keys)
    assert puts.backlog_bytes == 0
    assert l1.pool.stats()["holds"] == 8, "the medium still uses two batches of four"
    puts.controller.committed(keys[:1])
    assert puts.skipped[-1] == (keys[0], "stopping")
    await puts.controller.stop(0)
    one.shelf.release()
    await until(lambda: l1.pool.stats()["holds"] == 0)


async def test_stop_puts_the_waiting_chunks_while_its_time_lasts(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one)
    keys = l1.store(chain("a", 14))
    puts.controller.committed(keys)
    await puts.controller.stop(LATER_S)
    assert one.records == set(keys)
    assert puts.skipped == []


async def test_more_keys_than_one_turn_takes_are_all_put_or_accounted_for(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one, max_waiting_keys=100)
    keys = l1.store(chain("a", 10))
    await puts.put([*keys, *chain("never stored", 150)])
    reasons = collections.Counter(reason for _, reason in puts.skipped)
    assert reasons == {"queue_full": 60, "evicted": 90}
    assert one.records == set(keys)


async def test_second_touch_puts_chunks_that_were_used_again(l1: L1, tier: OpenTier) -> None:
    one = await tier(StorePolicy.SECOND_TOUCH)
    puts = Puts(l1, one)
    once, twice, thrice = l1.store(chain("a", 3))
    await puts.put([once, twice, thrice])
    assert one.records == set()
    puts.controller.touched([twice, thrice])
    await puts.controller.idle()
    puts.controller.touched([thrice])
    await puts.controller.idle()
    assert one.records == {twice, thrice}
    assert one.shelf.stored[thrice] == 1


async def test_a_read_only_medium_gets_and_loses_nothing(l1: L1, tier: OpenTier) -> None:
    one, read_only = await tier(), await tier()
    medium = read_only.medium
    medium.capabilities = msgspec.structs.replace(medium.capabilities, takes_puts=False)
    puts = Puts(l1, one, read_only)
    keys = chain("a", 8)
    puts.controller.committed(l1.store(keys))
    await puts.controller.idle()
    assert one.records == set(keys)
    assert read_only.shelf.asked["put"] == 0
    assert puts.skipped == []
    assert await puts.controller.clear() == 8


async def test_clear_empties_queue_and_adapters(l1: L1, tier: OpenTier) -> None:
    one = await tier()
    puts = Puts(l1, one, batches_in_flight=1)
    done = l1.store(chain("done", 2))
    await puts.put(done)
    one.shelf.schedule(Fault.HANG)
    keys = l1.store(chain("a", 12))
    puts.controller.committed(keys)
    await until(lambda: one.shelf.hanging == 1)
    assert await puts.controller.clear() == 2
    assert sorted(puts.skipped) == sorted((key, "cleared") for key in keys[4:])
    one.shelf.release()
    await puts.controller.idle()
    assert one.records == set(), "a record whose put was under way is deleted once the put has ended"
    assert sorted(puts.skipped) == sorted((key, "cleared") for key in keys)


async def test_a_tier_that_cannot_be_reached_stops_nothing_and_is_used_once_it_can_be(start, l1, monkeypatch):
    monkeypatch.setattr(tier_module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tier_module, "MAX_PAUSE_S", 0.001)
    rig = start()
    SHELVES["away"].fails_to_open = StorageError("plugin-0: nobody answers")
    SHELVES["slow"].shut("open")
    for shelf, open_s in (("away", LATER_S), ("slow", 0.0), ("well", LATER_S)):
        rig.limits = msgspec.structs.replace(rig.limits, opening_s=open_s)
        await rig.open(shelf)
    assert rig.states() == {"plugin-0": "unreachable", "plugin-1": "unreachable", "plugin-2": "active"}
    rows = await rig.adapters.rows()
    assert [row.get("reason") for row in rows] == [
        "plugin-0: nobody answers",
        "plugin-1: it does not answer",
        None,
    ]
    assert [row.get("medium_well") for row in rows] == [False, False, None], "alerts see it"
    with pytest.raises(BadRequest, match="plugin-0 cannot be reached"):
        rig.adapters.pause("plugin-0")
    keys = chain("a", 3)
    await rig.put(keys)
    assert set(SHELVES["well"].records) == set(keys)
    l1.lose(keys)
    assert await rig.fetch(keys) == FetchOutcome(3, 3, "")
    SHELVES["away"].fails_to_open = OSError("a plugin may raise anything")
    await until(lambda: "OSError: a plugin may" in str(rig.adapters.document()["plugin-0"]["reason"]))
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
        await rig.open("b", must=True)
    assert rig.states() == {}


async def test_the_end_of_the_server_ends_an_opening(start: Start) -> None:
    rig = start(opening_s=0.0)
    SHELVES["a"].shut("open", "close")
    name = await rig.open("a")
    assert rig.states() == {name: "unreachable"}
    await until(lambda: SHELVES["a"].waiting["open"])
    closing = asyncio.create_task(rig.adapters.close())
    await until(lambda: SHELVES["a"].waiting["close"])
    SHELVES["a"].let_go()
    await closing
    SHELVES["a"].opened = SHELVES["a"].closed  # its opening was cancelled, and it was closed


async def test_a_paused_tier_is_asked_nothing_until_it_is_resumed(start: Start, l1: L1) -> None:
    rig = start()
    one, other = await rig.open("a"), await rig.open("b")
    before, meanwhile, after = chain("before", 3), chain("meanwhile", 3), chain("after", 3)
    await rig.put(before)
    row = rig.adapters.pause(one)
    assert row is not None and (row["state"], row["takes_loads"], row["under_way"]) == ("paused", False, 0)
    asked = SHELVES["a"].asked.copy()
    await rig.put(meanwhile)
    assert rig.skipped == [(key, "paused") for key in meanwhile]
    l1.lose(before)
    assert await rig.fetch(before) == FetchOutcome(3, 3, "") and SHELVES["b"].asked["load"]
    rig.adapters.pause(other)
    assert not rig.adapters.take_loads
    l1.lose(before)
    assert (await rig.fetch(before)).n_chunks == 0
    assert [row["usage"] for row in await rig.adapters.rows()] == [None, None]
    with pytest.raises(StorageError, match="plugin-0: not cleared: it is paused"):
        await rig.store.clear()
    assert SHELVES["a"].asked == asked
    for name in (one, other):
        row = rig.adapters.resume(name)
        assert row is not None and (row["state"], row["takes_loads"]) == ("active", True)
    await rig.put(after)
    assert set(SHELVES["a"].records) == {*before, *after}, "chunks that were skipped meanwhile stay skipped"
    assert (await rig.fetch(before)).n_chunks == 3
    assert rig.adapters.pause("nobody") is None


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
    row = rig.adapters.pause(name)
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
            rng.choice([rig.adapters.pause, rig.adapters.resume])(rng.choice(names))
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
        assert rig.store.document()["adapters"][name]["outcomes"].get("stored", 0) == len(records)
    assert rig.store.document()["backlog_bytes"] == 0
