// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/slab.h"

#include <algorithm>

namespace kvstrata {

namespace {

constexpr std::uint64_t kSlabsPerPool = 32;

constexpr std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) {
  return a / b + (a % b != 0);
}

// The slab size for a pool whose first extent has this size: REQUIRES extent_bytes <=
// extents_bytes.
std::uint64_t slab_size(std::uint64_t extents_bytes, std::uint64_t extent_bytes) {
  const std::uint64_t wanted = std::max(extent_bytes, extents_bytes / kSlabsPerPool);
  const std::uint64_t slab = divide_up(wanted, extent_bytes) * extent_bytes;
  return slab <= extents_bytes ? slab : extents_bytes / extent_bytes * extent_bytes;
}

}  // namespace

std::uint32_t stored_slab_count(std::uint64_t extents_bytes, std::uint64_t slab_bytes) noexcept {
  if (slab_bytes == 0 || slab_bytes % kExtentAlignment != 0 || slab_bytes > extents_bytes) return 0;
  const std::uint64_t slabs = divide_up(extents_bytes, slab_bytes);
  return slabs <= kMaxSlabs ? static_cast<std::uint32_t>(slabs) : 0;
}

StoredRun stored_run(std::span<const std::uint64_t> table, std::uint32_t slab,
                     std::uint32_t slab_count) noexcept {
  const std::uint64_t word = load_word(table[slab]);
  const StoredRun run = {slab_run_slabs(word), slab_extent_bytes(word)};
  if (run.extent_bytes == 0 || run.slabs == 0 || slab + run.slabs > slab_count) return {};
  for (std::uint32_t i = 0; i < run.slabs; ++i) {
    if (load_word(table[slab + i]) != pack_slab(run.extent_bytes, run.slabs, i)) return {};
  }
  return run;
}

SlabMap::SlabMap(std::uint64_t extents_bytes, std::uint64_t* slab_bytes_word,
                 std::span<std::uint64_t> table) noexcept
    : extents_bytes_(extents_bytes), slab_bytes_word_(slab_bytes_word), table_(table) {
  std::fill(std::begin(run_of_), std::end(run_of_), kNoRun);
}

bool SlabMap::restore() noexcept {
  const std::uint64_t slab_bytes = load_word(*slab_bytes_word_);
  slab_count_ = stored_slab_count(extents_bytes_, slab_bytes);
  const bool sound = slab_bytes == 0 || slab_count_ != 0;
  if (slab_count_ != 0) {
    slab_bytes_ = slab_bytes;
  } else {
    store_word<std::uint64_t>(*slab_bytes_word_, 0);
  }
  std::uint32_t slab = 0;
  while (slab < slab_count_) {
    const auto [slabs, extent] = stored_run(table_, slab, slab_count_);
    const bool whole = slabs != 0 && bytes_between(slab, slabs) >= extent;
    bool recycled = false;
    std::uint32_t cls = kNoClass;
    if (whole) {
      used_extents_ += 1;  // keeps class_for from choosing another geometry
      cls = class_for(extent, &recycled);
      used_extents_ -= 1;
    }
    if (cls != kNoClass) {
      make_run(slab, slabs, cls);
      slab += slabs;
    } else {
      store_word<std::uint64_t>(table_[slab], 0);
      slab += 1;
    }
  }
  for (; slab < kMaxSlabs; ++slab) {
    if (load_word(table_[slab]) != 0) store_word<std::uint64_t>(table_[slab], 0);
  }
  return sound;
}

std::uint64_t SlabMap::bytes_between(std::uint32_t first, std::uint32_t slabs) const noexcept {
  const std::uint64_t begin = first * slab_bytes_;
  return std::min(extents_bytes_, begin + slabs * slab_bytes_) - begin;
}

