// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The registry: which instance holds which chunk; see src/kvstrata/native/registry.pyi for what
// tags, slots and groups are and for what is promised of them.
//
// - Thread-safe. Nothing throws but std::bad_alloc, which ends the process.
// - Lookups see a placement only where its slot is visible at that moment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvstrata/status.h"

namespace kvstrata {

using Tag = std::uint64_t;
using Slot = std::uint16_t;

// Tags differ when these of their bits differ.
inline constexpr int kTagBits = 58;
inline constexpr Tag kTagMask = ~Tag{0} << (64 - kTagBits);
inline constexpr Slot kNoSlot = 0;
inline constexpr std::uint32_t kMaxSlots = 65534;

// Tags as they come in a message: whole, and aligned to nothing. Must not outlive the bytes.
class TagSpan {
 public:
  TagSpan() noexcept = default;
  TagSpan(const void* bytes, std::size_t count) noexcept
      : bytes_(static_cast<const std::uint8_t*>(bytes)), count_(count) {}
  TagSpan(std::span<const Tag> tags) noexcept : TagSpan(tags.data(), tags.size()) {}

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

 private:
  Registry() = default;

  std::mutex mutex_;
  std::vector<SlotRow> rows_;
  std::unordered_map<Tag, std::vector<Slot>> holders_;
  bool bound_reached() const noexcept;
  std::uint64_t max_bytes_ = 0;
  std::uint64_t placements_ = 0;
};

}  // namespace kvstrata
