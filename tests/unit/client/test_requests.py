"""The table of requests under way: each ends exactly once, whatever happens to messages and connections."""

from __future__ import annotations

import math

from kvstrata.client.link import MAX_ASKS, Kind, Pending, RequestTable
from kvstrata.errors import Refused
from kvstrata.rpc import wire


class Recorded:
    """A request that writes down how it ended."""

    def __init__(self, kind: Kind = Kind.ASK) -> None:
        self.ends: list[object] = []
        self.pending = Pending(kind, lambda seq, ms: wire.Cancel(seq, 77), self.ends.append, self.ends.append)


def send_all(table: RequestTable, now_s: float) -> list[int]:
    """Send what is due; returns the numbers of the requests."""
    return [wire.decode_request(frame).seq for frame in table.to_send(now_s)]


def test_what_the_caller_does_not_take_is_sent_later_in_its_order():
    table, requests = RequestTable(), [Recorded(Kind.TELL), Recorded(Kind.TELL), Recorded()]
    for request in requests:
        table.add(request.pending)
    first = next(table.to_send(0.0))
    assert wire.decode_request(first).seq == requests[2].pending.seq == 1, "a caller waits for it"
    assert table.due_s() == -math.inf
    assert send_all(table, 0.0) == [2, 3]


def test_a_message_that_cannot_be_made_fails_its_request_alone():
    table, fine = RequestTable(), Recorded()
    ends = []

    def message(seq, remaining_ms):
        raise Refused("this identity is refused")

    table.add(Pending(Kind.ASK, message, ends.append, ends.append))
    table.add(fine.pending)
    assert send_all(table, 0.0) == [1]
    assert isinstance(ends[0], Refused)
    assert fine.ends == []


def test_asks_are_bounded_and_what_is_told_is_not():
    table = RequestTable()
    asks = [Recorded() for _ in range(MAX_ASKS)]
    assert all(table.add(ask.pending) for ask in asks)
    assert not table.add(Recorded().pending)
    assert table.add(Recorded(Kind.TELL).pending)
    table.remove(asks[0].pending)
    table.remove(asks[0].pending)
    assert table.n_asks == MAX_ASKS - 1
    assert table.add(Recorded().pending)
