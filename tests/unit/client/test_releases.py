"""The queue of leases that a client releases: in which messages they go, and to which server."""

from __future__ import annotations

import math

import pytest

from kvstrata.client.copies import CopyLedger
from kvstrata.client.releases import HOLD_S, LEASES_PER_MESSAGE, ReleaseQueue
from kvstrata.client.requests import LAST_REPEAT_S, Kind, Pending, RequestTable
from kvstrata.errors import Unavailable
from kvstrata.rpc import wire
from kvstrata.types import LeaseName
from tests.unit.client import link_double

SESSION = bytes(16)


class Link:
    def __init__(self) -> None:
        self.session = SESSION
        self.epoch = 7
        self.asked: list = []
        self.table = RequestTable()

    def ask(self, pending):
        self.asked.append((pending, pending.message(len(self.asked) + 1, 0)))


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def released() -> list[LeaseName]:
    return []


@pytest.fixture
def queue(link, released) -> ReleaseQueue:
    return ReleaseQueue(link, CopyLedger(), released.extend)


def give(queue: ReleaseQueue, leases: list[LeaseName], *, group: bool = False) -> None:
    """Release leases in a pass of the link without awaited requests."""
    queue.add(leases, group=group)
    queue.tick(0.0)


def lease(seq: int, epoch: int = 7) -> LeaseName:
    return LeaseName(b"s" * 16, seq, epoch)


def answer(link: Link) -> None:
    pending, message = link.asked.pop(0)
    pending.replied(wire.Ok(message.seq, link.epoch, len(message.leases)))


def test_releases_wait_behind_awaited_requests_but_not_for_long(queue, link):
    ask = Pending(Kind.ASK, lambda seq, ms: None, lambda reply: None, lambda error: None)
    link.table.add(ask)
    queue.add([lease(1)], group=False)
    queue.tick(5.0)
    queue.add([lease(2)], group=False)
    queue.tick(5.0 + HOLD_S / 2)
    assert link.asked == []
    assert queue.due_s() == 5.0 + HOLD_S
    queue.tick(5.0 + HOLD_S)
    assert [seq for _, seq in link.asked[0][1].leases] == [1, 2]
    assert queue.due_s() == math.inf
    answer(link)
    queue.add([lease(3)], group=False)
    queue.tick(6.0)
    assert link.asked == []
    link.table.remove(ask)
    queue.tick(6.0)
    assert link.asked == [], "this pass still belongs to the request that a caller waited for"
    queue.add([lease(4)], group=False)
    queue.tick(6.0)
    assert [seq for _, seq in link.asked[0][1].leases] == [3, 4]


def test_releases_queued_while_a_message_is_under_way_go_together_in_the_next(queue, link, released):
    give(queue, [lease(1)])
    for seq in range(2, 10):
        give(queue, [lease(seq)])
    assert [message.leases for _, message in link.asked] == [[(b"s" * 16, 1)]]
    answer(link)
    assert [seq for _, seq in link.asked[0][1].leases] == list(range(2, 10))
    answer(link)
    assert link.asked == []
    assert released == [lease(seq) for seq in range(1, 10)]


def test_a_release_message_names_a_bounded_number_of_leases(queue, link):
    give(queue, [lease(seq) for seq in range(LEASES_PER_MESSAGE + 5)])
    assert len(link.asked[0][1].leases) == LEASES_PER_MESSAGE
    answer(link)
    assert len(link.asked[0][1].leases) == 5


def test_leases_released_by_share_and_by_group_go_in_separate_messages(queue, link):
    give(queue, [lease(1)])
    give(queue, [lease(2)], group=True)
    assert [(m.group, m.leases[0][1]) for _, m in link.asked] == [(False, 1), (True, 2)]


def test_a_lease_released_twice_is_sent_once(queue, link):
    give(queue, [lease(1)])
    give(queue, [lease(2), lease(2)])
    give(queue, [lease(2)])
    answer(link)
    assert link.asked[0][1].leases == [(b"s" * 16, 2)]


def test_leases_of_an_older_epoch_are_not_sent_to_the_next_server(queue, link):
    give(queue, [lease(1)])
    give(queue, [lease(2)])
    queue.restarted(7, 8)
    link.epoch = 8
    pending, _ = link.asked.pop()
    pending.failed(Unavailable("restarted"))
    assert link.asked == []
    give(queue, [lease(3)])
    assert link.asked == []
    give(queue, [lease(4, epoch=8)])
    assert link.asked[0][1].leases == [(b"s" * 16, 4)]


def test_leases_of_a_newer_epoch_wait_until_the_client_has_attached_to_it(queue, link):
    give(queue, [lease(1, epoch=8)])
    assert link.asked == []
    queue.restarted(7, 8)
    link.epoch = 8
    queue.pump()
    assert link.asked[0][1].leases == [(b"s" * 16, 1)]


def test_a_refused_release_is_sent_again(released):
    link = link_double.Link()
    queue = ReleaseQueue(link, CopyLedger(), released.extend)
    give(queue, [lease(1)])
    [first] = link.said()
    link.table.reply(
        wire.Error(first.seq, 7, "refused", "1024 requests of this session are running", "seq", True)
    )
    assert released == []
    [again] = link.said(LAST_REPEAT_S)
    assert again.leases == first.leases and again.seq > first.seq
    link.table.reply(wire.Ok(again.seq, 7, 1))
    assert released == [lease(1)]
