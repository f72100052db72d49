// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Pool: whose bytes they are and which of them leave: tenants, eviction, what an admin removes.
#include "kvstrata/pool.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace kvstrata {

namespace {

constexpr int kQuotaLookSteps = 256;

}  // namespace

// ---- tenants

void Pool::tenant_link(std::uint32_t entry) noexcept {
  const auto found =
      tenants_.find(static_cast<std::uint32_t>(load_word(index_.cold(entry).tenant)));
  if (found == tenants_.end()) return;
  Tenant& tenant = found->second;
  EntryLocal& local = local_[entry];
  local.tenant_previous = kNoEntry;
  local.tenant_next = tenant.hot;
  if (tenant.hot != kNoEntry) local_[tenant.hot].tenant_previous = entry;
  tenant.hot = entry;
  if (tenant.cold == kNoEntry) tenant.cold = entry;
  local.marks |= kMarkTenantListed;
}

void Pool::tenant_unlink(std::uint32_t entry) noexcept {
  EntryLocal& local = local_[entry];
  if ((local.marks & kMarkTenantListed) == 0) return;
  Tenant& tenant = tenants_[static_cast<std::uint32_t>(load_word(index_.cold(entry).tenant))];
  if (local.tenant_previous != kNoEntry) {
    local_[local.tenant_previous].tenant_next = local.tenant_next;
  } else {
    tenant.hot = local.tenant_next;
  }
  if (local.tenant_next != kNoEntry) {
    local_[local.tenant_next].tenant_previous = local.tenant_previous;
  } else {
    tenant.cold = local.tenant_previous;
  }
  local.tenant_previous = local.tenant_next = kNoEntry;
  local.marks &= static_cast<std::uint8_t>(~kMarkTenantListed);
}

// Adds the entry to its tenant's account, or takes it off (sign -1).
void Pool::tenant_charge(std::uint32_t entry, std::int64_t sign) {
  const auto id = static_cast<std::uint32_t>(load_word(index_.cold(entry).tenant));
  Tenant& tenant = tenants_[id];
  if (sign > 0) {
    tenant.bytes += extent_bytes(entry);
    if (tenant.quota_bytes >= 0) tenant_link(entry);
    return;
  }
  tenant_unlink(entry);
  tenant.bytes -= extent_bytes(entry);
  if (tenant.bytes == 0 && tenant.quota_bytes < 0) tenants_.erase(id);
}

void Pool::set_quota(std::uint32_t id, std::int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return;
  Tenant& tenant = tenants_[id];
  const bool listed = tenant.quota_bytes >= 0;
  tenant.quota_bytes = bytes < 0 ? -1 : bytes;
  if (bytes < 0) {
    while (tenant.hot != kNoEntry)
      tenant_unlink(tenant.hot);
    if (tenant.bytes == 0) tenants_.erase(id);
  } else if (!listed) {
    std::vector<std::uint32_t> members;
    for (std::uint32_t entry = 0; entry < entries_touched_; ++entry) {
      const EntryState state = index_.state(entry);
      if (state == EntryState::kFree || state == EntryState::kQuarantined) continue;
      if (load_word(index_.cold(entry).tenant) == id) members.push_back(entry);
    }
    std::sort(members.begin(), members.end(), [&](std::uint32_t a, std::uint32_t b) {
      return load_word(index_.cold(a).stamp) < load_word(index_.cold(b).stamp);
    });
    for (const std::uint32_t entry : members)
      tenant_link(entry);
  }
}

// ---- room

// Evicts everything in the window with all descendants, unless one of them is blocked or was used
// at or after the stamp `older_than`; then nothing changes and the window is left alone for a
// while.
bool Pool::evict_window(const SlabMap::Window& window, std::uint64_t older_than) {
  family_.clear();
  const auto visit = [&](std::uint32_t entry) {
    if ((local_[entry].marks & kMarkVisited) != 0) return;
    local_[entry].marks |= kMarkVisited;
    family_.push_back(entry);
  };
  std::uint64_t runs = 0;
  for (std::uint32_t slab = window.first; slab < window.first + window.slabs; ++slab) {
    const std::uint32_t first = slabs_.run_of(slab);
    if (first == kNoRun || (runs >> first & 1) != 0) continue;
    runs |= 1ULL << first;
    for (const std::uint32_t occupant : slabs_.run(first).slots) {
      if (occupant != 0) visit(occupant - 1);
    }
  }
  std::uint64_t newest = 0;
  bool blocked = false;
  for (std::size_t i = 0; i < family_.size() && !blocked; ++i) {
    const std::uint32_t entry = family_[i];
    blocked = local_[entry].is_blocked();
    newest = std::max(newest, load_word(index_.cold(entry).stamp));
    blocked |= newest >= older_than;
    for (std::uint32_t child = local_[entry].first_child; child != kNoEntry;
         child = local_[child].next_sibling) {
      visit(child);
    }
  }
  const auto unmark = [&](std::uint32_t entry) {
    local_[entry].marks &= static_cast<std::uint8_t>(~kMarkVisited);
  };
  if (blocked) {
    for (const std::uint32_t entry : family_)
      unmark(entry);
    for (std::uint32_t first = 0; first < kMaxSlabs; ++first) {
      if ((runs >> first & 1) == 0) continue;
      SlabMap::Run& run = slabs_.run(first);
      // A look costs the entries that were met; so many operations pass before the next one.
      run.retry_at = operations_ + family_.size() / 16;
      // Descendants elsewhere can be newer than anything in the run.
      run.newest = std::max(run.newest, newest);
    }
    return false;
  }
  // Leaves first, each followed by its ancestors as they become leaves. The family holds all
  // descendants of its members, so this reaches everybody.
  for (const std::uint32_t entry : family_) {
    std::uint32_t at = entry;
    while (at != kNoEntry && (local_[at].marks & kMarkVisited) != 0 && local_[at].children == 0) {
      const std::uint32_t parent = index_.parent(at);
      unmark(at);
      drop(at, Cause::kWindow);
      at = parent;
    }
  }
  return true;
}

