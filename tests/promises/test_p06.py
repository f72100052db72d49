"""P6: everything that a client of this host can make the server keep is bounded, and honest clients do not notice."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

import kvstrata.server.listener as listener
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.rpc import wire
from kvstrata.session.zmtp import Codec, header
from kvstrata.types import RequestIdentity
from tests.promises.caller import Caller, holds_nothing, prompts
from tests.world import Server, World, tell

UNSENT_BYTES = 8 << 10
ALL_UNSENT_BYTES = 24 << 10
PARTIAL_BYTES = 128 << 10
FLOOD = b"".join(header(len(ping)) + ping for ping in (wire.encode(wire.Ping(seq)) for seq in range(1, 400)))
"""Requests with more answers than the kernel keeps for a client that does not read."""
MAX_OPEN = 64 + 64 + 2
"""Unfinished handshakes, clients without a row, and the honest engine, which may just be attaching again."""


def test_strangers_cannot_make_the_server_keep_much_or_answer_others_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "MAX_UNSENT_BYTES", UNSENT_BYTES)
    monkeypatch.setattr(listener, "MAX_ALL_UNSENT_BYTES", ALL_UNSENT_BYTES)
    monkeypatch.setattr(listener, "MAX_PARTIAL_BYTES", PARTIAL_BYTES)
    tell(strangers)


class Stranger:
    """A connection that keeps no rule."""

    def __init__(self, world: World, server: Server) -> None:
        self.world, self.random = world, world.random
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        # So many may wait to be accepted that the kernel takes no more.
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(os.fspath(server.folder / RPC_SOCKET))
        if self.random.random() < 0.8:
            self.send(Codec(b"DEALER", 1).opening)
        self.seq = 0
        if self.random.random() < 0.5:
            self.message(wire.encode(wire.Ping(1)))

    def send(self, data: bytes) -> None:
        try:
            self.socket.send(data, socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the server has closed the connection, or reads nothing more of it

    def act(self) -> None:
        rng = self.random
        match rng.randrange(8):
            case 0:
                self.send(rng.randbytes(rng.randrange(1, 200)))
            case 1:  # a message that never ends
                self.send(
                    header(rng.choice([1 << 10, 1 << 16, 1 << 16, 1 << 40])) + bytes(rng.choice([9, 50_000]))
                )
            case 2:
                self.message(rng.randbytes(rng.randrange(300)))
            case 3:
                self.message(rng.choice([b"locked", b"bye", b"ok", b"", b"\x91" * 2000, b"\x81\xa1k" * 900]))
            case 4:
                self.message(self.damaged(wire.encode(self.request())))
            case 5 if rng.random() < 0.5:
                self.send(FLOOD)
            case _:
                self.message(wire.encode(self.request()))

    def request(self) -> wire.AnyRequest:
        self.seq += 1
        rng = self.random
        keys = rng.randbytes(32 * rng.choice([1, 200]))
        return rng.choice(
            [
                wire.Identify(self.seq, RequestIdentity(salt=str(rng.random()))),
                wire.Ping(self.seq),
                wire.Lookup(self.seq, 100, 1, "stranger", [wire.KeyGroup(wire.Rule.PREFIX, keys)]),
                wire.Reserve(self.seq, 100, 1, b"", keys, 1000),
                wire.Release(self.seq, [(rng.randbytes(16), self.seq)]),
            ]
        )

    def damaged(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(changed[: self.random.randrange(1, len(data) + 1)])

    def message(self, data: bytes) -> None:
        self.send(header(len(data)) + data)


def strangers(world: World) -> None:
    rng = world.random
    server = world.server()
    caller = Caller(world.engine(server), prompts(world, 3, 4))
    world.run(lambda: caller.engine.identity().ready, "the honest engine is ready")
    wire_before = caller.engine.wire
    others: list[Stranger] = []
    attach = server.instance.attach

    def look() -> None:
        traffic = attach.traffic
        assert traffic.connections <= MAX_OPEN
        assert traffic.unread_reply_bytes <= ALL_UNSENT_BYTES
        assert all(one.link.unsent_bytes <= UNSENT_BYTES for one in attach._connections)
        assert sum(one.link.partial_bytes for one in attach._connections) <= PARTIAL_BYTES

    for _ in range(30):
        match rng.randrange(8):
            case 0 | 1:
                others += [Stranger(world, server) for _ in range(rng.choice([1, 3, 40]))]
            case 2 if others:
                others.pop(rng.randrange(len(others))).socket.close()
            case 3 | 4 | 5 if others:
                for stranger in rng.sample(others[-20:], min(len(others), 5)):
                    stranger.act()
            case _:
                caller.act()
        look()
        world.sleep(rng.choice([0.0, 0.001, 0.01]))
        look()
    world.run(lambda: not caller.waits, "the honest engine's calls are answered")
    assert caller.engine.wire is wire_before, "the honest engine's connection was closed"
    assert not {"unavailable", "failed"} & caller.outcomes.keys(), caller.outcomes
    for stranger in others:
        stranger.socket.close()
    while caller.held:
        caller.release()
    world.run(lambda: attach.traffic.connections == 1, "strangers' connections end")
    holds_nothing(server)
