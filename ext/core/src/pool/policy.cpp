// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/policy.h"

#include <utility>

namespace kvstrata {

void EvictionPolicy::push_hot(EntryList& list, std::uint32_t entry) noexcept {
  EntryLocal& local = entries_[entry];
  local.list_previous = kNoEntry;
  local.list_next = list.hot;
  if (list.hot != kNoEntry) entries_[list.hot].list_previous = entry;
  list.hot = entry;
  if (list.cold == kNoEntry) list.cold = entry;
  list.size += 1;
}

void EvictionPolicy::push_cold(EntryList& list, std::uint32_t entry) noexcept {
  EntryLocal& local = entries_[entry];
  local.list_next = kNoEntry;
  local.list_previous = list.cold;
  if (list.cold != kNoEntry) entries_[list.cold].list_next = entry;
  list.cold = entry;
  if (list.hot == kNoEntry) list.hot = entry;
  list.size += 1;
}

void EvictionPolicy::unlink(EntryList& list, std::uint32_t entry) noexcept {
  const EntryLocal& local = entries_[entry];
  if (local.list_previous != kNoEntry) {
    entries_[local.list_previous].list_next = local.list_next;
  } else {
    list.hot = local.list_next;
  }
  if (local.list_next != kNoEntry) {
    entries_[local.list_next].list_previous = local.list_previous;
  } else {
    list.cold = local.list_previous;
  }
  list.size -= 1;
}

std::int64_t EvictionPolicy::check_list(const EntryList& list, std::uint8_t mark) const noexcept {
  std::int64_t seen = 0;
  std::uint32_t previous = kNoEntry;
  for (std::uint32_t entry = list.hot; entry != kNoEntry; entry = entries_[entry].list_next) {
    const EntryLocal& local = entries_[entry];
    if (local.list != mark || local.parked || local.list_previous != previous) return -1;
    if (++seen > list.size) return -1;
    previous = entry;
  }
  return previous == list.cold && seen == list.size ? seen : -1;
}

void EvictionPolicy::preview_list(const EntryList& list, std::size_t count,
                                  std::vector<std::uint32_t>* out) const {
  // The number of steps is bounded, because blocked entries at the cold end are not parked here.
  std::size_t steps = 4 * count + 64;
  for (std::uint32_t entry = list.cold; entry != kNoEntry && out->size() < count && steps > 0;
       --steps) {
    if (!entries_[entry].is_blocked()) out->push_back(entry);
    entry = entries_[entry].list_previous;
  }
}

bool GhostList::erase(std::uint64_t fingerprint) {
  return live_.erase(fingerprint) != 0;
}

void GhostList::add(std::uint64_t fingerprint) {
  live_[fingerprint] = next_ticket_;
  ring_.push_back({fingerprint, next_ticket_});
  next_ticket_ += 1;
  // Positions that no longer count are dropped when they are the larger part.
  if (ring_.size() > 64 && ring_.size() > 2 * live_.size() + begin_ / 2) {
    std::vector<Slot> kept;
    kept.reserve(live_.size() + live_.size() / 2);
    for (std::size_t i = begin_; i < ring_.size(); ++i) {
      const auto found = live_.find(ring_[i].fingerprint);
      if (found != live_.end() && found->second == ring_[i].ticket) kept.push_back(ring_[i]);
    }
    ring_.swap(kept);
    begin_ = 0;
  }
}

void GhostList::trim(std::size_t limit) {
  while (live_.size() > limit && begin_ < ring_.size()) {
    const Slot& slot = ring_[begin_++];
    const auto found = live_.find(slot.fingerprint);
    if (found != live_.end() && found->second == slot.ticket) live_.erase(found);
  }
}

void GhostList::clear() noexcept {
  ring_.clear();
  live_.clear();
  begin_ = 0;
}

std::unique_ptr<EvictionPolicy> make_policy(std::string_view name, EntryLocal* entries) {
  std::unique_ptr<EvictionPolicy> rest;
  if (name == "LRU") rest = make_lru_policy(entries);
  if (name == "ARC") rest = make_arc_policy(entries);
  if (name == "S3FIFO") rest = make_s3fifo_policy(entries);
  if (name == "noop") rest = make_noop_policy(entries);
  if (rest == nullptr || !rest->evicts()) return rest;
  return make_tails_first(entries, std::move(rest));
}

}  // namespace kvstrata
