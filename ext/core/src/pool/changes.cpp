// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/changes.h"

#include <algorithm>
#include <bit>

namespace kvstrata {

namespace {

// Remembers (tier, tag) pairs, at most as many as it was made for.
class Seen {
 public:
  explicit Seen(std::size_t most) : slots_(std::bit_ceil(2 * most + 1)) {}

  // Whether the pair is new.
  bool add(std::uint16_t tier, std::uint64_t tag) noexcept {
    const std::size_t mask = slots_.size() - 1;
    std::size_t at = (tag ^ (tag >> 29) ^ (std::size_t{tier} * 0x9e3779b9)) & mask;
    for (; slots_[at].is_used; at = (at + 1) & mask)
      if (slots_[at].tag == tag && slots_[at].tier == tier) return false;
    slots_[at] = {tag, tier, true};
    return true;
  }

 private:
  struct Slot {
    std::uint64_t tag = 0;
    std::uint16_t tier = 0;
    bool is_used = false;
  };
  std::vector<Slot> slots_;
};

TierChanges& of_tier(std::vector<TierChanges>& tiers, std::uint16_t tier) {
  const auto found = std::find_if(tiers.begin(), tiers.end(),
                                  [&](const TierChanges& one) { return one.tier == tier; });
  if (found != tiers.end()) return *found;
  tiers.emplace_back().tier = tier;
  return tiers.back();
}

}  // namespace

Status Changes::begin() noexcept {
  const std::lock_guard lock(mutex_);
  return signal_.fd() < 0 ? signal_.open() : Status();
}

void Changes::note_all(std::uint16_t tier, Change change, const std::uint64_t* tags, std::size_t n,
                       std::size_t stride) noexcept {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < n; ++i, ++next_)
    entries_[next_ % kChanges] = {tags[i * stride], tier, change};
  if (armed_ && n != 0) {
    armed_ = false;
    signal_.signal();
  }
}

std::uint64_t Changes::next() noexcept {
  const std::lock_guard lock(mutex_);
  return next_;
}

bool Changes::wait(std::uint64_t cursor) noexcept {
  const std::lock_guard lock(mutex_);
  if (cursor != next_) return true;
  armed_ = true;
  return false;
}

bool Changes::read(std::uint64_t cursor, std::size_t limit, std::vector<ChangeEntry>* entries) {
  const std::lock_guard lock(mutex_);
  if (cursor > next_ || next_ - cursor > kChanges) return false;
  const std::size_t n = std::min<std::uint64_t>(next_ - cursor, limit);
  const std::size_t before_end = std::min(n, kChanges - cursor % kChanges);
  const ChangeEntry* const first = &entries_[cursor % kChanges];
  entries->reserve(n);
  entries->assign(first, first + before_end);
  entries->insert(entries->end(), &entries_[0], &entries_[0] + (n - before_end));
  return true;
}

bool Changes::read(std::uint64_t cursor, std::size_t limit, ChangedTiers* changed) {
  std::vector<ChangeEntry> entries;
  if (!read(cursor, limit, &entries)) return false;
  // The last change of a chunk decides, so the changes are read backwards; those before a clear of
  // their tier have no effect.
  changed->next = cursor + entries.size();
  Seen seen(entries.size());
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    TierChanges& tier = of_tier(changed->tiers, entry->tier);
    if (tier.cleared) continue;
    if (entry->change == Change::kEmptied)
      tier.cleared = true;
    else if (seen.add(entry->tier, entry->tag))
      (entry->change == Change::kCame ? tier.came : tier.gone).push_back(entry->tag);
  }
  return true;
}

}  // namespace kvstrata
