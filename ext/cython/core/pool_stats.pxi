# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# PoolStats as the dict that `Pool.stats` returns.

cdef inline dict stats_dict(PoolStats& s, int prefault_error):
    cdef size_t i
    return {
        "policy": s.policy.decode(),
        "extents_bytes": s.extents_bytes,
        "used_bytes": s.used_bytes,
        "free_bytes": s.extents_bytes - s.used_bytes,
        "slab_bytes": s.slab_bytes,
        "unusable_bytes": s.unusable_bytes,
        "largest_allocatable_bytes": s.largest_allocatable_bytes,
        "fragmentation": s.fragmentation,
        "entry_capacity": s.entry_capacity,
        "entries": {STATES[i]: s.entries[i] for i in range(1, 5)},
        "bytes": {STATES[i]: s.bytes[i] for i in range(1, 5)},
        "tails": {
            "entries": s.tail_entries,
            "record_bytes": s.tail_record_bytes,
            "extent_bytes": s.tail_extent_bytes,
        },
        "reserved_bytes": s.bytes[1],
        "quarantined_bytes": s.bytes[4],
        "leased_bytes": s.leased_bytes,
        "pinned_bytes": s.pinned_bytes,
        "blocked_bytes": s.blocked_bytes,
        "leases": s.lease_tickets,
        "reservations": s.reservations,
        "holds": s.holds,
        "rows_claimed": s.rows_claimed,
        "rows_capacity": s.rows_capacity,
        "inserted_entries": s.inserted_entries,
        "inserted_bytes": s.inserted_bytes,
        "evicted_entries": s.evicted_entries,
        "evicted_bytes": s.evicted_bytes,
        "evictions": {
            "policy": s.evicted_by_policy,
            "window": s.evicted_by_window,
            "quota": s.evicted_by_quota,
            "watermark": s.evicted_by_watermark,
        },
        "cleared_entries": s.cleared_entries,
        "corrupt_entries": s.corrupt_entries,
        "quarantined_entries": s.quarantined_entries,
        "bad_records": s.bad_records,
        "refused": {OUTCOMES[i]: s.refused[i] for i in (*range(3, 9), 10)},
        "leases_trimmed": s.leases_trimmed,
        "adopted_entries": s.adopted_entries,
        "adoption_dropped": s.adoption_dropped,
        "events_lost": s.events_lost,
        "backed_bytes": s.backed_bytes,
        "missing_bytes": s.missing_bytes,
        "prefaulted_bytes": s.prefaulted_bytes,
        "prefault_error": prefault_error,
        "classes": [
            {
                "extent_bytes": s.classes[i].extent_bytes,
                "used": s.classes[i].used,
                "capacity": s.classes[i].capacity,
            }
            for i in range(s.classes.size())
        ],
        "tenants": {
            s.tenants[i].tenant: {"bytes": s.tenants[i].bytes, "quota_bytes": s.tenants[i].quota_bytes}
            for i in range(s.tenants.size())
        },
    }
