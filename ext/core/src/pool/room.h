// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Finds the place of a new extent, and evicts entries for it: the policy's victim in the
// extent's own size class or, if it is older, a window of runs of other classes, with the entries
// in it and all their descendants.
//
// Keeps: an extent is handed out only when the file system has given it memory (Backing). A blocked
// entry is never evicted, nor is an ancestor of one. An entry of a tenant within its quota is
// evicted only for an entry that is within its own tenant's quota, and only if no other entry can
// be evicted.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "pool/departures.h"
#include "pool/entries.h"
#include "pool/slab.h"
#include "pool/value.h"

namespace kvstrata {

struct Room {
  // Both must outlive the object, as must all that they refer to.
  Room(Entries& entries, Departures& departures) noexcept
      : entries(entries),
        departures(departures),
        tenants(departures.tenants),
        index(entries.index),
        local(entries.local),
        slabs(entries.slabs),
        policy(entries.policy),
        backing(entries.segment.extents_backing) {}

  // The new entry, and which entries may be evicted for it.
  struct Claim {
    std::uint64_t bytes;  // of its extent
    std::uint32_t order;  // of its tenant, see Tenants
    bool may_evict;
    bool is_within_quota;  // of its tenant
    float worth;           // entries that are worth more stay; infinite within the quota
  };
  Claim claim(std::uint32_t tenant, std::uint64_t bytes, bool may_evict, float worth) const;

  struct Victim {
    std::uint32_t entry = kNoEntry;
    float worth = std::numeric_limits<float>::infinity();
  };

  enum class Made : std::uint8_t { kPlace, kNone, kWorthLess, kProtected };
  // Finds an extent for the entry; evicts others for it, if that is allowed. kNone: it is not,
  // or no further entry can be evicted; kProtected: only entries that quotas protect could be;
  // kWorthLess: the entries that could be are worth more.
  [[nodiscard]] Made make(std::uint32_t cls, std::uint32_t entry, const Claim& claim,
                          SlabPlace* place);
  // Evicts one entry of any class, to free an entry number (kPlace); else as make().
  [[nodiscard]] Made evict_one_entry(const Claim& claim);

  // Whether the order's tenant still exceeds its quota after losing `gone` bytes; the claim's
  // tenant counts with the claim's bytes.
  bool may_lose(std::size_t order, std::uint64_t gone, const Claim& claim) const noexcept;
  // The entry of the class with the least worth that can, or with `protects` may, be evicted.
  Victim find_victim(std::uint32_t cls, const Claim& claim, bool protects);

  // A free extent that has memory. False when there is none.
  bool take_place(std::uint32_t cls, std::uint32_t entry, SlabPlace* place);
  // Evicts everything in the window with all descendants, unless one of them is blocked, was used
  // at or after the stamp `older_than`, is worth more than `worth`, or, if `protects`, would
  // leave its tenant within its quota; then nothing changes and the window is skipped for a while.
  // Returns whether a quota was the reason.
  bool evict_window(const SlabMap::Window& window, std::uint64_t older_than, float worth,
                    const Claim& claim, bool protects);

  Entries& entries;
  Departures& departures;
  Tenants& tenants;
  IndexView& index;
  EntryLocal* const local;
  SlabMap& slabs;
  Value& policy;
  Backing& backing;
  std::uint64_t operations = 0;  // searches for an extent so far, the clock of Run::retry_at
  // Scratch of evict_window; `leaving`: bytes by order.
  std::vector<std::uint32_t> family;
  std::vector<std::uint64_t> leaving;
};

}  // namespace kvstrata
