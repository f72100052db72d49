// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The registry: which instance holds which chunk; see src/kvstrata/native/registry.pyi for what
// tags, slots and groups are and for what is promised of them.
//
// Layout. The upper 10 bits of a tag name one of 1024 partitions, the next 47 are stored: 57 bits
// count, and of n tags present a tag that nobody holds meets one with odds of n / 2^57. A partition
// is an array of lines of eight 8-byte cells, (stored bits, kMore, slot) each. The upper 32 stored
// bits say in which line of its partition a tag is at home; where that is full, in the next that is
// not, at most kMaxProbeLines on. So
//
//   (1) all lines between a cell's home and the line where it is are full,
//   (2) in a line the cells in use come first,
//   (3) a cell without kMore is the only one of its tag,
//
// and a look-up ends at such a cell, or at the first line whose last cell is empty. A tag with more
// than kMaxInline holders has one cell, which names a list of slots in another arena.
//
// Growth. A partition that is kMaxLoad full is built anew elsewhere while readers still use the old
// lines, and swapped. Sizes differ from partition to partition, so that the turns of all are spread
// over the whole time in which the table grows by kGrowth.
//
// Concurrency. One writer at a time, in turns of some microseconds. Each partition has a seqlock,
// odd while cells are removed, moved or swapped; adding one is a single store and leaves it alone.
// Memory that readers may look at is never unmapped, and every word of it is read and written
// atomically; what a reader finds in lines or lists that serve somebody else by now, it drops
// because the seqlock has changed. Acquire and release on the words themselves order them, so there
// are no fences. After kSpins tries in vain a reader waits for the writer's turn to end.
//
// A slot's row (state, group, rank) is read after the cell and before the seqlock is looked at
// again: a slot is used again only after its old cells were removed under the seqlock, so a cell
// and a row that do not belong together are never answered.
//
// - Thread-safe. Nothing throws but std::bad_alloc, which ends the process.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "kvstrata/status.h"

namespace kvstrata {

using Tag = std::uint64_t;
using Slot = std::uint16_t;

// Tags differ when these of their bits differ.
inline constexpr int kTagBits = 57;
inline constexpr Tag kTagMask = ~Tag{0} << (64 - kTagBits);
inline constexpr Slot kNoSlot = 0;
inline constexpr std::uint32_t kMaxSlots = 65534;
// A cursor of `dump` is below.
inline constexpr std::uint32_t kRegistryPartitions = 1u << (kTagBits - 47);

// Tags as they come in a message: whole, and aligned to nothing. Must not outlive the bytes.
class TagSpan {
 public:
  TagSpan() noexcept = default;
  TagSpan(const void* bytes, std::size_t count) noexcept
      : bytes_(static_cast<const std::uint8_t*>(bytes)), count_(count) {}
  TagSpan(std::span<const Tag> tags) noexcept : TagSpan(tags.data(), tags.size()) {}
  TagSpan(std::span<Tag> tags) noexcept : TagSpan(tags.data(), tags.size()) {}

  std::size_t size() const noexcept { return count_; }
  Tag operator[](std::size_t at) const noexcept {
    Tag tag;
    std::memcpy(&tag, bytes_ + at * sizeof(Tag), sizeof(Tag));
    return tag & kTagMask;
  }
  TagSpan subspan(std::size_t begin, std::size_t count) const noexcept {
    return {bytes_ + begin * sizeof(Tag), count};
  }

 private:
  const std::uint8_t* bytes_ = nullptr;
  std::size_t count_ = 0;
};

enum class SlotState : std::uint8_t { kFree = 0, kHidden = 1, kVisible = 2, kRetired = 3 };

struct SlotRow {
  Slot slot = kNoSlot;
  SlotState state = SlotState::kFree;
  std::uint8_t rank = 0;
  std::uint16_t group = 0;
  std::uint64_t keys = 0;
};

struct PrefixQuery {
  std::size_t n_slices = 1;
  // Bit slot & 7 of byte slot >> 3; used where it has bytes.
  std::span<const std::uint8_t> allowed{};
  bool all_allowed = true;
  std::int32_t except_group = -1;
  std::size_t best = 1;
};

struct Candidate {
  std::uint16_t group = 0;
  std::size_t chunks = 0;
  std::vector<Slot> slots;  // one for each key of the prefix
};

struct RegistryUsage {
  std::uint64_t bytes = 0;
  std::uint64_t placements = 0;
  std::uint64_t shared_tags = 0;
  std::uint64_t slots = 0;
  std::uint64_t retired = 0;
  std::uint64_t rebuilds = 0;
  std::uint64_t refused = 0;
};

class Registry {
 public:
  static Status create(std::uint64_t max_bytes, std::uint32_t max_slots,
                       std::unique_ptr<Registry>* made) noexcept;

  // kNoSlot: none is free.
  Slot open_slot(std::uint16_t group, std::uint8_t rank) noexcept;
  // `retired` may be kNoSlot.
  Status publish(Slot slot, Slot retired) noexcept;
  Status retire(Slot slot) noexcept;

