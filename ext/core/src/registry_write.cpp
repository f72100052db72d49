// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>

#include "kvstrata/registry.h"
#include "registry_cells.h"

namespace kvstrata {

namespace {

// Of a cell that names a list, all but its number.
constexpr std::uint64_t kListCellBits = (std::uint64_t{1} << 36) - 1;
// A line overflows into the next one more often the fuller the table: at 0.8 a look-up reads 1.1
// lines.
constexpr double kMaxLoad = 0.8;
// Between a partition's turns; the table is full to 0.64 in the mean.
constexpr double kGrowth = 1.6;
// Where there is no memory to grow, a partition takes so many.
constexpr double kFullLoad = 0.9;
// Several cells of each tag make long chains early; a partition that is so full grows for them.
constexpr double kCrowdedLoad = 0.4;
// After a sweep, a partition that is less full is built anew.
constexpr double kMinLoad = 0.25;

}  // namespace

// Readers that saw anything of what `make` does look again.
template <typename Change>
void Registry::change(std::uint32_t partition, Change make) noexcept {
  Header& header = headers_[partition];
  const std::uint64_t before = header.load(std::memory_order_relaxed);
  header.store(before + (std::uint64_t{1} << 32), std::memory_order_relaxed);
  make();
  const std::uint64_t segments = header.load(std::memory_order_relaxed) & 0xFFFFFFFF;
  header.store(((before >> 32) + 2) << 32 | segments, std::memory_order_release);
}

void Registry::count_keys(Slot slot, std::int64_t more) noexcept {
  std::atomic<std::uint64_t>& keys = rows_[slot].keys;
  keys.store(keys.load(std::memory_order_relaxed) + static_cast<std::uint64_t>(more),
             std::memory_order_relaxed);
  placements_.store(placements_.load(std::memory_order_relaxed) + static_cast<std::uint64_t>(more),
                    std::memory_order_relaxed);
}

bool Registry::take_segments(std::uint32_t count, std::vector<std::uint32_t>* taken) noexcept {
  const std::uint64_t fresh = count - std::min<std::uint64_t>(count, free_segments_.size());
  if (!has_room_for(fresh * kSegmentBytes, 0)) return false;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (free_segments_.empty()) {
      taken->push_back(static_cast<std::uint32_t>(used_cells_bytes_ / kSegmentBytes));
      used_cells_bytes_ += kSegmentBytes;
      continue;
    }
    const std::uint32_t segment = free_segments_.back();
    free_segments_.pop_back();
    auto* const cells = reinterpret_cast<Cell*>(cells_.at(segment * kSegmentBytes));
    for (std::uint32_t at = 0; at < kSegmentCells; ++at)
      store_shared(cells[at], Cell{0});
    taken->push_back(segment);
  }
  return true;
}

Registry::List* Registry::take_list(std::uint32_t cls) noexcept {
  std::uint32_t number = 0;
  if (!free_lists_[cls].empty()) {
    number = free_lists_[cls].back();
    free_lists_[cls].pop_back();
  } else {
    if (!has_room_for(0, list_bytes(cls))) return nullptr;
    number = static_cast<std::uint32_t>(used_lists_bytes_ / 64);
    used_lists_bytes_ += list_bytes(cls);
    count_bytes();
  }
  return list_of(Cell{number} << 36);
}

void Registry::free_list(List* list) noexcept {
  const auto offset = reinterpret_cast<std::uint8_t*>(list) - lists_.at(0);
  free_lists_[list->size_class()].push_back(static_cast<std::uint32_t>(offset / 64));
}

// Into the first free cell at or after its home; false where there is none near enough.
bool Registry::put_cell(std::uint32_t partition, std::uint32_t lines, std::uint32_t home,
                        Cell cell) noexcept {
  for (std::uint32_t probed = 0; probed <= kMaxProbeLines && probed < lines; ++probed) {
    Cell* const line = line_at(partition, home);
    const std::uint32_t used = used_cells(line);
    if (used < kLineCells) {
      store_shared(line[used], cell);
      return true;
    }
    if (++home == lines) home = 0;
  }
  return false;
}

