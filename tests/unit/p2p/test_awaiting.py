"""Questions to an instance that stands still while its link is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvstrata.clock import SystemClock
from kvstrata.errors import Unavailable
from kvstrata.p2p.awaiting import AwaitedPeers
from kvstrata.p2p.settings import PeerSettings
from kvstrata.rpc.cluster_wire import Await, Awaited, Owner, Where

OWNER = Owner("b", 7, "tcp://127.0.0.1:1", 0, True, bytes(32))
MOST_S = 0.05
ASKED = Await(0, bytes(32), bytes(64), bytes(32), 0, 0)


class Link:
    """A link that is up; the owner behind it answers, or stands still, which alone takes time."""

    connected = True

    def __init__(self) -> None:
        self.asked = 0
        self.stands_still = False
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    async def ask(self, request: Await, reply: type[Any], within_s: float) -> Awaited:
        self.asked += 1
        if self.stands_still:
            self.now_s += within_s
            raise Unavailable("no answer in time")
        return Awaited(0, OWNER.incarnation, 1, "ready")

    def close(self) -> None: ...


def asks(scene: Callable[[Link, Callable[[], Awaitable[str]]], Awaitable[None]]) -> None:
    """Run a scene with an asker, the link to its owner, and a function that asks and returns how that ended."""

    async def run() -> None:
        peers, link = AwaitedPeers(PeerSettings((), "tcp"), SystemClock(), "a"), Link()

        async def asked(where: Where, most_s: float) -> list[Owner]:
            return [OWNER]

        peers._asked, peers._linked = asked, lambda entry: link  # type: ignore[method-assign, assignment, return-value]
        peers._loop = link  # type: ignore[assignment]

        async def ask() -> str:
            return (await peers.wait("b", ASKED, MOST_S))[1]

        await scene(link, ask)

    asyncio.run(run())


def test_an_owner_that_stands_still_costs_two_lookups_their_time_and_then_none():
    async def scene(link: Link, ask: Callable[[], Awaitable[str]]) -> None:
        link.stands_still = True
        ends = [await ask() for _ in range(4)]
        assert ends == ["late", "late", "broken", "broken"]
        assert link.asked == 2

    asks(scene)


def test_an_answer_between_two_silences_keeps_an_owner_asked():
    async def scene(link: Link, ask: Callable[[], Awaitable[str]]) -> None:
        for _ in range(3):
            link.stands_still = True
            assert await ask() == "late"
            link.stands_still = False
            assert await ask() == "ready"
        assert link.asked == 6

    asks(scene)