// The smallest number of slabs that extents of this size fill to at least seven eighths. If none of
// the first few numbers does so, the one with the least waste.
std::uint32_t SlabMap::slabs_for(std::uint64_t extent_bytes) const noexcept {
  const std::uint64_t fewest = divide_up(extent_bytes, slab_bytes_);
  if (fewest >= slab_count_) return slab_count_;
  const std::uint64_t most =
      std::min<std::uint64_t>(fewest + 3, std::max<std::uint64_t>(fewest, slab_count_ / 4));
  std::uint64_t best = fewest;
  std::uint64_t best_waste = ~0ULL;  // in 1/1024 of the run
  for (std::uint64_t slabs = fewest; slabs <= most; ++slabs) {
    const std::uint64_t bytes = slabs * slab_bytes_;
    const std::uint64_t waste = (bytes % extent_bytes) * 1024 / bytes;
    if (waste <= 128) return static_cast<std::uint32_t>(slabs);
    if (waste < best_waste) {
      best = slabs;
      best_waste = waste;
    }
  }
  return static_cast<std::uint32_t>(best);
}

void SlabMap::set_geometry(std::uint64_t extent_bytes) {
  for (std::uint32_t slab = 0; slab < slab_count_; ++slab) {
    if (runs_[slab].slabs != 0) dissolve_run(slab);
  }
  slab_bytes_ = slab_size(extents_bytes_, extent_bytes);
  slab_count_ = static_cast<std::uint32_t>(divide_up(extents_bytes_, slab_bytes_));
  store_word(*slab_bytes_word_, slab_bytes_);
  for (Class& size_class : classes_) {
    if (size_class.extent_bytes != 0) size_class.run_slabs = slabs_for(size_class.extent_bytes);
  }
}

std::uint32_t SlabMap::find_class(std::uint64_t extent_bytes) const noexcept {
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    if (classes_[cls].extent_bytes == extent_bytes) return cls;
  }
  return kNoClass;
}

std::uint32_t SlabMap::class_for(std::uint64_t extent_bytes, bool* recycled) {
  *recycled = false;
  if (extent_bytes == 0 || extent_bytes > extents_bytes_) return kNoClass;
  if (used_extents_ == 0 && slab_bytes_ != slab_size(extents_bytes_, extent_bytes))
    set_geometry(extent_bytes);
  std::uint32_t cls = find_class(extent_bytes);
  if (cls != kNoClass) return cls;
  cls = find_class(0);
  if (cls == kNoClass) {
    // There are as many ids as slabs. So some id has no extent now, or every slab is in use.
    for (std::uint32_t other = 0; other < kMaxClasses && cls == kNoClass; ++other) {
      if (classes_[other].used == 0) cls = other;
    }
    if (cls == kNoClass) return kNoClass;
    for (std::uint32_t slab = 0; slab < slab_count_; ++slab) {
      if (runs_[slab].slabs != 0 && runs_[slab].cls == cls) dissolve_run(slab);
    }
    *recycled = true;
  }
  classes_[cls] = Class{};
  classes_[cls].extent_bytes = extent_bytes;
  classes_[cls].run_slabs = slabs_for(extent_bytes);
  return cls;
}

bool SlabMap::is_loose(std::uint32_t slab) const noexcept {
  return run_of_[slab] == kNoRun || runs_[run_of_[slab]].used == 0;
}

void SlabMap::make_run(std::uint32_t first, std::uint32_t slabs, std::uint32_t cls) {
  for (std::uint32_t slab = first; slab < first + slabs; ++slab) {
    if (run_of_[slab] != kNoRun) dissolve_run(run_of_[slab]);
  }
  Run& run = runs_[first];
  const std::uint64_t extent = classes_[cls].extent_bytes;
  run.slabs = slabs;
  run.cls = cls;
  run.capacity = static_cast<std::uint32_t>(bytes_between(first, slabs) / extent);
  run.used = run.blocked = run.fresh = 0;
  run.newest = run.retry_at = 0;
  run.slots.assign(run.capacity, 0);
  run.freed.clear();
  classes_[cls].capacity += run.capacity;
  for (std::uint32_t i = 0; i < slabs; ++i) {
    run_of_[first + i] = first;
    store_word(table_[first + i], pack_slab(extent, slabs, i));
  }
}

// REQUIRES: the run is empty.
void SlabMap::dissolve_run(std::uint32_t first) noexcept {
  Run& run = runs_[first];
  for (std::uint32_t i = 0; i < run.slabs; ++i) {
    run_of_[first + i] = kNoRun;
    store_word<std::uint64_t>(table_[first + i], 0);
  }
  classes_[run.cls].capacity -= run.capacity;
  run.slabs = 0;
  run.cls = kNoClass;
  run.capacity = run.used = run.blocked = run.fresh = 0;
  run.slots.clear();
  run.freed.clear();
}