  Status admit(Slot slot, TagSpan tags, std::uint64_t* added) noexcept;
  Status evict(Slot slot, TagSpan tags, std::uint64_t* removed) noexcept;
  // Each tag to the slot slot_of[slots[i]]; kNoSlot leaves it out. REQUIRES: as many slots as tags.
  Status restore(TagSpan tags, std::span<const Slot> slots, std::span<const Slot> slot_of,
                 std::uint64_t* added) noexcept;

  // Cells looked at; 0: nothing is retired.
  std::uint64_t sweep(std::uint64_t max_cells) noexcept;

  // Appends the visible holders of one tag.
  void lookup(Tag tag, std::vector<Slot>* holders) noexcept;
  // The same for many; ends[i] is where those of tag i end.
  void lookup(TagSpan tags, std::vector<Slot>* holders, std::vector<std::size_t>* ends) noexcept;
  std::vector<Candidate> lookup_prefix(TagSpan tags, const PrefixQuery& query) noexcept;

  SlotRow slot(Slot slot) noexcept;
  std::vector<SlotRow> slots() noexcept;
  // Appends; the next cursor, 0 at the end.
  std::uint64_t dump(std::uint64_t cursor, std::uint64_t max_cells, std::vector<Tag>* tags,
                     std::vector<Slot>* slots) noexcept;
  RegistryUsage usage() noexcept;

  ~Registry();
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

 private:
  friend struct RegistryProbe;  // tests/registry_test.cpp

  static constexpr std::uint32_t kPartitions = kRegistryPartitions;
  static constexpr std::uint32_t kLineCells = 8;
  static constexpr std::uint64_t kLineBytes = 64;
  // Partitions are whole pieces.
  static constexpr std::uint32_t kPieceLines = 256;
  static constexpr std::uint32_t kMaxProbeLines = 64;
  static constexpr std::uint32_t kMaxInline = 4;
  static constexpr Slot kListed = 0xFFFF;  // in a cell: it names a list
  static constexpr std::size_t kTurnKeys = 512;
  // So many are asked of the memory before the first is looked at.
  static constexpr std::size_t kGroupKeys = 64;
  static constexpr int kSpins = 64;
  static constexpr std::uint32_t kListClasses = 13;

  using Cell = std::uint64_t;

  // Whose turn it is goes by who came first, about: a writer with many pieces takes a place behind
  // each that waits.
  class Turns {
   public:
    void lock() noexcept {
      const std::lock_guard next(next_);
      turn_.lock();
    }
    void unlock() noexcept { turn_.unlock(); }

   private:
    std::mutex next_;
    std::mutex turn_;
  };

  // Address space of which no more than the beginning was ever touched. The system takes longer to
  // find a page and clear it than the writer to fill it, so a thread does that ahead of the writer.
  class Arena {
   public:
    ~Arena();
    // Readers may look as much as `beyond_bytes` further.
    bool reserve(std::uint64_t bytes, std::uint64_t beyond_bytes) noexcept;
    std::uint8_t* at(std::uint64_t offset) const noexcept { return begin_ + offset; }
    // Bytes that the system gave for the first `used` ones.
    static std::uint64_t touched_bytes(std::uint64_t used) noexcept;
    // Says how many bytes will be needed soon; true is answered where that can be done.
    bool start_touching() noexcept;
    void touch(std::uint64_t bytes) noexcept;

   private:
    void touch_all() noexcept;

    static constexpr std::uint64_t kEnd = ~std::uint64_t{0};

    void* mapped_ = nullptr;
    std::uint8_t* begin_ = nullptr;
    std::uint64_t mapped_bytes_ = 0;
    std::atomic<std::uint64_t> wanted_bytes_{0};
    std::thread thread_;
  };

  // What readers need of a partition. `begin` belongs to `word` while that is even and the same.
  struct alignas(16) Header {
    std::atomic<std::uint64_t> word{0};   // count of its lines | sequence << 32
    std::atomic<std::uint64_t> begin{0};  // of the lines, in the arena
  };

  struct PartitionRoom {
    std::uint32_t cells = 0;  // in use
    std::uint32_t limit = 0;  // grows when it has as many
  };

  struct Place {
    Cell* line;
    std::uint32_t number;  // of the line in its partition
    std::uint32_t cell;
  };

  // state | rank << 8 | group << 16; apart from the counts, so that those in use stay in the cache.
  using Row = std::atomic<std::uint32_t>;

  struct Holder {
    Slot slot;
    std::uint32_t row;
  };

  struct List;

  Registry() = default;

  // Of a tag, and back.
  static std::uint32_t partition_of(Tag tag) noexcept {
    return static_cast<std::uint32_t>(tag >> 54);
  }
  // The cell of a tag, without a slot.
  static Cell cell_of(Tag tag) noexcept { return tag << 10 & ~std::uint64_t{0x1FFFF}; }
  static std::uint32_t home_of(Tag tag, std::uint32_t lines) noexcept {
    return static_cast<std::uint32_t>((tag >> 22 & 0xFFFFFFFF) * lines >> 32);
  }
  Tag tag_of(std::uint32_t partition, Cell cell) const noexcept;

