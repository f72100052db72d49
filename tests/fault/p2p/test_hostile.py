"""Owners that send what they must not, readers that ask what they must not, and those that stand still."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq

from kvstrata.p2p import frames, serving
from kvstrata.p2p.frames import ASK, HELLO, MAGIC, TABLE, Stream, Ticket, new_ticket
from kvstrata.p2p.settings import OwnerLimits
from kvstrata.rpc.cluster_wire import (
    ANSWERS,
    CLUSTER_PROTOCOL_VERSION,
    TO_INSTANCE,
    Failure,
    Goodbye,
    Owner,
    PeerHello,
    PeerWelcome,
    encode,
)
from kvstrata.rpc.zmq_curve import ClusterKeys
from kvstrata.rpc.zmq_server import Address
from kvstrata.testing.strategies import load_item, payload_of, record_hold, settled, watched
from kvstrata.tiers.reasons import blames_medium
from kvstrata.types import FORMAT_VERSION
from tests.harness.directory_double import Endpoint
from tests.harness.l1 import L1, RECORD, SIZE
from tests.harness.peers import ABSENT, KEYS, LOADED, Opened, PeerNet, PeerOwner, failed, unknown
from tests.harness.waiting import expire, until

FOR_EVER = OwnerLimits(open_s=600, max_open_s=600)
Say = Callable[[Stream, int, list[bytes]], None]


class ScriptedOwner(Endpoint):
    """Gives tickets as an owner does, and then says on its connections what a test wants."""

    def __init__(self, say: Say) -> None:
        public, secret = zmq.curve_keypair()
        super().__init__(TO_INSTANCE, ClusterKeys(secret))
        self.public, self.say = public.decode(), say
        self.tickets: dict[bytes, Ticket] = {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sockets: list[socket.socket] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    @property
    def entry(self) -> Owner:
        return Owner("owner", 11, self.endpoint, len(KEYS), True, self.public)

    def answer(self, request: PeerHello) -> PeerWelcome:
        ticket = new_ticket(seal=request.seal, reader="")
        self.tickets[ticket.name] = ticket
        port = self.listener.getsockname()[1]
        return PeerWelcome(request.seq, 11, "owner", ticket.name, ticket.secret, port, "", "")

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.sockets.append(sock)
            with sock, contextlib.suppress(OSError, frames.FrameError):
                stream, _ = frames.admit_reader(sock, lambda name: self.tickets.pop(name, None))
                asked = frames.receive_ask(stream)
                self.say(stream, asked.number, asked.keys)

    async def close(self) -> None:
        self.ended.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(self.thread.join)
        self.listener.close()
        super().close()


def record_of(key: bytes, of: bytes = b"") -> bytes:
    """The bytes of this key's record, or of another key's."""
    return record_hold(of or key, payload_of(of or key, SIZE)).bytes()


def table(number: int, *lengths: int) -> bytes:
    return TABLE.pack(len(lengths), number) + struct.pack(f"<{len(lengths)}I", *lengths)


def too_long(stream: Stream, number: int, keys: list[bytes]) -> None:
    stream.send(table(number, *[1 << 30] * len(keys)), bytes(1 << 20))


def too_short(stream: Stream, number: int, keys: list[bytes]) -> None:
    stream.send(table(number, *[511] * len(keys)), bytes(511 * len(keys)))


def too_many(stream: Stream, number: int, keys: list[bytes]) -> None:
    stream.send(table(number, *[RECORD] * (len(keys) + 1)), bytes(RECORD * (len(keys) + 1)))


def none_at_all(stream: Stream, number: int, keys: list[bytes]) -> None:
    stream.send(table(number) * 1000)


def of_another_ask(stream: Stream, number: int, keys: list[bytes]) -> None:
    stream.send(table(number + 1, *[RECORD] * len(keys)), bytes(RECORD * len(keys)))


def half(stream: Stream, number: int, keys: list[bytes]) -> None:
    stream.send(table(number, *[RECORD] * len(keys)), record_of(keys[0]), bytes(RECORD // 2))


def half_a_table(stream: Stream, number: int, keys: list[bytes]) -> None:
    stream.send(table(number, *[RECORD] * len(keys))[:-1])


def garbage(stream: Stream, number: int, keys: list[bytes]) -> None:
    stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)


def silence(stream: Stream, number: int, keys: list[bytes]) -> None:
    pass


@pytest.mark.parametrize(
    "say",
    [too_long, too_short, too_many, none_at_all, of_another_ask, half, half_a_table, garbage, silence],
)
async def test_an_owner_that_breaks_the_protocol_is_a_miss_writes_nowhere_else_and_is_skipped(
    net: Opened, say: Say
) -> None:
    one = await net(ScriptedOwner(say), limits=FOR_EVER)
    beside = [load_item(key, SIZE) for key in KEYS]
    before = [watched(item).bytes() for item in beside]
    assert await one.load(*KEYS) == [failed("peer_gone")] * 8
    assert [watched(item).bytes() for item in beside] == before
    assert not blames_medium("peer_gone"), "one bad owner is no reason to leave all others alone"
    assert await one.load(*KEYS) == [failed("peer_skipped")] * 8
    assert await one.ask(KEYS) == [unknown("peer_skipped")] * 8
    assert (one.counted("owners_skipped"), one.counted("hellos")) == (1, 1)


def endless(stream: Stream, number: int, keys: list[bytes]) -> None:
    stream.send(table(number, *[RECORD] * len(keys)), *[record_of(key) for key in keys])
    while True:
        stream.send(table(number, *[RECORD] * len(keys)), *[record_of(key) for key in keys])


async def test_records_that_nobody_asked_for_are_not_read(net: Opened) -> None:
    one = await net(ScriptedOwner(endless), limits=FOR_EVER)
    assert await one.load(*KEYS) == [LOADED] * 8
    assert await one.load(*KEYS) == [LOADED] * 8
    assert one.counted("hellos") == 2, "on the first connection the next answer was one to an older ask"


@pytest.mark.parametrize("what", ["another key's", "changed"])
async def test_wrong_bytes_are_a_miss_and_the_owner_is_skipped(net: Opened, what: str) -> None:
    def say(stream: Stream, number: int, keys: list[bytes]) -> None:
        records = [bytearray(record_of(key)) for key in keys]
        if what == "changed":
            records[3][RECORD // 2] ^= 1
        else:
            records[3] = bytearray(record_of(keys[3], keys[4]))
        stream.send(table(number, *[RECORD] * len(keys)), *map(bytes, records))

    one = await net(ScriptedOwner(say), limits=FOR_EVER)
    outcomes = await one.load(*KEYS)
    assert outcomes == [LOADED] * 3 + [ABSENT] + [LOADED] * 4
    assert (one.counted("unsound_records"), one.counted("owners_skipped")) == (1, 1)


async def test_another_owner_sends_what_the_first_one_breaks_off(net: Opened, second: PeerOwner) -> None:
    one = await net(ScriptedOwner(half))
    one.directory.tell(second.entry, KEYS)
    assert await one.load(*KEYS) == [LOADED] * 8


async def test_at_the_deadline_the_wait_ends_and_then_the_connection_with_its_holds(net: Opened) -> None:
    def say(stream: Stream, number: int, keys: list[bytes]) -> None:
        stream.send(table(number, *[RECORD] * len(keys)), record_of(keys[0])[:100])
        begun.set()
        owner.ended.wait()

    begun, owner = threading.Event(), ScriptedOwner(say)
    one: PeerNet = await net(owner, limits=FOR_EVER)
    loading = asyncio.create_task(one.load(*KEYS))
    await asyncio.to_thread(begun.wait)
    expire(60.0)
    assert await loading == [failed("peer_deadline")] * 8
    assert not one.adapter._parts.reader._open
    assert await one.load(*KEYS) == [failed("peer_skipped")] * 8


async def test_after_the_deadline_the_holds_stay_until_the_thread_has_finished_with_the_bytes(
    net: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: PeerNet = await net(limits=FOR_EVER)
    begun, go_on, reader = threading.Event(), threading.Event(), one.adapter._parts.reader
    verify = reader._checked

    def checked(items: Any, lengths: Any) -> Any:
        begun.set()
        return go_on.wait() and verify(items, lengths)

    monkeypatch.setattr(reader, "_checked", checked)
    items = [load_item(key, SIZE) for key in KEYS]
    loading = asyncio.create_task(settled(one.adapter.load, items))
    await asyncio.to_thread(begun.wait)
    expire(60.0)
    assert await loading == [failed("peer_deadline")] * 8
    assert all(watched(item).drops == 0 for item in items)
    go_on.set()
    for item in items:
        await watched(item).until_dropped()
        watched(item).check()


async def test_a_cancelled_load_keeps_its_holds_until_the_bytes_have_come(net: Opened) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def say(stream: Stream, number: int, keys: list[bytes]) -> None:
        begun.set()
        go_on.wait()
        stream.send(table(number, *[RECORD] * len(keys)), *[record_of(key) for key in keys])

    one: PeerNet = await net(ScriptedOwner(say))
    items = [load_item(key, SIZE) for key in KEYS]
    loading = asyncio.create_task(one.adapter.load(items))
    await asyncio.to_thread(begun.wait)
    loading.cancel()
    await asyncio.wait({loading})
    assert all(watched(item).drops == 0 for item in items)
    go_on.set()
    for item in items:
        await watched(item).until_dropped()
        watched(item).check()


# --- readers ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def owner(l1: L1) -> AsyncIterator[PeerOwner]:
    l1.store(KEYS)
    made = PeerOwner(l1)
    made.records.start()
    yield made
    await made.close()


@contextlib.contextmanager
def connected(owner: PeerOwner) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", owner.records.port)) as sock:
        yield sock


async def ended(sock: socket.socket) -> bool:
    """Wait until the owner has closed the connection."""

    def drain() -> bool:
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1 << 20):
                pass
        return True

    return await asyncio.to_thread(drain)


def proved(owner: PeerOwner, sock: socket.socket) -> Stream:
    return frames.prove_as_reader(sock, owner.records.ticket(seal=False, reader=""))


ASKS = {
    "10,000 keys": ASK.pack(frames.GET, 10_000, 1) + bytes(320_000),
    "no keys": ASK.pack(frames.GET, 0, 1),
    "no kind": ASK.pack(9, 1, 1) + bytes(32),
    "keys of a done": ASK.pack(frames.DONE, 1, 1) + bytes(32),
    "no grant": ASK.pack(frames.DONE, 0, 1),
    "a grant without a number": ASK.pack(frames.GRANT, 1, 0) + KEYS[0],
    "two grants": ASK.pack(frames.GRANT, 1, 1) + KEYS[0] + ASK.pack(frames.GRANT, 1, 2) + KEYS[0],
    "another grant's end": ASK.pack(frames.GRANT, 1, 1) + KEYS[0] + ASK.pack(frames.DONE, 0, 2),
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 10,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_an_impossible_ask_ends_the_connection_and_nothing_is_held(
    owner: PeerOwner, ask: bytes
) -> None:
    with connected(owner) as sock:
        stream = await asyncio.to_thread(proved, owner, sock)
        stream.send(ask)
        assert await ended(sock)
    await until(lambda: not owner.records._connections)
    assert (owner.records.refused, owner.records.sending_bytes) == (1, 0)
    owner.l1.nothing_in_use()


async def test_nothing_is_sent_without_a_proof_and_a_ticket_is_of_use_once(owner: PeerOwner) -> None:
    ticket = owner.records.ticket(seal=False, reader="")
    heard: list[bytes] = []

    class Recorder(Stream):
        def send(self, *parts: bytes | memoryview) -> None:
            heard.extend(map(bytes, parts))
            super().send(*parts)

    with connected(owner) as sock:  # an honest reader, whom somebody hears
        original, frames.Stream = frames.Stream, Recorder
        try:
            stream = await asyncio.to_thread(frames.prove_as_reader, sock, ticket)
        finally:
            frames.Stream = original
        assert await asyncio.to_thread(frames.have, stream, 1, KEYS[:1]) == b"\1"
    with connected(owner) as sock, pytest.raises((OSError, frames.FrameError)):
        await asyncio.to_thread(frames.prove_as_reader, sock, ticket)
    replay = b"".join(heard[:2])
    nobody = HELLO.pack(MAGIC, os.urandom(16), os.urandom(16)) + os.urandom(32)
    guess = HELLO.pack(MAGIC, owner.records.ticket(seal=False, reader="").name, os.urandom(16)) + os.urandom(
        32
    )
    for said in (replay, nobody, guess, ASK.pack(frames.GET, 1, 1) + KEYS[0] + bytes(100)):
        with connected(owner) as sock:
            sock.sendall(said + ASK.pack(frames.GET, 1, 1) + KEYS[0])
            assert await ended(sock)
    await until(lambda: owner.records.refused == 5)
    assert owner.records.sent_records == 0


async def test_a_process_that_does_not_know_the_secret_is_not_taken_for_the_owner(owner: PeerOwner) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(os.urandom(48))
        with pytest.raises(frames.FrameError, match="another process"):
            frames.prove_as_reader(here, new_ticket(seal=False, reader=""))


@pytest.mark.parametrize("how", ["half a hello", "half an ask", "reads nothing", "grant"])
async def test_a_reader_that_stands_still_is_cut_and_its_holds_are_dropped(
    owner: PeerOwner, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("KVSTRATA_PATIENCE", "1")
    monkeypatch.setattr(serving, "GRANT_S", 0.05)
    if how == "half a hello":
        monkeypatch.setattr(frames, "STALL_S", 0.05)
    with connected(owner) as sock:
        if how == "half a hello":
            sock.sendall(MAGIC)
        else:
            stream = await asyncio.to_thread(proved, owner, sock)
            monkeypatch.setattr(frames, "STALL_S", 0.05)  # before the proof it would bound that too
            frames.set_stall(next(iter(owner.records._connections)).socket)
            count, kind = len(KEYS), frames.GRANT if how == "grant" else frames.GET
            asks = [ASK.pack(kind, count, 1) + b"".join(KEYS)] * (100 if how == "reads nothing" else 1)
            with contextlib.suppress(OSError, frames.FrameError):
                stream.send(*asks[:-1], asks[-1][:-1] if how == "half an ask" else asks[-1])
        await until(lambda: not owner.records._connections)
    assert owner.records.sending_bytes == 0
    owner.l1.nothing_in_use()


class Taking:
    """A socket whose other side takes at most so many bytes at a time, each time until the time is over."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self.calls = n_bytes, 0

    def sendmsg(self, parts: list[memoryview]) -> int:
        self.calls += 1
        return min(self.n_bytes, sum(map(len, parts)))