// Sizes of partition p are the least whole numbers from kGrowth^(i + p / kPartitions), so that
// those of all partitions are spread evenly.
std::uint32_t Registry::next_segments(std::uint32_t partition, std::uint32_t segments) noexcept {
  if (segments == 0) return 1;
  double size = std::pow(kGrowth, static_cast<double>(partition) / kPartitions);
  while (std::ceil(size) <= segments)
    size *= kGrowth;
  return static_cast<std::uint32_t>(std::ceil(size));
}

// Moves all that is not retired to so many new segments; false, and nothing is changed, where
// there is no memory for them.
bool Registry::rebuild(std::uint32_t partition, std::uint32_t segments) noexcept {
  std::vector<std::uint32_t> taken;
  if (segments > max_segments_ || !take_segments(segments, &taken)) return false;
  const auto before =
      static_cast<std::uint32_t>(headers_[partition].load(std::memory_order_relaxed));
  const std::uint32_t lines = segments * kSegmentLines;
  PartitionRoom& room = rooms_[partition];
  room.cells = 0;
  const auto place = [&](Cell cell) {
    std::uint32_t home = home_of(tag_of(partition, cell), lines);
    for (std::uint32_t probed = 0; probed <= kMaxProbeLines && probed < lines; ++probed) {
      Cell* const line =
          reinterpret_cast<Cell*>(cells_.at(taken[home / kSegmentLines] * kSegmentBytes)) +
          home % kSegmentLines * kLineCells;
      const std::uint32_t used = used_cells(line);
      if (used < kLineCells) {
        store_shared(line[used], cell);
        ++room.cells;
        return true;
      }
      if (++home == lines) home = 0;
    }
    return false;
  };
  std::vector<List*> dropped;
  for (std::uint32_t number = 0; number < before * kSegmentLines; ++number) {
    const Cell* const line = line_at(partition, number);
    for (std::uint32_t at = 0; at < kLineCells; ++at) {
      const Cell cell = load_shared(line[at]);
      const auto slot = static_cast<Slot>(cell);
      if (cell == 0) continue;
      const bool listed = slot == kListed;
      if (!listed && is_retired(slot)) {
        count_keys(slot, -1);
      } else if (!place(cell)) {
        refused_.fetch_add(1, std::memory_order_relaxed);
        if (listed) {
          dropped.push_back(list_of(cell));
        } else {
          count_keys(slot, -1);
        }
      }
    }
  }
  change(partition, [&] {
    std::atomic<std::uint32_t>* const mine = &segments_[std::size_t{partition} * max_segments_];
    for (std::uint32_t at = 0; at < before; ++at)
      free_segments_.push_back(mine[at].load(std::memory_order_relaxed));
    for (std::uint32_t at = 0; at < segments; ++at)
      mine[at].store(taken[at], std::memory_order_release);
    Header& header = headers_[partition];
    const std::uint64_t sequence = header.load(std::memory_order_relaxed) >> 32;
    header.store(sequence << 32 | segments, std::memory_order_relaxed);
  });
  for (List* const list : dropped) {
    for (std::uint32_t at = 0; at < list->size(); ++at)
      count_keys(list->begin()[at], -1);
    free_list(list);
    shared_tags_.fetch_sub(1, std::memory_order_relaxed);
  }
  room.limit = static_cast<std::uint32_t>(kMaxLoad * segments * kSegmentCells);
  rebuilds_.fetch_add(1, std::memory_order_relaxed);
  count_bytes();
  return true;
}

