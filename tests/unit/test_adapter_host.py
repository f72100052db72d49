"""The server's side of an adapter host, with the test as the child: what it may say, and what frees which bytes."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstrata.errors import ConfigError, StorageError
from kvstrata.storage.base import (
    Capabilities,
    Found,
    KeyPage,
    LoadOutcome,
    LoadStatus,
    PayloadKind,
    Presence,
    PutItem,
    PutOutcome,
    PutStatus,
    Usage,
)
from kvstrata.storage.host import channel as host_channel
from kvstrata.storage.host import parent as host
from kvstrata.storage.host.channel import MAX_FRAME_BYTES, MAX_ITEMS, Counted, Kind, Request
from kvstrata.storage.host.parent import STEADY_S, WELL_S, HostedAdapter, Pauses
from kvstrata.testing.strategies import (
    WAIT_S,
    key_of,
    lent_context,
    load_item,
    put_item,
    record_hold,
    watched,
)

if TYPE_CHECKING:
    from kvstrata.native.pool import Hold

STORED = PutOutcome(PutStatus.STORED)
PUT_DIED = PutOutcome(PutStatus.FAILED, "host_died")
LOADED = LoadOutcome(LoadStatus.LOADED)
CAPABILITIES = Capabilities(persistent=True, shared=False, max_batch=7)


class Child:
    """In place of the process: the test reads what the server says, and answers. It is reaped when `reap` says so."""

    made: list[Child]

    def __init__(self, name: str, channel_fd: int, pool_fds: list[int], ended: Callable[[str], None]) -> None:
        self.pid = 1
        self.killed = asyncio.Event()
        self.reaps_at_once = False
        self._ended = ended
        self._channel = socket.socket(fileno=os.dup(channel_fd))
        self._channel.setblocking(False)
        os.close(channel_fd)
        Child.made.append(self)

    def start(self) -> None:
        pass

    def kill(self) -> None:
        if not self.killed.is_set():
            self.killed.set()
            if self.reaps_at_once:
                asyncio.get_running_loop().call_soon(self.reap)

    def reap(self) -> None:
        if self.pid:
            self.pid = 0
            self._channel.close()
            self._ended("signal SIGKILL")

    async def request(self) -> Request:
        """The next frame."""
        frame = await asyncio.wait_for(
            asyncio.get_running_loop().sock_recv(self._channel, MAX_FRAME_BYTES), WAIT_S
        )
        return host_channel.read_request(frame)

    def say(self, *frames: bytes) -> None:
        for frame in frames:
            self._channel.send(frame)

    async def until_killed(self) -> None:
        await asyncio.wait_for(self.killed.wait(), WAIT_S)


@pytest.fixture(autouse=True)
def child_in_place_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    Child.made = []
    monkeypatch.setattr(host, "HostProcess", Child)
    monkeypatch.setattr(host, "CLOSE_S", 0.05)


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until something that must happen has happened."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (a host has no event for this)
            await asyncio.sleep(0.001)


async def opened_with(
    evicted: Callable[[bytes], None] = lambda key: None,
    capabilities: Capabilities = CAPABILITIES,
    kill_ms: int = 600_000,
    payload_kind: Callable[[bytes, bytes], PayloadKind | None] | None = None,
) -> tuple[HostedAdapter, Child]:
    entry = {"type": "fs"} if payload_kind is None else {"type": "fs", "codec": ["fp8"]}
    adapter = HostedAdapter(entry, 0, name="hosted-0", kill_ms=kill_ms, max_pause_s=0.01)
    context = lent_context(evicted)
    if payload_kind is not None:
        context = context._replace(payload_kind=payload_kind)
    opening = asyncio.create_task(adapter.open(context))
    await until(lambda: Child.made)
    child = Child.made[-1]
    request = await child.request()
    assert request.config is not None
    assert request.config.entry == entry
    child.say(host_channel.opened(capabilities, b"first"))
    await opening
    return adapter, child


@pytest.fixture
async def pair() -> AsyncIterator[tuple[HostedAdapter, Child]]:
    adapter, child = await opened_with()
    yield adapter, child
    for one in Child.made:
        one.reaps_at_once = True
        if one.killed.is_set():
            one.reap()
    await adapter.close()


def all_stored(request: Request, *, dropped: bool = True) -> bytes:
    outcomes = [STORED] * len(request.items)
    return host_channel.ended(Kind.PUT_ENDED, request.number, outcomes, [dropped] * len(outcomes))


async def test_a_batch_goes_as_keys_and_places_and_comes_back_as_outcomes(pair) -> None:
    adapter, child = pair
    items = [put_item(key_of(n), 100 + n) for n in range(3)]
    wait = asyncio.create_task(adapter.put(items))
    request = await child.request()
    assert request.kind is Kind.PUT
    assert request.items == [(item.key, item.hold.offset, item.hold.length) for item in items]
    outcomes = [STORED, PutOutcome(PutStatus.EXISTS), PutOutcome(PutStatus.THROTTLED, "full")]
    child.say(host_channel.ended(Kind.PUT_ENDED, request.number, outcomes, [True] * 3))
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
    assert await answered(adapter.exists(keys), lambda n: host_channel.found(n, found), Kind.EXISTS) == found
    assert await answered(adapter.delete(keys), lambda n: host_channel.counted(n, 2), Kind.DELETE) == 2
    assert await answered(adapter.clear(), lambda n: host_channel.counted(n, 0), Kind.CLEAR) == 0
    usage = Usage(1, 2, 3)
    assert await answered(adapter.usage(), lambda n: host_channel.used(n, usage), Kind.USAGE) == usage
    for page in (KeyPage(keys, 9), KeyPage([], 9), None):
        said = functools.partial(host_channel.listed, page=page)
        assert await answered(adapter.list_keys(7, 5), said, Kind.LIST) == page
    cannot = StorageError("cannot be cleared")
    with pytest.raises(StorageError, match="cannot be cleared"):
        await answered(adapter.clear(), lambda n: host_channel.problem(Kind.RAISED, n, cannot), Kind.CLEAR)


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
    child.say(host_channel.dropped(request.number, [1]))
    await watched(items[1]).until_dropped()
    assert not watched(items[0]).dropped.is_set()
    child.say(host_channel.ended(Kind.LOAD_ENDED, request.number, [LOADED] * 2, [True, False]))
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
    child.say(host_channel.dropped(request.number, [0]))
    await watched(item).until_dropped()


def head(kind: int, count: int, number: int) -> bytes:
    return struct.pack("<BBHIQ", kind, 0, count, 0, number)


UNTRUE: dict[str, Callable[[int], Sequence[bytes]]] = {
    "no frame": lambda n: [b"?"],
    "longer than any": lambda n: [bytes(MAX_FRAME_BYTES + 1)],
    "unknown kind": lambda n: [head(200, 0, n)],
    "a kind of the server's": lambda n: [host_channel.bare(Kind.CLOSE, n)],
    "unknown request": lambda n: [host_channel.counted(n + 1, 0)],
    "a page": lambda n: [host_channel.listed(n, KeyPage([key_of(1)], 1))],
    "a page of cut keys": lambda n: [host_channel.listed(n, KeyPage([key_of(1)], 1))[:-1]],
    "another operation's answer": lambda n: [host_channel.counted(n, 0)],
    "a load's answer": lambda n: [host_channel.ended(Kind.LOAD_ENDED, n, [LOADED] * 2, [True] * 2)],
    "too few outcomes": lambda n: [host_channel.ended(Kind.PUT_ENDED, n, [STORED], [True])],
    "too many outcomes": lambda n: [host_channel.ended(Kind.PUT_ENDED, n, [STORED] * 3, [True] * 3)],
    "cut outcomes": lambda n: [host_channel.ended(Kind.PUT_ENDED, n, [STORED] * 2, [True] * 2)[:-1]],
    "more than the outcomes": lambda n: [host_channel.ended(Kind.PUT_ENDED, n, [STORED] * 2, [True] * 2) + b"x"],
    "unknown status": lambda n: [head(Kind.PUT_ENDED, 2, n) + b"\x09\x00" * 2],
    "reason cut": lambda n: [head(Kind.PUT_ENDED, 2, n) + b"\x00\x00\x03\x09io"],
    "reason no text": lambda n: [head(Kind.PUT_ENDED, 2, n) + b"\x00\x00\x03\x01\xff"],
    "a drop beyond the items": lambda n: [host_channel.dropped(n, [2])],
    "a drop twice": lambda n: [host_channel.dropped(n, [1]), host_channel.dropped(n, [1])],
    "an answer twice": lambda n: [
        host_channel.ended(Kind.PUT_ENDED, n, [STORED] * 2, [False] * 2),
        host_channel.ended(Kind.PUT_ENDED, n, [STORED] * 2, [False] * 2),
    ],
    "opened again": lambda n: [host_channel.opened(CAPABILITIES)],
    "refused when open": lambda n: [host_channel.problem(Kind.REFUSED, 0, StorageError("no"))],
    "keys cut": lambda n: [host_channel.evicted([key_of(1)])[:-1]],
    "no JSON": lambda n: [head(Kind.RAISED, 0, n) + b"{"],
    "counts that are none": lambda n: [head(Kind.COUNTS, 0, 0) + b'{"numbers":{"a":1.5}}'],
    "counts by no name": lambda n: [host_channel.counts(Counted({"Größe": 1}))],
    "counts too large for a metric": lambda n: [host_channel.counts(Counted({"a": 1 << 63}))],
    "more counts than anybody reads": lambda n: [host_channel.counts(Counted({f"n{i}": i for i in range(201)}))],
    "more items than any frame has": lambda n: [head(Kind.EVICTED, MAX_ITEMS + 1, 0) + bytes(32) * 1_001],
}  # fmt: skip


@pytest.mark.parametrize("what", UNTRUE)
async def test_a_child_that_says_what_cannot_be_is_killed_and_its_bytes_wait_for_its_end(pair, what) -> None:
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


async def test_what_the_child_said_before_its_end_counts_and_the_rest_has_died(pair) -> None:
    adapter, child = pair
    first, second = put_item(key_of(1), 100), put_item(key_of(2), 100)
    waits = [asyncio.create_task(adapter.put([item])) for item in (first, second)]
    exists = asyncio.create_task(adapter.exists([key_of(1)]))
    load = asyncio.create_task(adapter.load([load_item(key_of(3), 100)]))
    delete, usage = asyncio.create_task(adapter.delete([key_of(4)])), asyncio.create_task(adapter.usage())
    clear = asyncio.create_task(adapter.clear())
    request = await child.request()
    child.say(all_stored(request))
    child.reap()
    assert await waits[0] == [STORED]
    assert await waits[1] == [PUT_DIED]
    assert await exists == [Found(Presence.UNKNOWN, 0, "host_died")]
    assert await load == [LoadOutcome(LoadStatus.FAILED, "host_died")]
    assert (await delete, await usage) == (0, Usage(0, 0, 0))
    with pytest.raises(StorageError, match="not cleared: host_died"):
        await clear
    watched(first).check()
    watched(second).check()


async def test_while_there_is_no_child_everything_is_answered_at_once_and_then_another_comes(pair) -> None:
    adapter, child = pair
    child.kill()
    child.reap()
    item, load = put_item(key_of(1), 100), load_item(key_of(1), 100)
    assert await adapter.put([item]) == [PutOutcome(PutStatus.THROTTLED, "host_down")]
    assert await adapter.load([load]) == [LoadOutcome(LoadStatus.FAILED, "host_down")]
    assert await adapter.exists([key_of(1)]) == [Found(Presence.UNKNOWN, 0, "host_down")]
    assert await adapter.delete([key_of(1)]) == 0
    watched(item).check()
    watched(load).check()
    await until(lambda: len(Child.made) == 2)
    await Child.made[1].request()
    assert adapter.advertisement() == b""
    Child.made[1].say(host_channel.opened(CAPABILITIES, b"second"))
    await until(lambda: adapter.host_status()["state"] == "up")
    assert adapter.advertisement() == b"second"
    assert adapter.restarts == 1
    wait = asyncio.create_task(adapter.put([item := put_item(key_of(2), 100)]))
    Child.made[1].say(all_stored(await Child.made[1].request()))
    assert await wait == [STORED]


async def test_a_child_that_does_not_read_costs_bounded_bytes_and_no_wait(pair) -> None:
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
    assert len(waits) * len(keys) * 32 < host.QUEUE_BYTES + (4 << 20)
    absent = [Found(Presence.ABSENT)] * len(keys)
    for wait in waits[:-1]:
        request = await child.request()
        assert request.keys == keys
        child.say(host_channel.found(request.number, absent))
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
        child.say(host_channel.found(request.number, [Found(Presence.UNKNOWN, 0, "r" * 99)] * count))
    assert asked == keys
    assert await wait == [Found(Presence.UNKNOWN, 0, "r" * host_channel.MAX_REASON_BYTES)] * len(keys)


async def test_items_that_the_child_cannot_reach_are_failed_one_by_one(pair) -> None:
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
    child.say(host_channel.evicted([key_of(1), key_of(2)]))
    await until(lambda: evicted)
    assert evicted == [key_of(1), key_of(2)]
    child.reaps_at_once = True
    await adapter.close()


async def test_a_silent_child_with_work_is_killed() -> None:
    adapter, child = await opened_with(kill_ms=10)
    wait = asyncio.create_task(adapter.put([put_item(key_of(1), 100)]))
    await child.until_killed()
    assert not wait.done()
    child.reap()
    assert await wait == [PUT_DIED]
    child.reaps_at_once = True
    await adapter.close()


async def test_a_child_may_clear_for_as_long_as_it_takes() -> None:
    adapter, child = await opened_with(kill_ms=10)
    clear = asyncio.create_task(adapter.clear())
    request = await child.request()
    assert adapter._due_s() is None
    child.say(host_channel.counted(request.number, 5))
    assert await clear == 5
    child.reaps_at_once = True
    await adapter.close()


@pytest.mark.parametrize("quiesce", ["drain", "never"])
async def test_an_operation_of_an_adapter_that_never_ends_by_itself_is_ended_although_others_are_answered(
    quiesce: str,
) -> None:
    capabilities = Capabilities(persistent=True, shared=False, quiesce=quiesce)
    adapter, child = await opened_with(capabilities=capabilities, kill_ms=600_000)
    wait = asyncio.create_task(adapter.put([put_item(key_of(1), 100)]))
    put = await child.request()
    first_due_s = adapter._due_s()
    lookup = asyncio.create_task(adapter.exists([key_of(2)]))
    request = await child.request()
    child.say(host_channel.found(request.number, [Found(Presence.ABSENT)]))
    await lookup
    assert first_due_s is not None
    assert (adapter._due_s() == first_due_s) == (quiesce == "never")
    child.say(all_stored(put))
    assert await wait == [STORED]
    assert adapter._due_s() is None
    child.reaps_at_once = True
    await adapter.close()


async def test_what_the_child_counts_is_told_until_it_is_gone_and_is_no_sign_of_work(pair) -> None:
    adapter, child = pair
    assert (adapter.stats(), adapter.numbers()) == ({}, {})
    wait = asyncio.create_task(adapter.put([put_item(key_of(1), 100)]))
    await child.request()
    due_s = adapter._due_s()
    child.say(host_channel.counts(Counted({"encoded": 3}, {"syncs": 4}, {"why": "so"})))
    await until(adapter.stats)
    assert (adapter.stats(), adapter.numbers()) == ({"encoded": 3}, {"syncs": 4})
    assert adapter.remarks() == {"why": "so"}
    assert adapter._due_s() == due_s, "its loop turns, its adapter may hang all the same"
    child.reap()
    assert (adapter.stats(), adapter.numbers(), adapter.remarks()) == ({}, {}, {})
    assert await wait == [PUT_DIED]


async def test_what_the_child_advertises_later_is_passed_on_until_it_is_gone_and_is_no_sign_of_work(
    pair,
) -> None:
    adapter, child = pair
    wait = asyncio.create_task(adapter.put([put_item(key_of(1), 100)]))
    await child.request()
    due_s = adapter._due_s()
    child.say(host_channel.advertised(b"other metadata"))
    await until(lambda: adapter.advertisement() == b"other metadata")
    assert adapter._due_s() == due_s
    child.reap()
    assert adapter.advertisement() == b""
    assert await wait == [PUT_DIED]


async def test_a_child_that_advertises_before_it_is_open_is_given_up(pair) -> None:
    adapter, child = pair
    child.kill()
    child.reap()
    await until(lambda: len(Child.made) == 2)
    await Child.made[1].request()
    Child.made[1].say(host_channel.advertised(b"too early"))
    await Child.made[1].until_killed()
    assert adapter.advertisement() == b""


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
    second.say(host_channel.opened(CAPABILITIES))
    await until(lambda: adapter.host_status()["state"] == "up")
    assert await told_before(second, b, a) == both[::-1], "another child knows nothing"
    del known[b]
    assert await told_before(second, a, b) == [(b + bytes(32), None)]
    second.reaps_at_once = True
    await adapter.close()


async def test_close_lets_the_child_finish_and_kills_it_when_it_is_silent() -> None:
    adapter, child = await opened_with()
    wait = asyncio.create_task(adapter.put([put_item(key_of(1), 100)]))
    put = await child.request()
    closing = asyncio.create_task(adapter.close())
    assert (await child.request()).kind is Kind.CLOSE
    child.say(all_stored(put))
    assert await wait == [STORED]
    child.reaps_at_once = True
    await child.until_killed()
    await closing
    await adapter.close()
    assert await adapter.put([put_item(key_of(2), 100)]) == [PutOutcome(PutStatus.FAILED, "closed")]
    assert adapter.host_status()["state"] == "closed"


async def test_close_at_the_moment_in_which_another_child_is_up_ends_it(pair) -> None:
    adapter, child = pair
    child.kill()
    child.reap()
    await until(lambda: len(Child.made) == 2)
    second = Child.made[1]
    second.reaps_at_once = True
    await second.request()
    closing: list[asyncio.Task[None]] = []
    take_opening = adapter._take_opening

    def then_close(answer: host_channel.Answer) -> None:
        take_opening(answer)
        closing.append(asyncio.create_task(adapter.close()))

    adapter._take_opening = then_close
    second.say(host_channel.opened(CAPABILITIES))
    await until(lambda: closing and closing[0].done())
    assert second.killed.is_set()
    assert adapter.host_status()["state"] == "closed"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ConfigError("l2_adapters[0].x: wrong", field="l2_adapters[0].x"), ConfigError),
        (StorageError("no disk"), StorageError),
        (ValueError("no disk"), StorageError),
    ],
)
async def test_what_the_child_says_when_it_cannot_open_is_raised(raised, kind) -> None:
    adapter = HostedAdapter({"type": "fs"}, 0, name="hosted-0", kill_ms=1)
    opening = asyncio.create_task(adapter.open(lent_context(lambda key: None)))
    await until(lambda: Child.made)
    [child] = Child.made
    child.reaps_at_once = True
    await child.request()
    child.say(host_channel.problem(Kind.REFUSED, 0, raised))
    with pytest.raises(kind, match=str(raised).replace("[", r"\[")) as caught:
        await opening
    assert caught.value.field == getattr(raised, "field", "")


async def test_a_child_that_ends_before_its_adapter_is_open_is_an_error_that_says_how() -> None:
    adapter = HostedAdapter({"type": "fs"}, 0, name="hosted-0", kill_ms=1)
    opening = asyncio.create_task(adapter.open(lent_context(lambda key: None)))
    await until(lambda: Child.made)
    Child.made[0].reap()
    with pytest.raises(StorageError, match=r"hosted-0: its host process ended with signal SIGKILL before"):
        await opening


async def test_an_entry_too_long_for_a_host_is_refused() -> None:
    adapter = HostedAdapter({"type": "fs", "x": "x" * MAX_FRAME_BYTES}, 3, name="hosted-3", kill_ms=1)
    opening = asyncio.create_task(adapter.open(lent_context(lambda key: None)))
    await until(lambda: Child.made)
    Child.made[0].reaps_at_once = True
    if Child.made[0].killed.is_set():
        Child.made[0].reap()
    with pytest.raises(ConfigError, match=r"l2_adapters\[3\]: its fields take \d+ bytes"):
        await opening


def test_pauses_between_children_double_until_one_has_answered_well_for_some_seconds() -> None:
    pauses = Pauses(longest_s=1.0, now_s=0.0)
    now_s = 0.0

    def ends_after(up_s: float, *well_s: float) -> float:
        nonlocal now_s
        pauses.begun(now_s)
        for at_s in well_s:
            pauses.answered_well(now_s + at_s)
        now_s += up_s
        return pauses.next_s(now_s)

    assert [ends_after(1.0) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert ends_after(4.0, 0.1, 2.0) == 1.0, "it answered well for less than WELL_S"
    assert ends_after(4.0, 0.1, 2.0, 0.1 + WELL_S) == 0.1
    assert [ends_after(1.0, 0.1), ends_after(1.0, 0.1)] == [0.2, 0.4], "each child by itself"
    assert ends_after(STEADY_S) == 0.1, "an idle one that stays is steady too"
