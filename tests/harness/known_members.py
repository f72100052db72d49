"""A controller's members, their syncs and commands; tests drive them by messages, as controller/cluster.py does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvstrata.controller.commands import Commands
from kvstrata.controller.instance_keys import InstanceKeys, Listed
from kvstrata.controller.member import Issued, Member, Outbox, Sync
from kvstrata.controller.members import Members
from kvstrata.controller.orders import Orders
from kvstrata.controller.syncs import Syncs
from kvstrata.rpc import cluster_wire as wire

KEY = "k" * 40
"""The key that messages come with, unless a test names another."""


class KnownMembers:
    """Members without a directory; a caller that needs one applies the returned changes itself."""

    def __init__(
        self,
        *,
        orders: Orders | None = None,
        max_instances: int = 8,
        first_command: int = 100,
        unix_s: Callable[[], float] = time.time,
        listed: Listed | None = None,
    ) -> None:
        orders = orders or Orders()
        self.keys = InstanceKeys(orders, unix_s, lambda: listed)
        self.outbox = Outbox()
        self.commands = Commands(self.outbox, first_command)
        self.syncs = Syncs(self.commands, self.outbox)
        self.members = Members(
            self.commands,
            self.syncs,
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

    def register(self, told: wire.Register, now_s: float, key: str = KEY) -> tuple[Member, bool]:
        return self.members.register(told, key, now_s)

    def goodbye(self, told: wire.Goodbye, now_s: float, key: str = KEY) -> None:
        self.members.goodbye(told, key, now_s)

    def heartbeat(
        self, told: wire.Heartbeat, now_s: float, *, leads: bool = True, key: str = KEY
    ) -> list[wire.Command]:
        return self.members.heartbeat(told, key, now_s, leads=leads)

    def tick(self, now_s: float) -> None:
        self.members.tick(now_s)

    def issue(self, member: Member, kind: wire.CommandKind, argument: dict[str, Any], now_s: float) -> Issued:
        return self.commands.issue(member, kind, argument, now_s)

    def events(self, told: wire.Events, key: str = KEY) -> Member | None:
        """Take a batch of events; return the member whose placements it changes, None when the batch is dropped."""
        member = self.members.get(told.instance)
        return member if self.syncs.events(member, told, key) else None

    def sync_begin(self, told: wire.SyncBegin, now_s: float, key: str = KEY) -> tuple[Member, Sync | None]:
        member = self.members.speaker(told.instance, told.incarnation, key, now_s)
        return member, self.syncs.begin(member, told, now_s)

    def sync_part(self, told: wire.SyncPart, now_s: float, key: str = KEY) -> tuple[Member, Sync, bool]:
        member = self.members.speaker(told.instance, told.incarnation, key, now_s)
        return member, *self.syncs.part(member, told)

    def sync_end(self, told: wire.SyncEnd, now_s: float, key: str = KEY) -> tuple[Member, Sync | None]:
        member = self.members.speaker(told.instance, told.incarnation, key, now_s)
        return member, self.syncs.end(member, told)
