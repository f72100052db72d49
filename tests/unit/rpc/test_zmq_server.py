"""rpc/zmq_server.py with real sockets: no client can disturb the others."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio

from kvstrata.errors import ConfigError
from kvstrata.rpc.wire import MAX_MESSAGE_BYTES
from kvstrata.rpc.zmq_server import MESSAGES_PER_WAKE, SEND_QUEUE, Address, ZmqServer


class Echo:
    """A server that sends each frame back; `handled` has the first 64 bytes of each, in order."""

    def __init__(self) -> None:
        self.server = ZmqServer(asyncio.get_running_loop())
        self.port = self.server.bind_tcp("127.0.0.1", 0, curve=None, insecure=False)
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


async def test_the_largest_message_is_allowed(echo: Echo) -> None:
    client = echo.client()
    assert await ask(client, bytes(MAX_MESSAGE_BYTES)) == [bytes(MAX_MESSAGE_BYTES)]


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
    for number in range(60):
        await client.send(b"%d" % number)
    seen_between: list[int] = []

    def watch() -> None:
        seen_between.append(len(server.handled))
        if len(server.handled) < 60:
            asyncio.get_running_loop().call_soon(watch)

    server.start()
    watch()
    await server.until(lambda: len(server.handled) == 60)
    steps = [after - before for before, after in itertools.pairwise(seen_between)]
    assert max(steps, default=0) <= MESSAGES_PER_WAKE


async def test_a_client_that_does_not_read_loses_replies_and_blocks_nobody(echo: Echo) -> None:
    deaf, good = echo.client(), echo.client()
    deaf.setsockopt(zmq.RCVHWM, 1)
    reply = bytes(50_000)
    sent = 2 * SEND_QUEUE
    for number in range(1, sent + 1):
        await deaf.send(reply)
        if number % 64 == 0:  # more at a time than a client may ask, and it would be cut
            await echo.until(lambda number=number: len(echo.handled) >= number)  # type: ignore[misc]
    assert await ask(good, b"ping") == [b"ping"]
    assert await ask(good, b"after") == [b"after"]


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
            server.bind_tcp("127.0.0.1", port, curve=None, insecure=False)
        server.close()
    assert str(port) in str(caught.value)
    assert f"pid {os.getpid()}" in str(caught.value)
    assert caught.value.field == "port"


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.7", "::"])
async def test_off_loopback_needs_a_key_or_permission(host: str) -> None:
    server = ZmqServer(asyncio.get_running_loop())
    with pytest.raises(ConfigError, match="--insecure") as caught:
        server.bind_tcp(host, 0, curve=None, insecure=False)
    assert caught.value.field == "host"
    server.close()


async def test_an_address_of_another_machine_is_a_named_error() -> None:
    server = ZmqServer(asyncio.get_running_loop())
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7"):
        server.bind_tcp("192.0.2.7", 0, curve=None, insecure=True)
    server.close()


async def test_a_server_that_is_closed_at_once_leaves_no_callback_that_fails() -> None:
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
    server = Echo()
    server.start()
    server.close()
    await asyncio.sleep(0)
    assert failed == []
