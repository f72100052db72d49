"""rpc/zmq_server.py, zmq_inbox.py and zmq_server.py with real sockets: no client can disturb the others."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import zmq
import zmq.asyncio

from kvstrata.errors import ConfigError
from kvstrata.rpc import zmq_server
from kvstrata.rpc.wire import MAX_MESSAGE_BYTES
from kvstrata.rpc.zmq_server import (
    CLIENT_BYTES,
    MAX_FRAMES,
    MAX_REFUSED,
    MAX_WAITING_MESSAGES,
    MESSAGES_PER_WAKE,
    Address,
    Inbox,
    Message,
    Outbox,
    ZmqServer,
)
from tests.harness.waiting import until


class Echo:
    """A server that sends each frame back; `handled` has the first 64 bytes of each, in order."""

    def __init__(self) -> None:
        self.server = ZmqServer(asyncio.get_running_loop())
        self.port = self.server.bind_tcp("127.0.0.1", 0, keys=None, anywhere=False)
        self.handled: list[bytes] = []
        self.context = zmq.asyncio.Context()
        self.reply_to_all = True
        self._progress = asyncio.Event()

    def start(self) -> None:
        self.server.start(self.frame, lambda address, count: b"%d frames" % count)

    def frame(self, address: Address, frame: bytes) -> None:
        self.handled.append(frame[:64])
        self._progress.set()
        if self.reply_to_all:
            self.server.send(address, frame)

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is asked again after each frame."""
        while not happened():
            self._progress.clear()
            await self._progress.wait()

    def client(self) -> zmq.asyncio.Socket:
        client = self.context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://127.0.0.1:{self.port}")
        return client

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.server.close()


@pytest.fixture
async def unstarted() -> AsyncIterator[Echo]:
    """A server that is bound, but does not read yet."""
    server = Echo()
    yield server
    server.close()


@pytest.fixture
async def echo(unstarted: Echo) -> Echo:
    unstarted.start()
    return unstarted


async def ask(client: zmq.asyncio.Socket, *frames: bytes) -> list[bytes]:
    await client.send_multipart(frames)
    return await asyncio.wait_for(client.recv_multipart(), 30)


async def test_an_oversized_message_costs_only_its_sender(echo: Echo) -> None:
    bad, good = echo.client(), echo.client()
    await bad.send(bytes(MAX_MESSAGE_BYTES + 1))
    for number in range(20):
        assert await ask(good, b"%d" % number) == [b"%d" % number]
    assert all(len(frame) < 64 for frame in echo.handled)
    # libzmq connects anew by itself; what was sent before is lost, the next message is not.
    assert await ask(bad, b"small") == [b"small"]


async def test_a_client_that_floods_the_server_does_not_keep_others_waiting(echo: Echo) -> None:
    flood, quiet = echo.client(), echo.client()
    echo.reply_to_all = False
    ended = asyncio.Event()

    async def flooding() -> None:
        while not ended.is_set():
            for _ in range(100):
                await flood.send(b"flood")
            await asyncio.sleep(0)

    sender = asyncio.create_task(flooding())
    await echo.until(lambda: len(echo.handled) > 1000)
    await quiet.send(b"quiet")
    await asyncio.wait_for(echo.until(lambda: b"quiet" in echo.handled[-5000:]), 60)
    ended.set()
    await sender


async def test_other_tasks_of_the_loop_run_while_messages_flood_in(unstarted: Echo) -> None:
    server = unstarted
    server.reply_to_all = False
    client = server.client()
    for number in range(200):
        await client.send(b"%d" % number)
    seen_between: list[int] = []

    def watch() -> None:
        seen_between.append(len(server.handled))
        if len(server.handled) < 200:
            asyncio.get_running_loop().call_soon(watch)

    server.start()
    watch()
    await server.until(lambda: len(server.handled) == 200)
    steps = [after - before for before, after in itertools.pairwise(seen_between)]
    assert max(steps, default=0) <= 2 * MESSAGES_PER_WAKE, "a turn of the loop may wake it twice"


async def test_messages_that_come_while_replies_go_out_are_not_missed(echo: Echo) -> None:
    """Sending may swallow the signal that something arrived."""
    clients = [echo.client() for _ in range(8)]

    async def talk(client: zmq.asyncio.Socket, number: int) -> None:
        for turn in range(200):
            assert await ask(client, b"%d.%d" % (number, turn)) == [b"%d.%d" % (number, turn)]

    await asyncio.gather(*(talk(client, number) for number, client in enumerate(clients)))


# --- tcp ------------------------------------------------------------------------------------------------------


