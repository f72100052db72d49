// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Space of the extents file: at most kMaxSlabs slabs of equal size (the last one may be shorter),
// grouped into runs of one or more neighbours. A run holds extents of one size, its class. A run
// without extents is unowned, and its slabs can join a run of any class.
//
// - The first extent that is stored in an empty pool chooses the geometry: a slab is the smallest
//   multiple of that extent that is at least 1/32 of the pool. When the pool is empty again and an
//   extent of another class comes, the geometry is chosen anew.
// - Extents are rounded up to 4 KiB. A class takes runs of as many slabs as keep its waste small.
// - The index keeps the table of runs, one word a slab, so that a restarted server knows them. The
//   words of a run are written before its first entry is, and cleared after its last entry is free.
//
// Not thread-safe. REQUIRES, in a pool: the pool's mutex.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/sizes.h"
#include "base/status.h"
#include "memory/backing.h"
#include "pool/index.h"

namespace kvstrata {

inline constexpr std::uint32_t kNoClass = 0xFF;
inline constexpr std::uint32_t kNoRun = 0xFF;
inline constexpr std::uint32_t kNoSlabSlot = 0xFFFFFFFFu;
inline constexpr std::uint32_t kMaxClasses = kMaxSlabs;

// The word of a slab in the index.
inline constexpr std::uint64_t kRunMark = 1ULL << 48;
constexpr std::uint64_t pack_slab(std::uint64_t extent_bytes, std::uint32_t run_slabs,
                                  std::uint32_t position) {
  return (extent_bytes / kExtentAlignment) | (static_cast<std::uint64_t>(run_slabs) << 32) |
         (static_cast<std::uint64_t>(position) << 40) | kRunMark;
}
constexpr std::uint64_t slab_extent_bytes(std::uint64_t word) {
  return (word & 0xFFFFFFFFULL) * kExtentAlignment;
}
constexpr std::uint32_t slab_run_slabs(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32) & 0xFF;
}
constexpr std::uint32_t slab_position(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 40) & 0xFF;
}

// A run as the table in the index has it; slabs 0: no run begins there.
struct StoredRun {
  std::uint32_t slabs = 0;
  std::uint64_t extent_bytes = 0;
};
// Slabs of a pool whose stored slab size is this; 0 when none was chosen or it is impossible.
std::uint32_t stored_slab_count(std::uint64_t extents_bytes, std::uint64_t slab_bytes) noexcept;
// REQUIRES: slab < slab_count <= table.size().
StoredRun stored_run(std::span<const std::uint64_t> table, std::uint32_t slab,
                     std::uint32_t slab_count) noexcept;

struct SlabPlace {
  std::uint64_t offset = 0;
  std::uint32_t run = kNoRun;
  std::uint32_t slot = 0;
};

class SlabMap {
 public:
  // A run is named by its first slab.
  struct Run {
    std::uint32_t slabs = 0;  // 0: no run begins here
    std::uint32_t cls = kNoClass;
    std::uint32_t capacity = 0;  // extents
    std::uint32_t used = 0;
    std::uint32_t blocked = 0;         // blocked entries in it (pool/entries.h)
    std::uint64_t newest = 0;          // stamp of the last use of anything in it
    std::uint64_t retry_at = 0;        // skip it until this many operations were done
    std::uint32_t fresh = 0;           // slots at or above this one were never used
    std::vector<std::uint32_t> slots;  // entry + 1
    std::vector<std::uint32_t> freed;
  };
  struct Class {
    std::uint64_t extent_bytes = 0;  // 0: unused class id
    std::uint32_t run_slabs = 0;
    std::uint32_t used = 0;      // extents in use
    std::uint32_t capacity = 0;  // extents in its runs
  };
  // Neighbouring runs and loose slabs that a class could take once the entries in them are gone.
  struct Window {
    std::uint32_t first = 0;  // slab
    std::uint32_t slabs = 0;
    std::uint32_t used = 0;    // entries to evict
    std::uint64_t newest = 0;  // of the runs in it
  };

  // The words are those of an index; they must outlive the map and be zero for a fresh pool.
  SlabMap(std::uint64_t extents_bytes, std::uint64_t* slab_bytes_word,
          std::span<std::uint64_t> table) noexcept;
  // Reads geometry and runs back from the words; invalid runs are cleared. False when the slab
  // size itself is impossible (then nothing is allocated and the geometry is unset).
  bool restore() noexcept;