// A free extent that has memory. False when there is none.
bool Pool::take_place(std::uint32_t cls, std::uint32_t entry, SlabPlace* place) {
  if (!extents_backing_.is_short()) {
    if (!slabs_.allocate(cls, entry, nullptr, place)) return false;
    if (extents_backing_.ensure(place->offset, slabs_.size_class(cls).extent_bytes)) return true;
    slabs_.free(place->run, place->slot);
  }
  return slabs_.allocate(cls, entry, &extents_backing_, place);
}

// An extent for the entry, evicting what must go if that is allowed. False when what is left cannot
// be evicted.
bool Pool::make_room(std::uint32_t cls, std::uint32_t entry, bool may_evict, SlabPlace* place) {
  std::uint64_t tried = 0;
  while (!take_place(cls, entry, place)) {
    operations_ += 1;
    if (!may_evict) return false;
    const std::uint32_t victim = policy_->victim(cls);
    const std::uint64_t stamp = victim == kNoEntry ? std::numeric_limits<std::uint64_t>::max()
                                                   : load_word(index_.cold(victim).stamp);
    const std::uint64_t now =
        victim == kNoEntry ? std::numeric_limits<std::uint64_t>::max() : operations_;
    SlabMap::Window window;
    if (slabs_.oldest_window(cls, now, tried, &window) && window.newest < stamp) {
      tried |= 1ULL << window.first;
      static_cast<void>(evict_window(window, stamp));
    } else if (victim != kNoEntry) {
      drop(victim, Cause::kPolicy);
    } else {
      return false;
    }
  }
  return true;
}

std::uint32_t Pool::oldest_victim() noexcept {
  std::uint32_t oldest = kNoEntry;
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    if (slabs_.size_class(cls).used == 0) continue;
    const std::uint32_t victim = policy_->victim(cls);
    if (victim == kNoEntry) continue;
    if (oldest == kNoEntry ||
        load_word(index_.cold(victim).stamp) < load_word(index_.cold(oldest).stamp)) {
      oldest = victim;
    }
  }
  return oldest;
}

bool Pool::evict_one_entry() {
  const std::uint32_t victim = oldest_victim();
  if (victim == kNoEntry) return false;
  drop(victim, Cause::kPolicy);
  return true;
}

// Evicts the tenant's own oldest leaves, if that is allowed, until `bytes` more are within its
// quota.
bool Pool::fit_quota(std::uint32_t id, std::uint64_t bytes, bool may_evict) {
  while (true) {
    const auto found = tenants_.find(id);
    if (found == tenants_.end() || found->second.quota_bytes < 0) return true;
    const auto quota = static_cast<std::uint64_t>(found->second.quota_bytes);
    if (bytes > quota) return false;
    if (found->second.bytes + bytes <= quota) return true;
    if (!may_evict) return false;
    std::uint32_t victim = found->second.cold;
    for (int step = 0; victim != kNoEntry && !local_[victim].is_victim(); ++step) {
      victim = step < kQuotaLookSteps ? local_[victim].tenant_previous : kNoEntry;
    }
    if (victim == kNoEntry) return false;
    drop(victim, Cause::kQuota);
  }
}

// ---- administration

std::uint64_t Pool::remove(const std::uint8_t* keys, std::size_t n_keys, bool returned) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return 0;
  std::uint64_t removed = 0;
  for (std::size_t i = 0; i < n_keys; ++i) {
    const std::uint32_t entry = index_.find(Key::load(keys + i * kKeyBytes));
    if (entry == kNoEntry || local_[entry].is_blocked()) continue;
    drop(entry, returned ? Cause::kReturned : Cause::kRemoved);
    removed += 1;
  }
  return removed;
}

