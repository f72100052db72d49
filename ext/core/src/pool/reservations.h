// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Running stores: a ticket names the entries that one row may write, until each of them is
// committed or aborted, or the row is gone.
//
// Keeps: a RESERVED entry is in exactly one reservation, whose row is its owner. A reservation with
// no item left does not exist. A row has at most its share of the pool reserved or quarantined, but
// may always have one extent.
//
// A lookup counts leading chunks, so a chunk is useless while the one before it is missing. A
// chunk that is reserved after a missing parent therefore evicts nothing:
// - if the parent was refused to a process, no tier has it, and the chunk is refused
//   (kParentAbsent). Chunks that the server itself loads are in L2 and exempt from this;
// - without an L2, the chunk gets free space or is refused likewise;
// - otherwise L2 may have the parent, and the chunk is treated like any other.
//
// A new chunk that is worth less than every chunk that could be evicted for it is refused
// (kWorthLess), unless L2 takes it, or the server itself loads it for a request. The request's most
// valuable chunk decides for all.
//
// A key whose entry is of another identity is refused like one that finds no place in the index:
// the keys of two identities are equal only if a client has chosen them so.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "pool/departures.h"
#include "pool/entries.h"
#include "pool/room.h"
#include "pool/rows.h"

namespace kvstrata {

inline constexpr std::size_t kMaxReservations = 65'536;
inline constexpr std::size_t kRefusedKeys = 65'536;

enum class CommitOutcome : std::uint8_t { kCommitted = 0, kNotReserved = 1, kBadRecord = 2 };

struct ReserveRequest {
  const std::uint8_t* keys = nullptr;
  std::size_t n_keys = 0;
  const std::uint8_t* parent = nullptr;  // 32 bytes or none
  std::uint64_t record_bytes = 0;
  bool tail = false;               // the record is a tail
  std::uint64_t extent_bytes = 0;  // minimum length of the extent; 0: that of the record
  std::uint32_t row = 0;
  const std::uint8_t* identity = nullptr;  // 32 bytes
  std::uint32_t tenant = 0;
};

struct ReserveResult {
  std::uint64_t ticket = 0;
  std::vector<std::uint8_t> outcomes;
  std::vector<ExtentRecord> extents;
};

// The keys that were added last: at least kRefusedKeys / 2, at most kRefusedKeys.
class RefusedKeys {
 public:
  void add(const Key& key) {
    if (recent_.size() >= kRefusedKeys / 2) {
      older_.swap(recent_);
      recent_.clear();
    }
    recent_.insert(key.word[0]);
  }
  void erase(const Key& key) {
    recent_.erase(key.word[0]);
    older_.erase(key.word[0]);
  }
  bool contains(const Key& key) const {
    return recent_.contains(key.word[0]) || older_.contains(key.word[0]);
  }

 private:
  std::unordered_set<std::uint64_t> recent_, older_;  // first words
};

struct Reservations {
  struct Reservation {
    std::uint32_t row = 0;
    std::uint32_t left = 0;
    Key identity{};
    // The entry of each requested key, kNoEntry where none is reserved (any more).
    std::vector<std::uint32_t> items;
  };

  // All must outlive the object. `next_ticket` is shared with leases.
  Reservations(Room& room, std::uint64_t extents_bytes, std::uint32_t max_session_share,
               std::uint64_t& next_ticket) noexcept
      : entries(room.entries),
        departures(room.departures),
        family(room.departures.family),
        rows(room.departures.rows),
        room(room),
        extents_bytes(extents_bytes),
        row_limit(extents_bytes / max_session_share),
        next_ticket(next_ticket) {}

  // REQUIRES: the row is claimed, record_bytes > 0.
  void reserve(const ReserveRequest& request, ReserveResult* result);
  // A commit in two steps, between which the caller may drop the mutex to look at the records.
  //
  // Pins the items: the entry of each index, kNoEntry where none is reserved. False when the ticket
  // names no reservation; then nothing is pinned.
  bool begin_commit(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                    std::vector<std::uint32_t>* pinned, Key* identity);
  // Unpins them, and commits those whose record has an acceptable length, which becomes the
  // entry's; the extents of the others are freed. `lengths` empty: the records were not read. An
  // item that another thread ended meanwhile is kNotReserved.
  void end_commit(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                  const std::vector<std::uint32_t>& pinned,
                  const std::vector<std::uint32_t>& lengths, std::uint8_t* outcomes);
  // Whether an entry's record may have this length: the reserved one, or, for records that the
  // server itself loads, a shorter one that needs the same extent; a tail has a chunk's extent.
  bool may_have_length(std::uint32_t entry, std::uint32_t row, std::uint32_t length) const;
  // As Pool::abort.
  std::uint64_t abort(std::uint64_t ticket, std::span<const std::uint32_t> indices, bool all);
  void end_row(std::uint32_t row);
  // The entry of an item, kNoEntry when it is not reserved.
  std::uint32_t item(std::uint64_t ticket, std::uint64_t index) const;

  // Reserves one key that is not in the pool. Returns kReserved, or the refusal; kChainExceedsPool
  // means here only that no extent is available, and why_no_room() then finds the cause.
  ReserveOutcome reserve_one(const ReserveRequest& request, const Key& key, std::uint64_t bytes,
                             std::uint32_t parent, bool may_evict, float worth, std::uint32_t* cls,
                             std::uint32_t* out);
  // Chunks before a child of this entry.
  std::size_t depth_below(std::uint32_t parent) const noexcept;
  // The highest worth of the request's new chunks, from this key on at this depth.
  float best_worth(const ReserveRequest& request, std::size_t first,
                   std::size_t depth) const noexcept;
  // kChainExceedsPool if the request's own chain takes most of what cannot be evicted, else
  // kPoolPinned.
  ReserveOutcome why_no_room(const ReserveRequest& request, const std::vector<std::uint32_t>& own,
                             const Reservation& reservation);
  void commit_one(std::uint32_t entry);

  Entries& entries;
  Departures& departures;
  Family& family;
  Rows& rows;
  Room& room;
  const std::uint64_t extents_bytes;
  const std::uint64_t row_limit;  // bytes
  std::uint64_t& next_ticket;
  std::unordered_map<std::uint64_t, Reservation> reservations;  // by ticket
  RefusedKeys refused;  // keys that were refused to processes and not stored since
  ReservationCounts counts{};
};

}  // namespace kvstrata
