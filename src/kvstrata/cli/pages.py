"""The page of `kvstrata ctl status`, and the warnings about a server or a cluster.

The page has at most LINES lines of COLUMNS columns, whatever the server holds; warnings come first.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstrata.cli.asking import Ask
from kvstrata.text import printable
from kvstrata.types import GB

COLUMNS, LINES = 80, 40
MB = 1 << 20
BAR_CELLS = 20
MOST_WARNINGS, MOST_ROWS = 4, 5
WINDOWS = (("minute", "last minute"), ("hour", "last hour"), ("start", "since start"))
FAULTS = ("corrupt", "l2_failed", "breaker_open", "deadline", "put_skipped", "refused", "evicted")
"""Reasons of a miss that an operator can act on, the worst first."""

Asker = Callable[[Ask], Any]


class Seen(NamedTuple):
    """A server's status document and the rows of its tiers, read together."""

    status: dict[str, Any]
    tiers: list[dict[str, Any]]


def everything(options: argparse.Namespace, ask: Asker) -> dict[str, Any]:
    """First what needs attention in the server or the cluster, then all that is known. Raises KvstrataError."""
    if options.command == "cluster":
        cluster = ask(Ask("/v1/cluster"))
        found = cluster_warnings(cluster, ask(Ask("/v1/instances"))["instances"])
        return {"needs_attention": found or "nothing", **cluster}
    seen = see_server(ask)
    return {"needs_attention": warnings_of(seen) or "nothing", **seen.status}


def see_server(ask: Asker) -> Seen:
    """Read a server's status and tiers."""
    return Seen(ask(Ask("/v1/status")), ask(Ask("/v1/l2/adapters"))["adapters"])


# --- parts ------------------------------------------------------------------------------------------------------------


def size(n_bytes: float) -> str:
    """Bytes in GB or MB, as the settings count them."""
    return f"{n_bytes / GB:,.2f} GB" if n_bytes >= GB / 10 else f"{n_bytes / MB:,.1f} MB"


def count(number: float) -> str:
    """A number of at most 9 characters."""
    for limit, unit, by in ((1e5, "", 1.0), (1e8, " k", 1e3), (1e11, " M", 1e6)):
        if abs(number) < limit:
            return f"{number / by:,.0f}{unit}"
    return f"{number / 1e9:,.0f} G"


def span(seconds: float) -> str:
    """A time, with its two largest units."""
    if abs(seconds) < 10:
        return f"{round(seconds, 1) + 0.0:.1f} s"  # no -0.0
    whole = round(abs(seconds))
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    for (large, large_s), (small, small_s) in itertools.pairwise(units):
        if whole >= large_s:
            sign = "-" if seconds < 0 else ""
            return f"{sign}{whole // large_s} {large} {whole % large_s // small_s} {small}"
    return f"{seconds:.0f} s"