Pool::ClearResult Pool::clear(std::int64_t tenant, const std::uint8_t* identity) noexcept {
  constexpr std::uint32_t kStep = 512;
  constexpr std::uint32_t kServerRow = 0;
  ClearResult result;
  for (std::uint64_t begin = 0;; begin += kStep) {
    const std::lock_guard lock(mutex_);
    if (is_closed() || begin >= entries_touched_) return result;
    const std::uint64_t end = std::min(begin + kStep, entries_touched_);
    for (auto entry = static_cast<std::uint32_t>(begin); entry < end; ++entry) {
      const EntryState state = index_.state(entry);
      if (state != EntryState::kReady && state != EntryState::kUnverified) continue;
      if (tenant >= 0 &&
          load_word(index_.cold(entry).tenant) != static_cast<std::uint64_t>(tenant)) {
        continue;
      }
      const ColdEntry& cold = index_.cold(entry);
      if (identity != nullptr && std::memcmp(cold.identity, identity, sizeof cold.identity) != 0) {
        continue;
      }
      if (local_[entry].leases != 0 && rows_of(entry).test(kServerRow)) {
        result.kept += 1;
        continue;
      }
      drop(entry, identity == nullptr ? Cause::kCleared : Cause::kRemoved);
      if (index_.state(entry) == EntryState::kQuarantined) local_[entry].marks |= kMarkCleared;
      result.dropped += 1;
    }
  }
}

Pool::ClearedInUse Pool::cleared_in_use() noexcept {
  const std::lock_guard lock(mutex_);
  ClearedInUse in_use;
  if (is_closed()) return in_use;
  for (const std::uint32_t entry : quarantine_) {
    if ((local_[entry].marks & kMarkCleared) == 0) continue;
    const bool leased = local_[entry].leases != 0 || old_rows_.contains(entry);
    (leased ? in_use.leased : in_use.held) += 1;
  }
  return in_use;
}

std::uint64_t Pool::ready_tags(std::uint64_t from, std::uint64_t max_entries,
                               std::vector<std::uint64_t>* tags) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed() || from >= entries_touched_) return 0;
  const std::uint64_t end = from + std::min(max_entries, entries_touched_ - from);
  for (auto entry = static_cast<std::uint32_t>(from); entry < end; ++entry) {
    if (index_.state(entry) == EntryState::kReady) tags->push_back(index_.key(entry).word[0]);
  }
  return end < entries_touched_ ? end : 0;
}

std::uint64_t Pool::evict_to_watermark() noexcept {
  constexpr int kStep = 64;
  std::uint64_t evicted_bytes = 0;
  std::uint64_t goal_bytes = 0;
  for (bool first = true;; first = false) {
    const std::lock_guard lock(mutex_);
    if (is_closed() || options_.watermark == 0.0 || !policy_->evicts()) return evicted_bytes;
    if (first) {
      const auto total = static_cast<double>(extents_bytes());
      if (static_cast<double>(used_bytes_) <= options_.watermark * total) return 0;
      goal_bytes =
          static_cast<std::uint64_t>(static_cast<double>(used_bytes_) * options_.watermark_ratio);
    }
    for (int step = 0; step < kStep; ++step) {
      if (evicted_bytes >= goal_bytes) return evicted_bytes;
      const std::uint32_t victim = oldest_victim();
      if (victim == kNoEntry) return evicted_bytes;
      evicted_bytes += extent_bytes(victim);
      drop(victim, Cause::kWatermark);
    }
  }
}

std::vector<Key> Pool::victims_preview(std::uint64_t need_bytes) noexcept {
  constexpr std::uint64_t kMost = 4096;
  const std::lock_guard lock(mutex_);
  std::vector<Key> keys;
  if (is_closed()) return keys;
  struct Candidate {
    std::uint64_t stamp;
    std::size_t order;
    std::uint32_t entry;
  };
  std::vector<Candidate> candidates;
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    const SlabMap::Class& size_class = slabs_.size_class(cls);
    if (size_class.used == 0) continue;
    std::vector<std::uint32_t> entries;
    policy_->preview(cls, std::min(kMost, need_bytes / size_class.extent_bytes + 1), &entries);
    // A policy's own order counts within a class, age between classes.
    std::uint64_t stamp = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      stamp = std::max(stamp, load_word(index_.cold(entries[i]).stamp));
      candidates.push_back({stamp, i, entries[i]});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     return a.stamp != b.stamp ? a.stamp < b.stamp : a.order < b.order;
                   });
  std::uint64_t bytes = 0;
  for (const Candidate& candidate : candidates) {
    if (bytes >= need_bytes) break;
    if (index_.state(candidate.entry) != EntryState::kReady) continue;
    bytes += extent_bytes(candidate.entry);
    keys.push_back(index_.key(candidate.entry));
  }
  return keys;
}

}  // namespace kvstrata
