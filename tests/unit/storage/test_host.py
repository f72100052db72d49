"""The server's side of an adapter host, with the test as the child: what it may say, and what frees which bytes."""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstrata.errors import StorageError
from kvstrata.storage.base import Found, KeyPage, PayloadKind, Presence, PutItem, PutOutcome, PutStatus, Usage
from kvstrata.storage.host import channel, pipe
from kvstrata.storage.host.channel import MAX_ITEMS, Counted, Kind
from kvstrata.testing.strategies import key_of, load_item, put_item, record_hold, watched
from tests.unit.storage.host_double import (
    CAPABILITIES,
    LOADED,
    PUT_DIED,
    STORED,
    Child,
    all_stored,
    opened_with,
    until,
)

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

pytestmark = pytest.mark.usefixtures("child_in_place_of_a_process")


async def test_a_batch_is_sent_as_keys_and_places_and_answered_with_outcomes(pair) -> None:
    adapter, child = pair
    items = [put_item(key_of(n), 100 + n) for n in range(3)]
    wait = asyncio.create_task(adapter.put(items))
    request = await child.request()
    assert request.kind is Kind.PUT
    assert request.items == [(item.key, item.hold.offset, item.hold.length) for item in items]
    outcomes = [STORED, PutOutcome(PutStatus.EXISTS), PutOutcome(PutStatus.THROTTLED, "full")]
    child.say(channel.ended(Kind.PUT_ENDED, request.number, outcomes, [True] * 3))
    assert await wait == outcomes
    for item in items:
        watched(item).check()
    assert adapter.host_status()["requests"] == 0
    assert adapter.capabilities == CAPABILITIES


async def test_every_other_operation_is_asked_and_answered(pair) -> None:
    adapter, child = pair

    async def answered(call: Any, frame: Callable[[int], bytes], kind: Kind) -> Any:
        wait = asyncio.create_task(call)
        request = await child.request()
        assert request.kind is kind
        child.say(frame(request.number))
        return await wait

    found = [Found(Presence.PRESENT, 77), Found(Presence.UNKNOWN, 0, "io")]
    keys = [key_of(1), key_of(2)]
    assert await answered(adapter.exists(keys), lambda n: channel.found(n, found), Kind.EXISTS) == found
    assert await answered(adapter.delete(keys), lambda n: channel.counted(n, 2), Kind.DELETE) == 2
    assert await answered(adapter.clear(), lambda n: channel.counted(n, 0), Kind.CLEAR) == 0
    usage = Usage(1, 2, 3)
    assert await answered(adapter.usage(), lambda n: channel.used(n, usage), Kind.USAGE) == usage
    for page in (KeyPage(keys, 9), KeyPage([], 9), None):
        said = functools.partial(channel.listed, page=page)
        assert await answered(adapter.list_keys(7, 5), said, Kind.LIST) == page
    cannot = StorageError("cannot be cleared")
    with pytest.raises(StorageError, match="cannot be cleared"):
        await answered(adapter.clear(), lambda n: channel.problem(Kind.RAISED, n, cannot), Kind.CLEAR)


async def test_a_preferred_source_reaches_the_child_with_all_its_keys(pair) -> None:
    adapter, child = pair
    keys = [key_of(n) for n in range(MAX_ITEMS + 1)]
    adapter.prefer(keys, b"there")
    first, rest = await child.request(), await child.request()
    assert [(r.kind, r.source) for r in (first, rest)] == [(Kind.PREFER, b"there")] * 2
    assert first.keys + rest.keys == keys
    adapter.prefer(keys[:1], b"")
    last = await child.request()
    assert (last.keys, last.source) == (keys[:1], b"")


async def test_a_cancelled_wait_keeps_its_holds_until_the_child_has_dropped_them(pair) -> None:
    adapter, child = pair
    items = [load_item(key_of(n), 100) for n in range(2)]
    wait = asyncio.create_task(adapter.load(items))
    request = await child.request()
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert not any(watched(item).dropped.is_set() for item in items)
    child.say(channel.dropped(request.number, [1]))
    await watched(items[1]).until_dropped()
    assert not watched(items[0]).dropped.is_set()
    child.say(channel.ended(Kind.LOAD_ENDED, request.number, [LOADED] * 2, [True, False]))
    await watched(items[0]).until_dropped()
    assert adapter.host_status()["requests"] == 0


async def test_a_hold_may_be_dropped_after_its_batch_was_answered(pair) -> None:
    adapter, child = pair
    item = put_item(key_of(1), 100)
    wait = asyncio.create_task(adapter.put([item]))
    request = await child.request()
    child.say(all_stored(request, dropped=False))
    assert await wait == [STORED]
    assert not watched(item).dropped.is_set()
    child.say(channel.dropped(request.number, [0]))
    await watched(item).until_dropped()


