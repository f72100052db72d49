// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The registry: a map from chunks to the instances that hold them. ext/cython/core/registry.pxi
// explains tags, slots and groups, and what the registry promises.
//
// Layout. The upper 10 bits of a tag select one of 1024 partitions, and the next 47 are stored; the
// other 7 are ignored. So with n tags in the map, a look-up of an absent tag finds a wrong entry
// with a probability of n / 2^57. A partition is an array of lines of eight 8-byte cells, each with
// (stored bits, kMore, slot). The upper 32 stored bits determine the home line of a tag. If the
// home line is full, the cell is in the next line that has room, at most kMaxProbeLines further on.
// So
//
//   (1) all lines from a cell's home up to the line before the cell's own are full,
//   (2) in each line the cells in use come first,
//   (3) a cell without kMore is the only cell of its tag,
//
// and a look-up ends at a cell without kMore, or at the first line whose last cell is empty. A tag
// with more than kMaxInline holders has one cell, which names a list of slots in another arena.
//
// Growth. A partition whose load reaches kMaxLoad is rebuilt in new lines while readers still use
// the old lines; then the new lines replace the old ones. The partitions have different sizes, so
// their rebuilds are spread evenly over the time in which the whole table grows by kGrowth.
//
// Concurrency. There is one writer at a time, in turns of some microseconds. Each partition has a
// seqlock, which is odd while cells are removed, moved or replaced. Adding a cell is a single store
// and does not touch the seqlock. Memory that readers may read is never unmapped, and each of its
// words is read and written atomically. A reader may read lines or lists that were reused
// meanwhile; then the seqlock has changed, and the reader drops the holders that it found. The
// words themselves are loaded with acquire and stored with release, so no fence instructions are
// needed. After kSpins failed attempts a reader takes a turn like a writer and reads in it.
//
// A reader loads a slot's row (state, group) after the cell and before it checks the seqlock
// again. A slot is reused only after its old cells were removed under the seqlock, so a reader
// never returns a cell together with the row of the slot's next use.
//
// Thread-safe. Nothing throws; a failed allocation of ordinary memory ends the process.
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
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"

namespace kvstrata {

using Tag = std::uint64_t;
using Slot = std::uint16_t;

// Only the upper kTagBits of a tag count: two tags that differ only below are the same tag.
inline constexpr int kTagBits = 57;
inline constexpr Tag kTagMask = ~Tag{0} << (64 - kTagBits);
inline constexpr Slot kNoSlot = 0;
inline constexpr std::uint32_t kMaxSlots = 65534;
inline constexpr std::uint32_t kRegistryPartitions = 1u << (kTagBits - 47);

// A view of the tags in a message, at any alignment; operator[] applies kTagMask. Must not outlive
// the bytes.
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
  std::uint16_t group = 0;
  std::uint64_t keys = 0;
};

struct PrefixQuery {
  std::size_t n_slices = 1;
  // A bit per slot: bit slot & 7 of byte slot >> 3. A slot beyond the end is not allowed.
  std::span<const std::uint8_t> allowed{};
  bool all_allowed = true;         // ignores `allowed`
  std::int32_t except_group = -1;  // a group that is left out, or -1
  std::size_t best = 1;            // how many candidates are wanted
};

struct Candidate {
  std::uint16_t group = 0;
  std::size_t chunks = 0;
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
  // Reserves address space for max_bytes of cells and lists and starts a thread that touches their
  // memory. kNoSpace: the system refuses the memory or the thread; `*made` is unchanged. REQUIRES:
  // max_slots <= kMaxSlots.
  static Status create(std::uint64_t max_bytes, std::uint32_t max_slots,
                       std::unique_ptr<Registry>* made) noexcept;

  // Returns a hidden slot, which the caller publishes or retires; kNoSlot if none is free.
  Slot open_slot(std::uint16_t group) noexcept;
  // Makes `slot` visible and retires `retired`, which may be kNoSlot. kNotFound: `slot` is not
  // hidden, or `retired` is neither hidden nor visible; nothing changes.
  Status publish(Slot slot, Slot retired) noexcept;
  // Look-ups ignore the slot from now on; sweep() frees it. kNotFound: neither hidden nor visible.
  Status retire(Slot slot) noexcept;

