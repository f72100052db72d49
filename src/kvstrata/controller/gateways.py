"""The gateways that send heartbeats to this controller, and the replies to them.

1. At most MAX_GATEWAYS are kept; a further one replaces the one that was silent longest.  A gateway that was silent for
   KEPT_S is forgotten.  Only operators' pages use this table.
2. A gateway's name is checked like an instance's id: where the controller's key file lists ids, the key of the
   connection must be listed with the name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvstrata.clock import Clock
from kvstrata.controller.instance_keys import InstanceKeys
from kvstrata.controller.member import MemberState
from kvstrata.controller.members import Members
from kvstrata.observability.numbers import Numbers, gauge
from kvstrata.rpc.cluster_wire import MAX_TOLD_INSTANCES, GatewayBeat, GatewayHeard, Served

MAX_GATEWAYS = 256
KEPT_S = 600.0
BEAT_S = 2.0
"""Interval of a gateway's heartbeats, and so the maximum age of its list of instances."""


class Gateway(NamedTuple):
    """One gateway's last heartbeat."""

    told: GatewayBeat
    host: str
    """Source address of the heartbeat."""
    heard_s: float


class Gateways(Numbers):
    """The table of gateways. Belongs to the event loop."""

    known = gauge(
        "Gateways heard from in the last ten minutes.", lambda self: len(list(self)), name="gateways"
    )

    def __init__(self, clock: Clock, members: Members, keys: InstanceKeys) -> None:
        self._clock = clock
        self._members = members
        self._keys = keys
        self._known: dict[str, Gateway] = {}
        """By name, the one with the oldest heartbeat first."""

    def __iter__(self) -> Iterator[Gateway]:
        """The gateways with a heartbeat within KEPT_S, sorted by name."""
        self._forget()
        return iter([self._known[name] for name in sorted(self._known)])

    def beat(self, told: GatewayBeat, key: str, host: str, epoch: int) -> GatewayHeard:
        """Record a gateway's heartbeat, and return the reply. Raises NotPermitted."""
        self._keys.check_name(told.gateway, key)
        self._known.pop(told.gateway, None)
        self._known[told.gateway] = Gateway(told, host, self._clock.monotonic_s())
        self._forget()
        served = [
            Served(one.told, one.key, one.readable)
            for one in self._members
            if one.state in (MemberState.LIVE, MemberState.RESTORED)
        ]
        return GatewayHeard(told.seq, epoch, round(BEAT_S * 1_000), served[:MAX_TOLD_INSTANCES])

    def _forget(self) -> None:
        """Drop gateways that were silent for KEPT_S, and the longest silent ones above MAX_GATEWAYS."""
        oldest_s = self._clock.monotonic_s() - KEPT_S
        while self._known:
            name, first = next(iter(self._known.items()))
            if first.heard_s >= oldest_s and len(self._known) <= MAX_GATEWAYS:
                break
            del self._known[name]
