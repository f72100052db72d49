// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The entries of a pool: their states, the blockers that keep each one from being evicted, and the
// counts of bytes that follow from these.
//
// Keeps: an extent belongs to exactly one entry that is not FREE. An entry is "blocked", which
// forbids its eviction, while it is pinned, leased, or held back (reserved, quarantined, or
// touchable by a row of an earlier epoch). The run of its extent counts blocked entries, and the
// policy is told when an entry stops being blocked.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "memory/backing.h"
#include "pool/index.h"
#include "pool/slab.h"
#include "pool/stats.h"
#include "pool/value.h"

namespace kvstrata {

// The two files of a pool as the server has them: mapped, and backed by memory as far as they are
// used. An extent or entry without memory is never touched, so a full file system costs a refusal,
// not a SIGBUS.

// Opened in steps, index before extents; the caller keeps the descriptors. Complete, and neither
// moved nor changed, once a Pool owns it.
struct PoolSegment {
  // Gets memory for the first `head_bytes` of the index and for a part of its cold entries. Entries
  // that were never used get theirs when they are taken (Entries::take).
  [[nodiscard]] Status back_index(int index_fd, std::uint64_t file_bytes, std::uint64_t head_bytes,
                                  std::uint64_t cold_offset, std::uint64_t cold_bytes);
  [[nodiscard]] Status map_index(int index_fd, std::uint64_t file_bytes);
  // Maps the extents, and makes the server's own table of entries. REQUIRES: `index` is set.
  [[nodiscard]] Status open_extents(int extents_fd);

  std::uint8_t* extents_address() const noexcept {
    return static_cast<std::uint8_t*>(extents_mapping.address());
  }
  EntryLocal* local() const noexcept { return static_cast<EntryLocal*>(local_mapping.address()); }
  std::uint64_t missing_bytes() const noexcept {
    return index_backing.missing_bytes() + extents_backing.missing_bytes();
  }

  IndexView index;
  Mapping index_mapping;
  Mapping extents_mapping;
  Mapping local_mapping;  // private memory: an EntryLocal for each entry
  Backing index_backing;
  Backing extents_backing;
};

// The bits of EntryLocal::marks.
inline constexpr std::uint8_t kMarkVisited = 1;  // by the walk of Room::evict_window
inline constexpr std::uint8_t kMarkCleared = 2;  // quarantined by a clear

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
  Entries(PoolSegment& segment, SlabMap& slabs, Value& policy) noexcept;

  // The entry of each of these 32-byte keys, kNoEntry for one that is in no bucket; valid until the
  // next call.
  const std::vector<std::uint32_t>& find(const std::uint8_t* keys, std::size_t n_keys);

  // An unused entry with memory, kNoEntry when there is none. It stays FREE until change().
  std::uint32_t take() noexcept;
  void give(std::uint32_t entry) noexcept { free.push_back(entry); }
  // Fills in the EntryLocal of an entry from take(), which gets the extent at this place and was
  // last used at this tick.
  void init_local(std::uint32_t entry, const SlabPlace& place, Traits traits,
                  std::uint32_t used_at) noexcept;

  // Changes the state, and the counts and blockers that follow from it. No other function but
  // adopt() changes a state. REQUIRES one of these moves:
  //
  //   FREE        -> RESERVED     one row, or the server for a load, gets the entry to write it
  //   RESERVED    -> READY        the writer has finished, and the record is the promised one
  //               -> FREE         the writer aborted, is gone, or wrote another record
  //               -> QUARANTINED  the same while the bytes are in use
  //   READY       -> FREE         evicted, cleared, removed, or found corrupt
  //               -> QUARANTINED  the same while the bytes are in use
  //   UNVERIFIED  -> READY        its checksums were found right
  //               -> FREE, QUARANTINED  as from READY
  //   QUARANTINED -> FREE         the last hold, lease or earlier process that could touch the
  //                               bytes has ended
  void change(std::uint32_t entry, EntryState to) noexcept;
  // Sets the length of a RESERVED entry's record.
  void set_length(std::uint32_t entry, std::uint32_t length) noexcept;
  // The same for an entry that an earlier server left, whatever its state: it is counted here for
  // the first time. UNVERIFIED: the entry, its key and its extent are sound. QUARANTINED or FREE:
  // the entry cannot be served, and its bytes are in use, or not.
  void adopt(std::uint32_t entry, EntryState to) noexcept;
  // Makes the entry FREE, and returns its extent and its number to the free ones.
  void release(std::uint32_t entry) noexcept;
  void count_state(std::uint32_t entry, EntryState state, int sign) noexcept;