std::uint32_t SlabMap::take_slot(std::uint32_t first, const Backing* backing) {
  Run& run = runs_[first];
  const std::uint64_t extent = classes_[run.cls].extent_bytes;
  const auto suits = [&](std::uint32_t slot) {
    return backing == nullptr || backing->is_backed(offset_of(first, slot), extent);
  };
  for (std::size_t i = run.freed.size(); i-- > 0;) {
    const std::uint32_t slot = run.freed[i];
    if (!suits(slot)) continue;
    run.freed.erase(run.freed.begin() + static_cast<std::ptrdiff_t>(i));
    return slot;
  }
  while (run.fresh < run.capacity) {
    const std::uint32_t slot = run.fresh++;
    if (suits(slot)) return slot;
    run.freed.push_back(slot);
  }
  return kNoSlabSlot;
}

bool SlabMap::any_backed(const Backing& backing, std::uint64_t offset, std::uint64_t extent_bytes,
                         std::uint64_t slots) noexcept {
  for (std::uint64_t slot = 0; slot < slots; ++slot) {
    if (backing.is_backed(offset + slot * extent_bytes, extent_bytes)) return true;
  }
  return false;
}

bool SlabMap::allocate(std::uint32_t cls, std::uint32_t entry, const Backing* backing,
                       SlabPlace* place) {
  const Class& size_class = classes_[cls];
  std::uint32_t chosen = kNoRun;
  std::uint32_t slot = kNoSlabSlot;
  std::uint64_t tried = 0;
  while (slot == kNoSlabSlot && size_class.used < size_class.capacity) {
    // The fullest run that has room: the emptier ones get a chance to run dry and change class.
    chosen = kNoRun;
    for (std::uint32_t first = 0; first < slab_count_; ++first) {
      const Run& run = runs_[first];
      if (run.slabs == 0 || run.cls != cls || run.used == run.capacity) continue;
      if ((tried >> first & 1) != 0) continue;
      if (chosen == kNoRun ||
          run.capacity - run.used < runs_[chosen].capacity - runs_[chosen].used) {
        chosen = first;
      }
    }
    if (chosen == kNoRun) break;
    tried |= 1ULL << chosen;
    slot = take_slot(chosen, backing);
  }
  // Runs of one slab fill the file from its start, longer ones from its end, so that short runs do
  // not fragment the space for long ones.
  const std::uint64_t extent = size_class.extent_bytes;
  const std::uint32_t fewest = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(divide_up(extent, slab_bytes_), slab_count_));
  for (const std::uint32_t slabs : {size_class.run_slabs, fewest}) {
    if (slot != kNoSlabSlot || slabs == 0 || slabs > slab_count_) break;
    std::uint32_t best = kNoRun;
    std::uint64_t best_capacity = 0;
    std::uint32_t loose = 0;
    for (std::uint32_t slab = 0; slab < slab_count_; ++slab) {
      loose = is_loose(slab) ? loose + 1 : 0;
      if (loose < slabs) continue;
      const std::uint32_t first = slab + 1 - slabs;
      const std::uint64_t capacity = bytes_between(first, slabs) / extent;
      const bool better = slabs == 1 ? capacity > best_capacity : capacity >= best_capacity;
      if (capacity > 0 && better &&
          (backing == nullptr || any_backed(*backing, first * slab_bytes_, extent, capacity))) {
        best = first;
        best_capacity = capacity;
      }
    }
    if (best != kNoRun) {
      make_run(best, slabs, cls);
      chosen = best;
      slot = take_slot(chosen, backing);
    }
  }
  if (slot == kNoSlabSlot) return false;
  Run& run = runs_[chosen];
  run.slots[slot] = entry + 1;
  run.used += 1;
  classes_[cls].used += 1;
  used_extents_ += 1;
  *place = {offset_of(chosen, slot), chosen, slot};
  return true;
}

void SlabMap::free(std::uint32_t first, std::uint32_t slot) noexcept {
  Run& run = runs_[first];
  run.slots[slot] = 0;
  run.used -= 1;
  classes_[run.cls].used -= 1;
  used_extents_ -= 1;
  if (run.used == 0) {
    run.freed.clear();
    run.fresh = 0;
    run.newest = 0;
    run.retry_at = 0;
  } else {
    run.freed.push_back(slot);
  }
}