// Keeps (1) and (2): what may move back into the gap does, until the gap is in a line that nothing
// behind it needs full. REQUIRES: within `change`.
void Registry::erase_cell(std::uint32_t partition, Place place) noexcept {
  const auto lines = kSegmentLines * static_cast<std::uint32_t>(
                                         headers_[partition].load(std::memory_order_relaxed));
  // Whether the line was full before; then its last cell is the gap.
  const auto erase_in_line = [](const Place& at) {
    const std::uint32_t last = used_cells(at.line) - 1;
    store_shared(at.line[at.cell], load_shared(at.line[last]));
    store_shared(at.line[last], Cell{0});
    return last + 1 == kLineCells;
  };
  --rooms_[partition].cells;
  bool gap = erase_in_line(place);
  Place next = place;
  while (gap) {
    next.number = next.number + 1 == lines ? 0 : next.number + 1;
    if (next.number == place.number) return;
    next.line = line_at(partition, next.number);
    const std::uint32_t used = used_cells(next.line);
    bool moved = false;
    for (next.cell = 0; next.cell < used; ++next.cell) {
      const Cell cell = load_shared(next.line[next.cell]);
      const std::uint32_t home = home_of(tag_of(partition, cell), lines);
      const std::uint32_t distance = (next.number + lines - home) % lines;
      const std::uint32_t gap_distance = (place.number + lines - home) % lines;
      if (gap_distance >= distance) continue;
      store_shared(place.line[kLineCells - 1], cell);
      moved = true;
      break;
    }
    if (moved) {
      gap = erase_in_line(next);
      place = next;
    } else {
      gap = used == kLineCells;
    }
  }
}

// REQUIRES: within `change`.
void Registry::erase_listed(std::uint32_t partition, const Place& place, List* list,
                            std::uint32_t at) noexcept {
  const std::uint32_t size = list->size();
  count_keys(list->begin()[at], -1);
  store_shared(list->begin()[at], load_shared(list->begin()[size - 1]));
  store_shared(list->count, std::uint64_t{size - 1});
  if (size > 1) return;
  erase_cell(partition, place);
  free_list(list);
  shared_tags_.fetch_sub(1, std::memory_order_relaxed);
}

// False: no memory.
bool Registry::admit_listed(Slot slot, std::uint32_t partition, const Place& place,
                            bool* added) noexcept {
  const Cell cell = load_shared(place.line[place.cell]);
  List* list = list_of(cell);
  const std::uint32_t size = list->size();
  *added = std::find(list->begin(), list->begin() + size, slot) == list->begin() + size;
  if (!*added) return true;
  const std::uint32_t cls = list->size_class();
  if (size == List::capacity(cls)) {
    List* const larger = take_list(cls + 1);
    if (larger == nullptr) return false;
    store_shared(larger->tag_and_class, list->tag() | (cls + 1));
    for (std::uint32_t at = 0; at < size; ++at)
      store_shared(larger->begin()[at], load_shared(list->begin()[at]));
    store_shared(larger->count, std::uint64_t{size});
    const auto number =
        static_cast<std::uint64_t>(reinterpret_cast<std::uint8_t*>(larger) - lists_.at(0)) / 64;
    change(partition,
           [&] { store_shared(place.line[place.cell], number << 36 | (cell & kListCellBits)); });
    free_list(list);
    list = larger;
  }
  store_shared(list->begin()[size], slot);
  store_shared(list->count, std::uint64_t{size + 1});
  return true;
}

