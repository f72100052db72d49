// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The figures that Pool::stats() reports. Each struct of counts has one owner, the part of the pool
// that it is named after; PoolStats puts them together with the current sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool/index.h"

namespace kvstrata {

// Numbers are those of kvstrata.rpc.wire.
enum class ReserveOutcome : std::uint8_t {
  kReserved = 0,
  kPresent = 1,
  kInFlight = 2,
  kChainExceedsPool = 3,
  kPoolPinned = 4,
  kSessionLimit = 5,
  kQuota = 6,
  kTooLarge = 7,
  kEntriesFull = 8,
  // 9 (frozen) is answered by the server, never by the pool.
  kParentAbsent = 10,
};
inline constexpr std::size_t kReserveOutcomes = 11;

// By EntryState; FREE is not counted.
struct EntryCounts {
  std::uint64_t entries[kEntryStateCount];
  std::uint64_t bytes[kEntryStateCount];
};

// Records of the unfinished last chunks of prompts. An extent may be longer than its record.
struct TailCounts {
  std::uint64_t tail_entries;
  std::uint64_t tail_record_bytes, tail_extent_bytes;
};

struct ReservationCounts {
  std::uint64_t refused[kReserveOutcomes];  // by ReserveOutcome
  std::uint64_t inserted_entries, inserted_bytes;
  std::uint64_t bad_records;
};

struct LeaseCounts {
  std::uint64_t leases_trimmed;
};

struct DepartureCounts {
  std::uint64_t evicted_entries, evicted_bytes;
  std::uint64_t evicted_by_policy, evicted_by_window, evicted_by_quota, evicted_by_watermark;
  std::uint64_t cleared_entries, corrupt_entries, quarantined_entries;
};

struct AdoptionCounts {
  std::uint64_t adopted_entries, adoption_dropped;
};

struct ClassStats {
  std::uint64_t extent_bytes;
  std::uint32_t used;
  std::uint32_t capacity;
};

struct TenantStats {
  std::uint32_t tenant;
  std::uint64_t bytes;
  std::int64_t quota_bytes;  // -1: none
};

struct PoolStats : EntryCounts,
                   TailCounts,
                   ReservationCounts,
                   LeaseCounts,
                   DepartureCounts,
                   AdoptionCounts {
  std::uint64_t extents_bytes, used_bytes, slab_bytes, unusable_bytes, largest_allocatable_bytes;
  std::uint64_t leased_bytes, pinned_bytes, blocked_bytes;
  std::uint64_t lease_tickets, reservations, holds;
  std::uint64_t events_lost, prefaulted_bytes;
  std::uint64_t entry_capacity, rows_claimed, rows_capacity;
  // Bytes of the extents file that have memory, and bytes of both files for which the file system
  // refused memory when it was last asked. Extents without memory are never handed out.
  std::uint64_t backed_bytes, missing_bytes;
  double fragmentation;
  const char* policy;
  std::vector<ClassStats> classes;
  std::vector<TenantStats> tenants;
};

}  // namespace kvstrata
