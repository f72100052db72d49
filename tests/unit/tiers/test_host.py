"""The server's side of an adapter host, with the test as the child: its life, what it may say, what frees its bytes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvstrata.errors import ConfigError, StorageError
from kvstrata.testing.strategies import (
    WAIT_S,
    Found,
    Settled,
    ask_for,
    key_of,
    lent_context,
    load_item,
    put_item,
    settled,
    watched,
)
from kvstrata.tiers.base import Ask, Capabilities, Outcome, Presence, StorageAdapter, Usage
from kvstrata.tiers.config import TierConfig
from kvstrata.tiers.host import frames, parent
from kvstrata.tiers.host.frames import (
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    QUEUE_BYTES,
    Answer,
    Configure,
    Message,
    Opened,
    answer_of,
    frame_of,
    read_request,
)
from kvstrata.tiers.host.parent import HostedAdapter
from kvstrata.tiers.media.fs import FsConfig
from kvstrata.tiers.structs import Place
from kvstrata.types import KEY_BYTES

pytestmark = pytest.mark.usefixtures("child_in_place_of_a_process")


@pytest.fixture
def child_in_place_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    Child.made = []
    monkeypatch.setattr(parent, "HostProcess", Child)
    monkeypatch.setattr(parent, "CLOSE_S", 0.05)


@pytest.fixture
async def pair(child_in_place_of_a_process: None) -> AsyncIterator[tuple[HostedAdapter, Child]]:
    adapter, child = await opened_with()
    yield adapter, child
    for one in Child.made:
        one.reaps_at_once = True
        if one.killed.is_set():
            one.reap()
    await adapter.close()


STORED = Settled(Outcome.STORED)
PUT_DIED = Settled(Outcome.FAILED, "host_died")
LOADED = Settled(Outcome.LOADED)


def never_made() -> StorageAdapter:
    raise AssertionError("only the child makes it")


CONFIG = TierConfig(
    "hosted-0",
    never_made,
    "kvstrata.tiers.media.fs:MEDIUM",
    FsConfig(base_path="/x"),
    Place("l2_adapters[0]"),
)
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

    def last_lines(self) -> str:
        return "E1128 no such host"

    def reap(self) -> None:
        if self.pid:
            self.pid = 0
            self._channel.close()
            self._ended("SIGKILL")

    async def request(self) -> Any:
        """The next message."""
        frame = await asyncio.wait_for(
            asyncio.get_running_loop().sock_recv(self._channel, MAX_FRAME_BYTES), WAIT_S
        )
        return read_request(frame)

    def say(self, *messages: Message | bytes) -> None:
        for message in messages:
            self._channel.send(message if isinstance(message, bytes) else frame_of(message))

    async def until_killed(self) -> None:
        await asyncio.wait_for(self.killed.wait(), WAIT_S)


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until something that must happen has happened."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (a host has no event for this)
            await asyncio.sleep(0.001)


async def opened_with(
    evicted: Callable[[bytes], None] = lambda key: None,
    capabilities: Capabilities = CAPABILITIES,
    kill_ms: int = 600_000,
) -> tuple[HostedAdapter, Child]:
    adapter = HostedAdapter(CONFIG, kill_ms=kill_ms, max_pause_s=0.01)
    opening = asyncio.create_task(adapter.open(lent_context(evicted)))
    await until(lambda: Child.made)
    child = Child.made[-1]
    config = await child.request()
    assert isinstance(config, Configure)
    assert (config.medium, config.name, config.place) == (CONFIG.medium, "hosted-0", CONFIG.place)
    assert msgspec.json.decode(config.config, type=FsConfig) == CONFIG.fields
    child.say(Opened(capabilities, b"first"))
    await opening
    return adapter, child


def all_stored(request: Any, *, dropped: bool = True) -> Answer:
    count = len(request.items)
    return answer_of(request.number, [STORED] * count, list(range(count)) if dropped else [])


async def test_answers_from_before_a_childs_end_count_and_its_other_operations_fail(pair) -> None:
    adapter, child = pair
    first, second = put_item(key_of(1), 100), put_item(key_of(2), 100)
    waits = [asyncio.create_task(settled(adapter.put, [item])) for item in (first, second)]
    exists = asyncio.create_task(ask_for(adapter, [key_of(1)]))
    load = asyncio.create_task(settled(adapter.load, [load_item(key_of(3), 100)]))
    delete, usage = asyncio.create_task(adapter.delete(key_of(4))), asyncio.create_task(adapter.usage())
    clear = asyncio.create_task(adapter.clear())
    request = await child.request()
    child.say(all_stored(request))
    child.reap()
    assert await waits[0] == [STORED]
    assert await waits[1] == [PUT_DIED]
    assert await exists == [Found(Presence.UNKNOWN, "host_died")]
    assert await load == [Settled(Outcome.FAILED, "host_died")]
    assert (await delete, await usage) == (0, Usage(0, 0, 0))
    with pytest.raises(StorageError, match="not cleared: host_died"):
        await clear
    watched(first).check()
    watched(second).check()


async def test_without_a_child_operations_fail_at_once_until_another_child_is_up(pair) -> None:
    adapter, child = pair
    child.kill()
    child.reap()
    item, load = put_item(key_of(1), 100), load_item(key_of(1), 100)
    assert await settled(adapter.put, [item]) == [Settled(Outcome.THROTTLED, "host_down")]
    assert await settled(adapter.load, [load]) == [Settled(Outcome.FAILED, "host_down")]
    assert await ask_for(adapter, [key_of(1)]) == [Found(Presence.UNKNOWN, "host_down")]
    assert await adapter.delete(key_of(1)) == 0
    watched(item).check()
    watched(load).check()
    await until(lambda: len(Child.made) == 2)
    await Child.made[1].request()
    assert adapter.advertisement() == b""
    Child.made[1].say(Opened(CAPABILITIES, b"second"))
    await until(lambda: adapter.host_status()["state"] == "up")
    assert adapter.advertisement() == b"second"
    assert adapter.host_status()["restarts"] == 1
    wait = asyncio.create_task(settled(adapter.put, [item := put_item(key_of(2), 100)]))
    Child.made[1].say(all_stored(await Child.made[1].request()))
    assert await wait == [STORED]


async def test_a_silent_child_with_work_is_killed() -> None:
    adapter, child = await opened_with(kill_ms=10)
    wait = asyncio.create_task(settled(adapter.put, [put_item(key_of(1), 100)]))
    await child.until_killed()
    assert not wait.done()
    child.reap()
    assert await wait == [PUT_DIED]
    child.reaps_at_once = True
    await adapter.close()


@pytest.mark.parametrize("quiesce", ["drain", "never"])
async def test_an_operation_of_an_adapter_that_never_ends_by_itself_is_ended_although_others_are_answered(
    quiesce: str,
) -> None:
    capabilities = Capabilities(persistent=True, shared=False, quiesce=quiesce)
    adapter, child = await opened_with(capabilities=capabilities, kill_ms=600_000)
    wait = asyncio.create_task(settled(adapter.put, [put_item(key_of(1), 100)]))
    put = await child.request()
    first_due_s = adapter._due_s()
    lookup = asyncio.create_task(ask_for(adapter, [key_of(2)]))
    request = await child.request()
    child.say(frames.answer_of(request.number, (bytes(1), ""), []))
    await lookup
    assert first_due_s is not None
    assert (adapter._due_s() == first_due_s) == (quiesce == "never")
    child.say(all_stored(put))
    assert await wait == [STORED]
    assert adapter._due_s() is None
    child.reaps_at_once = True
    await adapter.close()


async def test_a_child_that_advertises_before_it_is_open_is_given_up(pair) -> None:
    adapter, child = pair
    child.kill()
    child.reap()
    await until(lambda: len(Child.made) == 2)
    await Child.made[1].request()
    Child.made[1].say(frames.Report(advertisement=b"too early"))
    await Child.made[1].until_killed()
    assert adapter.advertisement() == b""


async def test_close_lets_the_child_finish_and_kills_it_when_it_is_silent() -> None:
    adapter, child = await opened_with()
    wait = asyncio.create_task(settled(adapter.put, [put_item(key_of(1), 100)]))
    put = await child.request()
    closing = asyncio.create_task(adapter.close())
    assert await child.request() == frames.Close()
    child.say(all_stored(put))
    assert await wait == [STORED]
    child.reaps_at_once = True
    await child.until_killed()
    await closing
    await adapter.close()
    assert adapter.host_status()["state"] == "closed"


async def test_close_ends_a_child_that_comes_up_at_that_moment(pair) -> None:
    adapter, child = pair
    child.kill()
    child.reap()
    await until(lambda: len(Child.made) == 2)
    second = Child.made[1]
    second.reaps_at_once = True
    await second.request()
    closing: list[asyncio.Task[None]] = []
    take = adapter._take

    def then_close(answer: Opened) -> None:
        take(answer)
        closing.append(asyncio.create_task(adapter.close()))

    adapter._take = then_close
    second.say(Opened(CAPABILITIES))
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
async def test_the_error_of_a_child_that_cannot_open_is_raised(raised, kind) -> None:
    adapter = HostedAdapter(CONFIG, kill_ms=1)
    opening = asyncio.create_task(adapter.open(lent_context(lambda key: None)))
    await until(lambda: Child.made)
    [child] = Child.made
    await child.request()
    child.say(frames.raised(0, raised))
    child.reap()
    with pytest.raises(kind, match=str(raised).replace("[", r"\[")) as caught:
        await opening
    assert caught.value.field == getattr(raised, "field", "")


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
