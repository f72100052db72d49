"""P6: everything that a client of this host can make the server keep is bounded, and honest clients do not notice."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import kvstrata.server.listener as listener
from kvstrata.memory.paths import RPC_SOCKET
from kvstrata.rpc import wire
from kvstrata.session.zmtp import Codec, header
from kvstrata.types import RequestIdentity, Role
from tests.harness.rpc_client import FACTS, layout, part
from tests.promises.caller import Caller, holds_nothing, prompts
from tests.world import Server, World, tell

UNSENT_BYTES = 8 << 10
ALL_UNSENT_BYTES = 24 << 10
PARTIAL_BYTES = 128 << 10
FLOOD = b"".join(header(len(ping)) + ping for ping in (wire.encode(wire.Ping(seq)) for seq in range(1, 400)))
"""Requests with more answers than the kernel keeps for a client that does not read."""
MAX_OPEN = 64 + 64 + 2
"""Unfinished handshakes, clients without a row, and the honest engine, which may just be attaching again."""


ATTACH: dict[str, Any] = msgspec.to_builtins(
    wire.AttachRequest(
        protocol=wire.PROTOCOL_VERSION,
        session=b"s" * 16,
        group=b"g" * 16,
        role=Role.CLIENT,
        layout=layout(),
        engine_slices=1,
        slice=part(),
        facts=FACTS,
    ),
    builtin_types=(bytes,),
)
VALUES: list[Any] = [
    None,
    True,
    -1,
    1 << 63,
    0.5,
    "",
    "x" * 100,
    b"",
    bytes(16),
    [],
    [[1, 2]],
    {"a": {"b": 1}},
]
FILES: list[Callable[[], int]] = [
    lambda: os.pidfd_open(1),
    lambda: os.open(os.devnull, os.O_RDWR),
    lambda: os.open("/", os.O_RDONLY),
    lambda: socket.socket(socket.AF_UNIX).detach(),
    lambda: os.eventfd(0),
]


def attach_request(rng: random.Random) -> bytes:
    """A request with fields changed, dropped, added or nested deeper than a parser's stack; sometimes a good one."""
    request = {**ATTACH, "session": rng.randbytes(16)}
    for field in rng.sample(sorted(ATTACH), rng.choice([0, 0, 1, 2, 3])):
        request[field] = rng.choice(VALUES)
        if rng.random() < 0.3:
            del request[field]
    data = msgspec.msgpack.encode(request)
    if rng.random() < 0.2:
        nested = rng.choice([b"\x91", b"\x81\xa1k"]) * rng.randrange(1, 30_000)
        name = msgspec.msgpack.encode(rng.choice(["facts", "layout", "x"]))
        data = b"\xdf" + (len(request) + 1).to_bytes(4, "big") + data[1:] + name + nested + b"\xc0"
    return data


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
        self.pid = world.kernel.born()
        self.socket.bind(b"\0%d.%d.%d" % (os.getpid(), self.pid, next(world.numbers)))
        # So many may wait to be accepted that the kernel takes no more.
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(os.fspath(server.folder / RPC_SOCKET))
        if self.random.random() < 0.8:
            self.send(Codec(b"DEALER", 1).opening)
        self.seq = 0
        first = self.random.random()
        if first < 0.4:
            self.message(wire.encode(wire.Ping(1)))
        elif first < 0.55:
            self.attach()

    def send(self, data: bytes) -> None:
        try:
            self.socket.send(data, socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the server has closed the connection, or reads nothing more of it

    def attach(self) -> None:
        """Ask to attach, with any descriptors beside the request; never lock the row's byte."""
        rng, data = self.random, attach_request(self.random)
        if rng.random() < 0.3:
            data = self.damaged(data)
        files = [self.world.kernel.pidfd_of(self.pid)] if rng.random() < 0.7 else []
        files += [make() for make in rng.choices(FILES, k=rng.choice([0, 0, 0, 1, 4, 60]))]
        with contextlib.suppress(OSError):
            socket.send_fds(self.socket, [header(len(data)) + data], files)
        for file in files:
            os.close(file)
        if rng.random() < 0.3:
            self.message(b"locked")

    def act(self) -> None:
        rng = self.random
        match rng.randrange(10):
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
            case 6 | 7:
                self.attach()
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
                wire.Lookup(self.seq, 100, 1, "stranger", keys),
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
    opened = world.kernel.other_files()

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
    world.sleep(1.5 * listener.HANDSHAKE_S)
    assert not attach._pending, "a handshake is not ended after its time"
    world.run(lambda: len(server.parts.pool.rows()) == 1, "strangers have no rows")
    for stranger in others:
        stranger.socket.close()
    while caller.held:
        caller.release()
    world.run(lambda: attach.traffic.connections == 1, "strangers' connections end")
    assert world.kernel.other_files() == opened, "a stranger's descriptor is kept"
    assert not attach.refused["internal"], "see the log"
    holds_nothing(server)
