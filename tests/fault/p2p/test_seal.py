"""`p2p.seal`: whoever reads or changes the bytes between two hosts learns nothing and gets nothing served."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from kvstrata.p2p import frames
from kvstrata.p2p.frames import PIECE_BYTES, SEAL_BYTES, FrameError, SealedStream
from kvstrata.p2p.settings import OwnerLimits
from kvstrata.testing.strategies import payload_of
from tests.harness.l1 import L1, RECORD, SIZE
from tests.harness.peers import KEYS, LOADED, Opened, PeerNet, PeerOwner, failed
from tests.harness.waiting import until

Change = Callable[[bytearray], None]


class ManInTheMiddle:
    """Passes a reader's connections on to an owner's port; `change`, once, changes what came at a time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.change: Change | None = None
        self.heard = bytearray()
        self.threads = [threading.Thread(target=self._accept)]
        self.sockets: list[socket.socket] = []
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self.listener.accept()
            except OSError:
                return
            owner = socket.create_connection(("127.0.0.1", self.port))
            self.sockets += [reader, owner]
            for source, sink, changes in ((reader, owner, False), (owner, reader, True)):
                self.threads.append(threading.Thread(target=self._pass, args=(source, sink, changes)))
                self.threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket, changes: bool) -> None:
        with contextlib.suppress(OSError):
            while came := bytearray(source.recv(1 << 20)):
                self.heard += came
                if changes and self.change is not None and len(came) > RECORD // 4:
                    change, self.change = self.change, None
                    change(came)
                sink.sendall(came)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        for sock in (self.listener, *self.sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            await asyncio.to_thread(thread.join)
        for sock in (self.listener, *self.sockets):
            sock.close()


@pytest.fixture
async def between(net: Opened, l1: L1) -> AsyncIterator[Callable[..., object]]:
    """Opens a net whose reader reaches the owner through a man in the middle; returns both."""
    middles: list[ManInTheMiddle] = []

    async def opened(*, seal: bool) -> tuple[PeerNet, ManInTheMiddle]:
        owner = PeerOwner(l1, seal=seal)
        middle = ManInTheMiddle(owner.records.port)
        middles.append(middle)
        owner.records.port = middle.listener.getsockname()[1]
        made = await net(owner, seal=seal, limits=OwnerLimits(open_s=0.0, max_open_s=0.0))
        return made, middle

    yield opened
    for middle in middles:
        await middle.close()


def flip(came: bytearray) -> None:
    came[len(came) // 2] ^= 1


def repeat(came: bytearray) -> None:
    came[:] = came + came


def swap(came: bytearray) -> None:
    half = len(came) // 2
    came[:] = came[half:] + came[:half]


def leave_out(came: bytearray) -> None:
    del came[len(came) // 4 : len(came) // 2]


@pytest.mark.parametrize("change", [flip, repeat, swap, leave_out])
async def test_what_was_changed_on_the_way_closes_the_connection_and_is_a_miss(
    between, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "PIECE_BYTES", 64 << 10)  # others follow the one that was changed
    one, middle = await between(seal=True)
    assert await one.load(*KEYS) == [LOADED] * 8
    for connection in list(one.adapter._parts.reader._open):  # so that no idle connection is tried first
        one.adapter._parts.reader._drop(connection)
    middle.change = change
    outcomes = await one.load(*KEYS)
    if change is not repeat:  # what was repeated may come after the last byte of the answer
        assert outcomes == [failed("peer_gone")] * 8
        assert not one.adapter._parts.reader._open
    await until(
        lambda: not one.owner.records.sending_bytes
    )  # or it is still too busy with what was broken off
    assert await one.load(*KEYS) == [LOADED] * 8, "a new connection has new keys"


async def test_nobody_on_the_way_can_read_what_is_sealed_and_everybody_what_is_not(between) -> None:
    for seal in (True, False):
        one, middle = await between(seal=seal)
        assert await one.load(*KEYS) == [LOADED] * 8
        readable = [part in middle.heard for part in (KEYS[3], payload_of(KEYS[3], SIZE)[:64])]
        assert readable == [not seal] * 2


def pair() -> tuple[socket.socket, socket.socket, SealedStream, SealedStream]:
    here, there = socket.socketpair()
    keys = bytes(32), bytes([1]) * 32
    return here, there, SealedStream(here, *keys), SealedStream(there, *keys[::-1])


@pytest.mark.parametrize("n_bytes", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7])
def test_sealed_parts_come_as_they_went_in_both_directions(n_bytes: int) -> None:
    here, there, one, other = pair()
    with here, there:
        part = payload_of(bytes(32), n_bytes)
        for sender, receiver in ((one, other), (other, one)):
            thread = threading.Thread(target=sender.send, args=(b"head", [part, b"", b"end"]))
            thread.start()
            room, end = bytearray(n_bytes), bytearray(3)
            assert receiver.receive(4) == b"head"
            receiver.receive_into([memoryview(room), memoryview(end)])
            thread.join()
            assert (room, end) == (part, b"end")


@pytest.mark.parametrize("what", ["repeated", "swapped", "of the other direction", "of another length"])
def test_a_sealed_piece_fits_only_where_it_was_sent(what: str) -> None:
    here, there, one, other = pair()
    with here, there:
        one.send(b"first!", b"second")
        other.send(b"answer")
        first, second = there.recv(6 + SEAL_BYTES), there.recv(6 + SEAL_BYTES)
        answer = here.recv(6 + SEAL_BYTES)
        forged = {
            "repeated": first + first, "swapped": second + first, "of the other direction": answer + second,
            "of another length": first[1:] + second,
        }[what]  # fmt: skip
        here.sendall(forged)
        with pytest.raises(FrameError, match="changed, repeated or left out"):
            other.receive(6), other.receive(6)


async def test_a_sealed_and_an_unsealed_instance_do_not_read_each_other(net: Opened, l1: L1) -> None:
    one = await net(PeerOwner(l1, seal=False), seal=True, limits=OwnerLimits(open_s=0.0, max_open_s=0.0))
    assert await one.load(*KEYS) == [failed("peer_differs")] * 8
    one.shared.settings = msgspec.structs.replace(one.shared.settings, seal=False)
    assert await one.load(*KEYS) == [LOADED] * 8
