"""rpc/zmq_inbox.py: a client that sends too much or opens too many connections is cut, and no other client is."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

from kvstrata.rpc import zmq_inbox
from kvstrata.rpc.zmq_inbox import MAX_WAITING_MESSAGES, Inbox, Message

SIZE = 1_000


class Wire:
    """A listener and its connections; `ends[fd]` is the other end of the connection `fd`."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.accepted: dict[int, socket.socket] = {}
        self.ends: dict[int, socket.socket] = {}
        self.inbox = Inbox(SIZE)
        self.inbox.listen(self.port)

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def connect(self) -> int:
        end = socket.create_connection(("127.0.0.1", self.port))
        end.settimeout(30)
        accepted, _ = self.listener.accept()
        self.accepted[accepted.fileno()], self.ends[accepted.fileno()] = accepted, end
        self.inbox.opened(accepted.fileno())
        return accepted.fileno()

    def is_cut(self, connection: int) -> bool:
        self.ends[connection].setblocking(False)
        try:
            return self.ends[connection].recv(1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        for one in (*self.accepted.values(), *self.ends.values(), self.listener):
            one.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def message(connection: int, body: bytes = b"x") -> Message:
    return Message(connection, b"", [body])


def drained(inbox: Inbox) -> list[Message]:
    found = []
    while (one := inbox.next()) is not None:
        found.append(one)
    return found


@pytest.mark.parametrize(("body", "fits"), [(b"", MAX_WAITING_MESSAGES), (bytes(1_800), 4)])
def test_a_connection_with_too_much_waiting_is_cut_and_forgotten(wire: Wire, body: bytes, fits: int) -> None:
    inbox = wire.inbox = Inbox(SIZE * (MAX_WAITING_MESSAGES if not body else 1))
    inbox.listen(wire.port)
    flood, other = wire.connect(), wire.connect()
    inbox.add(message(other))
    for _ in range(fits):
        assert inbox.add(message(flood, body)) is None
    assert inbox.add(message(flood, body)) == flood
    assert inbox.add(message(flood, body)) is None
    assert [one.connection for one in drained(inbox)] == [other]
    assert wire.is_cut(flood)
    assert not wire.is_cut(other)
    assert (inbox.cut_count, inbox.connections_count) == (1, 1)


def test_when_all_connections_together_have_too_much_waiting_the_largest_is_cut(wire: Wire) -> None:
    small = [wire.connect() for _ in range(30)]
    large = wire.connect()
    for connection in small:
        assert wire.inbox.add(message(connection, bytes(800))) is None
    assert wire.inbox.add(message(large, bytes(1_500))) is None
    last = wire.connect()
    assert wire.inbox.add(message(last, bytes(800))) == large
    assert wire.is_cut(large)
    assert len(drained(wire.inbox)) == 31
    assert wire.inbox.add(message(last)) is None  # what was handled counts no more


def test_beyond_the_limit_of_connections_the_one_silent_for_longest_is_cut(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_inbox, "max_connections", lambda: 4)
    wire.inbox = Inbox(SIZE)
    wire.inbox.listen(wire.port)
    spoke, silent, later = wire.connect(), wire.connect(), wire.connect()
    wire.inbox.add(message(spoke))
    newer = [wire.connect() for _ in range(3)]
    assert [wire.is_cut(one) for one in (spoke, silent, later, *newer)] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_descriptor_that_another_connection_has_taken_over_is_not_cut(wire: Wire) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/null") as file:
        for descriptor in (ours.fileno(), file.fileno(), 1 << 20):
            wire.inbox.opened(descriptor)
            assert wire.inbox.add(message(descriptor, bytes(9 * SIZE))) == descriptor
        theirs.sendall(b"alive")
        assert ours.recv(5) == b"alive"


def test_the_messages_of_a_cut_connection_are_freed_over_several_wakes(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_inbox, "FREED_BYTES", 2_500)
    flooding, other = wire.connect(), wire.connect()
    body = bytes(SIZE)
    unused = sys.getrefcount(body)
    cut = None
    while cut is None:
        cut = wire.inbox.add(message(flooding, body))
    assert cut == flooding and wire.is_cut(flooding)
    wire.inbox.add(message(other, b"later"))
    found = wire.inbox.next()
    assert found is not None and found.connection == other, "a dropped message is never handled"
    assert wire.inbox.next() is None
    kept = []
    while wire.inbox.has_dropped:
        kept.append(sys.getrefcount(body) - unused)
        wire.inbox.woke(drained=True)
    assert kept == [7, 4, 1], "three messages of 1,200 bytes each time"
    assert sys.getrefcount(body) == unused
