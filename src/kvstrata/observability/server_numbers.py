"""The numbers of a server's requests and cluster, which several of its parts count."""

from __future__ import annotations

from kvstrata.observability.numbers import (
    LONG_BUCKETS,
    SHORT_BUCKETS,
    Numbers,
    counter,
    histogram,
    parts_by,
)


class TenantNumbers(Numbers):
    """What lookups of one tenant asked for, and where it was found."""

    asked = counter(
        "Chunks that lookups of a tenant asked for. Only tenants that the settings or the tenants file named at the "
        "start are counted.",
        name="tenant_lookup_chunks",
    )
    found = counter(
        "Chunks served to such a tenant, from L1 or after a load from L2.", "tier", name="tenant_hit_chunks"
    )

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant


class ServerNumbers(Numbers, prefix=""):
    """See the module. Belongs to the event loop."""

    requests = counter("Requests by operation.", "op")
    request_seconds = histogram(
        "Time from a request's arrival to its reply, by operation; pings included.",
        "op",
        bounds=SHORT_BUCKETS,
    )
    errors = counter("Error replies by code.", "code")
    first_miss_reasons = counter("Lookups by the reason of their first miss.", "reason", name="first_misses")
    reserve_outcomes = counter("Chunks that reserves asked for, by outcome.", "outcome")
    put_skipped = counter("Chunks not put to L2, by reason.", "reason")
    peeked_misses = counter(
        "Lookups that engines answered themselves as misses, from the shared index. All numbers of lookups, chunks and "
        "misses contain them; `kvstrata_lookup_seconds` does not."
    )
    lookup_chunks = counter("Chunks that lookups asked for.")
    l1_hit_chunks = counter("Chunks served from L1.")
    l2_hit_chunks = counter("Chunks served after a load from L2.")
    revoked_leases = counter("Leases revoked before a copy began, because other requests needed the space.")
    committed_chunks = counter("Chunks that became visible.")
    bad_records = counter("Commits refused because the record did not match its reservation.")
    of_tenants = parts_by(
        "tenant",
        TenantNumbers,
        lambda server: {one.tenant: one for one in server.tenants.values()},
        key="",
    )
    retrieved_bytes = counter("Bytes sent by retrieve.")
    lookup = histogram("Time from a lookup's arrival to its reply.", name="lookup_seconds")
    store = histogram(
        "Time from a reservation to the commit that ended it: the engine's copy of its chunks.",
        name="store_seconds",
    )
    prefetch = histogram(
        "Time that a lookup or prewarm took to load chunks from L2.", name="l2_prefetch_seconds"
    )
    heartbeat = histogram(
        "Time from a heartbeat to the controller's answer.", name="cluster_heartbeat_seconds"
    )
    sync = histogram(
        "Duration of a full sync with the controller, also of one that failed.",
        name="cluster_sync_seconds",
        bounds=LONG_BUCKETS,
    )

    def __init__(self) -> None:
        self.tenants: dict[int, TenantNumbers] = {}
        """By the tenant's number; only those that the settings or the tenants file named at the start."""
