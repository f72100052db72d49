"""The page of `kvstrata ctl status`, and the screen of `kvstrata ctl top`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstrata.cli.page_parts import (
    Column,
    bar,
    count,
    grid,
    line,
    not_closed,
    share,
    size,
    span,
    warnings,
    worst_reason,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_WARNINGS, MOST_ROWS = 4, 6
WINDOWS = (("minute", "last minute"), ("hour", "last hour"), ("start", "since start"))


class Seen(NamedTuple):
    """What a server said at one time: its status document, and the rows of its tiers."""

    status: dict[str, Any]
    tiers: list[dict[str, Any]]


def page(seen: Seen) -> RenderableType:
    """At most 40 lines of 80 columns: warnings, what is held, what lookups found, tiers, engines."""
    from rich.console import Group

    status = seen.status
    return Group(
        _head(status),
        *warnings(warnings_of(seen), MOST_WARNINGS),
        line(""),
        *_held(status),
        line(""),
        *_found(status["trend"]),
        line(""),
        *_tiers(seen.tiers, MOST_ROWS),
        line(""),
        *_engines(status["engines"], MOST_ROWS),
    )


def warnings_of(seen: Seen) -> list[str]:
    """Everything that an operator should look at, the most urgent first."""
    status, found = seen.status, []
    pool, attach, process = status["pool"], status["attach"], status["process"]
    if not status["instance"]["ready"]:
        found.append("not ready: kvstrata ctl ready says why")
    if pool["missing_bytes"]:
        found.append(f"L1 lacks {size(pool['missing_bytes'])} of memory: free space in /dev/shm")
    if pool["corrupt_entries"]:
        found.append(f"{pool['corrupt_entries']} chunks of L1 were corrupt and were dropped")
    for tier in seen.tiers:
        opened = not_closed(tier["breakers"])
        if tier["state"] != "active":
            found.append(
                f"{tier['name']}: {tier['state']}{': ' if tier.get('reason') else ''}{tier.get('reason', '')}"
            )
        if opened:
            found.append(f"{tier['name']}: breaker of {opened}")
        if tier["puts"].get("workers") == "degraded":
            found.append(f"{tier['name']}: degraded, puts crash and begin again: see the server's log")
        if tier.get("numbers", {}).get("read_only"):
            found.append(f"{tier['name']}: read-only after an error of the disk")
    cluster = status.get("cluster")
    if cluster and not cluster.get("member"):
        found.append("the cluster's controller does not answer")
    if attach["stranded_bytes"]:
        found.append(f"{size(attach['stranded_bytes'])} are kept for dead processes: ctl stranded list")
    incomplete = sum(not engine["complete"] for engine in status["engines"])
    if incomplete:
        found.append(f"{incomplete} engines lack processes, so that their lookups find nothing")
    if process["restarts"]:
        found.append(f"{process['restarts']} restarts, the last after {process['last_end']}")
    if status["sessions"]["leases_revoked"]:
        found.append(f"{status['sessions']['leases_revoked']} revoked leases were not given back yet")
    if status["log"]["dropped_lines"]:
        found.append(f"{status['log']['dropped_lines']} log lines were dropped: nobody read the log")
    return found


def _head(status: Mapping[str, Any]) -> RenderableType:
    instance = status["instance"]
    state = "ready" if instance["ready"] else "NOT READY"
    return line(
        f"{instance['instance_id']}  {state}  up {span(instance['uptime_s'])}  kvstrata {instance['version']}",
        "bold green" if instance["ready"] else "bold red",
    )


def _held(status: Mapping[str, Any]) -> list[RenderableType]:
    pool = status["pool"]
    used, limit = pool["used_bytes"], pool["limit_bytes"]
    return [
        line(f"L1  {bar(used, limit)}  {size(used)} of {size(limit)} ({share(used, limit)})"),
        line(
            f"    {count(pool['entries'].get('ready', 0))} records, {size(pool['leased_bytes'])} leased, "
            f"{count(pool['evicted_entries'])} evicted, {size(status['l2_store']['backlog_bytes'])} wait for L2"
        ),
    ]


def _found(trend: Mapping[str, Any]) -> list[RenderableType]:
    columns = [
        Column("lookups"), Column("number", True), Column("chunks asked", True), Column("hits", True),
        Column("L1", True), Column("L2", True), Column("saved", True),
    ]  # fmt: skip
    measured = bool(trend["computed_chunks"])
    rows = []
    for name, label in WINDOWS:
        window = trend[name]
        asked, l1, l2 = window["lookup_chunks"], window["l1_hit_chunks"], window["l2_hit_chunks"]
        saved = f"≈ {span(window['avoided_s'] - window['lookup_s'])}" if measured else "-"
        rows.append(
            [
                label,
                count(window["lookups"]),
                count(asked),
                share(l1 + l2, asked),
                share(l1, asked),
                share(l2, asked),
                saved,
            ]
        )
    shown = grid(columns, rows, len(rows), "")
    worst = worst_reason(trend["hour"]["first_misses"])
    return [*shown, *([line(f"first misses of the last hour: {worst}")] if worst else [])]


def _tiers(tiers: list[dict[str, Any]], most: int) -> list[RenderableType]:
    if not tiers:
        return [line("no L2 tier")]
    columns = [
        Column("tier"), Column("state"), Column("used", True), Column("of", True), Column("records", True),
        Column("puts wait", True), Column("stored", True), Column("breakers"),
    ]  # fmt: skip
    rows = []
    for tier in tiers:
        usage, puts = tier["usage"] or {}, tier["puts"]
        capacity = usage.get("capacity_bytes", 0)
        waiting = sum(puts.get(name, 0) for name in ("queued", "retrying", "in_flight"))
        rows.append([
            tier["name"], tier["state"], size(usage.get("used_bytes", 0)),
            size(capacity) if capacity else "-",
            count(usage.get("records", 0)), count(waiting), count(puts.get("outcomes", {}).get("stored", 0)),
            not_closed(tier["breakers"]) or "closed",
        ])  # fmt: skip
    return grid(columns, rows, most, "kvstrata ctl l2 list")


def _engines(engines: list[dict[str, Any]], most: int) -> list[RenderableType]:
    if not engines:
        return [line("no engine is attached")]
    columns = [
        Column("engine"), Column("pids"), Column("model"), Column("asked", True), Column("hits", True),
        Column("saved", True), Column("leases", True), Column("last ping", True),
    ]  # fmt: skip
    rows = [
        [
            engine["url"].partition("//")[2] or engine["engine"][:8],
            f"{', '.join(map(str, engine['pids'][:2]))}{', …' if len(engine['pids']) > 2 else ''}"
            f"{'' if engine['complete'] else ' (!)'}",
            engine["model"][-16:], count(engine["lookup_chunks"]),
            share(engine["hit_chunks"], engine["lookup_chunks"]),
            f"≈ {span(engine['avoided_s'])}" if engine["avoided_s"] else "-", count(engine["leases"]),
            "-" if engine["pinged_ago_s"] is None else span(engine["pinged_ago_s"]),
        ]
        for engine in sorted(engines, key=lambda engine: -engine["lookup_chunks"])
    ]  # fmt: skip
    return grid(columns, rows, most, "kvstrata ctl top")
