"""The list of the server's metric families: /metrics, docs/metrics.md and the dashboard are made from it.

A family counts as events happen (`COUNTED`), or shows a number of the status document (`STATUS_NUMBERS`).  Totals are
counters, durations are histograms of seconds, sizes are in bytes, and shares are between 0 and 1.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvstrata.observability.numbers import STATUS_NUMBERS, Number


class Family(NamedTuple):
    """One metric family. `labels` are in the order of the values that a sample gives."""

    kind: str
    """counter, gauge or histogram; a counter's samples end in `_total`."""
    labels: tuple[str, ...]
    meaning: str


COUNTED: dict[str, Family] = {
    "kvstrata_instance": Family("gauge", ("instance_id",), "This instance; always 1."),
    "kvstrata_requests": Family("counter", ("op",), "Requests by operation."),
    "kvstrata_request_seconds": Family(
        "histogram", ("op",), "Time from a request's arrival to its reply, by operation; pings included."
    ),
    "kvstrata_errors": Family("counter", ("code",), "Error replies by code."),
    "kvstrata_first_misses": Family("counter", ("reason",), "Lookups by the reason of their first miss."),
    "kvstrata_reserve_outcomes": Family(
        "counter", ("outcome",), "Chunks that reserves asked for, by outcome."
    ),
    "kvstrata_put_skipped": Family("counter", ("reason",), "Chunks not put to L2, by reason."),
    "kvstrata_peeked_misses": Family(
        "counter",
        (),
        "Lookups that engines answered themselves as misses, from the shared index. All numbers of lookups, chunks and "
        "misses contain them; `kvstrata_lookup_seconds` does not.",
    ),
    "kvstrata_lookup_chunks": Family("counter", (), "Chunks that lookups asked for."),
    "kvstrata_l1_hit_chunks": Family("counter", (), "Chunks served from L1."),
    "kvstrata_l2_hit_chunks": Family("counter", (), "Chunks served after a load from L2."),
    "kvstrata_revoked_leases": Family(
        "counter", (), "Leases revoked before a copy began, because other requests needed the space."
    ),
    "kvstrata_committed_chunks": Family("counter", (), "Chunks that became visible."),
    "kvstrata_bad_records": Family(
        "counter", (), "Commits refused because the record did not match its reservation."
    ),
    "kvstrata_tenant_lookup_chunks": Family(
        "counter",
        ("tenant",),
        "Chunks that lookups of a tenant asked for. Only tenants that the settings or the tenants file named at the "
        "start are counted.",
    ),
    "kvstrata_tenant_hit_chunks": Family(
        "counter", ("tenant", "tier"), "Chunks served to such a tenant, from L1 or after a load from L2."
    ),
    "kvstrata_retrieved_bytes": Family("counter", (), "Bytes sent by retrieve."),
    "kvstrata_lookup_seconds": Family("histogram", (), "Time from a lookup's arrival to its reply."),
    "kvstrata_store_seconds": Family(
        "histogram",
        (),
        "Time from a reservation to the commit that ended it: the engine's copy of its chunks.",
    ),
    "kvstrata_l2_prefetch_seconds": Family(
        "histogram", (), "Time that a lookup or prewarm took to load chunks from L2."
    ),
    "kvstrata_l2_seconds": Family(
        "histogram", ("adapter", "operation"), "Duration of one batch on an adapter."
    ),
    "kvstrata_l2_bytes": Family("counter", ("adapter", "operation"), "Record bytes moved by an adapter."),
    "kvstrata_l2_items": Family(
        "counter", ("adapter", "operation", "outcome"), "Chunks by outcome of an adapter's operation."
    ),
    "kvstrata_l2_breaker_open": Family(
        "gauge",
        ("adapter", "operation"),
        "1 while an adapter's breaker is open (it is not asked) or probing (one request is let through); else 0.",
    ),
    "kvstrata_cluster_heartbeat_seconds": Family(
        "histogram", (), "Time from a heartbeat to the controller's answer."
    ),
    "kvstrata_cluster_sync_seconds": Family(
        "histogram", (), "Duration of a full sync with the controller, also of one that failed."
    ),
}
"""Families that are counted as events happen, by name."""


def _family_of(path: str, number: Number) -> tuple[str, Family]:
    labels = (*(("adapter",) if "ADAPTER" in path else ()), *((number.label,) if number.label else ()))
    name = f"kvstrata_{number.name}"
    if name.endswith("_total"):
        return name.removesuffix("_total"), Family("counter", labels, number.meaning)
    return name, Family("gauge", labels, number.meaning)


PATHS: dict[str, str] = {path: _family_of(path, number)[0] for path, number in STATUS_NUMBERS.items()}
"""Path in the status document → name of the family that shows its numbers."""
FAMILIES: dict[str, Family] = COUNTED | dict(_family_of(*row) for row in STATUS_NUMBERS.items())
"""All families of the server, by name."""

_PATTERNS = [
    (
        re.compile(
            re.escape(path).replace("ADAPTER", r"(?P<adapter>[^\0]+)").replace("WORD", r"(?P<word>[^\0]+)")
        ),
        name,
    )
    for path, name in ((path.replace(".", "\0"), name) for path, name in PATHS.items())
]


def place_of(path: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """The family that shows the number at this path of the status document, and the values of its labels.

    None if no family does.
    """
    joined = "\0".join(path)
    for pattern, name in _PATTERNS:
        if found := pattern.fullmatch(joined):
            return name, list(found.groups())
    return None
