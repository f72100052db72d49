"""The reader of peers against a directory and owners that are stale, silent, restarted, lying or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest

from kvstrata.errors import TransferError
from kvstrata.native import copying
from kvstrata.p2p.engines import base as transfer
from kvstrata.p2p.engines.links import Devices
from kvstrata.p2p.owners import OwnerLimits
from kvstrata.p2p.tier import PeerAdapter, PeerSettings
from kvstrata.rpc.cluster_wire import Failure, Owner, PeerRelease
from kvstrata.storage.base import Found, LoadItem, LoadOutcome, LoadStatus, Presence, PutOutcome, PutStatus
from kvstrata.testing.strategies import (
    WAIT_S,
    lent_context,
    load_item,
    loaded_payload,
    payload_of,
    put_item,
    record_length,
    watched,
)
from tests.harness.l1 import L1, RECORD, SIZE, chain
from tests.harness.peer_net import CopyEngine, Directory, TestOwner, metadata_of

LOADED = LoadOutcome(LoadStatus.LOADED)
ABSENT = LoadOutcome(LoadStatus.ABSENT)
THERE = Found(Presence.PRESENT, RECORD)
NOT_THERE = Found(Presence.ABSENT)
KEYS = chain("a", 8)


def failed(reason: str) -> LoadOutcome:
    return LoadOutcome(LoadStatus.FAILED, reason)


def unknown(reason: str) -> Found:
    return Found(Presence.UNKNOWN, 0, reason)


class Net:
    """One reader, one owner with eight records, a directory that knows it."""

    def __init__(self, l1: L1, **settings: object) -> None:
        self.l1 = l1
        self.directory = Directory()
        self.owner = TestOwner("owner", l1.pool)
        self.others: list[TestOwner] = []
        self.engine = CopyEngine()
        values = {
            # Answers come; who waits for these is a test of somebody who is silent.
            "lookup_timeout_ms": 60_000,
            "load_timeout_ms": 60_000,
            "lease_ms": 60_000,
            "remember_ms": 0,
            "remember_none_ms": 0,
            **settings,
        }
        self.settings = PeerSettings((self.directory.endpoint,), "copy", **values)
        self.usable = frozenset({"eth0 10.0.0.1"})
        self.adapter = PeerAdapter(
            self.settings, lambda: self.engine, look=lambda: Devices(self.usable, frozenset())
        )
        l1.store(KEYS)
        self.directory.tell(self.owner, KEYS)

    def patience(self, **settings: int) -> None:
        """How long the reader waits from now on."""
        self.adapter.settings = self.adapter.settings._replace(**settings)

    async def load(self, *keys: bytes, items: list[LoadItem] | None = None) -> list[LoadOutcome]:
        """Load and check holds, and the bytes of what was loaded."""
        items = items or [load_item(key, SIZE) for key in keys]
        outcomes = await self.adapter.load(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome == LOADED:
                watched(item).check()
                assert loaded_payload(item, SIZE) == payload_of(item.key, SIZE)
        return outcomes

    def counted(self, name: str) -> int:
        return self.adapter.numbers()[name]

    async def reopen(self, engine: CopyEngine) -> CopyEngine:
        """A device comes up: this engine takes the place of the one that is returned."""
        before, self.engine = self.engine, engine
        self.usable |= {"eth1 10.0.1.1"}
        self.adapter._engines.look_now()
        await until(lambda: self.counted("reopened_devices") == 1)
        return before


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until something that must happen has happened."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (messages on sockets)
            await asyncio.sleep(0.001)


OpenNet = Callable[..., "asyncio.Future[Net]"]


@pytest.fixture
def l1() -> Iterator[L1]:
    made = L1()
    yield made
    made.nothing_in_use()
    made.pool.close()


@pytest.fixture
async def net(l1: L1) -> AsyncIterator[Callable[..., object]]:
    """Opens nets; at the end every lease must be back or in the owner's own hands."""
    nets: list[Net] = []

    async def opened(**settings: object) -> Net:
        made = Net(l1, **settings)
        nets.append(made)
        await made.adapter.open(lent_context(lambda key: None, "reader"))
        return made

    yield opened
    for made in nets:
        made.engine.let_go()
        await made.adapter.close()
        for owner in (made.owner, *made.others):
            for lease in list(owner.leases):
                owner.expire(lease)
            owner.close()
        made.directory.close()