bool SlabMap::occupy(std::uint64_t offset, std::uint64_t extent_bytes, bool may_be_longer,
                     std::uint32_t entry, SlabPlace* place, std::uint32_t* holder) noexcept {
  *holder = kNoEntry;
  if (slab_bytes_ == 0 || offset >= extents_bytes_) return false;
  const std::uint32_t first = run_of_[offset / slab_bytes_];
  if (first == kNoRun) return false;
  Run& run = runs_[first];
  const std::uint64_t extent = classes_[run.cls].extent_bytes;
  const std::uint64_t from_run = offset - first * slab_bytes_;
  if (extent < extent_bytes || (extent > extent_bytes && !may_be_longer)) return false;
  if (from_run % extent != 0 || from_run / extent >= run.capacity) return false;
  const auto slot = static_cast<std::uint32_t>(from_run / extent);
  if (run.slots[slot] != 0) {
    *holder = run.slots[slot] - 1;
    return false;
  }
  // Slots below `fresh` that are not in use are listed once, when the restart has placed every
  // entry.
  run.slots[slot] = entry + 1;
  run.used += 1;
  run.fresh = std::max(run.fresh, slot + 1);
  classes_[run.cls].used += 1;
  used_extents_ += 1;
  *place = {offset, first, slot};
  return true;
}

void SlabMap::finish_restore() {
  for (std::uint32_t first = 0; first < slab_count_; ++first) {
    Run& run = runs_[first];
    if (run.slabs == 0) continue;
    run.freed.clear();
    if (run.used == 0) run.fresh = 0;
    for (std::uint32_t slot = run.fresh; slot-- > 0;) {
      if (run.slots[slot] == 0) run.freed.push_back(slot);
    }
  }
}

bool SlabMap::oldest_window(std::uint32_t cls, std::uint64_t now, std::uint64_t except,
                            Window* window) const noexcept {
  const Class& size_class = classes_[cls];
  const std::uint32_t fewest = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(divide_up(size_class.extent_bytes, slab_bytes_), slab_count_));
  bool found = false;
  for (const std::uint32_t slabs : {size_class.run_slabs, fewest}) {
    if (found) break;
    for (std::uint32_t first = 0; first + slabs <= slab_count_; ++first) {
      if ((except >> first & 1) != 0 || bytes_between(first, slabs) < size_class.extent_bytes)
        continue;
      Window candidate{first, slabs, 0, 0};
      bool usable = true;
      for (std::uint32_t slab = first; usable && slab < first + slabs;) {
        const std::uint32_t begin = run_of_[slab];
        if (begin == kNoRun) {
          slab += 1;
          continue;
        }
        const Run& run = runs_[begin];
        slab = begin + run.slabs;
        if (run.used == 0) continue;
        usable = run.cls != cls && run.blocked == 0 && run.retry_at <= now;
        candidate.used += run.used;
        candidate.newest = std::max(candidate.newest, run.newest);
      }
      if (!usable) continue;
      if (!found || candidate.newest < window->newest ||
          (candidate.newest == window->newest && candidate.used < window->used)) {
        *window = candidate;
        found = true;
      }
    }
  }
  return found;
}

std::uint64_t SlabMap::largest_allocatable() const noexcept {
  if (slab_bytes_ == 0) return extents_bytes_;
  std::uint64_t largest = 0;
  std::uint32_t loose = 0;
  for (std::uint32_t slab = 0; slab < slab_count_; ++slab) {
    loose = is_loose(slab) ? loose + 1 : 0;
    if (loose > 0) largest = std::max(largest, bytes_between(slab + 1 - loose, loose));
    const Run& run = runs_[slab];
    if (run.slabs != 0 && run.used < run.capacity) {
      largest = std::max(largest, classes_[run.cls].extent_bytes);
    }
  }
  return largest;
}

std::uint64_t SlabMap::unusable_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (std::uint32_t slab = 0; slab < slab_count_; ++slab) {
    const Run& run = runs_[slab];
    if (run.slabs == 0 || run.used == 0) continue;
    bytes += bytes_between(slab, run.slabs) - run.capacity * classes_[run.cls].extent_bytes;
  }
  return bytes;
}

}  // namespace kvstrata
