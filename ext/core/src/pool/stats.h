// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The numbers of a pool, as Pool::stats() reports them. Each struct of counts has one owner, the
// part of the pool that it is named after; PoolStats puts them together with the current sizes.
// kPoolNumbers names them for the status document and for /metrics: a number of the pool is a field
// and a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
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
  kWorthLess = 11,
};
inline constexpr std::size_t kReserveOutcomes = 12;

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
  std::uint64_t evicted_by[2];  // by Cause; see kEvictionCauses
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
  std::uint64_t extents_bytes, used_bytes, free_bytes, slab_bytes, unusable_bytes,
      largest_allocatable_bytes;
  std::uint64_t leased_bytes, pinned_bytes, blocked_bytes;
  std::uint64_t lease_tickets, reservations, holds;
  std::uint64_t prefaulted_bytes, prefault_error;
  std::uint64_t entry_capacity, rows_claimed, rows_capacity;
  // Bytes of the extents file that have memory, and bytes of both files for which the file system
  // refused memory when it was last asked. Extents without memory are never handed out.
  std::uint64_t backed_bytes, missing_bytes;
  double fragmentation;
  const char* policy;
  std::vector<ClassStats> classes;
  std::vector<TenantStats> tenants;
};

// The words of labels; a value whose word is null is not shown.
inline constexpr const char* kEntryStates[] = {nullptr, "reserved", "ready", "unverified",
                                               "quarantined"};
inline constexpr const char* kEvictionCauses[] = {"policy", "window"};
inline constexpr const char* kRefusals[kReserveOutcomes] = {
    nullptr,        nullptr,         nullptr,         "chain_exceeds_pool",
    "pool_pinned",  "session_limit", "quota",         "too_large",
    "entries_full", nullptr,         "parent_absent", "worth_less"};

