"""Bytes of replies that clients do not read are bounded, for each client and for all together."""

from __future__ import annotations

import asyncio

import pytest
import zmq.asyncio

from kvstrata.rpc import zmq_outbox
from kvstrata.rpc.zmq_outbox import CLIENT_BYTES, Outbox
from kvstrata.rpc.zmq_server import Address, ZmqServer


class Sent:
    done = False


def test_beyond_the_bound_of_all_clients_each_gets_one_reply_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_outbox, "TOTAL_BYTES", 3 << 20)
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
    port = server.bind_tcp("127.0.0.1", 0, curve=None, insecure=False)
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
        assert sum(dropped) >= 64 - CLIENT_BYTES // len(big) - 4, "some more fit into the kernel's buffers"
        assert server.stats()["unread_reply_bytes"] <= CLIENT_BYTES
        replies = [await asyncio.wait_for(deaf.recv(), 30) for _ in range(64)]
        assert [len(reply) == len(big) for reply in replies] == [not one for one in dropped]
        assert server.send(Address(b"nobody"), big) is False
    finally:
        context.destroy(linger=0)
        server.close()
