"""The server's side of an adapter host, with the test as the child: what it may say, and what frees which bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvstrata.testing.strategies import Found, Settled, ask_for, key_of, load_item, put_item, settled, watched
from kvstrata.tiers.base import Ask, Outcome, Presence
from kvstrata.tiers.host import frames
from kvstrata.tiers.host.frames import MAX_FRAME_BYTES, MAX_ITEMS, QUEUE_BYTES, Answer
from kvstrata.types import KEY_BYTES
from tests.unit.tiers.host_double import (
    CAPABILITIES,
    PUT_DIED,
    until,
)

pytestmark = pytest.mark.usefixtures("child_in_place_of_a_process")


def ended(number: int, statuses: bytes, dropped: list[int], reasons: Sequence[str] = ()) -> Answer:
    return frames.answer_of(number, (statuses, reasons), dropped)


def found(number: int, presences: bytes, reason: str = "") -> Answer:
    return frames.answer_of(number, (presences, reason), [])


async def test_how_keys_were_asked_for_reaches_the_child(pair) -> None:
    adapter, child = pair
    keys = [key_of(n) for n in range(MAX_ITEMS + 1)]
    asking = asyncio.create_task(ask_for(adapter, keys, each=True, owner=b"there"))
    for _ in range(2):
        request = await child.request()
        assert (request.each, request.owner) == (True, b"there")
        child.say(found(request.number, bytes(len(request.keys) // KEY_BYTES)))
    await asking
    items = [load_item(key_of(n), 100) for n in range(3)]
    for item in items:
        item.ask = Ask(each=item is not items[0], owner=b"there")
    loading = asyncio.create_task(settled(adapter.load, items))
    request = await child.request()
    assert request.owner == b"there"
    assert [item[3] for item in request.items] == [False, True, True]
    child.say(ended(request.number, bytes(3), [0, 1, 2]))
    await loading


async def test_a_cancelled_wait_keeps_its_holds_until_the_child_has_dropped_them(pair) -> None:
    adapter, child = pair
    items = [load_item(key_of(n), 100) for n in range(2)]
    wait = asyncio.create_task(settled(adapter.load, items))
    request = await child.request()
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert not any(watched(item).dropped.is_set() for item in items)
    child.say(frames.Dropped(request.number, [1]))
    await watched(items[1]).until_dropped()
    assert not watched(items[0]).dropped.is_set()
    child.say(ended(request.number, bytes(2), [0]))
    await watched(items[0]).until_dropped()
    assert adapter.host_status()["requests"] == 0


def packed(*values: object) -> bytes:
    """A frame that no message makes."""
    return msgspec.msgpack.encode(values)


UNTRUE: dict[str, Callable[[int], list[Any]]] = {
    "no frame": lambda n: [b"?"],
    "unknown message": lambda n: [packed("Nothing", n)],
    "unknown request": lambda n: [ended(n + 1, bytes(2), [])],
    "another operation's answer": lambda n: [frames.answer_of(n, 0, [])],
    "an unknown status": lambda n: [ended(n, bytes([0, 9]), [0, 1])],
    "too few outcomes": lambda n: [ended(n, bytes(1), [0])],
    "too few reasons": lambda n: [ended(n, bytes(2), [0, 1], ["io"])],
    "reason no text": lambda n: [packed("Answer", n, [bytes(2), [b"\xff", b""]], [0, 1])],
    "a drop beyond the items": lambda n: [frames.Dropped(n, [2])],
    "a drop twice": lambda n: [frames.Dropped(n, [1]), frames.Dropped(n, [1])],
    "an answer twice": lambda n: [ended(n, bytes(2), []), ended(n, bytes(2), [])],
    "opened again": lambda n: [frames.Opened(CAPABILITIES)],
    "more fields": lambda n: [packed("Answer", n, [bytes(2), []], [0, 1], 0)],
    "counts too large for a metric": lambda n: [frames.Report({"a": 1 << 63})],
    "more counts than anybody reads": lambda n: [frames.Report({f"n{i}": i for i in range(201)})],
    "more items than any frame has": lambda n: [frames.Dropped(n, [0] * (MAX_ITEMS + 1))],
    "a frame that is too long": lambda n: [frames.frame_of(frames.Report())[:-1] + bytes(MAX_FRAME_BYTES)],
}  # fmt: skip


@pytest.mark.parametrize("what", UNTRUE)
async def test_a_child_that_breaks_the_protocol_is_killed_and_its_bytes_are_held_until_its_end(pair, what):
    adapter, child = pair
    items = [put_item(key_of(n), 100) for n in range(2)]
    wait = asyncio.create_task(settled(adapter.put, items))
    request = await child.request()
    child.say(*UNTRUE[what](request.number))
    await child.until_killed()
    assert adapter.host_status()["state"] == "down"
    assert not watched(items[0]).dropped.is_set(), "it may still touch them"
    child.reap()
    assert [outcome.outcome for outcome in await wait] in (
        [Outcome.FAILED] * 2,
        [Outcome.STORED] * 2,  # it was answered once, and well
    )
    for item in items:
        watched(item).check()


async def test_a_child_that_does_not_read_costs_bounded_memory_and_no_wait(pair) -> None:
    adapter, child = pair
    keys = [key_of(n) for n in range(MAX_ITEMS)]
    waits, refused = [], None
    while refused is None:
        wait = asyncio.create_task(ask_for(adapter, keys))
        await asyncio.sleep(0)
        waits.append(wait)
        if wait.done():
            refused = wait.result()
    assert refused == [Found(Presence.UNKNOWN, "queue_full")] * len(keys)
    item = put_item(key_of(1), 100)
    assert await settled(adapter.put, [item]) == [Settled(Outcome.THROTTLED, "queue_full")]
    watched(item).check()
    assert len(waits) * len(keys) * 32 < QUEUE_BYTES + (4 << 20)
    absent = [Found(Presence.ABSENT)] * len(keys)
    for wait in waits[:-1]:
        request = await child.request()
        assert request.keys == b"".join(keys)
        child.say(found(request.number, bytes(len(keys))))
        assert await wait == absent


async def test_a_batch_larger_than_a_frame_is_asked_in_parts(pair) -> None:
    adapter, child = pair
    keys = [key_of(n) for n in range(2 * MAX_ITEMS + 1)]
    wait = asyncio.create_task(ask_for(adapter, keys))
    asked = b""
    for count in (MAX_ITEMS, MAX_ITEMS, 1):
        request = await child.request()
        assert len(request.keys) == count * KEY_BYTES
        asked += request.keys
        child.say(found(request.number, bytes([2]) * count, frames.word_of("r" * 99)))
    assert asked == b"".join(keys)
    assert await wait == [Found(Presence.UNKNOWN, "r" * frames.MAX_REASON_BYTES)] * len(keys)


async def test_a_childs_numbers_are_shown_until_it_is_gone_and_are_no_sign_of_progress(pair) -> None:
    adapter, child = pair
    assert adapter.numbers() == {}
    wait = asyncio.create_task(settled(adapter.put, [put_item(key_of(1), 100)]))
    await child.request()
    due_s = adapter._due_s()
    child.say(frames.Report({"syncs": 4}, {"why": "so"}))
    await until(adapter.numbers)
    assert adapter.numbers() == {"syncs": 4}
    assert adapter.remarks() == {"why": "so"}
    assert adapter._due_s() == due_s, "its loop turns, its adapter may hang all the same"
    child.reap()
    assert (adapter.numbers(), adapter.remarks()) == ({}, {})
    assert await wait == [PUT_DIED]