  // Makes the slot a holder of each tag, and adds to `*added` how many placements are new.
  // kNotFound: the slot is neither hidden nor visible, or was retired meanwhile. kNoSpace: the
  // registry is full. After an error the tags that were admitted before it stay admitted.
  Status admit(Slot slot, TagSpan tags, std::uint64_t* added) noexcept;
  // The reverse of admit(): adds to `*removed` how many placements were removed. kNotFound as
  // there.
  Status evict(Slot slot, TagSpan tags, std::uint64_t* removed) noexcept;
  // Removes cells of retired slots, until about max_cells were examined. Returns how many were
  // examined; 0: no slot is retired.
  std::uint64_t sweep(std::uint64_t max_cells) noexcept;

  // Appends the visible holders of one tag.
  void lookup(Tag tag, std::vector<Slot>* holders) noexcept;
  // Appends the visible holders of each tag to `holders`, and then the size of `holders` to `ends`.
  void lookup(TagSpan tags, std::vector<Slot>* holders, std::vector<std::size_t>* ends) noexcept;
  // Finds the groups that hold every key of a prefix of `tags`, in which n_slices keys in a row
  // make up a chunk. Returns at most query.best groups that hold a whole chunk or more, the longest
  // prefix first. REQUIRES: query.n_slices > 0.
  std::vector<Candidate> lookup_prefix(TagSpan tags, const PrefixQuery& query) noexcept;

  SlotRow slot(Slot slot) noexcept;
  // Appends the placements of one partition, in the form that restore() reads (saved.cpp).
  // REQUIRES: partition < kRegistryPartitions.
  void dump(std::uint32_t partition, std::vector<std::uint8_t>* bytes) noexcept;
  // Adds the placements of dumps of all partitions, in the bytes from `begin` to `end` of a file:
  // those of slot s to slot_of[s], and to `*added` how many they are. After an error any of them
  // may be there. kCorrupt, kOutOfRange, kOsError, kNoSpace. REQUIRES: begin <= end; no placements,
  // and nothing else that changes them, or retires one of the slots, meanwhile.
  Status restore(const std::string& path, std::uint64_t begin, std::uint64_t end,
                 std::span<const Slot> slot_of, std::uint64_t* added) noexcept;
  RegistryUsage usage() noexcept;

  ~Registry();
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

 private:
  friend struct RegistryProbe;  // tests/registry/registry_test.cpp

  static constexpr std::uint32_t kPartitions = kRegistryPartitions;
  static constexpr std::uint32_t kLineCells = 8;
  static constexpr std::uint64_t kLineBytes = 64;
  // The size of a partition is a multiple of this.
  static constexpr std::uint32_t kPieceLines = 256;
  static constexpr std::uint32_t kMaxProbeLines = 64;
  static constexpr std::uint32_t kMaxInline = 4;
  static constexpr Slot kListed = 0xFFFF;        // the slot of a cell that names a list
  static constexpr std::size_t kTurnKeys = 512;  // keys per turn of a writer
  static constexpr std::size_t kGroupKeys = 64;  // keys whose lines are prefetched together
  static constexpr int kSpins = 64;
  static constexpr std::uint32_t kListClasses = 13;
  // Lines overflow into the next line more often in a fuller table. At a load of 0.65, 3 % of the
  // cells lie beyond their home line (8 % at 0.8); a look-up of such a cell takes twice as long.
  static constexpr double kMaxLoad = 0.65;

  using Cell = std::uint64_t;

  // A mutex that threads get roughly in the order of their requests: a writer that needs many turns
  // goes to the end of the queue before each of them.
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

  // Reserved address space, used from its beginning. The kernel takes longer to allocate and clear
  // a page than the writer takes to fill it, so a thread touches pages ahead of the writer.
  class Arena {
   public:
    ~Arena();
    // Readers may read up to `beyond_bytes` after the first `bytes`. False: no address space.
    bool reserve(std::uint64_t bytes, std::uint64_t beyond_bytes) noexcept;
    std::uint8_t* at(std::uint64_t offset) const noexcept { return begin_ + offset; }
    // The memory that the kernel has allocated for the first `used` bytes.
    static std::uint64_t touched_bytes(std::uint64_t used) noexcept;
    // Starts the thread that touches pages. False: the system refuses the thread.
    bool start_touching() noexcept;
    // Tells the thread to touch the first `bytes`.
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

