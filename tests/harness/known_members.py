"""A controller's members without a network: tests drive them by messages, as controller/cluster.py does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvstrata.controller.cluster import Cluster
from kvstrata.controller.instance_keys import InstanceKeys, Listed
from kvstrata.controller.member import Member, Outbox
from kvstrata.controller.members import Members
from kvstrata.controller.orders import Orders
from kvstrata.rpc import cluster_wire as wire

KEY = "k" * 40
"""The key that messages come with, unless a test names another."""


class KnownMembers:
    """Members without a directory."""

    def __init__(
        self,
        *,
        orders: Orders | None = None,
        max_instances: int = 8,
        unix_s: Callable[[], float] = time.time,
        listed: Listed | None = None,
    ) -> None:
        orders = orders or Orders()
        self.keys = InstanceKeys(orders, unix_s, lambda: listed)
        self.outbox = Outbox()
        self.members = Members(
            self.outbox,
            orders=orders,
            keys=self.keys,
            heartbeat_s=10.0,
            dead_after_s=30.0,
            max_instances=max_instances,
            now_s=0.0,
        )

    def get(self, instance: str) -> Any:
        """Return the member of this id, None for an unknown id; Any, so that tests need no assertion for the type."""
        return self.members.get(instance)

    def register(self, told: wire.Register, now_s: float, key: str = KEY) -> Member:
        return self.members.register(told, key, now_s)

    def goodbye(self, told: wire.Goodbye, key: str = KEY) -> None:
        self.members.goodbye(told, key)

    def tick(self, now_s: float) -> None:
        self.members.tick(now_s)


class AskedLink:
    """A link whose questions wait until the test answers them."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, asyncio.Future[Any]]] = []

    async def ask(self, request: Any, answer: Any, timeout_s: float) -> Any:
        outcome = asyncio.get_running_loop().create_future()
        self.asked.append((request, outcome))
        return await outcome

    def close(self) -> None:
        pass


def joined(cluster: Cluster, told: wire.Register, key: str = KEY, *, confirmed: bool = False) -> Member:
    """Make a member of a cluster that is followed by nobody; its commands get no answer."""
    member = cluster.members.register(told, key, cluster.clock.monotonic_s())
    follower: Any = SimpleNamespace(
        link=AskedLink(), confirmed=confirmed, cursor=0, reason="", changes=0, lists=0, list_took_s=0.0,
        listed_s=None, listing=False, list_anew=lambda reason: None,
    )  # fmt: skip
    member.follower = follower
    cluster._followers._tasks[member.group] = asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[assignment]
    cluster.lookups.set_readable(member.group, member.readable)
    cluster.lookups.set_shared(member.group, told.media)
    cluster.settle()
    return member


async def tell(cluster: Cluster, member: Member, *runs: wire.Run) -> None:
    """Have these changes of a member applied, as its follower does."""
    cluster.directory.apply(member.group, member.told.tiers, list(runs))
    await cluster.directory.idle()