// One cell for the holders of a tag that has kMaxInline of them, and this one.
Registry::Admitted Registry::make_list(Slot slot, Tag tag) noexcept {
  List* const list = take_list(0);
  if (list == nullptr) return Admitted::kNoSpace;
  const std::uint32_t partition = partition_of(tag);
  const auto lines = kSegmentLines * static_cast<std::uint32_t>(
                                         headers_[partition].load(std::memory_order_relaxed));
  const std::uint32_t home = home_of(tag, lines);
  const Cell wanted = stored_of(tag) << 16;
  std::uint32_t size = 0;
  bool placed = false;
  store_shared(list->tag_and_class, tag);
  change(partition, [&] {
    Place place{nullptr, home, 0};
    // Until the end of the chain holds none; what an erased cell pulls back comes into lines that
    // are looked at again.
    for (bool full = true; full;) {
      place.line = line_at(partition, place.number);
      bool erased = false;
      full = true;
      for (place.cell = 0; place.cell < kLineCells && !erased; ++place.cell) {
        const Cell cell = load_shared(place.line[place.cell]);
        full &= cell != 0;
        if (cell == 0 || static_cast<Slot>(cell) == kListed || (cell ^ wanted) >> 16 != 0) continue;
        store_shared(list->begin()[size++], static_cast<Slot>(cell));
        erase_cell(partition, place);
        erased = true;
      }
      if (erased) {
        full = true;
      } else if (++place.number == lines) {
        place.number = 0;
      }
      if (!erased && place.number == home) break;
    }
    store_shared(list->begin()[size++], slot);
    store_shared(list->count, std::uint64_t{size});
    const auto number =
        static_cast<std::uint64_t>(reinterpret_cast<std::uint8_t*>(list) - lists_.at(0)) / 64;
    placed = put_cell(partition, lines, home, number << 36 | (wanted & kListCellBits) | kListed);
  });
  if (placed) {
    ++rooms_[partition].cells;
    shared_tags_.fetch_add(1, std::memory_order_relaxed);
    return Admitted::kAdded;
  }
  // Others came nearer to their homes and left no room: only tags that are no digests lie so.
  for (std::uint32_t at = 0; at + 1 < size; ++at)
    count_keys(list->begin()[at], -1);
  refused_.fetch_add(size - 1, std::memory_order_relaxed);
  free_list(list);
  return Admitted::kRefused;
}

Registry::Admitted Registry::admit_one(Slot slot, Tag tag) noexcept {
  const std::uint32_t partition = partition_of(tag);
  PartitionRoom& room = rooms_[partition];
  const auto segments_now = [&] {
    return static_cast<std::uint32_t>(headers_[partition].load(std::memory_order_relaxed));
  };
  if (room.cells >= room.limit && !rebuild(partition, next_segments(partition, segments_now())) &&
      room.cells >= kFullLoad * segments_now() * kSegmentCells)
    return Admitted::kNoSpace;
  const std::uint32_t lines = segments_now() * kSegmentLines;
  const Cell wanted = stored_of(tag) << 16;
  Place place{nullptr, home_of(tag, lines), 0};
  Cell* gap = nullptr;
  std::uint32_t holders = 0;
  for (std::uint32_t probed = 0; probed <= kMaxProbeLines && gap == nullptr; ++probed) {
    place.line = line_at(partition, place.number);
    const std::uint32_t used = used_cells(place.line);
    if (used < kLineCells) gap = &place.line[used];
    for (std::uint32_t alike = alike_cells(place.line, wanted); alike != 0; alike &= alike - 1) {
      place.cell = static_cast<std::uint32_t>(std::countr_zero(alike));
      const Cell cell = load_shared(place.line[place.cell]);
      if (cell == 0) break;
      if (static_cast<Slot>(cell) == kListed) {
        if (list_of(cell)->tag() != tag) continue;
        bool added = false;
        if (!admit_listed(slot, partition, place, &added)) return Admitted::kNoSpace;
        if (added) count_keys(slot, 1);
        return added ? Admitted::kAdded : Admitted::kPresent;
      }
      if ((cell ^ wanted) >> 16 != 0) continue;
      if (static_cast<Slot>(cell) == slot) return Admitted::kPresent;
      ++holders;
    }
    if (++place.number == lines) place.number = 0;
  }
  if (holders >= kMaxInline) {
    const Admitted admitted = make_list(slot, tag);
    if (admitted != Admitted::kAdded) return admitted;
  } else if (gap != nullptr) {
    store_shared(*gap, wanted | slot);
    ++room.cells;
  } else if (room.cells <= kCrowdedLoad * lines * kLineCells) {
    return Admitted::kRefused;
  } else if (rebuild(partition, next_segments(partition, segments_now()))) {
    return admit_one(slot, tag);
  } else {
    return Admitted::kNoSpace;
  }
  count_keys(slot, 1);
  return Admitted::kAdded;
}

