"""rpc/zmq_client.py against libzmq's ROUTER, and against a server that sends any bytes."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import zmq

from kvstrata.rpc import zmq_client
from kvstrata.rpc.zmq_client import GREETING, QUEUED_FRAMES, Dealer, Waiter, command, header, metadata
from tests.harness.amount import amount

PATIENCE_S = 20.0
READY = command(b"READY", metadata(b"Socket-Type", b"ROUTER"))


class Router:
    """A ROUTER of libzmq."""

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, round(1000 * PATIENCE_S))
        self.socket.bind(f"ipc://{path}")

    def close(self) -> None:
        self._context.destroy(linger=0)


class Raw:
    """A server that accepts one connection after the other and sends what the test says."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(PATIENCE_S)
        self.peer: socket.socket | None = None

    def accept(self, *, greet: bool = True) -> socket.socket:
        """Take the next connection, past its greeting and READY."""
        if self.peer is not None:
            self.peer.close()
        self.peer, _ = self._listener.accept()
        self.peer.settimeout(PATIENCE_S)
        if greet:
            assert self.read(len(GREETING)) == GREETING
            assert self.read(len(zmq_client.READY)) == zmq_client.READY
            self.peer.sendall(GREETING + READY)
        return self.peer

    def read(self, count: int) -> bytes:
        """Exactly so many bytes."""
        assert self.peer is not None
        data = b""
        while len(data) < count:
            part = self.peer.recv(count - len(data))
            assert part, "the client hung up"
            data += part
        return data

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close()
        self._listener.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rpc.sock"


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    waiter = Waiter()
    yield waiter
    waiter.close()


@pytest.fixture
def router(path: Path) -> Iterator[Router]:
    router = Router(path)
    yield router
    router.close()


@pytest.fixture
def raw(path: Path) -> Iterator[Raw]:
    raw = Raw(path)
    yield raw
    raw.close()


def frames_of(waiter: Waiter, dealer: Dealer, count: int) -> list[bytes]:
    """Wait for so many frames."""
    frames: list[bytes] = []
    ends_s = time.monotonic() + PATIENCE_S
    while len(frames) < count:
        assert time.monotonic() < ends_s, f"only {len(frames)} of {count} frames arrived"
        waiter.wait(1.0)
        frames += dealer.receive(count - len(frames))
    return frames


def turn_until(waiter: Waiter, holds: Callable[[], bool]) -> None:
    """Let the waiter work until `holds()`."""
    ends_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends_s
        waiter.wait(0.05)


@pytest.mark.parametrize("size", [0, 255, 256, 5_000_000])
def test_frames_of_any_length_reach_a_router_and_come_back(path, router, waiter, size):
    dealer = waiter.connect(path)
    frame = Random(size).randbytes(size)
    assert dealer.try_send(frame)
    parts: list[bytes] = []
    while not parts:
        waiter.wait(0.01)
        if router.socket.poll(0):
            parts = router.socket.recv_multipart()
    assert parts[1:] == [frame]
    router.socket.send_multipart(parts)
    assert frames_of(waiter, dealer, 1) == [frame]


def test_frames_that_were_sent_before_the_server_listens_arrive_in_order(path, waiter):
    dealer = waiter.connect(path)
    sent = [b"%d" % number for number in range(20)]
    assert all(map(dealer.try_send, sent))
    router = Router(path)
    turn_until(waiter, lambda: bool(router.socket.poll(0)))
    waiter.wait(0.0)
    assert [router.socket.recv_multipart()[1] for _ in sent] == sent
    router.close()


def test_a_connection_that_ends_is_made_again(raw, path, waiter):
    dealer = waiter.connect(path)
    raw.accept()
    turn_until(waiter, lambda: dealer.try_send(b"first"))
    waiter.wait(0.0)
    assert raw.read(7) == b"\0\5first"
    raw.peer.close()
    turn_until(waiter, lambda: dealer.watched[0] == -1)
    assert dealer.try_send(b"second")
    turn_until(waiter, lambda: dealer.watched[0] != -1)
    raw.accept()
    turn_until(waiter, lambda: not dealer.watched[1] & 4 and dealer.has_frames is False)
    waiter.wait(0.01)
    assert raw.read(8) == b"\0\6second"


def test_a_message_of_several_frames_is_dropped_and_the_next_one_is_not(path, router, waiter):
    dealer = waiter.connect(path)
    dealer.try_send(b"hello")
    turn_until(waiter, lambda: bool(router.socket.poll(0)))
    client = router.socket.recv_multipart()[0]
    for parts in ([b"a", b"b", b"c"], [b"", b"d"], [b"one"]):
        router.socket.send_multipart([client, *parts])
    assert frames_of(waiter, dealer, 1) == [b"one"]


def test_a_ping_of_the_server_is_answered_with_its_context(raw, path, waiter):
    dealer = waiter.connect(path)
    peer = raw.accept()
    peer.sendall(command(b"PING", b"\0\0context") + header(1) + b"x")
    assert frames_of(waiter, dealer, 1) == [b"x"]
    pong = command(b"PONG", b"context")
    assert raw.read(len(pong)) == pong