  // Where readers find a partition. `word` and `begin` belong together if the sequence is even and
  // `word` does not change while both are read.
  struct alignas(16) Header {
    std::atomic<std::uint64_t> word{0};   // number of lines | sequence of the seqlock << 32
    std::atomic<std::uint64_t> begin{0};  // offset of the lines in the arena
  };

  struct PartitionRoom {
    std::uint32_t cells = 0;  // in use
    std::uint32_t limit = 0;  // with this many cells in use, the partition grows
  };

  struct Place {
    Cell* line;
    std::uint32_t number;  // of the line in its partition
    std::uint32_t cell;
  };

  // state | group << 16. Kept apart from the counts of keys, so that the rows stay in
  // the cache.
  using Row = std::atomic<std::uint32_t>;

  struct Holder {
    Slot slot;
    std::uint32_t row;
  };

  struct List;

  Registry() = default;

  // The parts of a tag, and the tag of a cell.
  static std::uint32_t partition_of(Tag tag) noexcept {
    return static_cast<std::uint32_t>(tag >> 54);
  }
  // The cell of a tag, with kNoSlot.
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

  // How many cells of the line are in use.
  static std::uint32_t used_cells(const Cell* line) noexcept;
  // Bit i is set if cell i may belong to the tag of `wanted`; it may also be empty.
  static std::uint32_t alike_cells(const Cell* line, Cell wanted) noexcept;
  std::uint32_t lines_of(std::uint32_t partition) const noexcept {
    return static_cast<std::uint32_t>(headers_[partition].word.load(std::memory_order_acquire));
  }
  Cell* line_at(std::uint32_t partition, std::uint32_t line) const noexcept;
  List* list_of(Cell cell) const noexcept;
  Cell name_of(const List* list) const noexcept;  // the bits that list_of() reads
  static constexpr std::uint64_t list_bytes(std::uint32_t cls) noexcept {
    return std::uint64_t{64} << cls;
  }

  // Readers.
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
  void use_lines(std::uint32_t partition, std::uint64_t begin, std::uint32_t lines) noexcept;
  struct Saved;
  Status restore_partition(std::uint32_t partition, const Saved& saved, const std::uint8_t* from,
                           const Slot* slot_of, std::uint64_t* keys) noexcept;
  void sweep_partition(std::uint32_t partition) noexcept;
  void count_keys(Slot slot, std::int64_t more) noexcept;
  bool take_lines(std::uint64_t bytes, std::uint64_t* begin) noexcept;
  void free_lines(std::uint64_t begin, std::uint64_t bytes) noexcept;
  List* take_list(std::uint32_t cls) noexcept;
  void free_list(List* list) noexcept;
  // used_cells_bytes_ and the bytes that are touched ahead of use.
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
  std::unique_ptr<std::atomic<std::uint64_t>[]> keys_;  // number of keys of each slot
  Arena cells_;
  Arena lists_;

  // The writer's.
  Turns turns_;
  std::array<PartitionRoom, kPartitions> rooms_{};
  // Bytes of the arena that were ever given out, including free_lines_. The first piece always
  // stays empty: a reader of a partition without lines reads this piece.
  std::uint64_t used_cells_bytes_ = kPieceLines * kLineBytes;
  std::uint64_t used_lists_bytes_ = 0;
  std::vector<std::uint8_t> line_cells_;  // during a rebuild: cells in use in each new line
  std::map<std::uint64_t, std::uint64_t> free_lines_;  // bytes by begin; no two are neighbours
  std::array<std::vector<std::uint32_t>, kListClasses> free_lists_;
  std::uint32_t sweep_at_ = 0;  // the next partition of the sweep; a pass begins at 0
  std::vector<Slot> sweeping_;  // slots that were retired when the pass began

  // Guards changes of the slots' states.
  std::mutex slots_mutex_;
  std::vector<Slot> free_slots_;
  std::uint32_t fresh_slot_ = 1;  // this slot and all after it were never used

  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> placements_{0};
  std::atomic<std::uint64_t> shared_tags_{0};
  std::atomic<std::uint64_t> open_{0};
  std::atomic<std::uint64_t> retired_{0};
  std::atomic<std::uint64_t> rebuilds_{0};
  std::atomic<std::uint64_t> refused_{0};
};

}  // namespace kvstrata