def share(part: float, whole: float) -> str:
    """A share in percent; a dash of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def bar(part: float, whole: float) -> str:
    """A share as a bar."""
    filled = round(BAR_CELLS * min(1.0, max(0.0, part / whole))) if whole else 0
    return "█" * filled + "░" * (BAR_CELLS - filled)


def cut(text: str, columns: int = COLUMNS) -> str:
    """One line, which nothing that a server or engine chose can leave."""
    text = printable(text)
    return text if len(text) <= columns else text[: columns - 1] + "…"


def grid(heads: str, rows: Iterable[Sequence[str]], more: str, most: int = MOST_ROWS) -> list[str]:
    """A table, and below it the number of rows beyond `most` with their place. `heads`: `>` ends those of numbers."""
    names = heads.split("|")
    every = list(rows)
    cells = [[name.strip(" >") for name in names], *([cut(cell, 30) for cell in row] for row in every[:most])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            f"{cell:>{width}}" if name.endswith(">") else f"{cell:<{width}}"
            for cell, width, name in zip(row, widths, names, strict=True)
        ).rstrip()
        for row in cells
    ]
    left = len(every) - most
    return [*map(cut, lines), *([f"and {left} more: {more}"] if left > 0 else [])]


def worst_reason(misses: Mapping[str, int]) -> str:
    """The worst reason among first misses, and the most frequent one if it is another; empty without a miss."""
    if not misses:
        return ""
    total = sum(misses.values())
    worst = next((reason for reason in FAULTS if misses.get(reason)), "")
    most = max(misses, key=lambda reason: misses[reason])
    shown = [f"{reason} {misses[reason]} of {total}" for reason in dict.fromkeys((worst, most)) if reason]
    return ", mostly ".join(shown)


def _warnings(found: Sequence[str]) -> list[str]:
    """The first warnings as lines, and how many more there are."""
    more = [f"! and {len(found) - MOST_WARNINGS} more: --all"] if len(found) > MOST_WARNINGS else []
    return [cut(f"! {text}") for text in found[:MOST_WARNINGS]] + more


def _not_closed(breakers: Mapping[str, Any]) -> str:
    """The operations of a tier whose breaker is not closed."""
    return ", ".join(f"{operation} {state}" for operation, state in breakers.items() if state != "closed")


# --- a server ---------------------------------------------------------------------------------------------------------


def server_page(seen: Seen) -> list[str]:
    """The lines of a server's page: warnings, contents, lookups, tiers, engines."""
    status, pool, trend = seen.status, seen.status["pool"], seen.status["trend"]
    worst = worst_reason(trend["hour"]["first_misses"])
    return [
        *_head(seen),
        cut(
            f"    {count(pool['entries'].get('ready', 0))} records, {size(pool['leased_bytes'])} leased, "
            f"{count(pool['evicted_entries'])} evicted, {size(status['l2_store']['backlog_bytes'])} waiting for L2"
        ),
        "",
        *grid("lookups|number>|chunks asked>|hits>|L1>|L2>|saved>", map(_found, WINDOWS, [trend] * 3), ""),
        *([cut(f"first misses of the last hour: {worst}")] if worst else []),
        *_forecast(pool.get("forecast_seconds", {})),
        *(["", *_tenants(status["tenants"])] if len(status["tenants"]) > 1 else []),
        "",
        *_tiers(seen.tiers),
        "",
        *_engines(status["engines"]),
    ]


def warnings_of(seen: Seen) -> list[str]:
    """Everything that an operator should look at, the most urgent first."""
    status, found = seen.status, []
    pool, attach, process = status["pool"], status["attach"], status["process"]
    if not status["instance"]["ready"]:
        found.append("not ready: run `kvstrata ctl ready` for the reason")
    if pool["missing_bytes"]:
        found.append(f"L1 lacks {size(pool['missing_bytes'])} of memory: free space in /dev/shm")
    if pool["corrupt_entries"]:
        found.append(f"{pool['corrupt_entries']} chunks of L1 were corrupt and were dropped")
    for tier in seen.tiers:
        name, why = tier["name"], tier.get("reason", "")
        if tier["state"] != "active":
            found.append(f"{name}: {tier['state']}{f': {why}' if why else ''}")
        if opened := _not_closed(tier["breakers"]):
            found.append(f"{name}: circuit breaker: {opened}")
        if tier.get("numbers", {}).get("read_only"):
            found.append(f"{name}: read-only after a disk error")
    cluster = status.get("cluster")
    if cluster and not cluster.get("member"):
        found.append("the cluster's controller does not answer")
    if attach["stranded_bytes"]:
        found.append(
            f"{size(attach['stranded_bytes'])} are quarantined for dead processes: kvstrata ctl stranded list"
        )
    incomplete = sum(not engine["complete"] for engine in status["engines"])
    if incomplete:
        found.append(f"{incomplete} engines lack processes, so their lookups find nothing")
    if process["restarts"]:
        found.append(f"{process['restarts']} restarts, the last after {process['last_end']}")
    if status["sessions"]["leases_revoked"]:
        found.append(f"{status['sessions']['leases_revoked']} revoked leases have not been released yet")
    if status["log"]["dropped_lines"]:
        found.append(
            f"{status['log']['dropped_lines']} log lines were dropped: the log was not read fast enough"
        )
    return found


def _head(seen: Seen) -> list[str]:
    instance, pool = seen.status["instance"], seen.status["pool"]
    used, limit = pool["used_bytes"], pool["extents_bytes"]
    return [
        cut(
            f"{instance['instance_id']}  {'ready' if instance['ready'] else 'NOT READY'}  "
            f"up {span(instance['uptime_s'])}  kvstrata {instance['version']}"
        ),
        *_warnings(warnings_of(seen)),
        "",
        f"L1  {bar(used, limit)}  {size(used)} of {size(limit)} ({share(used, limit)})",
    ]