def test_bytes_that_arrive_one_at_a_time_are_the_same_frames(raw, path, waiter):
    dealer = waiter.connect(path)
    peer = raw.accept(greet=False)
    frames = [b"", b"short", bytes(300)]
    stream = GREETING + READY + b"".join(header(len(frame)) + frame for frame in frames)
    got: list[bytes] = []
    for at in range(len(stream)):
        peer.send(stream[at : at + 1])
        waiter.wait(PATIENCE_S)
        got += dealer.receive(10)
    assert got == frames


def test_a_part_of_a_frame_does_not_end_the_wait(raw, path, waiter, monkeypatch):
    monkeypatch.setattr(zmq_client, "PART_S", PATIENCE_S)
    dealer = waiter.connect(path)
    peer = raw.accept()
    peer.sendall(header(1) + b"x")
    assert frames_of(waiter, dealer, 1) == [b"x"]
    frame = bytes(12_288)
    whole = header(len(frame)) + frame

    def send_rest_once_the_first_part_is_read() -> None:
        peer.sendall(whole[:8192])
        while struct.unpack("i", fcntl.ioctl(peer, termios.TIOCOUTQ, bytes(4)))[0]:
            time.sleep(0.001)
        peer.sendall(whole[8192:])

    sender = threading.Thread(target=send_rest_once_the_first_part_is_read)
    sender.start()
    try:
        arrived, _ = waiter.wait(PATIENCE_S)
    finally:
        sender.join()
    assert arrived
    assert dealer.receive(1) == [frame]


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64),
        zmq_client.SIGNATURE + bytes((1, 0)) + bytes(52),
        zmq_client.SIGNATURE + bytes((3, 1)) + b"CURVE".ljust(20, b"\0") + bytes(32),
        GREETING + command(b"ERROR", b"\4none"),
        GREETING + header(1) + b"x",
        GREETING + READY + b"\x80\0",
        GREETING + READY + b"\x05\0",
        GREETING + READY + b"\x02" + b"\xff" * 8,
    ],
)
def test_bytes_that_are_no_zmtp_end_the_connection_and_nothing_else(raw, path, waiter, sent):
    dealer = waiter.connect(path)
    raw.accept(greet=False).sendall(sent)
    turn_until(waiter, lambda: dealer.watched[0] == -1)
    turn_until(waiter, lambda: dealer.watched[0] != -1)
    raw.accept().sendall(header(4) + b"fine")
    assert frames_of(waiter, dealer, 1) == [b"fine"]


@pytest.mark.parametrize("seed", range(amount(6, 30)))
def test_no_bytes_of_a_server_raise(raw, path, waiter, seed):
    dealer, random = waiter.connect(path), Random(seed)
    peer = raw.accept(greet=False)
    peer.sendall(random.choice([b"", GREETING, GREETING + READY]))
    pieces = [random.randbytes(random.randrange(64)), READY, header(3) + b"abc", command(b"PING", b"")]
    peer.sendall(b"".join(random.choices([*pieces, bytes(2), b"\4\0", b"\4\1\7"], k=20)))
    waiter.wait(0.05)
    waiter.wait(0.0)
    dealer.receive(100)


def test_a_server_that_reads_nothing_fills_the_queue(raw, path, waiter):
    dealer = waiter.connect(path)
    peer = raw.accept()
    turn_until(waiter, lambda: dealer.try_send(bytes(1000)) and not dealer.watched[1] & 4)
    sent = 1
    while dealer.try_send(bytes(1000)):
        sent += 1
        waiter.wait(0.0)
    assert sent >= QUEUED_FRAMES
    peer.close()  # the test would otherwise end with megabytes under way


def test_frames_that_nobody_takes_stay_with_the_server(raw, path, waiter):
    dealer = waiter.connect(path)
    peer = raw.accept()
    peer.settimeout(1.0)
    with pytest.raises(TimeoutError):
        for _ in range(QUEUED_FRAMES):
            peer.sendall(50 * (header(1_000) + bytes(1_000)))
            waiter.wait(0.0)
    taken = 0
    while frames := dealer.receive(100_000):
        assert len(frames) < QUEUED_FRAMES + 1_000
        taken += len(frames)
    assert taken > QUEUED_FRAMES


def test_without_a_free_descriptor_the_connection_is_tried_again(router, path, waiter, monkeypatch):
    def refuse(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(zmq_client.socket, "socket", refuse)
        dealer = waiter.connect(path)
        waiter.wait(0.05)
    dealer.try_send(b"hello")
    turn_until(waiter, lambda: bool(router.socket.poll(0)))


def test_a_descriptor_with_the_number_of_a_lost_connection_is_watched(raw, path, waiter):
    dealer = waiter.connect(path)
    peer = raw.accept()
    waiter.wait(0.05)
    number = dealer.watched[0]
    peer.close()
    raw.close()
    path.unlink()
    turn_until(waiter, lambda: dealer.watched[0] == -1)
    waiter._register((number, 1))  # as `poll` knew the connection before it was lost
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        if one.fileno() == number:
            waiter.watch(number)
            (theirs if one is ours else ours).send(b"x")
            assert waiter.wait(PATIENCE_S) == (False, [number])
            assert waiter.wait(PATIENCE_S) == (False, [number])
            break
    else:
        pytest.skip(f"no new descriptor has the number {number}")
    ours.close()
    theirs.close()
