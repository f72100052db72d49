// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/registry.h"

#include <algorithm>
#include <new>

namespace kvstrata {

namespace {

// What a placement takes in a std::unordered_map, about.
constexpr std::uint64_t kPlacementBytes = 96;

bool is_filled(const SlotRow& row) {
  return row.state == SlotState::kHidden || row.state == SlotState::kVisible;
}

Status bad_slot(Slot slot) {
  return {StatusCode::kNotFound, "slot: is neither hidden nor visible", slot};
}

}  // namespace

Status Registry::create(std::uint64_t max_bytes, std::uint32_t max_slots,
                        std::unique_ptr<Registry>* made) noexcept {
  made->reset(new (std::nothrow) Registry);
  if (*made == nullptr) return {StatusCode::kNoSpace, "no memory for the registry"};
  (*made)->max_bytes_ = max_bytes;
  (*made)->rows_.resize(max_slots + 1);
  for (std::uint32_t slot = 0; slot <= max_slots; ++slot)
    (*made)->rows_[slot].slot = static_cast<Slot>(slot);
  return {};
}

bool Registry::bound_reached() const noexcept {
  return placements_ * kPlacementBytes >= max_bytes_;
}

Slot Registry::open_slot(std::uint16_t group, std::uint8_t rank) noexcept {
  const std::lock_guard lock(mutex_);
  for (std::size_t slot = 1; slot < rows_.size(); ++slot) {
    if (rows_[slot].state != SlotState::kFree) continue;
    rows_[slot].state = SlotState::kHidden;
    rows_[slot].group = group;
    rows_[slot].rank = rank;
    return static_cast<Slot>(slot);
  }
  return kNoSlot;
}

Status Registry::publish(Slot slot, Slot retired) noexcept {
  const std::lock_guard lock(mutex_);
  if (slot >= rows_.size() || rows_[slot].state != SlotState::kHidden)
    return {StatusCode::kNotFound, "slot: is not hidden", slot};
  if (retired != kNoSlot &&
      (retired >= rows_.size() || retired == slot || !is_filled(rows_[retired])))
    return bad_slot(retired);
  rows_[slot].state = SlotState::kVisible;
  if (retired != kNoSlot) rows_[retired].state = SlotState::kRetired;
  return {};
}

Status Registry::retire(Slot slot) noexcept {
  const std::lock_guard lock(mutex_);
  if (slot >= rows_.size() || !is_filled(rows_[slot])) return bad_slot(slot);
  rows_[slot].state = SlotState::kRetired;
  return {};
}

Status Registry::admit(Slot slot, TagSpan tags, std::uint64_t* added) noexcept {
  const std::lock_guard lock(mutex_);
  if (slot >= rows_.size() || !is_filled(rows_[slot])) return bad_slot(slot);
  for (std::size_t at = 0; at < tags.size(); ++at) {
    if (bound_reached()) return {StatusCode::kNoSpace, "max_bytes is reached"};
    std::vector<Slot>& holders = holders_[tags[at]];
    if (std::find(holders.begin(), holders.end(), slot) != holders.end()) continue;
    holders.push_back(slot);
    ++rows_[slot].keys;
    ++placements_;
    ++*added;
  }
  return {};
}

Status Registry::evict(Slot slot, TagSpan tags, std::uint64_t* removed) noexcept {
  const std::lock_guard lock(mutex_);
  if (slot >= rows_.size() || !is_filled(rows_[slot])) return bad_slot(slot);
  for (std::size_t at = 0; at < tags.size(); ++at) {
    const auto found = holders_.find(tags[at]);
    if (found == holders_.end() || std::erase(found->second, slot) == 0) continue;
    if (found->second.empty()) holders_.erase(found);
    --rows_[slot].keys;
    --placements_;
    ++*removed;
  }
  return {};
}

Status Registry::restore(TagSpan tags, std::span<const Slot> slots, std::span<const Slot> slot_of,
                         std::uint64_t* added) noexcept {
  for (std::size_t at = 0; at < tags.size(); ++at) {
    const Slot slot = slots[at] < slot_of.size() ? slot_of[slots[at]] : kNoSlot;
    if (slot == kNoSlot) continue;
    KVSTRATA_RETURN_IF_ERROR(admit(slot, tags.subspan(at, 1), added));
  }
  return {};
}

std::uint64_t Registry::sweep(std::uint64_t) noexcept {
  const std::lock_guard lock(mutex_);
  std::uint64_t retired = 0;
  for (const SlotRow& row : rows_)
    retired += row.state == SlotState::kRetired;
  if (retired == 0) return 0;
  for (auto found = holders_.begin(); found != holders_.end();) {
    placements_ -= std::erase_if(
        found->second, [this](Slot slot) { return rows_[slot].state == SlotState::kRetired; });
    found = found->second.empty() ? holders_.erase(found) : std::next(found);
  }
  for (SlotRow& row : rows_) {
    if (row.state == SlotState::kRetired) row = {.slot = row.slot};
  }
  return holders_.size() + 1;
}

void Registry::lookup(Tag tag, std::vector<Slot>* holders) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = holders_.find(tag & kTagMask);
  if (found == holders_.end()) return;
  std::copy_if(found->second.begin(), found->second.end(), std::back_inserter(*holders),
               [this](Slot slot) { return rows_[slot].state == SlotState::kVisible; });
}