def _forecast(saved: Mapping[str, float]) -> list[str]:
    """The line with the predicted savings of other sizes of L1; empty until there is a sample."""
    sizes = [f"{part} ×: {share(saved[part], 1)}" for part in sorted(saved, key=float)]
    return [cut(f"prefill saved by an L1 of {', '.join(sizes)}")] if sizes else []


def _tenants(tenants: list[dict[str, Any]]) -> list[str]:
    rows = [
        [cut(row["tenant"] or "(unnamed)", 20), size(row["bytes"])]
        + [size(row["quota_bytes"]) if row["quota_bytes"] > 0 else "-"]
        + [share(row["part"], 1) if "part" in row else "-"]
        + [share(row["seconds"][part], 1) if row.get("seconds") else "-" for part in ("0.5", "1", "2", "4")]
        for row in sorted(tenants, key=lambda row: -row["bytes"])
    ]  # fmt: skip
    heads = "tenant|L1>|quota>|of prefill>|saved by ½ ×>|1 ×>|2 ×>|4 ×>"
    return grid(heads, rows, "--json") if rows else ["no tenant has chunks in L1"]


def _found(window: tuple[str, str], trend: Mapping[str, Any]) -> list[str]:
    name, label = window
    numbers = trend[name]
    asked, l1, l2 = numbers["lookup_chunks"], numbers["l1_hit_chunks"], numbers["l2_hit_chunks"]
    saved = f"≈ {span(numbers['avoided_s'] - numbers['lookup_s'])}" if numbers["avoided_s"] else "-"
    shares = (share(part, asked) for part in (l1 + l2, l1, l2))
    return [label, count(numbers["lookups"]), count(asked), *shares, saved]


def _tiers(tiers: list[dict[str, Any]]) -> list[str]:
    rows = []
    for tier in tiers:
        usage, puts = tier["usage"] or {}, tier["puts"]
        capacity = usage.get("capacity_bytes", 0)
        waiting = sum(puts.get(name, 0) for name in ("queued", "retrying", "in_flight"))
        rows.append([
            tier["name"], tier["state"], size(usage.get("used_bytes", 0)), size(capacity) if capacity else "-",
            count(usage.get("records", 0)), count(waiting), count(puts.get("outcomes", {}).get("stored", 0)),
            _not_closed(tier["breakers"]) or "closed",
        ])  # fmt: skip
    heads = "tier|state|used>|of>|records>|puts wait>|stored>|breakers"
    return grid(heads, rows, "kvstrata ctl l2 list") if rows else ["no L2 tier"]


def _engines(engines: list[dict[str, Any]]) -> list[str]:
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
    heads = "engine|pids|model|asked>|hits>|saved>|leases>|last ping>"
    return grid(heads, rows, "--json") if rows else ["no engine is attached"]


# --- a cluster -------------------------------------------------------------------------------------------------------


def cluster_warnings(cluster: dict[str, Any], instances: list[dict[str, Any]]) -> list[str]:
    """Everything that an operator should look at, the most urgent first."""
    found = []
    if not cluster["ready"]:
        found.append(f"not ready: {cluster['why_not_ready']}")
    election = cluster["election"]
    if election["problem"]:
        found.append(f"election: {election['problem']}")
    if not election["leader"]:
        found.append(f"no controller has been the leader for {span(election['no_leader_s'])}")
    engines = {name.partition(",")[0] for name in cluster["peer_engines"]} - {"none"}
    if len(engines) > 1:
        found.append(
            f"instances use different transfer engines ({', '.join(sorted(engines))}), so some cannot read others; "
            "set the same p2p.engine on all"
        )
    for row in instances:
        if row["state"] != "live":
            found.append(f"{row['id']}: {row['state']}, last heard {span(row['heard_ago_s'])} ago")
            continue
        found += [f"{row['id']}: {tier} is {state}" for tier, state in row["tier_states"].items()]
        if row["late"]:
            found.append(f"{row['id']}: has not answered for {span(row['heard_ago_s'])}")
        if row["following"]["state"] == "wanted":
            found.append(
                f"{row['id']}: its chunks must be listed again ({row['following']['listed_because']})"
            )
    if cluster["restarts"]:
        found.append(f"{cluster['restarts']} restarts, the last after {cluster['last_end']}")
    if refused := cluster["directory"]["refused_keys_total"]:
        found.append(f"the directory is full: {refused} chunks were refused")
    return found