  // The extent's length, by its class: the extent of a tail may be longer than its record.
  std::uint64_t extent_bytes(std::uint32_t entry) const noexcept {
    return slabs.size_class(local[entry].cls).extent_bytes;
  }
  ExtentRecord extent_record(std::uint32_t entry) const noexcept {
    return {index.offset(entry), index.length(entry), entry, index.generation(entry), 0};
  }
  // Address of the record in this process.
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

  // Marks the entry, and the run that it lies in, as used most recently.
  void renew(std::uint32_t entry, std::memory_order order = std::memory_order_release) noexcept {
    stamp += 1;
    store_word(index.cold(entry).stamp, stamp, order);
    slabs.run(local[entry].run).newest = stamp;
  }
  // Writes the policy's data of the entry into the index, for the next server.
  void store_use(std::uint32_t entry) noexcept {
    store_word(index.cold(entry).use,
               std::uint64_t{local[entry].used_at} << 32 |
                   std::bit_cast<std::uint32_t>(local[entry].traits),
               std::memory_order_relaxed);
  }
  void touch(std::uint32_t entry, bool same) noexcept {
    renew(entry, std::memory_order_relaxed);
    policy.touch(entry, same);
    store_use(entry);
  }

  // Appends the first words of the keys that are READY among the next `max_entries` entries from
  // number `from` on; returns the number to continue from, 0 when there are no more.
  std::uint64_t ready_tags(std::uint64_t from, std::uint64_t max_entries,
                           std::vector<std::uint64_t>* tags) const;

  PoolSegment& segment;
  SlabMap& slabs;
  Value& policy;
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

// The links between chunks that continue each other: entries link to their parent in the index, and
// to their children and siblings in the server's memory.
//
// Keeps: parents form a forest of linked entries, and EntryLocal::children counts the children. An
// entry with children is not a victim.

inline constexpr std::uint32_t kMaxAncestors = 65'536;  // that one walk up a chain visits

struct Family {
  // The entries must outlive the object.
  explicit Family(Entries& entries) noexcept : entries(entries) {}

  // REQUIRES: `child` has no parent and is not above `parent`.
  void add(std::uint32_t parent, std::uint32_t child) noexcept;
  // Unlinks the entry from its parent, which may then be a victim.
  void leave_parent(std::uint32_t entry) noexcept;
  void orphan_children(std::uint32_t entry) noexcept;
  // Whether `candidate` is `entry` or above it. Also true if the walk up uses up `budget`.
  bool is_ancestor(std::uint32_t candidate, std::uint32_t entry,
                   std::uint64_t* budget) const noexcept;
  // Calls `visit` with each entry above this one, at most kMaxAncestors.
  template <typename Visit>
  void each_ancestor(std::uint32_t entry, Visit visit) const {
    std::uint32_t steps = 0;
    for (std::uint32_t up = entries.index.parent(entry); up != kNoEntry && steps < kMaxAncestors;
         up = entries.index.parent(up), ++steps) {
      visit(up);
    }
  }

  Entries& entries;
};

// The bytes of each tenant in the pool, and its quota, up to which other tenants cannot evict its
// entries (pool/room.h).
//
// Keeps: a tenant's bytes are those of its linked entries. A tenant that gets a quota gets an order
// of the policy of its own, in which its entries are, and keeps it as long as it has bytes; the
// others share order 0. A tenant with neither bytes nor quota has no account.

inline constexpr std::size_t kMaxQuotas = 1'024;

struct Tenants {
  struct Account {
    std::uint64_t bytes = 0;
    std::uint64_t n_entries = 0;
    std::int64_t quota_bytes = -1;  // -1: none
    std::uint16_t order = 0;
  };

  // The entries must outlive the object.
  explicit Tenants(Entries& entries) noexcept : entries(entries) {}

  // Adds an entry to its tenant's account, or removes it.
  void add(std::uint32_t entry);
  void remove(std::uint32_t entry);
  // -1 ends the quota. Evicts nothing. False, and nothing changes, if kMaxQuotas tenants have an
  // order.
  [[nodiscard]] bool set_quota(std::uint32_t tenant, std::int64_t bytes);
  void drop_if_idle(std::uint32_t tenant);

  Entries& entries;
  std::unordered_map<std::uint32_t, Account> accounts;
  std::vector<const Account*> of_order = {nullptr};  // null: no tenant's
};

}  // namespace kvstrata