void Registry::lookup(TagSpan tags, std::vector<Slot>* holders,
                      std::vector<std::size_t>* ends) noexcept {
  for (std::size_t at = 0; at < tags.size(); ++at) {
    lookup(tags[at], holders);
    ends->push_back(holders->size());
  }
}

std::vector<Candidate> Registry::lookup_prefix(TagSpan tags, const PrefixQuery& query) noexcept {
  std::vector<Candidate> running;
  std::vector<Candidate> ended;
  std::vector<Slot> holders;
  for (std::size_t at = 0; at < tags.size(); ++at) {
    holders.clear();
    lookup(tags[at], &holders);
    std::erase_if(holders, [&](Slot slot) {
      const bool allowed =
          query.all_allowed || (static_cast<std::size_t>(slot >> 3) < query.allowed.size() &&
                                (query.allowed[slot >> 3] >> (slot & 7) & 1) != 0);
      return !allowed || rows_[slot].group == query.except_group;
    });
    std::sort(holders.begin(), holders.end(),
              [&](Slot one, Slot other) { return rows_[one].rank < rows_[other].rank; });
    if (at == 0) {
      for (const Slot slot : holders) {
        if (std::none_of(running.begin(), running.end(),
                         [&](const Candidate& each) { return each.group == rows_[slot].group; }))
          running.push_back({.group = rows_[slot].group});
      }
    }
    for (auto each = running.begin(); each != running.end();) {
      const auto found = std::find_if(holders.begin(), holders.end(),
                                      [&](Slot slot) { return rows_[slot].group == each->group; });
      if (found != holders.end()) {
        each->slots.push_back(*found);
        ++each;
      } else {
        ended.push_back(std::move(*each));
        each = running.erase(each);
      }
    }
    if (running.empty()) break;
  }
  std::move(running.begin(), running.end(), std::back_inserter(ended));
  for (Candidate& each : ended) {
    each.chunks = each.slots.size() / query.n_slices;
    each.slots.resize(each.chunks * query.n_slices);
  }
  std::erase_if(ended, [](const Candidate& each) { return each.chunks == 0; });
  std::stable_sort(ended.begin(), ended.end(), [](const Candidate& one, const Candidate& other) {
    return one.chunks > other.chunks;
  });
  if (ended.size() > query.best) ended.resize(query.best);
  return ended;
}

SlotRow Registry::slot(Slot slot) noexcept {
  const std::lock_guard lock(mutex_);
  return slot < rows_.size() ? rows_[slot] : SlotRow{};
}

std::vector<SlotRow> Registry::slots() noexcept {
  const std::lock_guard lock(mutex_);
  std::vector<SlotRow> open;
  std::copy_if(rows_.begin(), rows_.end(), std::back_inserter(open),
               [](const SlotRow& row) { return row.state != SlotState::kFree; });
  return open;
}

std::uint64_t Registry::dump(std::uint64_t cursor, std::uint64_t max_cells, std::vector<Tag>* tags,
                             std::vector<Slot>* slots) noexcept {
  const std::lock_guard lock(mutex_);
  const std::uint64_t end = std::min<std::uint64_t>(holders_.bucket_count(),
                                                    cursor + std::max<std::uint64_t>(1, max_cells));
  for (; cursor < end; ++cursor) {
    for (auto found = holders_.begin(cursor); found != holders_.end(cursor); ++found) {
      for (const Slot slot : found->second) {
        if (rows_[slot].state != SlotState::kVisible) continue;
        tags->push_back(found->first);
        slots->push_back(slot);
      }
    }
  }
  return cursor < holders_.bucket_count() ? cursor : 0;
}

RegistryUsage Registry::usage() noexcept {
  const std::lock_guard lock(mutex_);
  RegistryUsage usage{.bytes = placements_ * kPlacementBytes, .placements = placements_};
  for (const SlotRow& row : rows_) {
    usage.slots += row.state != SlotState::kFree;
    usage.retired += row.state == SlotState::kRetired;
  }
  return usage;
}

}  // namespace kvstrata