bool Registry::evict_one(Slot slot, Tag tag) noexcept {
  const std::uint32_t partition = partition_of(tag);
  const auto lines = kSegmentLines * static_cast<std::uint32_t>(
                                         headers_[partition].load(std::memory_order_relaxed));
  if (lines == 0) return false;
  const Cell wanted = stored_of(tag) << 16;
  Place place{nullptr, home_of(tag, lines), 0};
  bool full = true;
  for (std::uint32_t probed = 0; probed <= kMaxProbeLines && full; ++probed) {
    place.line = line_at(partition, place.number);
    full = load_shared(place.line[kLineCells - 1]) != 0;
    for (std::uint32_t alike = alike_cells(place.line, wanted); alike != 0; alike &= alike - 1) {
      place.cell = static_cast<std::uint32_t>(std::countr_zero(alike));
      const Cell cell = load_shared(place.line[place.cell]);
      if (static_cast<Slot>(cell) == kListed) {
        List* const list = list_of(cell);
        if (list->tag() != tag) continue;
        const std::uint32_t size = list->size();
        const auto at = static_cast<std::uint32_t>(
            std::find(list->begin(), list->begin() + size, slot) - list->begin());
        if (at == size) return false;
        change(partition, [&] { erase_listed(partition, place, list, at); });
        return true;
      }
      if (cell != (wanted | slot)) continue;
      change(partition, [&] { erase_cell(partition, place); });
      count_keys(slot, -1);
      return true;
    }
    if (++place.number == lines) place.number = 0;
  }
  return false;
}

// `work` says whether to go on. A slot that is retired meanwhile is left alone from the next turn
// on: a sweep, which begins in a turn of its own, finds all that came into it.
template <typename Work>
Status Registry::in_turns(Slot slot, TagSpan tags, Work work) noexcept {
  for (std::size_t begin = 0; begin == 0 || begin < tags.size(); begin += kPieceKeys) {
    const std::size_t end = std::min(begin + kPieceKeys, tags.size());
    const std::lock_guard turn(turns_);
    if (!can_be_filled(slot))
      return {StatusCode::kNotFound, "slot: is neither hidden nor visible", slot};
    for (std::size_t at = begin; at < std::min(begin + kPrefetchKeys, end); ++at)
      prefetch(tags[at]);
    for (std::size_t at = begin; at < end; ++at) {
      if (at + kPrefetchKeys < end) prefetch(tags[at + kPrefetchKeys]);
      if (!work(tags[at])) return {StatusCode::kNoSpace, "max_bytes: the registry has no more"};
    }
  }
  return {};
}

Status Registry::admit(Slot slot, TagSpan tags, std::uint64_t* added) noexcept {
  return in_turns(slot, tags, [&](Tag tag) {
    const Admitted admitted = admit_one(slot, tag);
    *added += admitted == Admitted::kAdded;
    if (admitted == Admitted::kRefused) refused_.fetch_add(1, std::memory_order_relaxed);
    return admitted != Admitted::kNoSpace;
  });
}

Status Registry::evict(Slot slot, TagSpan tags, std::uint64_t* removed) noexcept {
  return in_turns(slot, tags, [&](Tag tag) {
    *removed += evict_one(slot, tag);
    return true;
  });
}

Status Registry::restore(TagSpan tags, std::span<const Slot> slots, std::span<const Slot> slot_of,
                         std::uint64_t* added) noexcept {
  for (std::size_t at = 0; at < tags.size(); ++at) {
    const Slot slot = slots[at] < slot_of.size() ? slot_of[slots[at]] : kNoSlot;
    if (slot != kNoSlot) KVSTRATA_RETURN_IF_ERROR(admit(slot, tags.subspan(at, 1), added));
  }
  return {};
}

