"""What the instance `a` tells a controller, and members of which `a` is in a given state."""

from __future__ import annotations

from typing import Any

from kvstrata.controller.member import Member
from kvstrata.rpc import cluster_wire as wire
from tests.harness.cluster_instance import LOAD, tags_of
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
        "peer_endpoint": "tcp://h:1",
        "http_url": "",
        "host": "one",
    }
    return wire.Register(1, instance=name, incarnation=incarnation, **{**fields, **changes})


def heartbeat(
    incarnation: int = CURRENT, last_event: int = 0, results: list[wire.CommandResult] | None = None
) -> wire.Heartbeat:
    return wire.Heartbeat(1, "a", incarnation, last_event, "ready", LOAD, [], results or [])


def events(seq: int, incarnation: int = CURRENT, tier: str = "l1", tags: bytes = b"") -> wire.Events:
    return wire.Events("a", incarnation, seq, [wire.Run(wire.Change.ADMIT, tier, tags or tags_of([seq]))])


def synced(known: KnownMembers, now_s: float = 0.0, sync: int = 1, seq: int = 0) -> Member:
    member, begun = known.sync_begin(wire.SyncBegin(1, "a", CURRENT, sync, seq), now_s)
    assert begun is not None
    _, ended = known.sync_end(wire.SyncEnd(1, "a", CURRENT, sync, 0, {}), now_s)
    assert ended is begun and known.syncs.done(member, begun, now_s)
    return member


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
    if state == "confirmed":
        synced(known)
    if state == "dead":
        for now_s in range(0, 33, 3):
            known.tick(float(now_s))
    if state == "gone":
        known.goodbye(wire.Goodbye(1, "a", CURRENT), 0.0)
    return known