async def test_what_an_owner_has_is_found_read_and_its_lease_given_back(net, l1: L1) -> None:
    one = await net()
    assert await one.adapter.exists([*KEYS, *chain("b", 2)]) == [THERE] * 8 + [NOT_THERE] * 2
    assert await one.load(*KEYS) == [LOADED] * 8
    await until(lambda: one.owner.leases == {})
    assert one.directory.asked == {"Where": 1}
    assert one.owner.asked == {"PeerHello": 1, "PeerLease": 1, "PeerRelease": 1}
    assert one.counted("read_bytes") == 8 * RECORD


async def test_batches_of_one_lease_are_each_answered_and_the_last_one_ends_it(net) -> None:
    one = await net()
    await one.adapter.exists(KEYS)
    assert await one.load(*KEYS[:3]) == [LOADED] * 3
    assert (one.owner.kept, len(one.owner.leases)) == (1, 1)
    assert await one.load(*KEYS[3:]) == [LOADED] * 5
    await until(lambda: one.owner.leases == {})
    assert one.owner.asked["PeerLease"] == 1


async def test_nothing_is_put_deleted_or_cleared(net) -> None:
    one = await net()
    item = put_item(KEYS[0], SIZE)
    assert await one.adapter.put([item]) == [PutOutcome(PutStatus.FAILED, "read_only")]
    watched(item).check()
    assert not one.adapter.capabilities.takes_puts
    assert await one.adapter.delete(KEYS) == 0


async def test_a_load_without_a_lookup_leases_by_itself_and_twice_the_same_key_is_read_twice(net) -> None:
    one = await net()
    assert await one.load(KEYS[0], KEYS[0], KEYS[1]) == [LOADED] * 3
    await until(lambda: one.owner.leases == {})


async def test_concurrent_lookups_of_one_prompt_ask_once_and_all_find_it(net) -> None:
    one = await net()
    answers = await asyncio.gather(*(one.adapter.exists(KEYS) for _ in range(20)))
    assert answers == [[THERE] * 8] * 20
    assert (one.directory.asked["Where"], one.owner.asked["PeerLease"]) == (1, 1)
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_many_concurrent_reads_are_all_right(net, l1: L1) -> None:
    one = await net()
    prompts = [chain(f"p{i}", 4) for i in range(6)]  # as much as may be leased
    for prompt in prompts:
        l1.store(prompt)
    one.directory.tell(one.owner, [key for prompt in prompts for key in prompt])

    async def read(prompt: list[bytes]) -> None:
        assert await one.adapter.exists(prompt) == [THERE] * 4
        assert await one.load(*prompt) == [LOADED] * 4

    await asyncio.gather(*map(read, prompts))
    await until(lambda: one.owner.leases == {})


async def test_more_than_an_owner_leases_at_a_time_is_read_in_parts(net) -> None:
    one = await net()
    one.owner.max_leased = 3
    assert await one.adapter.exists([*KEYS, *chain("b", 2)]) == [THERE] * 8 + [NOT_THERE] * 2
    assert await one.adapter.exists(KEYS) == [THERE] * 8  # though our own lease is all that it leases
    parts = await asyncio.gather(one.load(*KEYS[:2]), one.load(*KEYS[2:5]), one.load(*KEYS[5:]))
    assert [outcome for part in parts for outcome in part] == [LOADED] * 8
    await until(lambda: one.owner.leases == {})


async def test_room_that_an_owner_has_not_heard_of_yet_is_waited_for(net) -> None:
    one = await net()
    one.owner.max_leased = 3
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    one.owner.postponed = (PeerRelease,)
    first = asyncio.create_task(one.load(*KEYS[:3]))
    await until(lambda: one.owner.later)  # everything is read, and the owner does not know it
    leases = one.owner.asked["PeerLease"]
    second = asyncio.create_task(one.load(*KEYS[3:5]))
    await until(lambda: one.owner.asked["PeerLease"] > leases)  # and is refused
    await asyncio.wait({second}, timeout=0.05)
    one.owner.catch_up()
    assert (await first, await second) == ([LOADED] * 3, [LOADED] * 2)


async def test_what_others_have_leased_is_not_waited_for(net) -> None:
    one = await net()
    one.owner.max_leased = 3
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert await one.load(*KEYS[:3]) == [LOADED] * 3
    one.owner.max_leased = 0
    assert await one.load(*KEYS[3:]) == [failed("throttled")] * 5
    assert await one.adapter.exists(KEYS) == [NOT_THERE] * 8  # no length is known


