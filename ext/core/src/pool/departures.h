// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Removes entries from the index: every eviction, clear, removal, failed checksum and aborted
// reservation ends in leave(), which updates the policy, the buckets, the family, the tenant and
// the changes. The extent is free at once; or, while a process may still touch its bytes, the entry
// is quarantined until settle() finds that none can any more.
//
// Keeps: an entry is QUARANTINED exactly while it is in `quarantine`, and only as long as it is
// pinned, leased, or touchable by a row of an earlier epoch.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <cstdint>
#include <unordered_set>

#include "pool/changes.h"
#include "pool/entries.h"
#include "pool/rows.h"

namespace kvstrata {

enum class Cause : std::uint8_t { kPolicy, kWindow, kCleared, kRemoved, kCorrupt, kAborted };

struct ClearResult {
  std::uint64_t dropped = 0;
  // READY, but leased by the server itself: pinned, or read by another instance.
  std::uint64_t kept = 0;
};

// Entries that clears removed from the index and that are still in use: leased, or else held.
struct ClearedInUse {
  std::uint64_t held = 0;
  std::uint64_t leased = 0;  // also by processes that were attached to an earlier server
};

struct Departures {
  // All must outlive the object.
  Departures(Entries& entries, Family& family, Tenants& tenants, Rows& rows,
             Changes& changes) noexcept
      : entries(entries), family(family), tenants(tenants), rows(rows), changes(changes) {}

  // Removes the entry from the index. REQUIRES: the entry is RESERVED and the cause is kAborted, or
  // it is READY or UNVERIFIED and the cause is another; an evicted entry must not be blocked.
  void leave(std::uint32_t entry, Cause cause);
  // Frees the entry if it is quarantined and no process can touch its bytes any more.
  void settle(std::uint32_t entry);
  bool is_touchable(std::uint32_t entry) const noexcept {
    const EntryLocal& local = entries.local[entry];
    return local.pins != 0 || local.leases != 0 || rows.is_old(entry);
  }

  // Drops linked entries that are not in use; returns their number.
  std::uint64_t remove(const std::uint8_t* keys, std::size_t n_keys, Cause cause);
  // Does the work of Pool::clear for the entries [begin, end).
  void clear(std::uint64_t begin, std::uint64_t end, std::int64_t tenant, ClearResult* result);
  // As Pool::cleared_in_use.
  ClearedInUse cleared_in_use(std::int64_t tenant) const;
  // Quarantined entries no longer count against the row that reserved them.
  void forgive(std::uint32_t row) noexcept;

  Entries& entries;
  Family& family;
  Tenants& tenants;
  Rows& rows;
  Changes& changes;
  std::unordered_set<std::uint32_t> quarantine;
  DepartureCounts counts{};
};

}  // namespace kvstrata
