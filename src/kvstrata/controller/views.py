"""Makes the response bodies from the cluster's state; tests/unit/controller/routes_golden.txt shows each.

Times are in milliseconds since 1970 (`_unix_ms`), or as seconds ago (`_ago_s`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvstrata import __version__
from kvstrata.controller.member import SHOWN_STATES, Member, MemberState, total_keys
from kvstrata.types import GB, KEY_BYTES

if TYPE_CHECKING:  # with compiled modules, which `kvstrata ctl` does without
    from kvstrata.cluster.lookups import Place
    from kvstrata.controller.cluster import Cluster
    from kvstrata.controller.commands import Command
    from kvstrata.controller.gateways import Gateway
    from kvstrata.controller.history import Happened
    from kvstrata.controller.metrics import Surroundings
    from kvstrata.controller.operations import Placement

Body = dict[str, Any]


def _fields(value: object, names: str) -> Body:
    """The fields of these names."""
    return {name: getattr(value, name) for name in names.split()}


def instance_row(cluster: Cluster, member: Member, keys: Mapping[str, int]) -> Body:
    """One instance; `keys`: its placements by tier."""
    told, load, now_s = member.told, member.condition.load, cluster.clock.monotonic_s()
    return {
        "id": member.id,
        "state": member.state.value,
        "reported_state": member.condition.state,
        "draining": member.draining,
        "confirmed": member.confirmed,
        "incarnation": str(member.incarnation),
        **_fields(
            told,
            "version host pid zone http_url control_endpoint gives_to_peers peer_engine tiers chunk_tokens l1_bytes",
        ),
        "keys": dict(keys),
        **_fields(load, "used_bytes capacity_bytes tier_states hits_total sessions"),
        **_fields(load, "peer_sending_bytes peer_sent_bytes_total peer_read_bytes_total"),
        "engines": member.condition.engines,
        "waiting_commands": len(member.waiting),
        "heard_ago_s": round(max(0.0, now_s - member.heard_s), 3),
        "late": member.state is MemberState.LIVE and now_s - member.heard_s > cluster.settings.heartbeat_s,
        "joined_ago_s": round(max(0.0, now_s - member.joined_s), 3),
        "following": _following(member, now_s),
    }


def _following(member: Member, now_s: float) -> Body:
    """How the controller follows an instance.

    `exact`: the directory has all changes up to its last answer; `behind`: it does not have all of them yet; `listing`:
    the instance is listed; `wanted`: it is to be listed; `none`: only the snapshot is known.
    """
    follower = member.follower
    if follower is None:
        state = "none"
    elif follower.confirmed:
        state = "exact"
    elif follower.cursor is not None:
        state = "behind"
    else:
        state = "listing" if follower.listing else "wanted"
    ended_s = follower.listed_s if follower is not None else None
    return {
        "state": state,
        "listed_because": follower.reason if follower is not None else "",
        "changes": follower.changes if follower is not None else 0,
        "lists": follower.lists if follower is not None else 0,
        "last_took_s": round(follower.list_took_s, 4) if follower is not None else 0.0,
        "last_ended_ago_s": None if ended_s is None else round(now_s - ended_s, 3),
    }


def keys_of(cluster: Cluster) -> dict[int, dict[str, int]]:
    """Placements by group and tier."""
    found: dict[int, dict[str, int]] = {}
    for place, count in cluster.lookups.keys().items():
        found.setdefault(place.group, {})[place.tier] = count
    return found


def instances(cluster: Cluster) -> Body:
    """All instances, by name."""
    keys = keys_of(cluster)
    rows = [instance_row(cluster, member, keys.get(member.group, {})) for member in cluster.members]
    return {
        "instances": sorted(rows, key=lambda row: row["id"]),
        "drained": list(cluster.orders.drained),
        "removed": list(cluster.orders.removed),
    }


def tier_totals(cluster: Cluster, keys: Mapping[int, Mapping[str, int]]) -> dict[str, Counter[str]]:
    """Totals by tier over all instances that are not dead, L1 first; `keys` as from `keys_of`."""
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    members = [member for member in cluster.members if member.state is not MemberState.DEAD]
    known = total_keys(members, keys)
    for member in members:
        load = member.condition.load
        for tier in member.told.tiers:
            total = totals[tier]
            total["instances"] += 1
            total["keys"] = known[tier]
            total["used_bytes"] += load.used_bytes.get(tier, 0)
            total["capacity_bytes"] += load.capacity_bytes.get(tier, 0)
    return {tier: totals[tier] for tier in sorted(totals, key=lambda tier: (tier != "l1", tier))}


def models(cluster: Cluster) -> Body:
    """The kinds of KV of live instances."""
    from kvstrata.controller import prompts

    return {
        "models": [
            {
                "kind": number,
                "layout": msgspec.to_builtins(kind.layout),
                "slices": len(kind.slices),
                "instances": list(kind.instances),
            }
            for number, kind in enumerate(prompts.kinds(cluster.members))
        ]
    }


def election_body(cluster: Cluster) -> Body:
    """The election among several controllers. `token`: number of the leadership, 0 for the only controller."""
    election = cluster.leadership.election
    leader = election.leader if election is not None else None
    return {
        "leads": cluster.leadership.token is not None,
        "leader": leader.member.name if leader else cluster.name if election is None else "",
        "leader_url": leader.member.http_url if leader else "",
        "token": leader.token if leader else 0,
        "cluster_id": election.cluster_id if election is not None else 0,
        "members": [member.name for member in election.members] if election is not None else [cluster.name],
        "no_leader_s": round(election.no_leader_s, 1) if election is not None else 0.0,
        "problem": election.problem if election is not None else "",
    }


def state(cluster: Cluster, around: Surroundings) -> Body:
    """The whole cluster, as the dashboard shows it."""
    return {"cluster": cluster_body(cluster, around), **instances(cluster)}


def _gateway(known: Gateway, now_s: float) -> Body:
    told = known.told
    return {
        "name": told.gateway,
        "host": known.host,
        **_fields(told, "port version policy engines engines_up in_flight requests_total"),
        "heard_ago_s": round(max(0.0, now_s - known.heard_s), 3),
    }


def cluster_body(cluster: Cluster, around: Surroundings) -> Body:
    """The cluster at a glance."""
    totals, now_s = tier_totals(cluster, keys_of(cluster)), cluster.clock.monotonic_s()
    states = [member.state.value for member in cluster.members]
    counts = {state.value: states.count(state.value) for state in SHOWN_STATES}
    counts["draining"] = sum(member.draining for member in cluster.live())
    counts["late"] = sum(now_s - one.heard_s > cluster.settings.heartbeat_s for one in cluster.live())
    counts["unconfirmed"] = sum(not member.confirmed for member in cluster.live())
    directory, usage = cluster.directory, cluster.directory.usage()
    total = sum(cluster.ranking.seconds.counts)
    ready, why = cluster.readiness()
    return {
        "name": cluster.name,
        "version": __version__,
        "epoch": cluster.epoch,
        "unix_ms": cluster.clock.unix_ms(),
        "up_s": round(now_s - cluster.started_s, 3),
        "restarts": around.restarts.times,
        "last_end": around.restarts.cause,
        "ready": ready,
        "why_not_ready": why,
        "heartbeat_s": cluster.settings.heartbeat_s,
        "dead_after_s": cluster.settings.dead_after_s,
        "instances": counts,
        **{
            name: {tier: total[name] for tier, total in totals.items()}
            for name in ("keys", "used_bytes", "capacity_bytes")
        },
        "peer_engines": Counter(one.told.peer_engine or "none" for one in cluster.live()),
        "hits_total": cluster.hits_total,
        "directory": {
            **_fields(usage, "placements bytes shared_tags slots rebuilds"),
            "max_bytes": int(cluster.settings.directory.max_gb * GB),
            "retired_slots": usage.retired,
            "admitted_keys_total": directory.admitted_keys,
            "evicted_keys_total": directory.evicted_keys,
            "listed_keys_total": directory.listed_keys,
            "refused_keys_total": directory.refused_keys + usage.refused,
            "waiting_bytes": directory.waiting_bytes,
            "promised": directory.promised,
        },
        "gateways": [_gateway(one, now_s) for one in cluster.gateways],
        "lookups": {
            "total": total,
            "hits_total": cluster.ranking.hits,
            "keys_total": cluster.ranking.keys,
            "mean_ms": round(1000 * cluster.ranking.seconds.sum_s / total, 4) if total else 0.0,
        },
        "refused_requests": around.port.refused,
        "port": around.port.server.document(),
        "monitor_ports": {"reply": around.port_number},
        "snapshot": dict(around.snapshots.status) if around.snapshots is not None else {},
        "election": election_body(cluster),
    }


def event_row(event: Happened) -> Body:
    """One event."""
    return {
        **_fields(event, "number unix_ms kind instance"),
        "facts": plain(event.facts),
    }


def command_row(cluster: Cluster, command: Command) -> Body:
    """One command."""
    result = command.result
    operation = command.operation
    return {
        "number": command.number,
        "instance": command.member.id,
        "kind": operation.kind,
        "state": "under_way" if result is None else "done" if result.ok else "failed",
        "message": result.message if result is not None else "",
        "age_s": round(cluster.clock.monotonic_s() - command.issued_s, 3),
        "argument": plain(operation),
        "result": plain(result.body) if result is not None else {},
    }


def placement(cluster: Cluster, found: Placement, limit: int) -> Body:
    """The places of chunks; at most `limit` chunks one by one."""
    named = found.named
    members = {member.group: member for member in cluster.members}
    longest = [
        {
            "instance": members[one.group].id,
            "chunks": one.n_chunks,
            "tokens": one.n_chunks * named.chunk_tokens,
            "confirmed": members[one.group].confirmed,
        }
        for one in found.longest
        if one.group in members
    ]
    keys, chunks, told = named.keys, [], 0
    for index, places in enumerate(found.places[:limit]):
        told += len(places)
        if told > MAX_PLACES:
            break
        first = index * named.n_slices * KEY_BYTES
        end = first + named.n_slices * KEY_BYTES
        chunks.append(
            {
                "index": index,
                "keys": [keys[at : at + KEY_BYTES].hex() for at in range(first, end, KEY_BYTES)],
                "places": _places(members, places),
            }
        )
    return {
        "n_chunks": named.n_chunks,
        "n_slices": named.n_slices,
        "chunk_tokens": named.chunk_tokens,
        "identity": named.root.hex(),
        "held_chunks": found.held_chunks,
        "longest": longest,
        "chunks": chunks,
    }


def _places(members: Mapping[int, Member], places: list[Place]) -> list[Body]:
    return [
        {
            "instance": members[place.group].id,
            "tier": place.tier,
            "confirmed": members[place.group].confirmed,
        }
        for place in places
        if place.group in members
    ]


MAX_PLACES = 65_536
MAX_SHOWN_BYTES = 64


def plain(value: Any) -> Any:
    """A document for JSON: bytes become hexadecimal digits, or their length if they are long."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, bytes):
        return value.hex() if len(value) <= MAX_SHOWN_BYTES else f"{len(value)} bytes"
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)