async def test_a_window_that_is_full_of_our_own_reads_is_waited_for(net) -> None:
    one = await net(limits=OwnerLimits(first_window_bytes=RECORD))
    other = chain("b", 4)
    one.l1.store(other)
    one.directory.tell(one.owner, [*KEYS, *other])
    assert await one.adapter.exists(KEYS[:4]) == [THERE] * 4
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    first = asyncio.create_task(one.load(*KEYS[:4]))
    assert await one.load(*KEYS[4:]) == [LOADED] * 4
    assert await first == [LOADED] * 4


# -- a directory that is wrong, or not there ----------------------------------------------------------------


async def test_a_stale_directory_costs_one_refused_lease_and_is_a_miss(net, l1: L1) -> None:
    one = await net()
    l1.lose(KEYS)
    assert await one.adapter.exists(KEYS) == [NOT_THERE] * 8
    assert one.counted("leases_refused") == 1
    assert await one.load(*KEYS[:1]) == [ABSENT]


async def test_a_collision_of_tags_is_a_miss(net) -> None:
    one = await net()
    other = [key[:8] + bytes(24) for key in KEYS]
    assert await one.adapter.exists(other) == [NOT_THERE] * 8


async def test_a_second_owner_is_asked_where_the_first_one_has_nothing(net, l1: L1) -> None:
    one = await net()
    empty = L1()
    liar = TestOwner("empty", empty.pool)
    one.others.append(liar)
    one.directory.holds = {}
    one.directory.tell(liar, KEYS)
    one.directory.tell(one.owner, KEYS)
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert liar.asked["PeerLease"] == 1
    assert await one.load(*KEYS) == [LOADED] * 8


@pytest.fixture
async def second(l1: L1) -> AsyncIterator[tuple[L1, TestOwner, bytes]]:
    """Another owner of the same records, and how it is named."""
    pool = L1()
    pool.store(KEYS)
    owner = TestOwner("second", pool.pool)
    yield pool, owner, msgspec.msgpack.encode(Owner("second", owner.epoch, owner.endpoint, len(KEYS), True))
    for lease in list(owner.leases):
        owner.expire(lease)
    owner.close()
    pool.pool.close()


async def test_the_owner_that_is_named_is_asked_first_and_no_directory(net, second) -> None:
    one = await net()
    _, other, source = second
    one.adapter.prefer(KEYS, source)
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 8
    assert (other.asked["PeerLease"], one.owner.asked["PeerLease"], one.directory.asked["Where"]) == (1, 0, 0)
    assert (one.counted("named_leases"), one.counted("named_refused")) == (1, 0)
    one.adapter.prefer(KEYS, b"")
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert (other.asked["PeerLease"], one.owner.asked["PeerLease"]) == (1, 1)


async def test_the_owner_that_is_named_is_read_in_parts_where_it_leases_little_at_a_time(net, second) -> None:
    one = await net()
    _, other, source = second
    other.max_leased = 3
    one.adapter.prefer(KEYS, source)
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 8
    assert (other.asked["PeerLease"] > 2, one.owner.asked["PeerLease"]) == (True, 0)


