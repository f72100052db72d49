// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The leases that lookups have granted to processes. A ticket names the leased entries and the rows
// that hold the lease; it ends when the last row has released its share or is gone. No clock ends
// it.
//
// Keeps: leased bytes are at most half of the pool. A leased entry records the rows that hold it
// before they learn where its bytes are.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "pool/departures.h"
#include "pool/entries.h"
#include "pool/family.h"
#include "pool/rows.h"
#include "pool/sought.h"

namespace kvstrata {

inline constexpr std::size_t kMaxBatchKeys = std::size_t{1} << 20;
inline constexpr std::size_t kMaxLeaseTickets = 65'536;
inline constexpr std::size_t kMaxEntriesToEnd = 8'192;  // that Leases::to_end looks at

struct LeaseResult {
  std::uint64_t ticket = 0;
  std::uint64_t n_chunks = 0;
  std::uint64_t unverified = 0;
  // If leases would exceed half of the pool: the bytes that other leases must give back before the
  // rest of the prefix can be leased.
  std::uint64_t short_bytes = 0;
  // More keys would have had to be derived than the caller allowed. Then nothing is leased.
  bool exceeded = false;
  std::vector<ExtentRecord> extents;
};

struct Leases {
  struct Lease {
    RowMask rows;
    std::vector<std::uint32_t> entries;
  };
  using Iterator = std::unordered_map<std::uint64_t, Lease>::iterator;

  // All must outlive the object. `next_ticket` is shared with reservations.
  Leases(Departures& departures, std::uint64_t extents_bytes, std::uint64_t& next_ticket) noexcept
      : entries(departures.entries),
        departures(departures),
        rows(departures.rows),
        limit_bytes(extents_bytes / 2),
        next_ticket(next_ticket) {}

  // Leases the leading chunks that are READY in all slices, as far as the bounds allow; of a slice
  // whose span is not 0, only the last `span` of these chunks must be READY and are leased (see
  // windows.h), and the extents of the others are zero. An entry of another identity (any if
  // nullptr) counts as absent. REQUIRES: spans.size() is `sought.n_slices()`, and some row is set.
  void take(Sought& sought, std::span<const std::uint32_t> spans, const RowMask& holders,
            const std::uint8_t* identity, LeaseResult* result);
  // Ends one row's share, or the lease with row < 0. False when the ticket has no such share.
  bool release(std::uint64_t ticket, std::int64_t row);
  void end_row(std::uint32_t row);
  // As Pool::leases_to_end.
  std::size_t to_end(std::span<const std::uint64_t> tickets, std::uint64_t need_bytes);

  // The longest hit of at most `n_chunks` chunks whose bytes fit into the bound; a hit of
  // `n_chunks` must be READY, see take(). Notes in the result the bytes that this one lacks, and
  // sets `trimmed` if the bound shortens the hit.
  std::size_t within_bound(Sought& sought, std::span<const std::uint32_t> spans,
                           const std::uint8_t* identity, std::size_t n_chunks, bool* trimmed,
                           LeaseResult* result);
  void end(Iterator lease);
  void touch(std::uint32_t entry) noexcept {
    entries.touch(entry);
    departures.tenants.touch(entry);
  }

  Entries& entries;
  Departures& departures;
  Rows& rows;
  const std::uint64_t limit_bytes;
  std::uint64_t& next_ticket;
  std::unordered_map<std::uint64_t, Lease> leases;  // by ticket
  std::size_t items = 0;                            // entries of all leases
  std::uint64_t leased_bytes = 0;
  LeaseCounts counts{};
};

}  // namespace kvstrata
