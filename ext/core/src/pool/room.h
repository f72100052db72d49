// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Finds the place of a new extent, and the entries that leave for it: the policy's victim in the
// extent's own size class or, if it is older, a window of runs of other classes, with the entries
// in it and all their descendants.
//
// Keeps: an extent is handed out only once the file system has given it memory (Backing). A blocked
// entry is never evicted, nor is an ancestor of one.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <cstdint>
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

  enum class Made : std::uint8_t { kPlace, kNone, kWorthLess };
  // Finds an extent for the entry; evicts others for it, if that is allowed. kNone when that is not
  // allowed, or when nothing more can be evicted; kWorthLess when what could be is worth more than
  // `worth`.
  [[nodiscard]] Made make(std::uint32_t cls, std::uint32_t entry, bool may_evict, float worth,
                          SlabPlace* place);
  // Evicts the tenant's own oldest leaves, if that is allowed, until `bytes` more are within its
  // quota. False when they cannot be.
  [[nodiscard]] bool fit_quota(std::uint32_t tenant, std::uint64_t bytes, bool may_evict);
  // Evicts one entry of any class, to free an entry number (kPlace); else as make().
  [[nodiscard]] Made evict_one_entry(float worth);

  // A free extent that has memory. False when there is none.
  bool take_place(std::uint32_t cls, std::uint32_t entry, SlabPlace* place);
  // Evicts everything in the window with all descendants, unless one of them is blocked, was used
  // at or after the stamp `older_than`, or is worth more than `worth`; then nothing changes and the
  // window is left alone for a while.
  bool evict_window(const SlabMap::Window& window, std::uint64_t older_than, float worth);

  Entries& entries;
  Departures& departures;
  Tenants& tenants;
  IndexView& index;
  EntryLocal* const local;
  SlabMap& slabs;
  Value& policy;
  Backing& backing;
  std::uint64_t operations = 0;       // searches for room so far, the clock of Run::retry_at
  std::vector<std::uint32_t> family;  // scratch of evict_window
};

}  // namespace kvstrata