@pytest.mark.parametrize("how", ["refuses", "has nothing", "is full", "is silent"])
async def test_others_are_asked_where_the_named_owner_leases_nothing_and_that_is_counted(
    net, second, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = await net()
    pool, other, source = second
    match how:
        case "refuses":
            other.refuses["PeerLease"] = "refused"
        case "has nothing":
            pool.lose(KEYS)
        case "is full":
            other.max_leased = 0
        case "is silent":
            other.silent = True
            one.patience(lookup_timeout_ms=500, load_timeout_ms=500)
    one.adapter.prefer(KEYS, source)
    asked = asyncio.create_task(one.adapter.exists(KEYS))
    if how == "is silent":
        await until(lambda: one.counted("named_refused"))
    assert await asked == [THERE] * 8
    one.patience(lookup_timeout_ms=60_000, load_timeout_ms=60_000)
    assert await one.load(*KEYS) == [LOADED] * 8
    assert (one.counted("named_leases"), one.counted("named_refused")) == (0, 1)
    assert "second leases nothing of what it was named for; others are asked" in caplog.text


async def test_without_a_controller_lookups_are_answered_and_go_on_when_it_is_back(net) -> None:
    one = await net()
    one.patience(lookup_timeout_ms=50)
    one.directory.silent = True
    assert await one.adapter.exists(KEYS) == [unknown("controller_down")] * 8
    one.patience(lookup_timeout_ms=60_000)
    one.directory.silent = False
    async with asyncio.timeout(WAIT_S):
        while await one.adapter.exists(KEYS) != [THERE] * 8:  # noqa: ASYNC110 (the pause between two tries)
            await asyncio.sleep(0.01)


async def test_a_controller_that_refuses_is_no_reason_to_let_it_alone(net) -> None:
    one = await net()
    one.directory.failure = Failure(0, 0, "unknown_instance", "register first", "", True)
    assert await one.adapter.exists(KEYS) == [unknown("controller_down")] * 8
    one.directory.failure = None
    assert await one.adapter.exists(KEYS) == [THERE] * 8


async def test_that_nobody_has_a_chunk_is_remembered_for_a_moment(net) -> None:
    one = await net(remember_none_ms=60_000)
    nobody = chain("nobody", 3)
    for _ in range(3):
        assert await one.adapter.exists(nobody) == [NOT_THERE] * 3
    assert await one.adapter.exists(nobody[:2]) == [NOT_THERE] * 2
    assert one.directory.asked["Where"] == 1


# -- an owner that goes, stops or lies ----------------------------------------------------------------------


async def test_a_silent_owner_costs_one_deadline_and_is_let_alone(net) -> None:
    one = await net(limits=OwnerLimits(open_s=600, max_open_s=600))
    assert await one.adapter.exists(KEYS[:1]) == [THERE]
    one.owner.silent = True
    one.patience(lookup_timeout_ms=500)
    # With the connection the lease that stood is given up.
    assert await one.adapter.exists(KEYS) == [unknown("peer_deadline")] * 8
    asked = one.owner.asked["PeerLease"]
    assert await one.adapter.exists(KEYS) == [NOT_THERE] * 8
    assert one.owner.asked["PeerLease"] == asked
    assert one.counted("owners_let_alone") == 1


async def test_a_read_that_hangs_is_a_miss_at_its_deadline_and_its_bytes_stay_held_until_it_ends(net) -> None:
    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    one.engine.held = True
    one.patience(load_timeout_ms=50)
    items = [load_item(key, SIZE) for key in KEYS]
    assert await one.load(items=items) == [failed("peer_deadline")] * 8
    assert all(watched(item).drops == 0 for item in items)
    one.engine.let_go()
    for item in items:
        watched(item).check()


async def test_a_cancelled_load_keeps_its_holds_until_the_read_has_ended(net) -> None:
    one = await net()
    await one.adapter.exists(KEYS)
    one.engine.held = True
    items = [load_item(key, SIZE) for key in KEYS]
    load = asyncio.create_task(one.adapter.load(items))
    await until(lambda: one.engine.waiting)
    load.cancel()
    await asyncio.wait({load})
    assert all(watched(item).drops == 0 for item in items)
    one.engine.let_go()
    await until(lambda: all(watched(item).drops for item in items))
    for item in items:
        watched(item).check()


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (transfer.PEER_GONE, "peer_gone"),
        (transfer.FAILED, "transfer"),
        (transfer.BUSY, "throttled"),
        (transfer.DEADLINE, "peer_deadline"),
    ],
)
async def test_what_the_engine_says_is_passed_on_and_every_hold_dropped(net, word: str, reason: str) -> None:
    one = await net()
    await one.adapter.exists(KEYS)
    one.engine.answer = word
    items = [load_item(key, SIZE) for key in KEYS]
    assert await one.load(items=items) == [failed(reason)] * 8
    for item in items:
        watched(item).check()


async def test_a_lease_that_ended_before_its_bytes_were_read_is_a_miss(net, l1: L1) -> None:
    """The owner has cleared its pool in between, and other records lie there."""
    one = await net()
    await one.adapter.exists(KEYS)

    def ends() -> None:
        for lease in list(one.owner.leases):
            one.owner.expire(lease)
        assert l1.pool.clear() == (8, 0)
        l1.store(chain("others", 8))

    one.engine.before_read = ends
    assert await one.load(*KEYS) == [ABSENT] * 8
    assert one.counted("leases_lost") == 1


