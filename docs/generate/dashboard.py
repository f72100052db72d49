"""configs/grafana/kvstrata.json: Grafana's dashboard.

A panel names families of a server or of a gateway. Its query follows from their kind, its unit from their name, and
its description is their meaning.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from docs.generate.numbers import GATEWAY, SERVER, families_of

SOURCE = {"type": "prometheus", "uid": "prometheus"}
OF_GATEWAY = families_of(GATEWAY)
FAMILIES = families_of(SERVER) | OF_GATEWAY
SELECTED = '{instance=~"$instance"}'
EVERY = "[$__rate_interval]"
WIDTH = 24


class Panel(NamedTuple):
    """One panel."""

    title: str
    families: dict[str, str]
    """Name of a family without `kvstrata_` → legend; an empty legend is made of the labels in `by`.

    A legend names labels as `{{label}}`.
    """
    by: tuple[str, ...] = ()
    """Labels of which each value has a line of its own."""
    unit: str = ""
    """Grafana's unit, where the family's name does not say it."""
    kind: str = "timeseries"
    quantiles: tuple[float, ...] = (0.99,)
    """Of a histogram."""
    query: str = ""
    """The whole query, where the panel shows a share of its families."""


class Row(NamedTuple):
    """A headline and the panels below it, each `width` wide."""

    title: str
    width: int
    panels: tuple[Panel, ...]


def _rate(name: str) -> str:
    return f"sum(rate(kvstrata_{name}_total{SELECTED}{EVERY}))"


HIT, LOADED, ASKED = (_rate(f"{name}_chunks") for name in ("l1_hit", "l2_hit", "lookup"))
ROWS = (
    Row("Hits", 6, (
        Panel(
            "Chunks served from a cache",
            {"l1_hit_chunks": "", "l2_hit_chunks": "", "lookup_chunks": ""},
            unit="percentunit", kind="stat", query=f"({HIT} + {LOADED}) / {ASKED}",
        ),
        Panel("Lookups, 99th percentile", {"lookup_seconds": ""}, kind="stat"),
        Panel("Breakers open", {"l2_breaker_open": ""}, kind="stat"),
        Panel("Engines attached", {"sessions_groups": ""}, kind="stat"),
    )),
    Row("", 12, (
        Panel("Chunks by source", {
            "l1_hit_chunks": "L1", "l2_hit_chunks": "L2", "lookup_chunks": "looked up",
        }),
        Panel("First misses", {"first_misses": ""}, ("reason",)),
    )),
    Row("Requests", 8, (
        Panel("Requests", {"requests": ""}, ("op",), unit="reqps"),
        Panel("Request duration", {"request_seconds": ""}, ("op",)),
        Panel("Error replies", {"errors": ""}, ("code",)),
        Panel("Lookup duration", {"lookup_seconds": ""}, quantiles=(0.5, 0.95, 0.99)),
        Panel("Store duration", {"store_seconds": ""}, quantiles=(0.5, 0.95, 0.99)),
        Panel("Time lookups wait for L2", {"l2_prefetch_seconds": ""}, quantiles=(0.5, 0.95, 0.99)),
        Panel("Phases of loads for lookups", {"l2_prefetch_phase_seconds": ""}, ("phase",)),
    )),
    Row("L1", 8, (
        Panel("Bytes", {
            "pool_extents_bytes": "size", "pool_used_bytes": "used", "pool_leased_bytes": "leased",
            "pool_blocked_bytes": "not evictable", "pool_quarantined_bytes": "quarantined",
            "pool_missing_bytes": "without memory",
        }),
        Panel("Chunks in and out", {
            "pool_inserted_entries": "inserted", "pool_evicted_entries": "evicted",
            "pool_corrupt_entries": "dropped: wrong checksum",
        }),
        Panel("Reserves", {"reserve_outcomes": ""}, ("outcome",)),
        Panel("Evictions", {"pool_evictions": ""}, ("cause",)),
        Panel("Refused", {"pool_refused_entries": ""}, ("reason",)),
        Panel(
            "Prefill seconds that L1s of other sizes would save", {"pool_forecast_seconds": "{{size}} ×"}, ("size",),
            unit="percentunit", quantiles=(), query=f"avg by (size) (kvstrata_pool_forecast_seconds{SELECTED})",
        ),
        Panel(
            "Prefill seconds that other shares of L1 would save a tenant",
            {"pool_tenant_forecast": "{{tenant}}, {{size}} ×"}, ("tenant", "size"), unit="percentunit", quantiles=(),
            query='avg by (tenant, size) (kvstrata_pool_tenant_forecast{of="seconds", ' + SELECTED[1:] + ")",
        ),
        Panel("Revoked leases not released yet", {"sessions_leases_revoked": ""}),
    )),
    Row("L2", 8, (
        Panel("Bytes moved", {"l2_bytes": ""}, ("adapter", "operation")),
        Panel("Batch duration", {"l2_seconds": ""}, ("adapter", "operation")),
        Panel("Chunks", {"l2_items": ""}, ("adapter", "operation", "outcome")),
        Panel("Bytes waiting for puts", {"l2_store_backlog_bytes": "waiting", "l2_store_backlog_limit_bytes": "limit"}),
        Panel("Puts skipped", {"put_skipped": ""}, ("reason",)),
        Panel("Breakers", {"l2_breaker_open": ""}, ("adapter", "operation")),
        Panel("Bytes of hanging operations", {"l2_stuck_bytes": ""}, ("adapter",)),
        Panel("Restarts of adapter hosts", {"l2_host_restarts": ""}, ("adapter",)),
        Panel("Events reported by adapters", {"l2_adapter_events": ""}, ("adapter", "event")),
    )),
    Row("State of each tier", 8, (
        Panel("Directory exists and is writable", {"l2_medium_well": ""}, ("instance", "adapter")),
        Panel("Serves loads; read-only", {
            "l2_takes_loads": "serves loads: {{instance}} {{adapter}}",
            "l2_read_only": "read-only: {{instance}} {{adapter}}",
        }, ("instance", "adapter")),
        Panel("Puts in flight", {
            "l2_store_queued_puts": "queued: {{adapter}}", "l2_store_retrying_puts": "retrying: {{adapter}}",
            "l2_store_in_flight_puts": "in progress: {{adapter}}",
        }, ("adapter",)),
        Panel("Puts by outcome", {"l2_store_outcomes": ""}, ("adapter", "outcome")),
        Panel("Bytes stored", {"l2_store_stored_bytes": ""}, ("adapter",)),
        Panel("Waiting fetches, requests to adapter hosts", {
            "l2_prefetch_waiting_fetches": "waiting: {{adapter}}", "l2_host_requests": "in the host: {{adapter}}",
        }, ("adapter",)),
        Panel("Memory of loads and codecs", {
            "l2_prefetch_loading_bytes": "loading: {{adapter}}",
            "l2_codec_staging_used_bytes": "codec staging: {{adapter}}",
        }, ("adapter",)),
        Panel("Segment files", {"l2_segments_bytes": ""}, ("adapter",)),
        Panel("Bytes before and after codecs", {
            "l2_codec_input_bytes": "before: {{adapter}}", "l2_codec_output_bytes": "after: {{adapter}}",
        }, ("adapter",)),
        Panel("Records by codec outcome", {"l2_codec_records": ""}, ("adapter", "outcome")),
        Panel("Bytes reported by adapters", {"l2_adapter_bytes": ""}, ("adapter", "event")),
        Panel("Peers", {
            "l2_peer_owners": "remembered: {{adapter}}", "l2_peer_owners_skipped": "skipped: {{adapter}}",
        }, ("adapter",)),
    )),
    Row("Cluster and process", 8, (
        Panel("Accepted by a controller", {"cluster_member": ""}, ("instance",)),
        Panel("Followers", {"control_polls": "answered", "control_too_old": "had fallen behind"}),
        Panel("Restarts and lost log lines", {"process_restarts": "restarts", "log_dropped_lines": "log lines"}),
    )),
    Row("Gateways", 8, (
        Panel("Requests by outcome", {"gateway_requests": ""}, ("outcome",), unit="reqps"),
        Panel("Time to the first token", {"gateway_ttft_seconds": ""}, quantiles=(0.5, 0.95, 0.99)),
        Panel("Requests by class of service", {
            "gateway_slo_requests": "received: {{slo}}", "gateway_slo_met": "in time: {{slo}}",
        }, ("slo",)),
        Panel("Tokens", {"gateway_tokens": ""}, ("kind",)),
        Panel("Requests in flight at each engine", {"gateway_engine_in_flight": ""}, ("engine",)),
        Panel("Engines up", {"gateway_engine_up": ""}, ("engine",)),
    )),
)  # fmt: skip


def _unit(panel: Panel) -> str:
    """Grafana's unit of a panel, from the names and kinds of its families, which all have the same one."""
    if panel.unit:
        return panel.unit
    units = set()
    for short in panel.families:
        name, rate = f"kvstrata_{short}", FAMILIES[f"kvstrata_{short}"].kind == "counter"
        if name.endswith("_seconds"):
            units.add("s")
        elif name.endswith("_bytes"):
            units.add("Bps" if rate else "bytes")
        else:
            units.add("cps" if rate else "short")
    (unit,) = units
    return unit


