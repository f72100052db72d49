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

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvstrata/digest.h"
#include "pool/departures.h"
#include "pool/entries.h"
#include "pool/rows.h"

namespace kvstrata {

// The keys of a lookup and their entries. A lookup names a prompt by its chain; its storage keys
// are derived from the chain, one for each slice of a chunk. Those of slices with a span, of which
// a hit needs the last chunks only (pool/index.h), are derived and looked up only when needed.

// The keys of a prompt, derived from root, chain and slices, which must outlive the object.
class ChainKeys {
 public:
  // At most `max_keys` are derived.
  ChainKeys(const Digest& root, std::span<const Digest> chain, std::span<const Digest> slices,
            std::span<const std::uint32_t> spans, std::size_t max_keys);

  // Derives the keys of the slices without a span, and meanwhile prefetches their places in the
  // index. False if they are more than `max_keys`; then nothing is derived. Takes no lock.
  bool derive_whole(const IndexView& index, const EntryLocal* local);
  // The keys of the slices without a span, chunk-major, and guesses at their entries.
  std::span<const Digest> whole() const noexcept { return whole_keys_; }
  std::span<const std::uint32_t> guesses() const noexcept { return guesses_; }
  // The numbers of the slices without a span.
  std::span<const std::size_t> whole_slices() const noexcept { return whole_slices_; }

  // Writes the keys of the chunks [first, first + n) of one slice to `out`. False if they would be
  // more than `max_keys` together with those that were derived before.
  bool derive(std::size_t slice, std::size_t first, std::size_t n, Digest* out) noexcept;

  std::size_t n_chunks() const noexcept { return chain_.size(); }
  std::size_t n_slices() const noexcept { return bound_.size(); }

 private:
  std::span<const Digest> chain_;
  std::vector<Digest> bound_;  // by slice, see bind_slices()
  std::vector<std::size_t> whole_slices_;
  std::vector<Digest> whole_keys_;
  std::vector<std::uint32_t> guesses_;
  std::size_t keys_left_;
};

// The entries of a lookup's keys. REQUIRES, for everything here: the pool's mutex, and that nothing
// else uses Entries::found.
class Sought {
 public:
  // Of keys that are all given, chunk-major.
  Sought(Entries& entries, const std::uint8_t* keys, std::size_t n_keys, std::size_t n_slices);
  // Of keys of which derive_whole() has derived some.
  Sought(Entries& entries, ChainKeys& keys);

  // The entry of a chunk in a slice, kNoEntry if the index has none.
  std::uint32_t at(std::size_t chunk, std::size_t slice) {
    const std::uint32_t entry = found_[chunk * n_slices_ + slice];
    return entry != kNotSought ? entry : seek(chunk, slice);
  }
  std::size_t n_chunks() const noexcept { return n_chunks_; }
  std::size_t n_slices() const noexcept { return n_slices_; }
  // More keys would have to be derived than allowed; results of at() since then are invalid.
  bool exceeded() const noexcept { return exceeded_; }

 private:
  static constexpr std::uint32_t kNotSought = kNoEntry - 1;
  static constexpr std::size_t kPiece = 16;  // chunks of a slice that are looked up together

  std::uint32_t seek(std::size_t chunk, std::size_t slice);

  Entries& entries_;
  ChainKeys* const keys_ = nullptr;
  const std::size_t n_chunks_;
  const std::size_t n_slices_;
  std::vector<std::uint32_t>& found_;  // by chunk and slice
  bool exceeded_ = false;
};

inline constexpr std::size_t kMaxBatchKeys = std::size_t{1} << 20;
inline constexpr std::size_t kMaxLeaseTickets = 65'536;
inline constexpr std::size_t kMaxEntriesToEnd = 8'192;  // limit of entries read by to_end()

struct LeaseResult {
  std::uint64_t ticket = 0;
  std::uint64_t n_chunks = 0;
  std::uint64_t unverified = 0;
  // If leases would exceed half of the pool: the bytes of other leases that must end before the
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
    std::size_t unused = 0;  // the first entries, for which the lease does not count as a use
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
  // index.h), and the extents of the others are zero. An entry of another identity (any if
  // nullptr) counts as absent. REQUIRES: spans.size() is `sought.n_slices()`, and some row is set.
  // `again`, `unread`, `own_chunks`: see Pool::lease.
  void take(Sought& sought, std::span<const std::uint32_t> spans, const RowMask& holders,
            const std::uint8_t* identity, bool again, bool unread, std::size_t own_chunks,
            LeaseResult* result);
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