  static SlotState state_of(std::uint32_t row) noexcept { return SlotState(row & 0xFF); }
  bool is_retired(Slot slot) const noexcept {
    return state_of(rows_[slot].load(std::memory_order_acquire)) == SlotState::kRetired;
  }
  bool can_be_filled(Slot slot) const noexcept;
  Status retire_locked(Slot slot) noexcept;

  static std::uint32_t used_cells(const Cell* line) noexcept;
  // Bit i: cell i may be one of the tag. An empty one may be among them.
  static std::uint32_t alike_cells(const Cell* line, Cell wanted) noexcept;
  std::uint32_t lines_of(std::uint32_t partition) const noexcept {
    return static_cast<std::uint32_t>(headers_[partition].word.load(std::memory_order_acquire));
  }
  Cell* line_at(std::uint32_t partition, std::uint32_t line) const noexcept;
  List* list_of(Cell cell) const noexcept;
  static constexpr std::uint64_t list_bytes(std::uint32_t cls) noexcept {
    return std::uint64_t{64} << cls;
  }

  // Readers.
  // False ends it.
  template <typename Work>
  bool in_groups(TagSpan tags, Work work) const noexcept;
  template <typename Found>
  bool try_read(Tag tag, Found found) const noexcept;
  template <typename Found>
  bool try_read_all(Tag tag, Found found) const noexcept;
  template <typename Found, typename Again>
  void read(Tag tag, Found found, Again again) noexcept;
  template <typename Found, typename Again>
  void read_again(Tag tag, Found found, Again again) noexcept;

  // The writer, in its turn.
  template <typename Change>
  void change(std::uint32_t partition, Change make) noexcept;
  enum class Admitted : std::uint8_t { kAdded, kPresent, kRefused, kNoSpace };
  Admitted admit_one(Slot slot, Tag tag) noexcept;
  bool evict_one(Slot slot, Tag tag) noexcept;
  bool admit_listed(Slot slot, std::uint32_t partition, const Place& place, bool* added) noexcept;
  Admitted make_list(Slot slot, Tag tag) noexcept;
  void erase_cell(std::uint32_t partition, Place place) noexcept;
  void erase_holder(std::uint32_t partition, const Place& place) noexcept;
  void erase_listed(std::uint32_t partition, const Place& place, List* list,
                    std::uint32_t at) noexcept;
  bool put_cell(std::uint32_t partition, std::uint32_t lines, std::uint32_t home,
                Cell cell) noexcept;
  static std::uint32_t next_lines(std::uint32_t partition, std::uint32_t lines) noexcept;
  bool rebuild(std::uint32_t partition, std::uint32_t lines) noexcept;
  void sweep_partition(std::uint32_t partition) noexcept;
  void count_keys(Slot slot, std::int64_t more) noexcept;
  bool take_lines(std::uint64_t bytes, std::uint64_t* begin) noexcept;
  void free_lines(std::uint64_t begin, std::uint64_t bytes) noexcept;
  List* take_list(std::uint32_t cls) noexcept;
  void free_list(List* list) noexcept;
  // With what is touched before it is needed.
  std::uint64_t soon_used_bytes() const noexcept;
  bool has_room_for(std::uint64_t line_bytes, std::uint64_t list_bytes) const noexcept;
  void count_bytes() noexcept;
  template <typename Work>
  Status in_turns(Slot slot, TagSpan tags, Work work) noexcept;

  std::uint64_t max_bytes_ = 0;
  std::uint32_t max_slots_ = 0;
  std::uint32_t max_lines_ = 0;  // of a partition

  // For readers.
  std::unique_ptr<Header[]> headers_;
  std::unique_ptr<Row[]> rows_;
  std::unique_ptr<std::atomic<std::uint64_t>[]> keys_;  // of each slot
  Arena cells_;
  Arena lists_;

  // The writer's.
  Turns turns_;
  std::array<PartitionRoom, kPartitions> rooms_{};
  // Of the arena, what is free again included. Where it begins, partitions without lines look for
  // their tags: nothing ever stands there.
  std::uint64_t used_cells_bytes_ = kPieceLines * kLineBytes;
  std::uint64_t used_lists_bytes_ = 0;
  std::vector<std::uint8_t> line_cells_;  // while a partition is built anew: in use in each line
  std::map<std::uint64_t, std::uint64_t> free_lines_;  // bytes by begin; no two are neighbours
  std::array<std::vector<std::uint32_t>, kListClasses> free_lists_;
  std::uint32_t sweep_at_ = 0;  // partition; a pass begins at 0
  std::vector<Slot> sweeping_;

  // States of slots change under this one.
  std::mutex slots_mutex_;
  std::vector<Slot> free_slots_;
  std::uint32_t fresh_slot_ = 1;  // from this one on none was ever used

  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> placements_{0};
  std::atomic<std::uint64_t> shared_tags_{0};
  std::atomic<std::uint64_t> open_{0};
  std::atomic<std::uint64_t> retired_{0};
  std::atomic<std::uint64_t> rebuilds_{0};
  std::atomic<std::uint64_t> refused_{0};
};

}  // namespace kvstrata