def _queries(panel: Panel, short: str, legend: str) -> list[tuple[str, str]]:
    """(Query, legend) of one family."""
    name = f"kvstrata_{short}"
    family, selected = FAMILIES[name], "" if name in OF_GATEWAY else SELECTED
    unknown = set(panel.by) - {*family.labels, "instance"}
    assert not unknown, f"{panel.title}: {name} has no labels {unknown}"
    by = f" by ({', '.join(panel.by)}) " if panel.by else ""
    legend = legend or " ".join(f"{{{{{label}}}}}" for label in panel.by)
    if family.kind == "counter":
        return [(f"sum{by}(rate({name}_total{selected}{EVERY}))", legend)]
    if family.kind == "gauge":
        return [(f"sum{by}({name}{selected})", legend)]
    labels = ", ".join(("le", *panel.by))
    times = f"sum by ({labels}) (rate({name}_bucket{selected}{EVERY}))"
    many = len(panel.quantiles) > 1
    return [(f"histogram_quantile({q}, {times})", f"{q:.0%}" if many else legend) for q in panel.quantiles]


def _panel(panel: Panel, place: dict[str, int], number: int) -> dict[str, Any]:
    queries = [query for short, legend in panel.families.items() for query in _queries(panel, short, legend)]
    if panel.query:
        queries = [(panel.query, queries[0][1] if panel.by else "")]
    described = dict.fromkeys(FAMILIES[f"kvstrata_{short}"].meaning for short in panel.families)
    if any(short.endswith("_seconds") for short in panel.families) and len(panel.quantiles) == 1:
        described["The 99th percentile is shown."] = None
    stat = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"}
    return {
        "type": panel.kind,
        "id": number,
        "title": panel.title,
        "description": " ".join(described),
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": _unit(panel), "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(queries)
        ],
        "options": stat if panel.kind == "stat" else {"tooltip": {"mode": "multi"}},
    }


def dashboard() -> str:
    """The dashboard as JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        if row.title:
            place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
            panels.append(
                {"type": "row", "id": len(panels) + 1, "title": row.title, "gridPos": place, "panels": []}
            )
            y += 1
        for index, panel in enumerate(row.panels):
            x = index * row.width % WIDTH
            at = {"h": 8, "w": row.width, "x": x, "y": y}
            panels.append(_panel(panel, at, len(panels) + 1))
            if x + row.width == WIDTH:
                y += 8
    instances = "label_values(kvstrata_instance, instance)"
    variable = {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": instances, "refId": "A"},
        "definition": instances,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    document = {
        "uid": "kvstrata",
        "title": "kvstrata",
        "tags": ["kvstrata"],
        "schemaVersion": 39,
        "editable": True,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable]},
        "annotations": {"list": []},
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"
