"""Waits between instances are bounded, whoever lies, and an asker that is refused computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvstrata.clock import SystemClock
from kvstrata.p2p import awaiting
from kvstrata.p2p.awaiting import AwaitedPeers
from kvstrata.p2p.settings import PeerSettings
from kvstrata.rpc.cluster_wire import TO_INSTANCE, Await, Awaited, ClusterReply, Failure, Owner, WhereReply
from kvstrata.rpc.zmq_curve import OPEN_PUBLIC
from kvstrata.server.requests import promises
from kvstrata.server.requests.promises import Promises
from kvstrata.tiers.breaker import Breaker
from tests.harness.directory_double import Directory, Endpoint
from tests.harness.l1 import L1
from tests.harness.waiting import until

ROOT, CHAIN, SLICES = bytes(32), b"".join(bytes([n]) * 32 for n in range(8)), b"s" * 32
QUESTION = Await(0, ROOT, CHAIN, SLICES, 2, 2_000, True)


class Liar(Endpoint):
    """An owner that answers as it is told."""

    says: Callable[[Any], ClusterReply | None] = staticmethod(lambda asked: None)

    def answer(self, request: Any) -> ClusterReply | None:
        return self.says(request)


class Knows(Directory):
    """Knows the owner by its name."""

    owner: Owner

    def answer(self, request: Any) -> ClusterReply | None:
        return WhereReply(request.seq, 7, [self.owner] if request.named == self.owner.instance else [])


@pytest.fixture
async def asked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Liar, AwaitedPeers]]:
    monkeypatch.setattr(awaiting, "ANSWER_S", 0.05)
    monkeypatch.setattr(awaiting, "POLL_S", 0.05)
    monkeypatch.setattr(awaiting, "Breaker", lambda failures, *_: Breaker(failures, 600.0, 600.0))
    owner, directory = Liar(TO_INSTANCE), Knows()
    directory.owner = Owner("owner", 11, owner.endpoint, 0, True, OPEN_PUBLIC.decode())
    peers = AwaitedPeers(
        PeerSettings((directory.endpoint,), "tcp", lookup_timeout_ms=60_000), SystemClock(), "reader"
    )
    yield owner, peers
    peers.close()
    owner.close()
    directory.close()


async def test_answers_that_fit_nothing_end_the_wait_and_the_owner_is_left_alone_for_a_while(
    asked: tuple[Liar, AwaitedPeers],
) -> None:
    owner, peers = asked
    for says in (
        lambda one: None,
        lambda one: Awaited(one.seq, 12, 3, "ready"),
        lambda one: Awaited(one.seq, 11, 2, "ready"),
        lambda one: Awaited(one.seq, 11, 9, "ready"),
        lambda one: Awaited(one.seq, 11, 3, "late"),
        lambda one: Failure(one.seq, 11, "not_permitted", "no", "", False),
    ):
        owner.says = says
        peers._owners.clear()
        assert await peers.wait("owner", QUESTION, 60.0) == (2, "broken", b"")
        before = owner.asked.total()
        assert await peers.wait("owner", QUESTION, 60.0) == (2, "broken", b"")
        assert owner.asked.total() == before
    owner.says = lambda one: Awaited(one.seq, 11, 8, "ready")
    peers._owners.clear()
    n_chunks, end, named = await peers.wait("owner", QUESTION, 60.0)
    assert (n_chunks, end) == (8, "ready") and named


async def known(owner: Liar, peers: AwaitedPeers) -> None:
    """The controller has told where the owner is, for which a busy machine may need longer than a short wait."""
    owner.says = lambda one: Awaited(one.seq, 11, 8, "ready")
    assert (await peers.wait("owner", QUESTION, 60.0))[1] == "ready"


async def test_an_owner_that_says_late_for_ever_is_waited_for_as_long_as_the_request_may(
    asked: tuple[Liar, AwaitedPeers],
) -> None:
    owner, peers = asked
    await known(owner, peers)
    owner.says = lambda one: Awaited(one.seq, 11, 2, "late")
    assert await peers.wait("owner", QUESTION, 0.2) == (2, "late", b"")
    assert await peers.wait("owner", QUESTION, 0.2) == (2, "late", b""), "it is asked again"


async def test_an_owner_that_cannot_be_reached_costs_one_lookup_its_time_and_not_each(
    asked: tuple[Liar, AwaitedPeers],
) -> None:
    owner, peers = asked
    await known(owner, peers)
    owner.close()
    await until(lambda: not peers._owners["owner"].link.connected)  # or a question that was sent ends with it
    assert await peers.wait("owner", QUESTION, 0.2) == (2, "late", b"")
    assert await peers.wait("owner", QUESTION, 0.2) == (2, "broken", b"")


async def test_a_cancelled_wait_says_nothing_of_its_owner(asked: tuple[Liar, AwaitedPeers]) -> None:
    owner, peers = asked
    came = asyncio.Event()
    owner.says = lambda one: came.set()
    waiting = asyncio.create_task(peers.wait("owner", QUESTION, 60.0))
    await came.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    owner.says = lambda one: Awaited(one.seq, 11, 8, "ready")
    assert (await peers.wait("owner", QUESTION, 60.0))[:2] == (8, "ready")


async def test_waits_of_peers_are_bounded_for_each_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "MAX_WAITING", 3)
    monkeypatch.setattr(promises, "MAX_PEERS_WAITING", 5)
    l1 = L1()
    there = Promises(l1.pool)

    async def stage(chain: bytes) -> None:
        """There is no L2."""

    waiting = [asyncio.create_task(there.for_peer(peer, QUESTION, stage)) for peer in "aaaabbbb"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert there.peers_wait_now == 5 and sum(one.done() for one in waiting) == 3
    assert {one.result() for one in waiting if one.done()} == {(2, "none")}
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not there.peers_wait_now and not there._waits and not there._expecting
    l1.pool.close()


async def test_a_promise_that_is_broken_between_two_questions_ends_the_wait(
    asked: tuple[Liar, AwaitedPeers],
) -> None:
    owner, peers = asked
    ends = iter(["expected", "late", "none"])
    heard: list[bool] = []

    def says(one: Await) -> Awaited:
        heard.append(one.expects)
        return Awaited(one.seq, 11, 2, next(ends))  # type: ignore[arg-type]

    owner.says = says
    assert (await peers.wait("owner", QUESTION, 60.0))[:2] == (2, "broken")
    assert heard == [True, True, False]