  static std::uint64_t round_up(std::uint64_t bytes) noexcept {
    return kvstrata::round_up(bytes, kExtentAlignment);
  }

  // Class for extents of `extent_bytes` (a multiple of kExtentAlignment), made when there is none;
  // chooses the geometry when nothing is stored. kNoClass when such an extent can never fit.
  // `recycled` is set when the id belonged to another size before.
  std::uint32_t class_for(std::uint64_t extent_bytes, bool* recycled);
  std::uint32_t find_class(std::uint64_t extent_bytes) const noexcept;

  // A slot in a run of the class, or in a run made from empty slabs. False when there is none. With
  // `backing`: only one that has memory, which takes a search through the free slots.
  [[nodiscard]] bool allocate(std::uint32_t cls, std::uint32_t entry, const Backing* backing,
                              SlabPlace* place);
  void free(std::uint32_t run, std::uint32_t slot) noexcept;
  // Marks the slot at `offset` as used, for a restart; with `may_be_longer` it may be longer than
  // `extent_bytes`. False when no run has such a slot, or when it is taken (then `holder` is the
  // entry that has it).
  [[nodiscard]] bool occupy(std::uint64_t offset, std::uint64_t extent_bytes, bool may_be_longer,
                            std::uint32_t entry, SlabPlace* place, std::uint32_t* holder) noexcept;
  // Lists the free slots once every entry was placed by occupy().
  void finish_restore();

  // Of the windows that the class could take, finds the one whose newest stamp is oldest. Leaves
  // out windows with blocked entries, with runs of the class itself or with runs to be retried
  // after `now` (which counts operations), and windows that begin in a slab of the bit mask
  // `except`. False when there is none.
  [[nodiscard]] bool oldest_window(std::uint32_t cls, std::uint64_t now, std::uint64_t except,
                                   Window* window) const noexcept;

  Run& run(std::uint32_t first_slab) noexcept { return runs_[first_slab]; }
  const Run& run(std::uint32_t first_slab) const noexcept { return runs_[first_slab]; }
  const Class& size_class(std::uint32_t cls) const noexcept { return classes_[cls]; }
  std::uint64_t extents_bytes() const noexcept { return extents_bytes_; }
  std::uint64_t slab_bytes() const noexcept { return slab_bytes_; }
  std::uint32_t slab_count() const noexcept { return slab_count_; }
  std::uint64_t offset_of(std::uint32_t run, std::uint32_t slot) const noexcept {
    return run * slab_bytes_ + slot * classes_[runs_[run].cls].extent_bytes;
  }
  // Run that covers a slab, or kNoRun.
  std::uint32_t run_of(std::uint32_t slab) const noexcept { return run_of_[slab]; }

  // The largest extent that could be stored now without evicting anything.
  std::uint64_t largest_allocatable() const noexcept;
  // Bytes that no class could use: remainders of runs and of the file.
  std::uint64_t unusable_bytes() const noexcept;

 private:
  friend class Validation;  // of the tests

  void set_geometry(std::uint64_t extent_bytes);
  void make_run(std::uint32_t first, std::uint32_t slabs, std::uint32_t cls);
  void dissolve_run(std::uint32_t first) noexcept;
  std::uint64_t bytes_between(std::uint32_t first, std::uint32_t slabs) const noexcept;
  std::uint32_t slabs_for(std::uint64_t extent_bytes) const noexcept;
  // Whether the slab is in no run or in an empty one.
  bool is_loose(std::uint32_t slab) const noexcept;
  // Takes a free slot of the run; kNoSlabSlot when there is none or, with `backing`, none that has
  // memory.
  std::uint32_t take_slot(std::uint32_t first, const Backing* backing);
  // Whether one of `slots` neighbouring extents has memory.
  static bool any_backed(const Backing& backing, std::uint64_t offset, std::uint64_t extent_bytes,
                         std::uint64_t slots) noexcept;

  std::uint64_t extents_bytes_ = 0;
  std::uint64_t slab_bytes_ = 0;
  std::uint32_t slab_count_ = 0;
  std::uint64_t used_extents_ = 0;
  std::uint64_t* slab_bytes_word_ = nullptr;
  std::span<std::uint64_t> table_;
  std::uint32_t run_of_[kMaxSlabs] = {};
  Run runs_[kMaxSlabs];
  Class classes_[kMaxClasses];
};

}  // namespace kvstrata