def head(kind: int, count: int, number: int) -> bytes:
    return struct.pack("<BBHIQ", kind, 0, count, 0, number)


UNTRUE: dict[str, Callable[[int], Sequence[bytes]]] = {
    "no frame": lambda n: [b"?"],
    "unknown kind": lambda n: [head(200, 0, n)],
    "unknown request": lambda n: [channel.counted(n + 1, 0)],
    "a page of cut keys": lambda n: [channel.listed(n, KeyPage([key_of(1)], 1))[:-1]],
    "another operation's answer": lambda n: [channel.counted(n, 0)],
    "a load's answer": lambda n: [channel.ended(Kind.LOAD_ENDED, n, [LOADED] * 2, [True] * 2)],
    "too few outcomes": lambda n: [channel.ended(Kind.PUT_ENDED, n, [STORED], [True])],
    "reason no text": lambda n: [head(Kind.PUT_ENDED, 2, n) + b"\x00\x00\x03\x01\xff"],
    "a drop beyond the items": lambda n: [channel.dropped(n, [2])],
    "a drop twice": lambda n: [channel.dropped(n, [1]), channel.dropped(n, [1])],
    "an answer twice": lambda n: [
        channel.ended(Kind.PUT_ENDED, n, [STORED] * 2, [False] * 2),
        channel.ended(Kind.PUT_ENDED, n, [STORED] * 2, [False] * 2),
    ],
    "opened again": lambda n: [channel.opened(CAPABILITIES)],
    "no JSON": lambda n: [head(Kind.RAISED, 0, n) + b"{"],
    "counts too large for a metric": lambda n: [channel.counts(Counted({"a": 1 << 63}))],
    "more counts than anybody reads": lambda n: [channel.counts(Counted({f"n{i}": i for i in range(201)}))],
    "more items than any frame has": lambda n: [head(Kind.EVICTED, MAX_ITEMS + 1, 0) + bytes(32) * 1_001],
}  # fmt: skip


@pytest.mark.parametrize("what", UNTRUE)
async def test_a_child_that_breaks_the_protocol_is_killed_and_its_bytes_are_held_until_its_end(
    pair, what
) -> None:
    adapter, child = pair
    items = [put_item(key_of(n), 100) for n in range(2)]
    wait = asyncio.create_task(adapter.put(items))
    request = await child.request()
    child.say(*UNTRUE[what](request.number))
    await child.until_killed()
    assert adapter.host_status()["state"] == "down"
    assert not watched(items[0]).dropped.is_set(), "it may still touch them"
    child.reap()
    assert [outcome.status for outcome in await wait] in (
        [PutStatus.FAILED] * 2,
        [PutStatus.STORED] * 2,  # it was answered once, and well
    )
    for item in items:
        watched(item).check()


async def test_a_child_that_does_not_read_costs_bounded_memory_and_no_wait(pair) -> None:
    adapter, child = pair
    keys = [key_of(n) for n in range(MAX_ITEMS)]
    waits, refused = [], None
    while refused is None:
        wait = asyncio.create_task(adapter.exists(keys))
        await asyncio.sleep(0)
        waits.append(wait)
        if wait.done():
            refused = wait.result()
    assert refused == [Found(Presence.UNKNOWN, 0, "queue_full")] * len(keys)
    item = put_item(key_of(1), 100)
    assert await adapter.put([item]) == [PutOutcome(PutStatus.THROTTLED, "queue_full")]
    watched(item).check()
    assert len(waits) * len(keys) * 32 < pipe.QUEUE_BYTES + (4 << 20)
    absent = [Found(Presence.ABSENT)] * len(keys)
    for wait in waits[:-1]:
        request = await child.request()
        assert request.keys == keys
        child.say(channel.found(request.number, absent))
        assert await wait == absent


async def test_a_batch_larger_than_a_frame_is_asked_in_parts(pair) -> None:
    adapter, child = pair
    keys = [key_of(n) for n in range(2 * MAX_ITEMS + 1)]
    wait = asyncio.create_task(adapter.exists(keys))
    asked = []
    for count in (MAX_ITEMS, MAX_ITEMS, 1):
        request = await child.request()
        assert len(request.keys) == count
        asked += request.keys
        child.say(channel.found(request.number, [Found(Presence.UNKNOWN, 0, "r" * 99)] * count))
    assert asked == keys
    assert await wait == [Found(Presence.UNKNOWN, 0, "r" * channel.MAX_REASON_BYTES)] * len(keys)


