"""The screen of `kvstrata ctl top`: what engines, tiers and tenants do now, by the difference to the last look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvstrata.cli.page_parts import Column, bar, count, grid, line, not_closed, share, size, span, warnings
from kvstrata.cli.page_server import Seen, warnings_of

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_WARNINGS, MOST_ENGINES, MOST_TIERS, MOST_TENANTS = 3, 10, 6, 8


class Top:
    """Draws what a server said, with rates since the last look; on the first look, since the server's start."""

    def __init__(self) -> None:
        self._before: Seen | None = None

    def draw(self, seen: Seen) -> RenderableType:
        """The screen; at most 40 lines."""
        from rich.console import Group

        before, self._before = self._before, seen
        status, pool = seen.status, seen.status["pool"]
        instance = status["instance"]
        past = before.status if before is not None else None
        seconds = instance["uptime_s"] - (past["instance"]["uptime_s"] if past is not None else 0.0)
        seconds = max(seconds, 0.001)
        return Group(
            line(f"{instance['instance_id']}  up {span(instance['uptime_s'])}", "bold"),
            *warnings(warnings_of(seen), MOST_WARNINGS),
            line(
                f"L1  {bar(pool['used_bytes'], pool['limit_bytes'])}  {size(pool['used_bytes'])} of "
                f"{size(pool['limit_bytes'])}"
            ),
            line(""),
            *_engines(status["engines"], past["engines"] if past is not None else [], seconds),
            line(""),
            *_tiers(seen, before, seconds),
            line(""),
            *_tenants(status),
        )


def _engines(now: list[dict[str, Any]], past: list[dict[str, Any]], seconds: float) -> list[RenderableType]:
    columns = [
        Column("engine"), Column("model"), Column("lookups/s", True), Column("chunks/s", True),
        Column("hits", True), Column("stored/s", True), Column("saved, s/s", True),
    ]  # fmt: skip
    before = {row["engine"]: row for row in past}
    rows = []
    for row in now:
        old = before.get(row["engine"], {})

        def gained(name: str, row: Mapping[str, Any] = row, old: Mapping[str, Any] = old) -> float:
            return max(0.0, float(row[name] - old.get(name, 0)))  # an engine that attaches again begins at 0

        rows.append((gained("lookup_chunks"), [
            row["engine"][:8], row["model"][-20:], f"{gained('lookups') / seconds:.1f}",
            f"{gained('lookup_chunks') / seconds:.1f}", share(gained("hit_chunks"), gained("lookup_chunks")),
            f"{gained('stored_records') / seconds:.1f}", f"{gained('avoided_s') / seconds:.2f}",
        ]))  # fmt: skip
    busiest = [row for _, row in sorted(rows, key=lambda row: -row[0])]
    return grid(columns, busiest, MOST_ENGINES, "--json") if rows else [line("no engine is attached")]


def _tiers(seen: Seen, before: Seen | None, seconds: float) -> list[RenderableType]:
    columns = [
        Column("tier"), Column("state"), Column("used", True), Column("stored MB/s", True),
        Column("puts wait", True), Column("loading", True), Column("loads wait", True), Column("breakers"),
    ]  # fmt: skip
    old = (
        {tier["name"]: tier["puts"].get("stored_bytes", 0) for tier in before.tiers}
        if before is not None
        else {}
    )
    rows = []
    for tier in seen.tiers:
        puts, loads = tier["puts"], tier["loads"]
        stored = puts.get("stored_bytes", 0) - old.get(tier["name"], 0)
        rows.append([
            tier["name"], tier["state"], size((tier["usage"] or {}).get("used_bytes", 0)),
            f"{stored / seconds / 1e6:.1f}", count(puts.get("queued", 0) + puts.get("retrying", 0)),
            size(loads.get("loading_bytes", 0)), count(loads.get("waiting", 0)),
            not_closed(tier["breakers"]) or "closed",
        ])  # fmt: skip
    return grid(columns, rows, MOST_TIERS, "kvstrata ctl l2 list") if rows else [line("no L2 tier")]


def _tenants(status: Mapping[str, Any]) -> list[RenderableType]:
    columns = [Column("tenant"), Column("L1", True), Column("quota", True), Column("L2", True)]
    in_l2: dict[str, int] = {}
    for row in status["l2_tenants"]:
        in_l2[row["tenant"]] = in_l2.get(row["tenant"], 0) + row["bytes"]
    rows = [
        [
            row["tenant"] or "(unnamed)", size(row["bytes"]),
            size(row["quota_bytes"]) if row["quota_bytes"] > 0 else "-",
            size(in_l2[row["tenant"]]) if row["tenant"] in in_l2 else "-",
        ]
        for row in sorted(status["tenants"], key=lambda row: -row["bytes"])
    ]  # fmt: skip
    return grid(columns, rows, MOST_TENANTS, "--json") if rows else [line("no tenant holds anything")]
