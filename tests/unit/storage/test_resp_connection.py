"""What a connection to a Redis server reads of replies, and what it does not keep."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvstrata.storage.media.resp import connection
from kvstrata.storage.media.resp.connection import MAX_BULK_BYTES, Link, LinkLost
from kvstrata.testing.strategies import WAIT_S


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def array(count: int, items: bytes) -> Iterator[bytes]:
    yield b"*%d\r\n" % count
    while True:
        yield items


@pytest.mark.parametrize(
    ("count", "items"),
    [
        (1 << 20, bulk(bytes(MAX_BULK_BYTES))),
        (1 << 20, b":1\r\n" * 1000),
        (1 << 20, b"*1000\r\n" + b"$-1\r\n" * 1000),
        (1, b"$%d\r\n" % (MAX_BULK_BYTES + 1)),
    ],
)
def test_the_memory_that_a_reply_takes_is_bounded(
    count: int, items: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_ARRAY_BYTES", 1 << 23)
    ours, theirs = socket.socketpair()
    sent = 0

    def send() -> None:
        nonlocal sent
        try:
            for part in array(count, items):
                theirs.sendall(part)
                sent += len(part)
        except OSError:
            return

    sending = threading.Thread(target=send)
    sending.start()
    link = Link(ours, time.monotonic() + WAIT_S)
    with pytest.raises(LinkLost, match="not Redis"):
        link.reply()
    link.close()
    sending.join(WAIT_S)
    theirs.close()
    assert sent < 1 << 24


def test_the_longest_replies_of_real_servers_are_read() -> None:
    ours, theirs = socket.socketpair()
    node = b"*4\r\n" + bulk(b"127.100.100.100") + b":6379\r\n" + bulk(b"a" * 40) + b"*0\r\n"
    slots = b"*4096\r\n" + (b"*4\r\n:0\r\n:0\r\n" + node * 2) * 4096
    values = b"*40\r\n" + bulk(bytes(MAX_BULK_BYTES)) * 40  # twice: the bound is that of one reply
    sending = threading.Thread(target=theirs.sendall, args=(slots + values + values,))
    sending.start()
    link = Link(ours, time.monotonic() + WAIT_S)
    for count in (4096, 40, 40):
        reply = link.reply()
        assert isinstance(reply, list) and len(reply) == count
    sending.join(WAIT_S)
    link.close()
    theirs.close()


def test_what_the_server_said_before_it_broke_the_connection_is_in_the_error() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, time.monotonic() + WAIT_S)
    theirs.sendall(b"+OK\r\n-ERR Protocol error: invalid bulk length\r\n")
    theirs.close()
    with pytest.raises(LinkLost, match="the connection broke: ERR Protocol error: invalid bulk length"):
        link.send([b"*3\r\n"])
    link.close()
