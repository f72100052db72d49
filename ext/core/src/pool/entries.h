// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The entries of a pool: their states, the blockers that keep each one from being evicted, and the
// counts of bytes that follow from these.
//
// Keeps: an extent belongs to exactly one entry that is not FREE. An entry is "blocked", which
// forbids its eviction, while it is pinned, leased, or held back (reserved, quarantined, or
// touchable by a row of an earlier epoch). The run of its extent counts blocked entries, and the
// policy hears when an entry stops being blocked.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <cassert>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool/index.h"
#include "pool/policy.h"
#include "pool/segment.h"
#include "pool/slab.h"
#include "pool/states.h"
#include "pool/stats.h"

namespace kvstrata {

// The bits of EntryLocal::marks, beside kMarkTail.
inline constexpr std::uint8_t kMarkVisited = 1;       // by the walk of Room::evict_window
inline constexpr std::uint8_t kMarkTenantListed = 2;  // in the list of its tenant
inline constexpr std::uint8_t kMarkCleared = 4;       // quarantined by a clear

struct ExtentRecord {
  std::uint64_t offset;
  std::uint32_t length;
  std::uint32_t entry;
  std::uint32_t generation;
  std::uint32_t zero;
};
static_assert(sizeof(ExtentRecord) == 24);

struct Entries {
  // All three must outlive the object.
  Entries(PoolSegment& segment, SlabMap& slabs, EvictionPolicy& policy) noexcept;

  // The entry of each of these 32-byte keys, kNoEntry for one that is in no bucket; valid until the
  // next call.
  const std::vector<std::uint32_t>& find(const std::uint8_t* keys, std::size_t n_keys);

  // An unused entry with memory, kNoEntry when there is none. It stays FREE until change().
  std::uint32_t take() noexcept;
  void give(std::uint32_t entry) noexcept { free.push_back(entry); }
  // Fills in the EntryLocal of an entry from take(), which gets the extent at this place.
  void init_local(std::uint32_t entry, const SlabPlace& place, bool tail) noexcept;

  // Moves the entry by kEntryMachine, and updates the counts and blockers that follow from its
  // state. No other function but adopt() changes a state.
  void change(std::uint32_t entry, EntryEvent event) noexcept;
  // The same for an entry that an earlier server left: it is counted here for the first time.
  void adopt(std::uint32_t entry, EntryEvent event) noexcept;
  // Makes the entry FREE by this event, and gives its extent and itself back.
  void release(std::uint32_t entry, EntryEvent event) noexcept;
  void count_state(std::uint32_t entry, EntryState state, int sign) noexcept;

  // That of its class: the extent of a tail may be longer than its record.
  std::uint64_t extent_bytes(std::uint32_t entry) const noexcept {
    return slabs.size_class(local[entry].cls).extent_bytes;
  }
  ExtentRecord extent_record(std::uint32_t entry) const noexcept {
    return {index.offset(entry), index.length(entry), entry, index.generation(entry), 0};
  }
  // Where the record lies in this process.
  std::uint8_t* address(std::uint32_t entry) const noexcept {
    return segment.extents_address() + index.offset(entry);
  }
  std::uint32_t tenant(std::uint32_t entry) const noexcept {
    return static_cast<std::uint32_t>(load_word(index.cold(entry).tenant));
  }

  // Whether the entry's record is of this identity (the first 16 bytes of a root; any if nullptr).
  bool is_of(std::uint32_t entry, const std::uint8_t* identity) const noexcept {
    const ColdEntry& cold = index.cold(entry);
    return identity == nullptr || std::memcmp(cold.identity, identity, sizeof cold.identity) == 0;
  }

  // Applies a change of pins, leases or held_back to the EntryLocal, then updates the run and the
  // policy.
  // `used`: an entry that stops being blocked counts as used now.
  template <typename Change>
  void change_blockers(std::uint32_t entry, bool used, Change change) noexcept {
    EntryLocal& changed = local[entry];
    const bool before = changed.is_blocked();
    change(changed);
    const bool after = changed.is_blocked();
    if (before == after) return;
    if (after) {
      slabs.run(changed.run).blocked += 1;
      blocked_bytes += extent_bytes(entry);
    } else {
      slabs.run(changed.run).blocked -= 1;
      blocked_bytes -= extent_bytes(entry);
      if (used || changed.children == 0) policy.unblocked(entry, used);
    }
  }
  void pin(std::uint32_t entry) noexcept {
    if (local[entry].pins == 0) pinned_bytes += extent_bytes(entry);
    change_blockers(entry, false, [](EntryLocal& changed) { changed.pins += 1; });
  }
  void unpin(std::uint32_t entry) noexcept {
    assert(local[entry].pins > 0);
    if (local[entry].pins == 1) pinned_bytes -= extent_bytes(entry);
    change_blockers(entry, false, [](EntryLocal& changed) { changed.pins -= 1; });
  }

  // Makes the entry, and the run that it lies in, the newest of all.
  void renew(std::uint32_t entry, std::memory_order order = std::memory_order_release) noexcept {
    stamp += 1;
    store_word(index.cold(entry).stamp, stamp, order);
    slabs.run(local[entry].run).newest = stamp;
  }
  void touch(std::uint32_t entry) noexcept {
    renew(entry, std::memory_order_relaxed);
    policy.touch(entry);
  }

  // Appends the first words of the keys that are READY among the next `max_entries` entries from
  // number `from` on; returns the number to continue from, 0 when there are no more.
  std::uint64_t ready_tags(std::uint64_t from, std::uint64_t max_entries,
                           std::vector<std::uint64_t>* tags) const;

  PoolSegment& segment;
  SlabMap& slabs;
  EvictionPolicy& policy;
  IndexView index;
  EntryLocal* const local;  // by entry
  std::vector<std::uint32_t> free;
  std::uint64_t touched = 0;  // entries at or above this number were never used
  std::uint64_t stamp = 1;    // of the last use
  std::uint64_t used_bytes = 0;
  std::uint64_t blocked_bytes = 0;
  std::uint64_t pinned_bytes = 0;
  EntryCounts counts{};
  TailCounts tails{};
  std::vector<std::uint32_t> found;  // the result of find()
};

}  // namespace kvstrata
