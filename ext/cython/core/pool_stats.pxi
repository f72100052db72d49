# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# The numbers of a pool, by the table in pool/stats.h.

cdef vector[PoolNumber] numbers_of_pool = pool_numbers()
# Of each number: key of `Pool.stats`, name of the metric if it differs, kind, label, meaning.
POOL_NUMBERS: tuple[tuple[str, str, str, str, str], ...] = tuple(
    (numbers_of_pool[i].field.decode(), numbers_of_pool[i].metric.decode(), numbers_of_pool[i].kind.decode(),
     numbers_of_pool[i].label.decode(), numbers_of_pool[i].help.decode())
    for i in range(numbers_of_pool.size())
)
# Of each number, the places of its values with their words; empty: it is one value.
cdef list words_of_pool = [
    [(place, numbers_of_pool[i].words[place].decode()) for place in range(numbers_of_pool[i].words.size())
     if numbers_of_pool[i].words[place] != NULL]
    for i in range(numbers_of_pool.size())
]


cdef dict stats_dict(PoolStats& stats):
    """PoolStats as the dict that `Pool.stats` returns."""
    cdef size_t i, place
    cdef const uint64_t* at
    cdef dict found = {}
    for i in range(numbers_of_pool.size()):
        at = <const uint64_t*>(<const char*>&stats + numbers_of_pool[i].offset)
        if words_of_pool[i]:
            value = {}
            for place, word in words_of_pool[i]:
                value[word] = at[place]
        else:
            value = at[0]
        found[POOL_NUMBERS[i][0]] = value
    found["fragmentation"] = stats.fragmentation
    found["policy"] = stats.policy.decode()
    found["classes"] = [
        {
            "extent_bytes": stats.classes[i].extent_bytes,
            "used": stats.classes[i].used,
            "capacity": stats.classes[i].capacity,
        }
        for i in range(stats.classes.size())
    ]
    found["tenants"] = {
        stats.tenants[i].tenant: {"bytes": stats.tenants[i].bytes, "quota_bytes": stats.tenants[i].quota_bytes}
        for i in range(stats.tenants.size())
    }
    return found
