// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/room.h"

#include <algorithm>
#include <limits>

namespace kvstrata {

bool Room::evict_window(const SlabMap::Window& window, std::uint64_t older_than, float worth,
                        const Claim& claim, bool protects) {
  family.clear();
  leaving.assign(tenants.of_order.size(), 0);
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
  bool blocked = false, spared = false;
  for (std::size_t i = 0; i < family.size() && !blocked; ++i) {
    const std::uint32_t entry = family[i];
    blocked = local[entry].is_blocked();
    newest = std::max(newest, load_word(index.cold(entry).stamp));
    blocked |= newest >= older_than || policy.worth(entry) > worth;
    const std::uint16_t order = local[entry].order;
    spared = protects && !may_lose(order, leaving[order], claim);
    blocked |= spared;
    leaving[order] += entries.extent_bytes(entry);
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
    return spared;
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
  return false;
}

bool Room::take_place(std::uint32_t cls, std::uint32_t entry, SlabPlace* place) {
  if (!backing.is_short()) {
    if (!slabs.allocate(cls, entry, nullptr, place)) return false;
    if (backing.ensure(place->offset, slabs.size_class(cls).extent_bytes)) return true;
    slabs.free(place->run, place->slot);
  }
  return slabs.allocate(cls, entry, &backing, place);
}

Room::Claim Room::claim(std::uint32_t tenant, std::uint64_t bytes, bool may_evict,
                        float worth) const {
  Claim claim{bytes, 0, may_evict, false, worth};
  const auto found = tenants.accounts.find(tenant);
  if (found == tenants.accounts.end()) return claim;
  const Tenants::Account& account = found->second;
  claim.order = account.order;
  claim.is_within_quota = static_cast<std::int64_t>(account.bytes + bytes) <= account.quota_bytes;
  if (claim.is_within_quota) claim.worth = std::numeric_limits<float>::infinity();
  return claim;
}

bool Room::may_lose(std::size_t order, std::uint64_t gone, const Claim& claim) const noexcept {
  const Tenants::Account* account = tenants.of_order[order];
  if (account == nullptr) return true;
  const std::uint64_t has = account->bytes + (order == claim.order ? claim.bytes : 0);
  return static_cast<std::int64_t>(has - gone) > account->quota_bytes;
}

Room::Victim Room::find_victim(std::uint32_t cls, const Claim& claim, bool protects) {
  Victim least;
  for (std::size_t order = 0; order < tenants.of_order.size(); ++order) {
    if (protects && !may_lose(order, 0, claim)) continue;
    const std::uint32_t entry = policy.victim(cls, order, least.worth);
    const float worth = entry == kNoEntry ? least.worth : policy.worth(entry);
    if (worth < least.worth) least = {entry, worth};
  }
  return least;
}

Room::Made Room::make(std::uint32_t cls, std::uint32_t entry, const Claim& claim,
                      SlabPlace* place) {
  std::uint64_t tried = 0;
  bool protects = true, spared = false;
  while (!take_place(cls, entry, place)) {
    operations += 1;
    if (!claim.may_evict) return Made::kNone;
    const auto [victim, least] = find_victim(cls, claim, protects);
    // A tail leaves before anything else.
    const std::uint64_t stamp = victim == kNoEntry ? std::numeric_limits<std::uint64_t>::max()
                                : local[victim].is_tail() ? 0
                                                          : load_word(index.cold(victim).stamp);
    const std::uint64_t now =
        victim == kNoEntry ? std::numeric_limits<std::uint64_t>::max() : operations;
    SlabMap::Window window;
    if (slabs.oldest_window(cls, now, tried, &window) && window.newest < stamp) {
      tried |= 1ULL << window.first;
      spared |= evict_window(window, stamp, least, claim, protects);
    } else if (victim != kNoEntry && least > claim.worth) {
      return Made::kWorthLess;
    } else if (victim != kNoEntry) {
      departures.leave(victim, Cause::kPolicy);
    } else if (protects && claim.is_within_quota) {
      protects = false;
      tried = 0;
    } else {
      spared |= find_victim(cls, claim, false).entry != kNoEntry;
      return spared ? Made::kProtected : Made::kNone;
    }
  }
  return Made::kPlace;
}

Room::Made Room::evict_one_entry(const Claim& claim) {
  for (const bool protects : {true, false}) {
    Victim least;
    for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
      if (slabs.size_class(cls).used == 0) continue;
      const Victim victim = find_victim(cls, claim, protects);
      if (victim.worth < least.worth) least = victim;
    }
    if (least.entry == kNoEntry) continue;
    if (!protects && !claim.is_within_quota) return Made::kProtected;
    if (least.worth > claim.worth) return Made::kWorthLess;
    departures.leave(least.entry, Cause::kPolicy);
    return Made::kPlace;
  }
  return Made::kNone;
}

}  // namespace kvstrata
