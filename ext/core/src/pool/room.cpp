// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/room.h"

#include <algorithm>
#include <limits>

namespace kvstrata {

namespace {

constexpr int kQuotaLookSteps = 256;

}  // namespace

bool Room::evict_window(const SlabMap::Window& window, std::uint64_t older_than, float worth) {
  family.clear();
  const auto visit = [&](std::uint32_t entry) {
    if ((local[entry].marks & kMarkVisited) != 0) return;
    local[entry].marks |= kMarkVisited;
    family.push_back(entry);
  };
  std::uint64_t runs = 0;
  for (std::uint32_t slab = window.first; slab < window.first + window.slabs; ++slab) {
    const std::uint32_t first = slabs.run_of(slab);
    if (first == kNoRun || (runs >> first & 1) != 0) continue;
    runs |= 1ULL << first;
    for (const std::uint32_t occupant : slabs.run(first).slots) {
      if (occupant != 0) visit(occupant - 1);
    }
  }
  std::uint64_t newest = 0;
  bool blocked = false;
  for (std::size_t i = 0; i < family.size() && !blocked; ++i) {
    const std::uint32_t entry = family[i];
    blocked = local[entry].is_blocked();
    newest = std::max(newest, load_word(index.cold(entry).stamp));
    blocked |= newest >= older_than || policy.worth(entry) > worth;
    for (std::uint32_t child = local[entry].first_child; child != kNoEntry;
         child = local[child].next_sibling) {
      visit(child);
    }
  }
  const auto unmark = [&](std::uint32_t entry) {
    local[entry].marks &= static_cast<std::uint8_t>(~kMarkVisited);
  };
  if (blocked) {
    for (const std::uint32_t entry : family)
      unmark(entry);
    for (std::uint32_t first = 0; first < kMaxSlabs; ++first) {
      if ((runs >> first & 1) == 0) continue;
      SlabMap::Run& run = slabs.run(first);
      // The more entries this look has met, the longer the run is left alone.
      run.retry_at = operations + family.size() / 16;
      // Descendants elsewhere can be newer than anything in the run.
      run.newest = std::max(run.newest, newest);
    }
    return false;
  }
  // Leaves first, each followed by its ancestors as they become leaves. The family holds all
  // descendants of its members, so this reaches every one.
  for (const std::uint32_t entry : family) {
    std::uint32_t at = entry;
    while (at != kNoEntry && (local[at].marks & kMarkVisited) != 0 && local[at].children == 0) {
      const std::uint32_t parent = index.parent(at);
      unmark(at);
      departures.leave(at, Cause::kWindow);
      at = parent;
    }
  }
  return true;
}

bool Room::take_place(std::uint32_t cls, std::uint32_t entry, SlabPlace* place) {
  if (!backing.is_short()) {
    if (!slabs.allocate(cls, entry, nullptr, place)) return false;
    if (backing.ensure(place->offset, slabs.size_class(cls).extent_bytes)) return true;
    slabs.free(place->run, place->slot);
  }
  return slabs.allocate(cls, entry, &backing, place);
}

Room::Made Room::make(std::uint32_t cls, std::uint32_t entry, bool may_evict, float worth,
                      SlabPlace* place) {
  std::uint64_t tried = 0;
  while (!take_place(cls, entry, place)) {
    operations += 1;
    if (!may_evict) return Made::kNone;
    const std::uint32_t victim = policy.victim(cls);
    const float least =
        victim == kNoEntry ? std::numeric_limits<float>::infinity() : policy.worth(victim);
    // A tail leaves before anything else.
    const std::uint64_t stamp = victim == kNoEntry ? std::numeric_limits<std::uint64_t>::max()
                                : local[victim].is_tail() ? 0
                                                          : load_word(index.cold(victim).stamp);
    const std::uint64_t now =
        victim == kNoEntry ? std::numeric_limits<std::uint64_t>::max() : operations;
    SlabMap::Window window;
    if (slabs.oldest_window(cls, now, tried, &window) && window.newest < stamp) {
      tried |= 1ULL << window.first;
      static_cast<void>(evict_window(window, stamp, least));
    } else if (victim == kNoEntry) {
      return Made::kNone;
    } else if (least > worth) {
      return Made::kWorthLess;
    } else {
      departures.leave(victim, Cause::kPolicy);
    }
  }
  return Made::kPlace;
}

Room::Made Room::evict_one_entry(float worth) {
  std::uint32_t least = kNoEntry;
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    if (slabs.size_class(cls).used == 0) continue;
    const std::uint32_t victim = policy.victim(cls);
    if (victim == kNoEntry) continue;
    if (least == kNoEntry || policy.worth(victim) < policy.worth(least)) least = victim;
  }
  if (least == kNoEntry) return Made::kNone;
  if (policy.worth(least) > worth) return Made::kWorthLess;
  departures.leave(least, Cause::kPolicy);
  return Made::kPlace;
}

bool Room::fit_quota(std::uint32_t id, std::uint64_t bytes, bool may_evict) {
  while (true) {
    const auto found = tenants.accounts.find(id);
    if (found == tenants.accounts.end() || found->second.quota_bytes < 0) return true;
    const auto quota = static_cast<std::uint64_t>(found->second.quota_bytes);
    if (bytes > quota) return false;
    if (found->second.bytes + bytes <= quota) return true;
    if (!may_evict) return false;
    std::uint32_t victim = found->second.cold;
    for (int step = 0; victim != kNoEntry && !local[victim].is_victim(); ++step) {
      victim = step < kQuotaLookSteps ? local[victim].tenant_previous : kNoEntry;
    }
    if (victim == kNoEntry) return false;
    departures.leave(victim, Cause::kQuota);
  }
}

}  // namespace kvstrata