void Registry::sweep_partition(std::uint32_t partition) noexcept {
  const auto segments =
      static_cast<std::uint32_t>(headers_[partition].load(std::memory_order_relaxed));
  Place place{nullptr, 0, 0};
  for (; place.number < segments * kSegmentLines; ++place.number) {
    place.line = line_at(partition, place.number);
    for (place.cell = 0; place.cell < kLineCells;) {
      const Cell cell = load_shared(place.line[place.cell]);
      const auto slot = static_cast<Slot>(cell);
      if (cell == 0) {
        ++place.cell;
      } else if (slot == kListed) {
        List* const list = list_of(cell);
        std::uint32_t left = list->size();
        for (std::uint32_t at = left; at-- > 0;) {
          if (!is_retired(list->begin()[at])) continue;
          change(partition, [&] { erase_listed(partition, place, list, at); });
          --left;
        }
        if (left > 0) ++place.cell;
      } else if (is_retired(slot)) {
        // Something from a line behind may stand here now.
        change(partition, [&] { erase_cell(partition, place); });
        count_keys(slot, -1);
      } else {
        ++place.cell;
      }
    }
  }
  const PartitionRoom& room = rooms_[partition];
  if (segments > 1 && room.cells < kMinLoad * segments * kSegmentCells) {
    std::uint32_t smaller = 1;
    while (room.cells > kMaxLoad / kGrowth * smaller * kSegmentCells)
      smaller = next_segments(partition, smaller);
    if (smaller < segments) (void)rebuild(partition, smaller);
  }
}

std::uint64_t Registry::sweep(std::uint64_t max_cells) noexcept {
  std::uint64_t looked_at = 0;
  do {
    const std::lock_guard turn(turns_);
    if (sweep_at_ == 0) {
      if (retired_.load(std::memory_order_relaxed) == 0) break;
      const std::lock_guard lock(slots_mutex_);
      for (std::uint32_t slot = 1; slot < fresh_slot_; ++slot) {
        if (is_retired(static_cast<Slot>(slot))) sweeping_.push_back(static_cast<Slot>(slot));
      }
      if (sweeping_.empty()) break;
    }
    const auto segments =
        static_cast<std::uint32_t>(headers_[sweep_at_].load(std::memory_order_relaxed));
    sweep_partition(sweep_at_);
    looked_at += std::uint64_t{segments} * kSegmentCells + 1;
    if (++sweep_at_ < kPartitions) continue;
    sweep_at_ = 0;
    const std::lock_guard lock(slots_mutex_);
    for (const Slot slot : sweeping_) {
      rows_[slot].word.store(0, std::memory_order_release);
      free_slots_.push_back(slot);
    }
    retired_.fetch_sub(sweeping_.size(), std::memory_order_relaxed);
    open_.fetch_sub(sweeping_.size(), std::memory_order_relaxed);
    sweeping_.clear();
  } while (looked_at < max_cells);
  return looked_at;
}

std::uint64_t Registry::dump(std::uint64_t cursor, std::uint64_t max_cells, std::vector<Tag>* tags,
                             std::vector<Slot>* slots) noexcept {
  for (std::uint64_t looked_at = 0;
       cursor < kPartitions && looked_at < std::max(max_cells, std::uint64_t{1}); ++cursor) {
    const auto partition = static_cast<std::uint32_t>(cursor);
    const std::lock_guard turn(turns_);
    const auto segments =
        static_cast<std::uint32_t>(headers_[partition].load(std::memory_order_relaxed));
    const auto add = [&](Tag tag, Slot slot) {
      if (state_of(rows_[slot].word.load(std::memory_order_acquire)) != SlotState::kVisible) return;
      tags->push_back(tag);
      slots->push_back(slot);
    };
    for (std::uint32_t number = 0; number < segments * kSegmentLines; ++number) {
      const Cell* const line = line_at(partition, number);
      for (std::uint32_t at = 0; at < kLineCells; ++at) {
        const Cell cell = load_shared(line[at]);
        if (cell == 0) continue;
        const Tag tag = tag_of(partition, cell);
        if (static_cast<Slot>(cell) != kListed) {
          add(tag, static_cast<Slot>(cell));
          continue;
        }
        List* const list = list_of(cell);
        for (std::uint32_t i = 0; i < list->size(); ++i)
          add(tag, list->begin()[i]);
      }
    }
    looked_at += std::uint64_t{segments} * kSegmentCells + 1;
  }
  return cursor < kPartitions ? cursor : 0;
}

}  // namespace kvstrata
