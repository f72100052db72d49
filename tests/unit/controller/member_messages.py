"""What the instance `a` tells a controller, and members of which `a` is in a given state."""

from __future__ import annotations

from typing import Any

from kvstrata.rpc import cluster_wire as wire
from tests.harness.known_members import KEY, KnownMembers

OLD, CURRENT, NEXT = 1, 2, 3
"""Incarnations of a member: a superseded one, the current one, the next one."""


def register(incarnation: int = CURRENT, name: str = "a", **changes: Any) -> wire.Register:
    fields: dict[str, Any] = {
        "protocol": wire.CLUSTER_PROTOCOL_VERSION,
        "version": "1",
        "tiers": ["l1", "disk-0"],
        "l1_bytes": 1 << 30,
        "chunk_tokens": 256,
        "control_endpoint": "tcp://h:1",
        "gives_to_peers": True,
        "http_url": "",
        "host": "one",
    }
    return wire.Register(1, instance=name, incarnation=incarnation, **{**fields, **changes})


def in_state(state: str) -> KnownMembers:
    """Members of which `a`, of incarnation CURRENT, is in this state; before it there was incarnation OLD."""
    known = KnownMembers()
    if state == "unknown":
        return known
    if state == "restored":
        known.members.restore(register(), KEY, now_s=0.0)
        return known
    known.register(register(OLD), 0.0)
    known.register(register(), 0.0)
    if state == "dead":
        for now_s in range(0, 33, 3):
            known.tick(float(now_s))
    if state == "gone":
        known.goodbye(wire.Goodbye(1, "a", CURRENT))
    return known
