"""rpc/zmq_server.py with real sockets: a connection that sends only garbage is cut, and another one is served."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from kvstrata.rpc.zmq_inbox import MAX_FRAMES, MAX_REFUSED
from kvstrata.rpc.zmq_server import Address, ZmqServer
from tests.harness.waiting import until


async def send(messages: list[list[bytes]], *, cuts: int) -> None:
    """Send messages over one connection, wait for the answers to all but the last, and assert how many are cut."""
    server = ZmqServer(asyncio.get_running_loop())
    port = server.bind_tcp("127.0.0.1", 0, curve=None, insecure=False)
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
        assert server.stats()["cut_connections"] == cuts
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