async def test_a_taken_port_is_refused_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ZmqServer(asyncio.get_running_loop())
        with pytest.raises(ConfigError) as caught:
            server.bind_tcp("127.0.0.1", port, keys=None, anywhere=False)
        server.close()
    assert str(port) in str(caught.value)
    assert f"pid {os.getpid()}" in str(caught.value)
    assert caught.value.field == "port"


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.7", "::"])
async def test_off_loopback_needs_a_key_or_permission(host: str) -> None:
    server = ZmqServer(asyncio.get_running_loop())
    with pytest.raises(ConfigError, match="--insecure") as caught:
        server.bind_tcp(host, 0, keys=None, anywhere=False)
    assert caught.value.field == "host"
    server.close()


async def test_a_server_that_is_closed_at_once_leaves_no_callback_that_fails() -> None:
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
    server = Echo()
    server.start()
    server.close()
    await asyncio.sleep(0)
    assert failed == []


async def send(messages: list[list[bytes]], *, cuts: int) -> None:
    """Send messages over one connection, wait for the answers to all but the last, and assert how many are cut."""
    server = ZmqServer(asyncio.get_running_loop())
    port = server.bind_tcp("127.0.0.1", 0, keys=None, anywhere=False)
    handled: list[bytes] = []

    def handler(address: Address, frame: bytes) -> bool:
        handled.append(frame)
        server.send(address, frame)
        return frame != b"garbage"

    def frame_error(address: Address, count: int) -> bytes:
        handled.append(b"%d frames" % count)
        return handled[-1]

    server.start(handler, frame_error)
    context = zmq.asyncio.Context()
    bad, good = (context.socket(zmq.DEALER) for _ in range(2))
    try:
        for client in (bad, good):
            client.setsockopt(zmq.LINGER, 0)
            client.setsockopt(zmq.RECONNECT_IVL, -1)
            client.connect(f"tcp://127.0.0.1:{port}")
        async with asyncio.timeout(30):
            for number, message in enumerate(messages, 1):
                await bad.send_multipart(message)
                if number < len(messages):
                    await bad.recv_multipart()
            await until(lambda: len(handled) == len(messages))
            await good.send(b"fine")
            assert await good.recv() == b"fine"
        assert server.cut_connections == cuts
    finally:
        context.destroy(linger=0)
        server.close()


async def test_a_connection_is_cut_by_refused_messages_in_a_row() -> None:
    garbage = [[b"garbage"]] * (MAX_REFUSED - 1)
    await send([*garbage, [b"fine"], [b"garbage"]], cuts=0)
    await send([*garbage, [b"garbage"]], cuts=1)


async def test_a_message_of_more_frames_than_any_client_sends_cuts_its_connection() -> None:
    await send([[b"x"] * MAX_FRAMES], cuts=0)
    await send([[b"x"] * (MAX_FRAMES + 1)], cuts=1)


class Sent:
    done = False


def test_beyond_the_bound_of_all_clients_each_gets_one_reply_at_a_time(monkeypatch):
    monkeypatch.setattr(zmq_server, "TOTAL_BYTES", 3 << 20)
    outbox = Outbox()
    sent = {name: Sent() for name in "abcd"}
    for name, one in sent.items():
        assert outbox.has_room(name, 1 << 20)
        outbox.sent(name, 1 << 20, one)
    assert not outbox.has_room("a", 1 << 20)
    sent["b"].done = sent["c"].done = True
    assert outbox.has_room("a", 1 << 20)


async def test_replies_of_megabytes_that_nobody_reads_do_not_pile_up() -> None:
    server = ZmqServer(asyncio.get_running_loop())
    port = server.bind_tcp("127.0.0.1", 0, keys=None, anywhere=False)
    big = bytes(4 << 20)
    dropped: list[bool] = []

    def answer(address: Address, frame: bytes) -> None:
        dropped.append(server.send(address, big))
        if dropped[-1]:
            server.send(address, b"too many")

    server.start(answer, lambda address, count: b"")
    context = zmq.asyncio.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.connect(f"tcp://127.0.0.1:{port}")
    try:
        for number in range(1, 65):
            await deaf.send(b"%d" % number)
        async with asyncio.timeout(60):
            while len(dropped) < 64:  # noqa: ASYNC110 (what is waited for is in the server)
                await asyncio.sleep(0.001)
        assert sum(dropped) >= 64 - 2 * CLIENT_BYTES // len(big), "some more fit into the kernel's buffers"
        assert server.unread_reply_bytes <= CLIENT_BYTES
        replies = [await asyncio.wait_for(deaf.recv(), 30) for _ in range(64)]
        assert [len(reply) == len(big) for reply in replies] == [not one for one in dropped]
        assert server.send(Address(b"nobody"), big) is False
    finally:
        context.destroy(linger=0)
        server.close()


