"""The page of `kvstrata ctl cluster status`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.cli.page_parts import Column, bar, count, grid, line, share, size, span, warnings

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_WARNINGS, MOST_ROWS, MOST_EVENTS = 4, 7, 5
SOURCES = ("l1", "l2", "peer")


class SeenCluster(NamedTuple):
    """What a controller said at one time: the cluster, its instances, the last hour, and recent events."""

    cluster: dict[str, Any]
    instances: list[dict[str, Any]]
    sample_s: float
    points: list[dict[str, Any]]
    events: list[dict[str, Any]]


def page(seen: SeenCluster) -> RenderableType:
    """At most 40 lines of 80 columns: warnings, hits, tiers, instances, events."""
    from rich.console import Group

    cluster = seen.cluster
    instances = ", ".join(f"{number} {state}" for state, number in cluster["instances"].items() if number)
    return Group(
        line(
            f"{cluster['name']}  {'ready' if cluster['ready'] else 'NOT READY'}  up {span(cluster['up_s'])}  "
            f"kvstrata {cluster['version']}",
            "bold green" if cluster["ready"] else "bold red",
        ),
        *warnings(warnings_of(seen), MOST_WARNINGS),
        line(f"instances: {instances or 'none'}; {count(cluster['directory']['placements'])} placements"),
        line(""),
        *_hits(seen),
        line(""),
        *_tiers(cluster),
        line(""),
        *_instances(seen.instances),
        line(""),
        *_events(seen.events),
    )


def warnings_of(seen: SeenCluster) -> list[str]:
    """Everything that an operator should look at, the most urgent first."""
    cluster, found = seen.cluster, []
    if not cluster["ready"]:
        found.append(f"not ready: {cluster['why_not_ready']}")
    election = cluster["election"]
    if election["problem"]:
        found.append(f"election: {election['problem']}")
    if not election["leader"]:
        found.append(f"no controller leads since {span(election['no_leader_s'])}")
    found += [f"{row['id']}: {row['state']}, heard {span(row['heard_ago_s'])} ago"
              for row in seen.instances if row["state"] != "live"]  # fmt: skip
    found += [f"{row['id']}: a full sync is {row['sync']['state']}"
              for row in seen.instances if row["state"] == "live" and row["sync"]["state"] == "wanted"]  # fmt: skip
    if cluster["restarts"]:
        found.append(f"{cluster['restarts']} restarts, the last after {cluster['last_end']}")
    if cluster["directory"]["refused_keys_total"]:
        found.append(
            f"the directory is full: {cluster['directory']['refused_keys_total']} chunks were refused"
        )
    return found


def _hits(seen: SeenCluster) -> list[RenderableType]:
    columns = [Column("lookups"), Column("chunks asked", True), Column("hits", True),
               *(Column(source.upper() if source != "peer" else "peers", True) for source in SOURCES)]  # fmt: skip
    rows = []
    for label, points in (
        ("last minute", seen.points[-round(60 / seen.sample_s) :]),
        ("last hour", seen.points),
    ):
        hits: dict[str, float] = {}
        for point in points:
            for source, rate in point["hits_per_s"].items():
                hits[source] = hits.get(source, 0.0) + rate * seen.sample_s
        rows.append(_hit_row(label, hits))
    rows.append(_hit_row("since start", seen.cluster["hits_total"]))
    return grid(columns, rows, len(rows), "")


def _hit_row(label: str, hits: Mapping[str, float]) -> list[str]:
    asked = sum(hits.values())
    found = asked - hits.get("miss", 0)
    return [
        label,
        count(asked),
        share(found, asked),
        *(share(hits.get(source, 0), asked) for source in SOURCES),
    ]


def _tiers(cluster: Mapping[str, Any]) -> list[RenderableType]:
    columns = [Column("tier"), Column("used", True), Column("of", True), Column(""), Column("chunks", True)]
    rows = []
    for tier, used in cluster["used_bytes"].items():
        capacity = cluster["capacity_bytes"].get(tier, 0)
        rows.append([
            tier, size(used), size(capacity) if capacity else "-", bar(used, capacity) if capacity else "",
            count(cluster["keys"].get(tier, 0)),
        ])  # fmt: skip
    return grid(columns, rows, MOST_ROWS, "kvstrata ctl cluster tiers") if rows else [line("no tier")]


def _instances(instances: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    columns = [
        Column("instance"), Column("state"), Column("host"), Column("L1 used", True), Column("of", True),
        Column("chunks", True), Column("processes", True), Column("heard", True),
    ]  # fmt: skip
    rows = [
        [
            row["id"], "draining" if row["draining"] else row["state"], row["host"],
            size(row["used_bytes"].get("l1", 0)), size(row["l1_bytes"]), count(sum(row["keys"].values())),
            str(row["sessions"]), f"{span(row['heard_ago_s'])} ago",
        ]
        for row in sorted(instances, key=lambda row: (row["state"] == "live", row["id"]))
    ]  # fmt: skip
    return grid(columns, rows, MOST_ROWS, "kvstrata ctl cluster instances") if rows else [line("no instance")]


def _events(events: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    rows = [
        [
            time.strftime("%H:%M:%S", time.localtime(event["unix_ms"] / 1000)), event["kind"], event["instance"] or "-",
            " ".join(f"{name}={value}" for name, value in event["facts"].items()),
        ]
        for event in events[-MOST_EVENTS:]
    ]  # fmt: skip
    return grid([Column("time"), Column("event"), Column("instance"), Column("facts")], rows, MOST_EVENTS, "")