async def test_without_the_owners_word_what_was_read_is_a_miss(net) -> None:
    """It is cut off after the last byte."""
    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8

    def cut_off() -> None:
        one.owner.silent = True
        one.patience(load_timeout_ms=50)

    one.engine.before_read = cut_off
    items = [load_item(key, SIZE) for key in KEYS]
    assert await one.load(items=items) == [failed("peer_gone")] * 8
    for item in items:
        watched(item).check()
    assert one.counted("read_records") == 8


async def test_bytes_that_are_not_the_record_are_a_miss_though_the_lease_stood(net, l1: L1) -> None:
    one = await net()
    await one.adapter.exists(KEYS)
    hold = l1.pool.hold(KEYS[3])
    assert hold is not None
    address = hold.address
    hold.drop()

    def damage() -> None:
        l1.write(KEYS[4], address - l1.pool.extents_address, bytes(32))

    one.engine.before_read = damage
    assert await one.load(*KEYS) == [LOADED] * 3 + [ABSENT] + [LOADED] * 4
    assert one.counted("unsound_records") == 1
    assert copying.verify_record(address, RECORD, KEYS[4]) == 0


async def test_an_owner_that_was_started_again_is_introduced_anew(net) -> None:
    one = await net(limits=OwnerLimits(open_s=0.0, max_open_s=0.0))
    assert await one.load(*KEYS[:2]) == [LOADED] * 2
    one.owner.epoch = 12
    await one.adapter.exists(KEYS)
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 8
    assert one.owner.asked["PeerHello"] == 2


async def test_an_owner_with_another_record_version_or_metadata_is_a_miss_and_told_once(
    net, caplog: pytest.LogCaptureFixture
) -> None:
    one = await net(limits=OwnerLimits(open_s=0.0, max_open_s=0.0))
    one.owner.refuses["PeerHello"] = "wrong_version"
    for _ in range(3):
        assert await one.adapter.exists(KEYS) == [NOT_THERE] * 8
    assert caplog.text.count("wrong_version") == 1
    one.owner.refuses.clear()
    one.owner.metadata = b"garbage"
    assert await one.adapter.exists(KEYS) == [NOT_THERE] * 8
    one.owner.metadata = metadata_of(one.l1.pool.extents_address, one.l1.pool.extents_bytes)
    assert await one.adapter.exists(KEYS) == [THERE] * 8


async def test_extents_outside_the_owners_pool_are_never_read(net) -> None:
    one = await net()
    one.owner.lies = True
    assert await one.adapter.exists(KEYS) == [NOT_THERE] * 8
    assert await one.load(*KEYS[:1]) == [ABSENT]
    assert one.engine.reads == 0


async def test_a_record_of_another_length_than_was_reserved_is_not_read(net) -> None:
    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    items = [load_item(KEYS[0], SIZE - 1), load_item(KEYS[1], SIZE)]
    assert await one.load(items=items) == [failed("length"), LOADED]
    watched(items[0]).check()


@pytest.mark.parametrize("size", [SIZE - 4096, SIZE + 4096])
async def test_a_length_that_was_taken_for_granted_and_is_another_is_a_miss(net, l1: L1, size: int) -> None:
    """Beyond what the owner leases at a time; its records have one length there, and another one here."""
    one = await net()
    one.owner.max_leased = 3
    l1.lose(KEYS[4:])
    assert l1.store(KEYS, first=4, size=size) == KEYS[4:]
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 4 + [failed("length")] * 4
    await until(lambda: one.owner.leases == {})
    # Leased together they are told as they are, and nothing behind them is guessed.
    one.owner.max_leased = 6
    other = Found(Presence.PRESENT, record_length(size))
    assert await one.adapter.exists(KEYS) == [THERE] * 4 + [other] * 2 + [NOT_THERE] * 2
    items = [load_item(key, SIZE) for key in KEYS[:4]] + [load_item(key, size) for key in KEYS[4:6]]
    assert await one.adapter.load(items) == [LOADED] * 6
    for item, of in zip(items, [SIZE] * 4 + [size] * 2, strict=True):
        assert loaded_payload(item, of) == payload_of(item.key, of)


