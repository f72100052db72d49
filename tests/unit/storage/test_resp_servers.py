"""What a server that does not do what Redis does cannot make of the `resp` adapter."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Self

import pytest

from kvstrata.storage.base import (
    Found,
    LoadOutcome,
    LoadStatus,
    Presence,
    PutOutcome,
    PutStatus,
    StorageAdapter,
)
from kvstrata.storage.entry import make_adapter
from kvstrata.testing.strategies import WAIT_S, key_of, lent_context, load_item, put_item, watched

INFO = b"redis_version:7.0.0\r\nredis_mode:standalone\r\nrole:master\r\n"


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class Peer:
    """Greets as Redis does, and answers every other command with what `answer` makes of its words."""

    def __init__(self, answer: Callable[[list[bytes]], bytes]) -> None:
        self.answer = answer
        self.accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            try:
                while line := stream.readline():
                    words = []
                    for _ in range(int(line[1:])):
                        length = int(stream.readline()[1:])
                        words.append(stream.read(length + 2)[:-2])
                    match words[0]:
                        case b"PING":
                            reply = b"+PONG\r\n"
                        case b"INFO":
                            reply = bulk(INFO)
                        case _:
                            reply = self.answer(words)
                    stream.write(reply)
                    stream.flush()
            except OSError:
                return

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)


async def adapter_of(peer: Peer) -> StorageAdapter:
    adapter = make_adapter({"type": "resp", "host": "127.0.0.1", "port": peer.port}, 0)
    await adapter.open(lent_context(lambda key: None))
    return adapter


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
async def test_redirections_of_a_server_without_a_cluster_are_not_followed(word: bytes) -> None:
    with (
        Peer(lambda words: b"+OK\r\n") as other,
        Peer(lambda words: b"-%b 1 127.0.0.1:%d\r\n" % (word, other.port)) as peer,
    ):
        adapter = await adapter_of(peer)
        assert await adapter.exists([key_of(1)]) == [Found(Presence.UNKNOWN, 0, "cluster_down")]
        item, hole = put_item(key_of(1), 1000), load_item(key_of(1), 1000)
        assert await adapter.put([item]) == [PutOutcome(PutStatus.FAILED, "cluster_down")]
        assert await adapter.load([hole]) == [LoadOutcome(LoadStatus.FAILED, "cluster_down")]
        for one in (item, hole):
            watched(one).check()
        assert other.accepted == 0
        await adapter.close()


@pytest.mark.parametrize("length", [-5, 1 << 30, 1 << 40])
async def test_a_value_of_an_impossible_length_is_absent(length: int) -> None:
    with Peer(lambda words: b":%d\r\n" % length) as peer:
        adapter = await adapter_of(peer)
        assert await adapter.exists([key_of(1)]) == [Found(Presence.ABSENT)]
        await adapter.close()