struct PoolNumber {
  const char*
      field;  // in the section `pool` of the status document; "a.b" is `b` in the object `a`
  const char* metric;  // after `kvstrata_pool_`, where it differs from `field`; else empty
  const char* kind;    // counter or gauge
  const char* help;
  std::size_t offset;  // in PoolStats, of a uint64_t, of an array of them, or of `fragmentation`
  const char* label = "";  // of the values of an array, which `words` name
  std::span<const char* const> words = {};
};

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"  // PoolStats has bases
inline constexpr PoolNumber kPoolNumbers[] = {
    {"extents_bytes", "", "gauge", "Size of L1.", offsetof(PoolStats, extents_bytes)},
    {"used_bytes", "", "gauge", "Bytes of L1 occupied by extents in any state.",
     offsetof(PoolStats, used_bytes)},
    {"free_bytes", "", "gauge", "Bytes of L1 outside all extents.",
     offsetof(PoolStats, free_bytes)},
    {"slab_bytes", "", "gauge", "Size of one slab.", offsetof(PoolStats, slab_bytes)},
    {"unusable_bytes", "", "gauge", "Bytes left over in used slabs, too few for another extent.",
     offsetof(PoolStats, unusable_bytes)},
    {"largest_allocatable_bytes", "", "gauge",
     "Length of the longest record that fits without an eviction.",
     offsetof(PoolStats, largest_allocatable_bytes)},
    {"fragmentation", "fragmentation_ratio", "gauge",
     "0 when a single record could occupy all free bytes; approaches 1 as the longest record that "
     "fits gets shorter.",
     offsetof(PoolStats, fragmentation)},
    {"entry_capacity", "", "gauge", "Maximum number of entries in the index.",
     offsetof(PoolStats, entry_capacity)},
    {"entries", "", "gauge", "Entries in this state: reserved, ready, unverified or quarantined.",
     offsetof(PoolStats, entries), "state", kEntryStates},
    {"bytes", "entry_bytes", "gauge", "Bytes of the entries in this state.",
     offsetof(PoolStats, bytes), "state", kEntryStates},
    {"tails.entries", "tails", "gauge", "Tails in L1: unfinished last chunks of prompts.",
     offsetof(PoolStats, tail_entries)},
    {"tails.record_bytes", "tail_record_bytes", "gauge", "Bytes of the records of tails.",
     offsetof(PoolStats, tail_record_bytes)},
    {"tails.extent_bytes", "tail_extent_bytes", "gauge", "Bytes of the extents of tails.",
     offsetof(PoolStats, tail_extent_bytes)},
    {"reserved_bytes", "", "gauge",
     "Bytes that a process may be writing and that no lookup can see yet.",
     offsetof(PoolStats, bytes[1])},
    {"quarantined_bytes", "", "gauge",
     "Bytes withheld from use because a process that is gone or unknown may still write them.",
     offsetof(PoolStats, bytes[4])},
    {"leased_bytes", "", "gauge", "Bytes that leases protect from eviction.",
     offsetof(PoolStats, leased_bytes)},
    {"pinned_bytes", "", "gauge", "Bytes held by running operations: puts, loads, retrieves.",
     offsetof(PoolStats, pinned_bytes)},
    {"blocked_bytes", "", "gauge",
     "Bytes that cannot be evicted because they are leased, held or not ready.",
     offsetof(PoolStats, blocked_bytes)},
    {"leases", "", "gauge", "Active leases.", offsetof(PoolStats, lease_tickets)},
    {"reservations", "", "gauge", "Open reservations.", offsetof(PoolStats, reservations)},
    {"holds", "", "gauge", "References to extents held by running operations.",
     offsetof(PoolStats, holds)},
    {"rows_claimed", "", "gauge",
     "Rows of the session table in use: processes that are attached, or that have ended but whose "
     "copies may still run.",
     offsetof(PoolStats, rows_claimed)},
    {"rows_capacity", "", "gauge",
     "Rows of the session table: the maximum number of attached processes.",
     offsetof(PoolStats, rows_capacity)},
    {"inserted_entries", "", "counter",
     "Chunks that became visible, including those loaded from L2.",
     offsetof(PoolStats, inserted_entries)},
    {"inserted_bytes", "", "counter", "Bytes of the chunks that became visible.",
     offsetof(PoolStats, inserted_bytes)},
    {"evicted_entries", "", "counter", "Chunks evicted.", offsetof(PoolStats, evicted_entries)},
    {"evicted_bytes", "", "counter", "Bytes of the chunks evicted.",
     offsetof(PoolStats, evicted_bytes)},
    {"evictions", "", "counter", "Evictions by cause: policy or window (a whole slab).",
     offsetof(PoolStats, evicted_by), "cause", kEvictionCauses},
    {"cleared_entries", "", "counter", "Chunks dropped by a clear.",
     offsetof(PoolStats, cleared_entries)},
    {"corrupt_entries", "", "counter", "Chunks dropped because their checksum was wrong.",
     offsetof(PoolStats, corrupt_entries)},
    {"quarantined_entries", "", "counter", "Entries put into quarantine.",
     offsetof(PoolStats, quarantined_entries)},
    {"bad_records", "", "counter",
     "Commits that the pool refused because the record did not match its reservation.",
     offsetof(PoolStats, bad_records)},
    {"refused", "refused_entries", "counter", "Chunks that were refused an extent, by reason.",
     offsetof(PoolStats, refused), "reason", kRefusals},
    {"leases_trimmed", "trimmed_leases", "counter",
     "Lookups shortened because leases already covered half of L1.",
     offsetof(PoolStats, leases_trimmed)},
    {"adopted_entries", "", "counter", "Entries taken over from the previous server.",
     offsetof(PoolStats, adopted_entries)},
    {"adoption_dropped", "dropped_adoptions", "counter",
     "Entries of the previous server that could not be taken over.",
     offsetof(PoolStats, adoption_dropped)},
    {"backed_bytes", "", "gauge",
     "Bytes of L1 that have memory behind them; only these are handed out.",
     offsetof(PoolStats, backed_bytes)},
    {"missing_bytes", "", "gauge",
     "Bytes of L1 without memory because its file system (often /dev/shm) is full; should be 0.",
     offsetof(PoolStats, missing_bytes)},
    {"prefaulted_bytes", "", "gauge", "Bytes of L1 whose pages have been faulted in.",
     offsetof(PoolStats, prefaulted_bytes)},
    {"prefault_error", "", "gauge", "The errno that ended prefaulting early; 0 if none did.",
     offsetof(PoolStats, prefault_error)},
};
#pragma GCC diagnostic pop

inline std::vector<PoolNumber> pool_numbers() {
  return {std::begin(kPoolNumbers), std::end(kPoolNumbers)};
}

}  // namespace kvstrata
