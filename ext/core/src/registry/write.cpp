// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>

#include "registry/cells.h"
#include "registry/registry.h"

namespace kvstrata {

namespace {

// The ratio of successive sizes of a partition. On average the load of the table is 0.53.
constexpr double kGrowth = 1.5;
// The load up to which a partition is filled when there is no memory to grow.
constexpr double kFullLoad = 0.9;
// Tags with several cells make long chains early. A partition above this load grows when a chain is
// too long; below it, the cell is refused.
constexpr double kCrowdedLoad = 0.4;
// A partition below this load is rebuilt with fewer lines after a sweep.
constexpr double kMinLoad = 0.25;

}  // namespace

// Calls make() under the seqlock: readers that read the partition meanwhile start anew.
template <typename Change>
void Registry::change(std::uint32_t partition, Change make) noexcept {
  std::atomic<std::uint64_t>& word = headers_[partition].word;
  const std::uint64_t before = word.load(std::memory_order_relaxed);
  word.store(before + (std::uint64_t{1} << 32), std::memory_order_relaxed);
  make();
  const std::uint64_t lines = word.load(std::memory_order_relaxed) & 0xFFFFFFFF;
  word.store(((before >> 32) + 2) << 32 | lines, std::memory_order_release);
}

void Registry::count_keys(Slot slot, std::int64_t more) noexcept {
  std::atomic<std::uint64_t>& keys = keys_[slot];
  keys.store(keys.load(std::memory_order_relaxed) + static_cast<std::uint64_t>(more),
             std::memory_order_relaxed);
  placements_.store(placements_.load(std::memory_order_relaxed) + static_cast<std::uint64_t>(more),
                    std::memory_order_relaxed);
}

// Takes empty lines: the first free run that is large enough, or new bytes of the arena. False: the
// registry has no room.
bool Registry::take_lines(std::uint64_t bytes, std::uint64_t* begin) noexcept {
  for (auto run = free_lines_.begin(); run != free_lines_.end(); ++run) {
    if (run->second < bytes) continue;
    *begin = run->first;
    const std::uint64_t left = run->second - bytes;
    free_lines_.erase(run);
    if (left != 0) free_lines_.emplace(*begin + bytes, left);
    for (std::uint64_t at = 0; at < bytes; at += sizeof(Cell))
      store_shared(*reinterpret_cast<Cell*>(cells_.at(*begin + at)), Cell{0});
    return true;
  }
  if (!has_room_for(bytes, 0)) return false;
  *begin = used_cells_bytes_;
  used_cells_bytes_ += bytes;
  cells_.touch(soon_used_bytes());
  return true;
}

void Registry::free_lines(std::uint64_t begin, std::uint64_t bytes) noexcept {
  if (bytes == 0) return;
  auto next = free_lines_.lower_bound(begin);
  if (next != free_lines_.end() && next->first == begin + bytes) {
    bytes += next->second;
    next = free_lines_.erase(next);
  }
  if (next != free_lines_.begin() && std::prev(next)->first + std::prev(next)->second == begin) {
    std::prev(next)->second += bytes;
  } else {
    free_lines_.emplace(begin, bytes);
  }
}

Registry::List* Registry::take_list(std::uint32_t cls) noexcept {
  static_assert(List::capacity(kListClasses - 1) >= kMaxSlots);  // all slots may hold the same tag
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
  free_lists_[list->size_class()].push_back(static_cast<std::uint32_t>(name_of(list) >> 36));
}

// Stores the cell in the first line from `home` on that has room. False: none of the lines that
// look-ups probe has room.
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

// The next larger size of a partition. The sizes of partition p, in pieces, are
// ceil(kGrowth^(i + p / kPartitions)) for i = 0, 1, ..., so that the sizes of all partitions are
// spread evenly.
std::uint32_t Registry::next_lines(std::uint32_t partition, std::uint32_t lines) noexcept {
  if (lines == 0) return kPieceLines;
  double size = std::pow(kGrowth, static_cast<double>(partition) / kPartitions);
  while (std::ceil(size) * kPieceLines <= lines)
    size *= kGrowth;
  return static_cast<std::uint32_t>(std::ceil(size)) * kPieceLines;
}

// Moves the cells of a partition to new lines, except those of retired slots. False: there is no
// memory for the new lines, and nothing has changed.
bool Registry::rebuild(std::uint32_t partition, std::uint32_t lines) noexcept {
  std::uint64_t begin = 0;
  if (lines > max_lines_ || !take_lines(lines * kLineBytes, &begin)) return false;
  const std::uint32_t lines_before = lines_of(partition);
  const std::uint64_t begin_before = headers_[partition].begin.load(std::memory_order_relaxed);
  Cell* const made = reinterpret_cast<Cell*>(cells_.at(begin));
  PartitionRoom& room = rooms_[partition];
  room.cells = 0;
  line_cells_.assign(lines, 0);
  const auto place = [&](Cell cell) {
    std::uint32_t home = home_of(tag_of(partition, cell), lines);
    for (std::uint32_t probed = 0; probed <= kMaxProbeLines && probed < lines; ++probed) {
      if (line_cells_[home] < kLineCells) {
        store_shared(made[std::size_t{home} * kLineCells + line_cells_[home]++], cell);
        ++room.cells;
        return true;
      }
      if (++home == lines) home = 0;
    }
    return false;
  };
  std::vector<List*> dropped;
  for (std::uint32_t number = 0; number < lines_before; ++number) {
    const Cell* const line = line_at(partition, number);
    for (std::uint32_t at = 0; at < kLineCells; ++at) {
      const Cell cell = load_shared(line[at]);
      const auto slot = static_cast<Slot>(cell);
      if (cell == 0) continue;
      const bool listed = slot == kListed;
      // The cell of a retired slot whose tag may have other cells stays until the sweep, which
      // updates kMore.
      if (!listed && (cell & kMore) == 0 && is_retired(slot)) {
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
  use_lines(partition, begin, lines);
  free_lines(begin_before, lines_before * kLineBytes);
  for (List* const list : dropped) {
    for (std::uint32_t at = 0; at < list->size(); ++at)
      count_keys(list->begin()[at], -1);
    free_list(list);
    shared_tags_.fetch_sub(1, std::memory_order_relaxed);
  }
  rebuilds_.fetch_add(1, std::memory_order_relaxed);
  count_bytes();
  return true;
}

// Lets readers find the partition in these lines from now on.
void Registry::use_lines(std::uint32_t partition, std::uint64_t begin,
                         std::uint32_t lines) noexcept {
  Header& header = headers_[partition];
  change(partition, [&] {
    header.begin.store(begin, std::memory_order_release);
    const std::uint64_t sequence = header.word.load(std::memory_order_relaxed) >> 32;
    header.word.store(sequence << 32 | lines, std::memory_order_relaxed);
  });
  rooms_[partition].limit = static_cast<std::uint32_t>(kMaxLoad * lines * kLineCells);
}

// Removes a cell and keeps invariants (1) and (2): moves a later cell back into the gap, if its
// chain passes the gap's line, and repeats that for the new gap. REQUIRES: within change().
void Registry::erase_cell(std::uint32_t partition, Place place) noexcept {
  const std::uint32_t lines = lines_of(partition);
  // Returns true if the line was full before; its last cell is the gap then.
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

// Removes a cell of one holder. If the tag has a single cell left, clears kMore in that cell, so
// that look-ups end there (3). REQUIRES: within change().
void Registry::erase_holder(std::uint32_t partition, const Place& place) noexcept {
  const Cell erased = load_shared(place.line[place.cell]);
  count_keys(static_cast<Slot>(erased), -1);
  erase_cell(partition, place);
  if ((erased & kMore) == 0) return;
  const std::uint32_t lines = lines_of(partition);
  std::uint32_t number = home_of(tag_of(partition, erased), lines);
  Cell* left = nullptr;
  bool full = true;
  for (std::uint32_t probed = 0; probed <= kMaxProbeLines && full; ++probed) {
    Cell* const line = line_at(partition, number);
    const std::uint32_t used = used_cells(line);
    for (std::uint32_t at = 0; at < used; ++at) {
      const Cell cell = load_shared(line[at]);
      if ((cell ^ erased) >> kStoredShift != 0 || static_cast<Slot>(cell) == kListed) continue;
      if (left != nullptr) return;
      left = &line[at];
    }
    full = used == kLineCells;
    if (++number == lines) number = 0;
  }
  if (left != nullptr) store_shared(*left, load_shared(*left) & ~kMore);
}

// Removes entry `at` of a list; with the last entry, also the list and its cell. REQUIRES: within
// change().
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

// Adds `slot` to the list that a cell names, unless the list has it already, and sets `*added`.
// False: the registry has no room for a larger list.
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
    change(partition,
           [&] { store_shared(place.line[place.cell], name_of(larger) | (cell & kListCellBits)); });
    free_list(list);
    list = larger;
  }
  store_shared(list->begin()[size], slot);
  store_shared(list->count, std::uint64_t{size + 1});
  return true;
}

// Replaces the kMaxInline cells of a tag with one cell that names a list of those holders and
// `slot`.
Registry::Admitted Registry::make_list(Slot slot, Tag tag) noexcept {
  List* const list = take_list(0);
  if (list == nullptr) return Admitted::kNoSpace;
  const std::uint32_t partition = partition_of(tag);
  const std::uint32_t lines = lines_of(partition);
  const std::uint32_t home = home_of(tag, lines);
  const Cell wanted = cell_of(tag);
  std::uint32_t size = 0;
  bool placed = false;
  store_shared(list->tag_and_class, tag);
  change(partition, [&] {
    Place place{nullptr, home, 0};
    // Until the end of the chain. erase_cell() may move another cell into this line, so a line with
    // an erased cell is examined again.
    for (bool full = true; full;) {
      place.line = line_at(partition, place.number);
      bool erased = false;
      full = true;
      for (place.cell = 0; place.cell < kLineCells && !erased; ++place.cell) {
        const Cell cell = load_shared(place.line[place.cell]);
        full &= cell != 0;
        if (cell == 0 || static_cast<Slot>(cell) == kListed || (cell ^ wanted) >> kStoredShift != 0)
          continue;
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
    placed = put_cell(partition, lines, home, name_of(list) | (wanted & kListCellBits) | kListed);
  });
  if (placed) {
    ++rooms_[partition].cells;
    shared_tags_.fetch_add(1, std::memory_order_relaxed);
    return Admitted::kAdded;
  }
  // Cells of other tags have moved into the places of the erased cells and left no room. This
  // happens only if the tags are not digests.
  for (std::uint32_t at = 0; at + 1 < size; ++at)
    count_keys(list->begin()[at], -1);
  refused_.fetch_add(size - 1, std::memory_order_relaxed);
  free_list(list);
  return Admitted::kRefused;
}

Registry::Admitted Registry::admit_one(Slot slot, Tag tag) noexcept {
  const std::uint32_t partition = partition_of(tag);
  PartitionRoom& room = rooms_[partition];
  if (room.cells >= room.limit && !rebuild(partition, next_lines(partition, lines_of(partition))) &&
      room.cells >= kFullLoad * lines_of(partition) * kLineCells)
    return Admitted::kNoSpace;
  const std::uint32_t lines = lines_of(partition);
  const Cell wanted = cell_of(tag);
  Place place{nullptr, home_of(tag, lines), 0};
  Cell* gap = nullptr;
  Cell* holder = nullptr;
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
      if ((cell ^ wanted) >> kStoredShift != 0) continue;
      if (static_cast<Slot>(cell) == slot) return Admitted::kPresent;
      holder = &place.line[place.cell];
      ++holders;
    }
    if (++place.number == lines) place.number = 0;
  }
  if (holders >= kMaxInline) {
    const Admitted admitted = make_list(slot, tag);
    if (admitted != Admitted::kAdded) return admitted;
  } else if (gap != nullptr) {
    store_shared(*gap, wanted | (holders != 0 ? kMore : 0) | slot);
    if (holders == 1) store_shared(*holder, load_shared(*holder) | kMore);
    ++room.cells;
  } else if (room.cells <= kCrowdedLoad * lines * kLineCells) {
    return Admitted::kRefused;
  } else if (rebuild(partition, next_lines(partition, lines))) {
    return admit_one(slot, tag);
  } else {
    return Admitted::kNoSpace;
  }
  count_keys(slot, 1);
  return Admitted::kAdded;
}

bool Registry::evict_one(Slot slot, Tag tag) noexcept {
  const std::uint32_t partition = partition_of(tag);
  const std::uint32_t lines = lines_of(partition);
  if (lines == 0) return false;
  const Cell wanted = cell_of(tag);
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
      if ((cell & ~kMore) != (wanted | slot)) continue;
      change(partition, [&] { erase_holder(partition, place); });
      return true;
    }
    if (++place.number == lines) place.number = 0;
  }
  return false;
}

// Calls work(tag) for all tags, in turns of kTurnKeys, until it returns false (no memory). Checks
// at the beginning of each turn that the slot is not retired. A sweep begins in a turn of its own,
// so it finds all cells of a retired slot.
template <typename Work>
Status Registry::in_turns(Slot slot, TagSpan tags, Work work) noexcept {
  for (std::size_t begin = 0; begin == 0 || begin < tags.size(); begin += kTurnKeys) {
    const std::lock_guard turn(turns_);
    if (!can_be_filled(slot))
      return {StatusCode::kNotFound, "slot: is neither hidden nor visible", slot};
    const std::size_t keys = std::min(kTurnKeys, tags.size() - begin);
    if (!in_groups(tags.subspan(begin, keys), work))
      return {StatusCode::kNoSpace, "max_bytes: the registry is full"};
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

void Registry::sweep_partition(std::uint32_t partition) noexcept {
  const std::uint32_t lines = lines_of(partition);
  Place place{nullptr, 0, 0};
  for (; place.number < lines; ++place.number) {
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
        // Not ++place.cell: a cell of a later line may have moved here.
        change(partition, [&] { erase_holder(partition, place); });
      } else {
        ++place.cell;
      }
    }
  }
  const PartitionRoom& room = rooms_[partition];
  if (lines > kPieceLines && room.cells < kMinLoad * lines * kLineCells) {
    std::uint32_t smaller = kPieceLines;
    while (room.cells > kMaxLoad / kGrowth * smaller * kLineCells)
      smaller = next_lines(partition, smaller);
    if (smaller < lines) (void)rebuild(partition, smaller);
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
    looked_at += std::uint64_t{lines_of(sweep_at_)} * kLineCells + 1;
    sweep_partition(sweep_at_);
    if (++sweep_at_ < kPartitions) continue;
    sweep_at_ = 0;
    const std::lock_guard lock(slots_mutex_);
    for (const Slot slot : sweeping_) {
      rows_[slot].store(0, std::memory_order_release);
      free_slots_.push_back(slot);
    }
    retired_.fetch_sub(sweeping_.size(), std::memory_order_relaxed);
    open_.fetch_sub(sweeping_.size(), std::memory_order_relaxed);
    sweeping_.clear();
  } while (looked_at < max_cells);
  return looked_at;
}

}  // namespace kvstrata
