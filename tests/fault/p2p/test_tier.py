"""The reader of peers: records are found, leased, read and given back; the directory may be stale or absent."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvstrata.p2p.owners import OwnerLimits
from kvstrata.rpc.cluster_wire import Failure, PeerRelease
from kvstrata.testing.strategies import WAIT_S, Settled, put_item, settled, watched
from kvstrata.tiers.base import Outcome
from tests.fault.p2p.conftest import ABSENT, KEYS, LOADED, NOT_THERE, THERE, TestOwner, failed, unknown
from tests.harness.l1 import L1, RECORD, SIZE, chain
from tests.harness.waiting import until


async def test_chunks_of_an_owner_are_found_and_read_and_its_lease_given_back(net, l1: L1) -> None:
    one = await net()
    assert await one.ask([*KEYS, *chain("b", 2)]) == [THERE] * 8 + [NOT_THERE] * 2
    assert await one.load(*KEYS) == [LOADED] * 8
    await until(lambda: one.owner.leases == {})
    assert one.directory.asked == {"Where": 1}
    assert one.owner.asked == {"PeerHello": 1, "PeerLease": 1, "PeerRelease": 1}
    assert one.counted("read_bytes") == 8 * RECORD


async def test_each_batch_of_one_lease_is_answered_and_the_last_one_ends_the_lease(net) -> None:
    one = await net()
    await one.ask(KEYS)
    assert await one.load(*KEYS[:3]) == [LOADED] * 3
    assert (one.owner.kept, len(one.owner.leases)) == (1, 1)
    assert await one.load(*KEYS[3:]) == [LOADED] * 5
    await until(lambda: one.owner.leases == {})
    assert one.owner.asked["PeerLease"] == 1


async def test_nothing_is_put_deleted_or_cleared(net) -> None:
    one = await net()
    item = put_item(KEYS[0], SIZE)
    assert await settled(one.adapter.put, [item]) == [Settled(Outcome.FAILED, "read_only")]
    watched(item).check()
    assert not one.adapter.capabilities.takes_puts
    assert await one.adapter.delete(b"".join(KEYS)) == 0


async def test_a_load_without_a_lookup_leases_by_itself_and_reads_a_repeated_key_twice(net) -> None:
    one = await net()
    assert await one.load(KEYS[0], KEYS[0], KEYS[1]) == [LOADED] * 3
    await until(lambda: one.owner.leases == {})


async def test_concurrent_lookups_of_one_prompt_ask_once_and_all_find_it(net) -> None:
    one = await net()
    answers = await asyncio.gather(*(one.ask(KEYS) for _ in range(20)))
    assert answers == [[THERE] * 8] * 20
    assert (one.directory.asked["Where"], one.owner.asked["PeerLease"]) == (1, 1)
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_more_than_an_owner_leases_at_a_time_is_read_in_parts(net) -> None:
    one = await net()
    one.owner.max_leased = 3
    assert await one.ask([*KEYS, *chain("b", 2)]) == [THERE] * 8 + [NOT_THERE] * 2
    # The same answer comes again although our own lease takes all that the owner leases.
    assert await one.ask(KEYS) == [THERE] * 8
    parts = await asyncio.gather(one.load(*KEYS[:2]), one.load(*KEYS[2:5]), one.load(*KEYS[5:]))
    assert [outcome for part in parts for outcome in part] == [LOADED] * 8
    await until(lambda: one.owner.leases == {})


async def test_a_load_waits_for_room_until_the_owner_has_heard_of_releases(net) -> None:
    one = await net()
    one.owner.max_leased = 3
    assert await one.ask(KEYS) == [THERE] * 8
    one.owner.postponed = (PeerRelease,)
    first = asyncio.create_task(one.load(*KEYS[:3]))
    await until(lambda: one.owner.later)  # all is read, but the owner has not seen the release
    leases = one.owner.asked["PeerLease"]
    second = asyncio.create_task(one.load(*KEYS[3:5]))
    await until(lambda: one.owner.asked["PeerLease"] > leases)  # this lease is refused
    await asyncio.wait({second}, timeout=0.05)
    one.owner.catch_up()
    assert (await first, await second) == ([LOADED] * 3, [LOADED] * 2)


async def test_a_load_does_not_wait_for_leases_of_others(net) -> None:
    one = await net()
    one.owner.max_leased = 3
    assert await one.ask(KEYS) == [THERE] * 8
    assert await one.load(*KEYS[:3]) == [LOADED] * 3
    one.owner.max_leased = 0
    assert await one.load(*KEYS[3:]) == [failed("throttled")] * 5
    assert await one.ask(KEYS) == [NOT_THERE] * 8  # no record was leased, so no length is known


async def test_a_load_waits_while_our_own_reads_fill_the_window(net) -> None:
    one = await net(limits=OwnerLimits(first_window_bytes=RECORD))
    other = chain("b", 4)
    one.l1.store(other)
    one.directory.tell(one.owner.entry, [*KEYS, *other])
    assert await one.ask(KEYS[:4]) == [THERE] * 4
    assert await one.ask(KEYS) == [THERE] * 8
    first = asyncio.create_task(one.load(*KEYS[:4]))
    assert await one.load(*KEYS[4:]) == [LOADED] * 4
    assert await first == [LOADED] * 4


async def test_a_stale_directory_costs_one_refused_lease_and_is_a_miss(net, l1: L1) -> None:
    one = await net()
    l1.lose(KEYS)
    assert await one.ask(KEYS) == [NOT_THERE] * 8
    assert one.counted("leases_refused") == 1
    assert await one.load(*KEYS[:1]) == [ABSENT]


async def test_a_collision_of_tags_is_a_miss(net) -> None:
    one = await net()
    other = [key[:8] + bytes(24) for key in KEYS]
    assert await one.ask(other) == [NOT_THERE] * 8


@pytest.mark.parametrize("cheats", [True, False])
async def test_a_process_at_the_owners_endpoint_without_the_owners_key_is_not_believed(net, l1, cheats):
    one = await net(lookup_timeout_ms=500 if cheats else 60_000)
    fake = TestOwner("owner", l1.pool)  # answers as the owner does, with the owner's chunks
    one.others.append(fake)
    entry = fake.entry
    if cheats:
        entry = msgspec.structs.replace(entry, peer_key=one.owner.public_key)
    one.directory.holds = {}
    one.directory.tell(entry, KEYS)
    found = await one.ask(KEYS)
    assert (found == [THERE] * 8) == (not cheats)
    assert bool(fake.asked) == (not cheats)


async def test_a_named_owner_is_asked_first_and_the_directory_not(second, net) -> None:
    one = await net()
    _, other, source = second
    one.named = source
    assert await one.ask(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 8
    assert (other.asked["PeerLease"], one.owner.asked["PeerLease"], one.directory.asked["Where"]) == (1, 0, 0)
    assert (one.counted("named_leases"), one.counted("named_refused")) == (1, 0)
    one.named = b""
    assert await one.ask(KEYS) == [THERE] * 8
    assert (other.asked["PeerLease"], one.owner.asked["PeerLease"]) == (1, 1)


@pytest.mark.parametrize("how", ["refuses", "has nothing", "is full", "is silent"])
async def test_others_are_asked_when_the_named_owner_leases_nothing_and_that_is_counted(
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
    one.named = source
    asked = asyncio.create_task(one.ask(KEYS))
    if how == "is silent":
        await until(lambda: one.counted("named_refused"))
    assert await asked == [THERE] * 8
    one.patience(lookup_timeout_ms=60_000, load_timeout_ms=60_000)
    assert await one.load(*KEYS) == [LOADED] * 8
    assert (one.counted("named_leases"), one.counted("named_refused")) == (0, 1)
    assert "second leases none of the chunks it was named for; asking others" in caplog.text


async def test_without_a_controller_lookups_miss_and_hit_again_when_it_is_back(net) -> None:
    one = await net()
    one.patience(lookup_timeout_ms=50)
    one.directory.silent = True
    assert await one.ask(KEYS) == [unknown("controller_down")] * 8
    one.patience(lookup_timeout_ms=60_000)
    one.directory.silent = False
    async with asyncio.timeout(WAIT_S):
        while await one.ask(KEYS) != [THERE] * 8:  # noqa: ASYNC110 (the reader pauses between two tries)
            await asyncio.sleep(0.01)


async def test_a_controller_that_refuses_is_asked_again(net) -> None:
    one = await net()
    one.directory.failure = Failure(0, 0, "unknown_instance", "register first", "", True)
    assert await one.ask(KEYS) == [unknown("controller_down")] * 8
    one.directory.failure = None
    assert await one.ask(KEYS) == [THERE] * 8


async def test_an_answer_that_no_owner_has_a_chunk_is_remembered_for_a_moment(net) -> None:
    one = await net(remember_none_ms=60_000)
    nobody = chain("nobody", 3)
    for _ in range(3):
        assert await one.ask(nobody) == [NOT_THERE] * 3
    assert await one.ask(nobody[:2]) == [NOT_THERE] * 2
    assert one.directory.asked["Where"] == 1