async def test_items_with_a_bad_key_or_outside_the_pool_fail_alone(pair) -> None:
    adapter, child = pair
    good, short, elsewhere = put_item(key_of(1), 100), put_item(key_of(2), 100), put_item(key_of(3), 100)
    watched(elsewhere).offset += 1 << 40
    wait = asyncio.create_task(adapter.put([PutItem(b"short", short.hold), good, elsewhere]))
    child.say(all_stored(await child.request()))
    bad = PutOutcome(PutStatus.FAILED, "bad_item")
    assert await wait == [bad, STORED, bad]
    watched(elsewhere).offset -= 1 << 40
    for item in (good, short, elsewhere):
        watched(item).check()


async def test_evicted_keys_are_passed_on() -> None:
    evicted: list[bytes] = []
    adapter, child = await opened_with(evicted.append)
    child.say(channel.evicted([key_of(1), key_of(2)]))
    await until(lambda: evicted)
    assert evicted == [key_of(1), key_of(2)]
    child.reaps_at_once = True
    await adapter.close()


async def test_a_childs_numbers_are_shown_until_it_is_gone_and_are_no_sign_of_progress(pair) -> None:
    adapter, child = pair
    assert (adapter.stats(), adapter.numbers()) == ({}, {})
    wait = asyncio.create_task(adapter.put([put_item(key_of(1), 100)]))
    await child.request()
    due_s = adapter._life._due_s()
    child.say(channel.counts(Counted({"encoded": 3}, {"syncs": 4}, {"why": "so"})))
    await until(adapter.stats)
    assert (adapter.stats(), adapter.numbers()) == ({"encoded": 3}, {"syncs": 4})
    assert adapter.remarks() == {"why": "so"}
    assert adapter._life._due_s() == due_s, "its loop turns, its adapter may hang all the same"
    child.reap()
    assert (adapter.stats(), adapter.numbers(), adapter.remarks()) == ({}, {}, {})
    assert await wait == [PUT_DIED]


async def test_what_a_child_advertises_is_passed_on_until_it_is_gone_and_is_no_sign_of_progress(
    pair,
) -> None:
    adapter, child = pair
    wait = asyncio.create_task(adapter.put([put_item(key_of(1), 100)]))
    await child.request()
    due_s = adapter._life._due_s()
    child.say(channel.advertised(b"other metadata"))
    await until(lambda: adapter.advertisement() == b"other metadata")
    assert adapter._life._due_s() == due_s
    child.reap()
    assert adapter.advertisement() == b""
    assert await wait == [PUT_DIED]


def record_of(number: int, identity: bytes) -> PutItem:
    return PutItem(key_of(number), cast("Hold", record_hold(key_of(number), b"x" * 100, identity=identity)))


async def test_what_payloads_are_made_of_is_told_before_they_are_put_and_again_where_it_has_changed() -> None:
    known: dict[bytes, PayloadKind] = {}
    adapter, child = await opened_with(payload_kind=lambda identity, part: known.get(identity))

    async def told_before(child: Child, *identities: bytes) -> list[tuple[bytes, PayloadKind | None]]:
        """What was told before a put of such records."""
        items = [record_of(n, identity) for n, identity in enumerate(identities)]
        wait = asyncio.create_task(adapter.put(items))
        request = await child.request()
        kinds = request.kinds
        if request.kind is Kind.KINDS:
            request = await child.request()
        child.say(all_stored(request))
        assert await wait == [STORED] * len(items)
        return kinds

    a, b = b"a" * 32, b"b" * 32
    assert await told_before(child, a, b) == [], "nothing is known"
    known[a] = PayloadKind(2)
    assert await told_before(child, a, b, a) == [(a + bytes(32), PayloadKind(2))]
    assert await told_before(child, a, b) == []
    known[a], known[b] = PayloadKind(2, (1, 1, 2, 4, 3, 4)), PayloadKind(1)
    both = [(of + bytes(32), known[of]) for of in (a, b)]
    assert await told_before(child, a, b) == both
    assert await told_before(child, a, b) == []
    child.kill()
    child.reap()
    assert await adapter.put([record_of(9, a)]) == [PutOutcome(PutStatus.THROTTLED, "host_down")]
    await until(lambda: len(Child.made) == 2)
    second = Child.made[1]
    await second.request()
    second.say(channel.opened(CAPABILITIES))
    await until(lambda: adapter.host_status()["state"] == "up")
    assert await told_before(second, b, a) == both[::-1], "another child knows nothing"
    del known[b]
    assert await told_before(second, a, b) == [(b + bytes(32), None)]
    second.reaps_at_once = True
    await adapter.close()
