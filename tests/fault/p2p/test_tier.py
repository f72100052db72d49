"""The reader of peers: records are found and read; the directory may be stale or absent."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvstrata.p2p import reading
from kvstrata.p2p.reading import OWNER_CONNECTIONS
from kvstrata.rpc.cluster_wire import Failure
from kvstrata.testing.strategies import WAIT_S, put_item, settled, watched
from tests.harness.l1 import L1, RECORD, SIZE, chain
from tests.harness.peers import ABSENT, KEYS, LOADED, NOT_THERE, THERE, PeerOwner, failed, unknown
from tests.harness.waiting import until


@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
async def test_chunks_of_an_owner_are_found_and_read(net, seal: bool, unix: bool) -> None:
    one = await net(seal=seal, unix=unix)
    assert await one.ask([*KEYS, *chain("b", 2)]) == [THERE] * 8 + [NOT_THERE] * 2
    assert await one.load(*KEYS) == [LOADED] * 8
    assert one.directory.asked == {"Where": 1}
    assert (one.counted("read_records"), one.counted("read_bytes"), one.counted("hellos")) == (
        8,
        8 * RECORD,
        1,
    )
    await until(
        lambda: one.owner.records.sent_bytes == 8 * RECORD
    )  # counted once the reader may have all of it


async def test_nothing_is_put_deleted_or_cleared(net) -> None:
    one = await net()
    item = put_item(KEYS[0], SIZE)
    assert await settled(one.adapter.put, [item]) == [failed("read_only")]
    watched(item).check()
    assert not one.adapter.capabilities.takes_puts
    assert await one.adapter.delete(b"".join(KEYS)) == 0


async def test_a_load_without_a_lookup_finds_owners_by_itself_and_reads_a_repeated_key_twice(net) -> None:
    one = await net()
    assert await one.load(KEYS[0], KEYS[0], KEYS[1]) == [LOADED] * 3


async def test_concurrent_lookups_ask_once_and_concurrent_loads_use_several_connections(net) -> None:
    one = await net()
    assert await asyncio.gather(*(one.ask(KEYS) for _ in range(20))) == [[THERE] * 8] * 20
    assert one.directory.asked["Where"] == 1
    one.owner.records.limit_bytes = 1 << 30
    assert await asyncio.gather(*(one.load(*KEYS) for _ in range(20))) == [[LOADED] * 8] * 20
    assert 1 < one.counted("hellos") <= OWNER_CONNECTIONS
    assert one.directory.asked["Where"] == 1


async def test_an_owner_sends_at_most_its_share_at_a_time_and_all_of_it_in_turn(net) -> None:
    one = await net()
    one.owner.records.limit_bytes = 3 * RECORD
    assert await one.load(*KEYS) == [LOADED] * 8
    one.owner.records.limit_bytes = RECORD - 1
    assert await one.load(*KEYS) == [failed("throttled")] * 8
    assert one.counted("owners_skipped") == 0, "an owner that is busy has not failed"


async def test_what_an_owner_is_too_busy_to_send_another_one_sends(net, second) -> None:
    one = await net()
    one.directory.tell(second.entry, KEYS)
    one.owner.server.records.draining = True
    assert await one.load(*KEYS) == [LOADED] * 8
    await until(lambda: second.records.sent_records == 8)


async def test_a_stale_directory_and_a_collision_of_tags_are_misses(net, l1: L1) -> None:
    one = await net()
    other = [key[:8] + bytes(24) for key in KEYS]
    assert await one.load(*other) == [ABSENT] * 8
    l1.lose(KEYS)
    assert await one.ask(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [ABSENT] * 8


async def test_reading_records_counts_as_using_them(net) -> None:
    lru = L1(policy="LRU")
    lru.store(KEYS)
    one = await net(PeerOwner(lru))
    for key in chain("fresh", 200):
        lru.store([key])
        assert await one.load(*KEYS) == [LOADED] * 8


@pytest.mark.parametrize("cheats", [True, False])
async def test_a_process_at_the_owners_endpoint_without_the_owners_key_is_not_believed(net, second, cheats):
    one = await net(lookup_timeout_ms=60_000, load_timeout_ms=500 if cheats else 60_000)
    entry = second.entry  # answers as the owner does, with the owner's chunks
    if cheats:
        entry = msgspec.structs.replace(entry, peer_key=one.owner.public)
    one.directory.holds = {}
    one.directory.tell(entry, KEYS)
    loaded = await one.load(*KEYS)
    assert (LOADED not in loaded) if cheats else loaded == [LOADED] * 8
    await until(lambda: second.records.sent_records == (0 if cheats else 8))


async def test_a_named_owner_is_asked_first_and_the_directory_not(net, second) -> None:
    one = await net()
    one.named = msgspec.msgpack.encode(second.entry)
    assert await one.ask(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 8
    await until(lambda: second.records.sent_records == 8)
    assert one.owner.records.sent_records == 0
    assert (one.directory.asked["Where"], one.counted("named_reads"), one.counted("named_refused")) == (
        0,
        1,
        0,
    )


@pytest.mark.parametrize("how", ["has nothing", "is full", "is gone"])
async def test_others_are_asked_when_the_named_owner_sends_nothing_and_that_is_counted(
    net, second, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = await net()
    one.named = msgspec.msgpack.encode(second.entry)
    match how:
        case "has nothing":
            second.l1.lose(KEYS)
        case "is full":
            second.records.limit_bytes = 0
        case "is gone":
            await second.records.close()
    assert await one.ask(KEYS) == [THERE] * 8
    assert await one.load(*KEYS) == [LOADED] * 8
    assert (one.counted("named_reads"), one.counted("named_refused")) == (0, 1)
    assert "second sends none of the chunks that the directory lists for it; asking others" in caplog.text


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
    assert await one.load(*KEYS) == [failed("controller_down")] * 8
    one.directory.failure = None
    assert await one.ask(KEYS) == [THERE] * 8


@pytest.mark.parametrize("lie", ["many owners", "many keys"])
async def test_an_answer_of_the_directory_with_more_than_was_asked_for_is_refused(net, lie: str) -> None:
    one = await net(lookup_timeout_ms=500)
    entry, answer = one.owner.entry, one.directory.answer
    n_keys = 9 if lie == "many keys" else 1
    owners = [msgspec.structs.replace(entry, n_keys=n_keys)] * (1_001 if lie == "many owners" else 1)
    one.directory.answer = lambda request: msgspec.structs.replace(answer(request), owners=owners)
    assert await one.ask(KEYS) == [unknown("controller_down")] * 8


async def test_an_answer_that_no_owner_has_a_chunk_is_remembered_for_a_moment(net) -> None:
    one = await net(remember_none_ms=60_000)
    nobody = chain("nobody", 3)
    for _ in range(3):
        assert await one.ask(nobody) == [NOT_THERE] * 3
    assert await one.ask(nobody[:2]) == [NOT_THERE] * 2
    assert one.directory.asked["Where"] == 1


GONE = chain("never stored", 4)
MIXED = [GONE[0], KEYS[2], GONE[1], KEYS[5], KEYS[1], GONE[2]]


async def test_each_of_scattered_keys_is_found_and_read_wherever_it_is(net, second, l1: L1) -> None:
    one = await net()
    one.each = True
    assert await one.ask(MIXED) == [NOT_THERE, THERE, NOT_THERE, THERE, THERE, NOT_THERE]
    assert await one.load(KEYS[5], KEYS[2], KEYS[1]) == [LOADED] * 3
    one.directory.tell(one.owner.entry, KEYS[:4])
    one.directory.tell(second.entry, KEYS[4:])
    l1.lose(KEYS[4:])
    second.l1.lose(KEYS[:4])
    keys = [KEYS[1], GONE[0], KEYS[6]]
    assert await one.ask(keys) == [THERE, NOT_THERE, THERE]
    assert await one.load(GONE[0], KEYS[1], KEYS[6]) == [ABSENT, LOADED, LOADED]


async def test_a_restarted_owner_is_asked_anew(net, l1: L1) -> None:
    one = await net()
    assert await one.load(*KEYS) == [LOADED] * 8
    one.others.append(one.owner)
    await one.owner.server.close()
    one.owner = PeerOwner(l1)
    one.directory.tell(msgspec.structs.replace(one.owner.entry, incarnation=12), KEYS)
    one.adapter._parts.finder.forget(KEYS)
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_to_open_one_more_the_connection_that_was_used_least_recently_is_closed(
    net, second, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_CONNECTIONS", 2)
    third_l1 = L1()
    third_l1.store(KEYS)
    third = PeerOwner(third_l1, "third")
    one = await net()
    one.others.append(third)
    owners = {"owner": one.owner, "second": second, "third": third}
    for name in ("owner", "second", "owner", "third"):  # the first one was opened first, and used since
        one.named = msgspec.msgpack.encode(owners[name].entry)
        assert await one.load(*KEYS) == [LOADED] * 8
    assert [peer.owner.instance for peer in one.adapter._parts.reader._open.values()] == ["owner", "third"]
    assert one.counted("hellos") == 3


async def test_a_connection_that_the_owner_has_closed_meanwhile_costs_no_miss(net) -> None:
    one = await net()
    assert await one.load(*KEYS) == [LOADED] * 8
    for connection in list(one.owner.records._connections):
        connection.cut()
    await until(lambda: not one.owner.records._connections)
    assert await one.load(*KEYS) == [LOADED] * 8
    assert one.counted("read_failures") == 0


async def test_after_close_nothing_is_asked_or_read(net) -> None:
    one = await net()
    await one.adapter.close()
    assert await one.ask(KEYS) == [unknown("closed")] * 8
    assert await one.load(KEYS[0]) == [failed("closed")]
    await one.adapter.close()
