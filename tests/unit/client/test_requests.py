"""The table of requests under way: each ends exactly once, whatever happens to messages and connections."""

from __future__ import annotations

import itertools

import pytest

from kvstrata.client.requests import (
    FIRST_REPEAT_S,
    LAST_REPEAT_S,
    MAX_ASKS,
    Kind,
    Pending,
    RequestTable,
)
from kvstrata.errors import BadRequest, Refused
from kvstrata.rpc import wire


class Recorded:
    """A request that writes down how it ended."""

    def __init__(self, kind: Kind = Kind.ASK) -> None:
        self.ends: list[object] = []
        self.pending = Pending(kind, lambda seq, ms: wire.Cancel(seq, 77), self.ends.append, self.ends.append)


def send_all(table: RequestTable, now_s: float) -> list[int]:
    """Send what is due; returns the numbers of the requests."""
    numbers = []
    for pending, frame in table.to_send(now_s):
        assert wire.decode_request(frame).seq == pending.seq
        table.sent(pending, now_s)
        numbers.append(pending.seq)
    return numbers


def test_a_request_is_repeated_under_its_number_ever_less_often():
    table, request = RequestTable(), Recorded()
    table.add(request.pending)
    times, now_s = [], 0.0
    while len(times) < 8:
        if send_all(table, now_s):
            times.append(now_s)
        now_s = max(table.due_s(), now_s)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[0] == FIRST_REPEAT_S
    assert gaps == sorted(gaps)
    assert gaps[-1] == LAST_REPEAT_S
    assert request.pending.seq == 1
    assert request.ends == []


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


@pytest.mark.parametrize("forgets", [1, 99])
def test_a_settlement_whose_number_the_server_has_forgotten_is_sent_again_a_bounded_number_of_times(forgets):
    table, request = RequestTable(), Recorded(Kind.SETTLE)
    table.add(request.pending)
    numbers = []
    while not request.ends:
        numbers += send_all(table, 0.0)
        if len(numbers) <= forgets:
            table.reply(wire.Error(numbers[-1], 5, "bad_request", "seq is forgotten", "seq", False))
        else:
            table.reply(wire.Ok(numbers[-1], 5, 1))
    assert numbers == ([1, 2] if forgets == 1 else [1, 2, 3, 4])
    assert isinstance(request.ends[0], wire.Ok if forgets == 1 else BadRequest)


@pytest.mark.parametrize(
    ("kind", "code"), [(Kind.SETTLE, "refused"), (Kind.SETTLE, "deadline"), (Kind.SETUP, "unavailable")]
)
def test_a_settlement_refused_for_now_is_sent_again_later_under_a_new_number(kind, code):
    table, request = RequestTable(), Recorded(kind)
    table.add(request.pending)
    times, now_s = [], 0.0
    while len(times) < 8:
        for number in send_all(table, now_s):
            times.append(now_s)
            assert number == len(times)
            assert table.reply(wire.Error(number, 5, code, "not now", "", True)) is None
        now_s = max(table.due_s(), now_s)
    assert request.ends == []
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[0] == FIRST_REPEAT_S and gaps[-1] == LAST_REPEAT_S, (
        "the server may have remembered the number"
    )
    [number] = send_all(table, now_s + LAST_REPEAT_S)
    answer = wire.Ok(number, 5, 1)
    table.reply(answer)
    assert request.ends == [answer]
    assert len(table) == 0


def test_asks_are_bounded_and_settlements_are_not_refused():
    table = RequestTable()
    asks = [Recorded() for _ in range(MAX_ASKS)]
    assert all(table.add(ask.pending) for ask in asks)
    assert not table.add(Recorded().pending)
    assert table.add(Recorded(Kind.SETTLE).pending)
    table.remove(asks[0].pending)
    table.remove(asks[0].pending)
    assert table.n_asks == MAX_ASKS - 1
    assert table.add(Recorded().pending)