SIZE = 1_000


class Wire:
    """A listener and its connections; `ends[fd]` is the other end of the connection `fd`."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.accepted: dict[int, socket.socket] = {}
        self.ends: dict[int, socket.socket] = {}
        self.inbox = Inbox(SIZE)
        self.inbox.listen(self.port)

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def connect(self) -> int:
        end = socket.create_connection(("127.0.0.1", self.port))
        end.settimeout(30)
        accepted, _ = self.listener.accept()
        self.accepted[accepted.fileno()], self.ends[accepted.fileno()] = accepted, end
        self.inbox.opened(accepted.fileno())
        return accepted.fileno()

    def is_cut(self, connection: int) -> bool:
        self.ends[connection].setblocking(False)
        try:
            return self.ends[connection].recv(1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        for one in (*self.accepted.values(), *self.ends.values(), self.listener):
            one.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def message(connection: int, body: bytes = b"x") -> Message:
    return Message(connection, b"", [body])


def drained(inbox: Inbox) -> list[Message]:
    found = []
    while (one := inbox.next()) is not None:
        found.append(one)
    return found


@pytest.mark.parametrize(("body", "fits"), [(b"", MAX_WAITING_MESSAGES), (bytes(1_800), 4)])
def test_a_connection_with_too_much_waiting_is_cut_and_forgotten(wire: Wire, body: bytes, fits: int) -> None:
    inbox = wire.inbox = Inbox(SIZE * (MAX_WAITING_MESSAGES if not body else 1))
    inbox.listen(wire.port)
    flood, other = wire.connect(), wire.connect()
    inbox.add(message(other))
    for _ in range(fits):
        assert inbox.add(message(flood, body)) is None
    assert inbox.add(message(flood, body)) == flood
    assert inbox.add(message(flood, body)) is None
    assert [one.connection for one in drained(inbox)] == [other]
    assert wire.is_cut(flood)
    assert not wire.is_cut(other)
    assert (inbox.cut_count, inbox.connections_count) == (1, 1)


def test_when_all_connections_together_have_too_much_waiting_the_largest_is_cut(wire: Wire) -> None:
    small = [wire.connect() for _ in range(30)]
    large = wire.connect()
    for connection in small:
        assert wire.inbox.add(message(connection, bytes(800))) is None
    assert wire.inbox.add(message(large, bytes(1_500))) is None
    last = wire.connect()
    assert wire.inbox.add(message(last, bytes(800))) == large
    assert wire.is_cut(large)
    assert len(drained(wire.inbox)) == 31
    assert wire.inbox.add(message(last)) is None  # what was handled counts no more


def test_beyond_the_limit_of_connections_the_one_silent_for_longest_is_cut(wire, monkeypatch):
    monkeypatch.setattr(zmq_server, "max_connections", lambda: 4)
    wire.inbox = Inbox(SIZE)
    wire.inbox.listen(wire.port)
    spoke, silent, later = wire.connect(), wire.connect(), wire.connect()
    wire.inbox.add(message(spoke))
    newer = [wire.connect() for _ in range(3)]
    assert [wire.is_cut(one) for one in (spoke, silent, later, *newer)] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_descriptor_that_another_connection_has_taken_over_is_not_cut(wire: Wire) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/null") as file:
        for descriptor in (ours.fileno(), file.fileno(), 1 << 20):
            wire.inbox.opened(descriptor)
            assert wire.inbox.add(message(descriptor, bytes(9 * SIZE))) == descriptor
        theirs.sendall(b"alive")
        assert ours.recv(5) == b"alive"


def test_the_messages_of_a_cut_connection_are_freed_over_several_wakes(wire, monkeypatch):
    monkeypatch.setattr(zmq_server, "FREED_BYTES", 2_500)
    flooding, other = wire.connect(), wire.connect()
    body = bytes(SIZE)
    unused = sys.getrefcount(body)
    cut = None
    while cut is None:
        cut = wire.inbox.add(message(flooding, body))
    assert cut == flooding and wire.is_cut(flooding)
    wire.inbox.add(message(other, b"later"))
    found = wire.inbox.next()
    assert found is not None and found.connection == other, "a dropped message is never handled"
    assert wire.inbox.next() is None
    kept = []
    while wire.inbox.has_dropped:
        kept.append(sys.getrefcount(body) - unused)
        wire.inbox.woke(drained=True)
    assert kept == [7, 4, 1], "three messages of 1,200 bytes each time"
    assert sys.getrefcount(body) == unused
