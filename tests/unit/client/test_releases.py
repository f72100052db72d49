"""The queue of leases that a client releases: in which messages they go, and to which server."""

from __future__ import annotations

import pytest

from kvstrata.client.copies import CopyLedger
from kvstrata.client.lookups import LEASES_PER_MESSAGE, Lookups, ReleaseQueue
from kvstrata.errors import Unavailable
from kvstrata.rpc import wire
from kvstrata.types import LeaseName
from tests.unit.client import link_double


class Link(link_double.Link):
    """It makes each message at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list = []

    def ask(self, pending):
        self.asked.append((pending, pending.message(len(self.asked) + 1, 0)))


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def queue(link) -> ReleaseQueue:
    return ReleaseQueue(link, CopyLedger(), Lookups(link, None, 0))


def give(queue: ReleaseQueue, leases: list[LeaseName]) -> None:
    """Release leases in a pass of the link without awaited requests."""
    queue.add(leases, group=False)
    queue.tick(0.0)


def lease(seq: int, epoch: int = 7) -> LeaseName:
    return LeaseName(b"s" * 16, seq, epoch)


def answer(link: Link) -> None:
    pending, message = link.asked.pop(0)
    pending.replied(wire.Ok(message.seq, link.epoch, len(message.leases)))


def test_a_release_message_names_a_bounded_number_of_leases(queue, link):
    give(queue, [lease(seq) for seq in range(LEASES_PER_MESSAGE + 5)])
    assert len(link.asked[0][1].leases) == LEASES_PER_MESSAGE
    answer(link)
    assert len(link.asked[0][1].leases) == 5


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