async def test_leases_that_nobody_reads_are_given_back(net) -> None:
    one = await net()
    await one.adapter.exists(KEYS)
    assert len(one.owner.leases) == 1
    await until(lambda: not one.owner.leases)
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_after_close_nothing_is_asked_or_read(net) -> None:
    one = await net()
    await one.adapter.exists(KEYS)
    await one.adapter.close()
    await until(lambda: one.owner.leases == {})
    assert await one.adapter.exists(KEYS) == [unknown("closed")] * 8
    items = [load_item(KEYS[0], SIZE)]
    assert await one.load(items=items) == [failed("closed")]
    watched(items[0]).check()
    await one.adapter.close()


async def test_a_bound_on_bytes_per_second_refuses_what_would_come_too_late(net) -> None:
    one = await net(max_bytes_per_s=RECORD / 10, load_timeout_ms=10_000)
    assert await one.load(*KEYS) == [LOADED] * 8
    assert await one.adapter.exists(KEYS) == [unknown("throttled")] * 8


# -- a transfer engine that is opened anew ------------------------------------------------------------------


async def test_leases_and_connections_go_on_when_the_engine_is_opened_anew(net) -> None:
    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert await one.load(*KEYS[:3]) == [LOADED] * 3
    before = await one.reopen(CopyEngine())
    assert await one.load(*KEYS[3:]) == [LOADED] * 5
    assert (before.reads, one.engine.reads) == (1, 1)
    assert one.owner.asked["PeerHello"] == one.owner.asked["PeerLease"] == 1
    assert "eth1 10.0.1.1" in one.adapter.remarks()["reopened"]


async def test_a_read_under_way_ends_where_it_was_begun_when_the_engine_is_opened_anew(net) -> None:
    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    one.engine.held = True
    reading = asyncio.create_task(one.load(*KEYS[:4]))
    await until(lambda: one.engine.waiting)
    before = await one.reopen(CopyEngine())
    assert await one.load(*KEYS[4:]) == [LOADED] * 4
    assert not reading.done()
    before.let_go()
    assert await reading == [LOADED] * 4
    assert one.owner.asked["PeerHello"] == 1


async def test_a_failure_in_the_engine_that_left_costs_the_connection_of_the_other_nothing(net) -> None:
    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    one.engine.held = True
    reading = asyncio.create_task(one.load(*KEYS[:4]))
    await until(lambda: one.engine.waiting)
    before = await one.reopen(CopyEngine())
    [(_, copy, outcome)] = before.waiting
    before.waiting = []
    outcome.set_result(transfer.PEER_GONE)
    assert await reading == [failed("peer_gone")] * 4
    copy()  # drops the holds
    assert await one.load(*KEYS[4:]) == [LOADED] * 4
    assert one.owner.asked["PeerHello"] == 1


async def test_a_peer_that_the_other_engine_cannot_connect_is_asked_for_its_metadata_again(net) -> None:
    class Refuses(CopyEngine):
        refusals = 1

        async def connect(self, peer: str, metadata: bytes) -> None:
            if self.refusals:
                self.refusals -= 1
                raise TransferError("copy: the metadata are of before", field="network")
            await super().connect(peer, metadata)

    one = await net()
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    await one.reopen(Refuses())
    assert await one.load(*KEYS[:1]) == [LOADED]
    assert one.owner.asked["PeerHello"] == 2


async def test_owners_that_were_let_alone_are_asked_again_when_the_engine_is_opened_anew(net) -> None:
    one = await net(limits=OwnerLimits(open_s=1e6, max_open_s=1e6))
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    one.engine.answer = transfer.PEER_GONE
    assert await one.load(KEYS[0]) == [failed("peer_gone")]
    assert await one.adapter.exists(KEYS) == [NOT_THERE] * 8
    await one.reopen(CopyEngine())
    assert await one.adapter.exists(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_an_adapter_that_is_closed_while_its_engine_is_opened_anew_closes_both(net) -> None:
    class Slow(CopyEngine):
        closed = False
        opening: asyncio.Future[bytes] | None = None

        async def open(self, regions):
            self.opening = asyncio.get_running_loop().create_future()
            return await self.opening

        async def close(self) -> None:
            self.closed = True

    one = await net()
    before, slow = one.engine, Slow()
    one.engine, one.usable = slow, one.usable | {"eth1 10.0.1.1"}
    one.adapter._engines.look_now()
    await until(lambda: slow.opening)
    assert await one.load(*KEYS) == [LOADED] * 8  # by the one in place
    await one.adapter.close()
    assert slow.closed
    one.engine = before