@pytest.mark.parametrize("n_bytes", [1, frames.STALL_BYTES - 1, frames.STALL_BYTES, 10 << 20])
def test_a_reader_that_only_trickles_is_cut(n_bytes: int) -> None:
    taking: Any = Taking(n_bytes)
    parts = [bytes(100), bytes(1 << 20), b"", bytes(n_bytes)]
    if n_bytes < frames.STALL_BYTES:
        with pytest.raises(frames.FrameError, match="too slowly"):
            Stream(taking).send(*parts)
        assert taking.calls == 1
    else:
        Stream(taking).send(*parts)
        assert taking.calls == -(-sum(map(len, parts)) // n_bytes)


async def test_a_granted_record_stays_until_the_readers_word_or_the_end_of_its_connection(
    owner: PeerOwner,
) -> None:
    pool = owner.l1.pool
    with connected(owner) as sock:
        stream = await asyncio.to_thread(proved, owner, sock)
        granted = await asyncio.to_thread(frames.grant, stream, 1, [KEYS[-1], bytes(32)], [RECORD] * 2)
        assert granted[1] == (0, frames.ABSENT)
        assert payload_at(owner.l1, granted[0]) == payload_of(KEYS[-1], SIZE)
        assert owner.records.sending_bytes == RECORD
        pool.clear()
        owner.l1.store(KEYS[:4])
        assert payload_at(owner.l1, granted[0]) == payload_of(KEYS[-1], SIZE), "it lies where it lay"
        await asyncio.to_thread(frames.done, stream, 1)
        assert owner.records.sending_bytes == 0
        owner.l1.store(KEYS)
        await asyncio.to_thread(frames.grant, stream, 2, KEYS, [RECORD] * len(KEYS))
        assert owner.records.sending_bytes == 8 * RECORD
    await until(lambda: owner.records.sending_bytes == 0)
    owner.l1.nothing_in_use()


def payload_at(l1: L1, granted: tuple[int, int]) -> bytes:
    """The payload that lies where a record was granted."""
    offset, length = granted
    return ctypes.string_at(l1.pool.extents_address + offset, length)[-SIZE:]


async def test_a_member_that_is_shut_out_loses_its_connections_and_tickets(owner: PeerOwner) -> None:
    stays, leaves = (key.decode() for key in (zmq.curve_keypair()[0], zmq.curve_keypair()[0]))
    unused = owner.records.ticket(seal=False, reader=leaves)
    with connected(owner) as one, connected(owner) as other, connected(owner) as late:
        streams = [
            await asyncio.to_thread(
                frames.prove_as_reader, sock, owner.records.ticket(seal=False, reader=key)
            )
            for sock, key in ((one, stays), (other, leaves))
        ]
        for stream in streams:
            assert await asyncio.to_thread(frames.have, stream, 1, KEYS[:1]) == b"\1"
        owner.records.keep_only(frozenset({stays.encode()}))
        assert await ended(other)
        with pytest.raises((OSError, frames.FrameError)):
            await asyncio.to_thread(frames.prove_as_reader, late, unused)
        assert await asyncio.to_thread(frames.have, streams[0], 2, KEYS[:1]) == b"\1"


async def test_connections_are_bounded_and_those_without_a_proof_go_first(
    owner: PeerOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 4)
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(connected(owner))
        stream = await asyncio.to_thread(proved, owner, good)
        assert await asyncio.to_thread(frames.have, stream, 1, KEYS[:1]) == b"\1"
        admitted: list[bool] = []
        admits = owner.records._admits
        monkeypatch.setattr(
            owner.records, "_admits", lambda one: admitted.append(admits(one)) or admitted[-1]
        )
        for number in range(20):
            stack.enter_context(connected(owner))
            await until(lambda n=number: len(admitted) > n and len(owner.records._connections) <= 4)
        assert all(admitted)
        another = await asyncio.to_thread(proved, owner, stack.enter_context(connected(owner)))
        assert await asyncio.to_thread(frames.have, stream, 2, KEYS[:1]) == b"\1"
        assert await asyncio.to_thread(frames.have, another, 1, KEYS[:1]) == b"\1"


async def test_tickets_are_bounded(owner: PeerOwner) -> None:
    for _ in range(2 * serving.MAX_TICKETS):
        owner.records.ticket(seal=False, reader="")
    assert len(owner.records._tickets) == serving.MAX_TICKETS


def hello(**other: object) -> PeerHello:
    values = {
        "protocol": CLUSTER_PROTOCOL_VERSION,
        "record_version": FORMAT_VERSION,
        "engine": "tcp",
        "seal": False,
    }
    return PeerHello(0, reader="reader", **{**values, **other})  # type: ignore[arg-type]


async def test_a_reader_that_is_set_up_in_another_way_is_refused_with_its_field(owner: PeerOwner) -> None:
    for request, code, field in (
        (hello(protocol=CLUSTER_PROTOCOL_VERSION - 1), "wrong_version", "protocol"),
        (hello(record_version=9), "wrong_version", "record_version"),
        (hello(engine="nixl"), "bad_request", "engine"),
        (hello(seal=True), "bad_request", "seal"),
    ):
        answer = answer_of(owner, encode(request))
        assert isinstance(answer, Failure) and (answer.code, answer.field) == (code, field)
    assert owner.control.refused == {"wrong_version": 2, "bad_request": 2}


def answer_of(owner: PeerOwner, frame: bytes) -> object:
    sent: list[bytes] = []
    owner.control.server.send = lambda address, reply: sent.append(reply)  # type: ignore[assignment,misc]
    owner.control._on_frame(Address(b"reader"), frame)
    return ANSWERS.decode(sent[0])


async def test_garbage_on_the_port_for_peers_is_answered_with_an_error(owner: PeerOwner) -> None:
    for frame in (b"", b"\xc1", b"\x93\xabpeer_hello\x07", b"\x91" * 5_000, encode(Goodbye(7, "reader", 1))):
        answer = answer_of(owner, frame)
        assert isinstance(answer, Failure) and answer.code == "bad_request", frame


async def test_another_setting_of_the_owner_is_a_miss_that_is_logged_once(
    net: Opened, l1: L1, caplog: pytest.LogCaptureFixture
) -> None:
    one = await net(PeerOwner(l1, seal=True), limits=OwnerLimits(open_s=0.0, max_open_s=0.0))
    for _ in range(3):
        assert await one.load(*KEYS) == [failed("peer_differs")] * 8
    assert caplog.text.count("set the same on both") == 1
