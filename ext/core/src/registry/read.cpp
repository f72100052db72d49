// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>

#include "registry/cells.h"
#include "registry/registry.h"

namespace kvstrata {

// Calls found(slot, row) for each visible holder of the tag. Before read() starts anew, it calls
// again(), which must drop the holders found so far.
template <typename Found, typename Again>
inline void Registry::read(Tag tag, Found found, Again again) noexcept {
  if (try_read(tag, found)) [[likely]]
    return;
  read_again(tag, found, again);
}

template <typename Found, typename Again>
[[gnu::noinline]] void Registry::read_again(Tag tag, Found found, Again again) noexcept {
  for (int spin = 1; spin < kSpins; ++spin) {
    again();
    if (try_read(tag, found)) return;
  }
  again();
  const std::lock_guard turn(turns_);
  (void)try_read(tag, found);
}

namespace {

[[gnu::noinline]] void grow_and_append(Slot slot, std::vector<Slot>* slots) noexcept {
  slots->push_back(slot);
}

inline void append(Slot slot, std::vector<Slot>* slots) noexcept {
  if (slots->size() == slots->capacity()) [[unlikely]]
    return grow_and_append(slot, slots);
  slots->push_back(slot);
}

}  // namespace

void Registry::lookup(Tag tag, std::vector<Slot>* holders) noexcept {
  const std::size_t before = holders->size();
  // Captures are by value and rare work is out of line, so that everything stays in registers.
  read(
      tag & kTagMask, [holders](Slot slot, std::uint32_t) { append(slot, holders); },
      [holders, before] { holders->resize(before); });
}

void Registry::lookup(TagSpan tags, std::vector<Slot>* holders,
                      std::vector<std::size_t>* ends) noexcept {
  ends->reserve(ends->size() + tags.size());
  in_groups(tags, [&](Tag tag) {
    lookup(tag, holders);
    ends->push_back(holders->size());
    return true;
  });
}

std::vector<Candidate> Registry::lookup_prefix(TagSpan tags, const PrefixQuery& query) noexcept {
  // The first `running` candidates are the groups that hold every key so far. Their `chunks` are
  // keys, up to the end.
  std::vector<Candidate> candidates;
  std::size_t running = 0;
  std::vector<Holder> holders;
  // By group: the index of its candidate + 1, or 0. Only used for more than kFewGroups groups.
  std::vector<std::uint16_t> place_of;
  const auto place = [&](std::uint16_t group, std::size_t count) {
    if (!place_of.empty()) return std::size_t{place_of[group]} - 1;
    std::size_t at = 0;
    while (at < count && candidates[at].group != group)
      ++at;
    return at < count ? at : ~std::size_t{0};
  };
  const auto counts = [&](const Holder& holder) {
    if (static_cast<std::int32_t>(holder.row >> 16) == query.except_group) return false;
    if (query.all_allowed) return true;
    const std::size_t byte = holder.slot >> 3;
    return byte < query.allowed.size() && (query.allowed[byte] >> (holder.slot & 7) & 1) != 0;
  };
  constexpr std::size_t kFewGroups = 8;

  std::size_t at = 0;
  in_groups(tags, [&](Tag tag) {
    holders.clear();
    read(
        tag, [&](Slot slot, std::uint32_t row) { holders.push_back({slot, row}); },
        [&] { holders.clear(); });
    for (const Holder& holder : holders) {
      if (!counts(holder)) continue;
      const auto group = static_cast<std::uint16_t>(holder.row >> 16);
      std::size_t mine = place(group, running);
      if (mine == ~std::size_t{0} && at == 0) {
        mine = running++;
        candidates.push_back({.group = group, .chunks = 0});
        if (!place_of.empty()) {
          place_of[group] = static_cast<std::uint16_t>(running);
        } else if (running > kFewGroups) {
          place_of.resize(1 << 16);
          for (std::size_t i = 0; i < running; ++i)
            place_of[candidates[i].group] = static_cast<std::uint16_t>(i + 1);
        }
      }
      if (mine < running) candidates[mine].chunks = at + 1;
    }
    for (std::size_t i = running; i-- > 0;) {
      if (candidates[i].chunks > at) continue;
      --running;
      std::swap(candidates[i], candidates[running]);
      if (place_of.empty()) continue;
      place_of[candidates[i].group] = static_cast<std::uint16_t>(i + 1);
      place_of[candidates[running].group] = 0;
    }
    ++at;
    return running != 0;
  });
  for (Candidate& each : candidates)
    each.chunks /= query.n_slices;
  std::erase_if(candidates, [](const Candidate& each) { return each.chunks == 0; });
  const std::size_t best = std::min(query.best, candidates.size());
  std::partial_sort(
      candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(best), candidates.end(),
      [](const Candidate& one, const Candidate& other) { return one.chunks > other.chunks; });
  candidates.resize(best);
  return candidates;
}

}  // namespace kvstrata
