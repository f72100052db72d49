// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Slots, memory and numbers of the registry; registry_read.cpp looks up, registry_write.cpp
// changes.
#include "kvstrata/registry.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace kvstrata {

namespace {

constexpr std::uint64_t kHugePageBytes = 2 << 20;
// No list is longer: a reader that finds the beginning of one anywhere stays within the arena.
constexpr std::uint64_t kLongestListBytes = 256 << 10;
// A cell has 28 bits for the number of a list's first 64 bytes.
constexpr std::uint64_t kMaxListsBytes = std::uint64_t{64} << 28;

std::uint32_t row_word(SlotState state, std::uint8_t rank, std::uint16_t group) {
  return static_cast<std::uint32_t>(state) | std::uint32_t{rank} << 8 | std::uint32_t{group} << 16;
}

std::uint32_t with_state(std::uint32_t word, SlotState state) {
  return (word & ~0xFFu) | static_cast<std::uint32_t>(state);
}

}  // namespace

Registry::Arena::~Arena() {
  if (mapped_ != nullptr) ::munmap(mapped_, mapped_bytes_);
}

bool Registry::Arena::reserve(std::uint64_t bytes) noexcept {
  mapped_bytes_ = bytes + kHugePageBytes + kLongestListBytes;
  void* const mapped = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return false;
  mapped_ = mapped;
  auto address = reinterpret_cast<std::uintptr_t>(mapped);
  address = (address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  begin_ = reinterpret_cast<std::uint8_t*>(address);
  // Half of a look-up's time is finding the page; without huge pages it works all the same.
  ::madvise(begin_, bytes, MADV_HUGEPAGE);
  return true;
}

std::uint64_t Registry::Arena::touched_bytes(std::uint64_t used) noexcept {
  return (used + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

Status Registry::create(std::uint64_t max_bytes, std::uint32_t max_slots,
                        std::unique_ptr<Registry>* made) noexcept {
  std::unique_ptr<Registry> registry(new (std::nothrow) Registry);
  const Status no_memory{StatusCode::kNoSpace, "max_bytes: no memory for so large a registry"};
  if (registry == nullptr) return no_memory;
  registry->max_bytes_ = max_bytes;
  registry->max_slots_ = max_slots;
  // Twice an even share.
  registry->max_segments_ =
      static_cast<std::uint32_t>(2 * max_bytes / kSegmentBytes / kPartitions) + 1;
  registry->headers_.reset(new (std::nothrow) Header[kPartitions]{});
  registry->segments_.reset(
      new (std::nothrow)
          std::atomic<std::uint32_t>[std::size_t{kPartitions} * registry->max_segments_] {});
  registry->rows_.reset(new (std::nothrow) Row[max_slots + 1]);
  if (!registry->headers_ || !registry->segments_ || !registry->rows_ ||
      !registry->cells_.reserve(max_bytes) ||
      !registry->lists_.reserve(std::min(max_bytes, kMaxListsBytes)))
    return no_memory;
  registry->count_bytes();
  *made = std::move(registry);
  return {};
}

Registry::~Registry() = default;

void Registry::count_bytes() noexcept {
  std::uint64_t bytes = sizeof(Registry) + kPartitions * sizeof(Header) +
                        std::uint64_t{kPartitions} * max_segments_ * sizeof(segments_[0]) +
                        (max_slots_ + 1) * sizeof(Row) + free_segments_.capacity() * 4 +
                        Arena::touched_bytes(used_cells_bytes_) +
                        Arena::touched_bytes(used_lists_bytes_);
  for (const auto& freed : free_lists_)
    bytes += freed.capacity() * 4;
  bytes_.store(bytes, std::memory_order_relaxed);
}

bool Registry::has_room_for(std::uint64_t segment_bytes, std::uint64_t list_bytes) const noexcept {
  return used_cells_bytes_ + segment_bytes + used_lists_bytes_ + list_bytes <= max_bytes_ &&
         used_lists_bytes_ + list_bytes <= kMaxListsBytes;
}

Slot Registry::open_slot(std::uint16_t group, std::uint8_t rank) noexcept {
  const std::lock_guard lock(slots_mutex_);
  Slot slot = kNoSlot;
  if (!free_slots_.empty()) {
    slot = free_slots_.back();
    free_slots_.pop_back();
  } else if (fresh_slot_ <= max_slots_) {
    slot = static_cast<Slot>(fresh_slot_++);
  } else {
    return kNoSlot;
  }
  rows_[slot].word.store(row_word(SlotState::kHidden, rank, group), std::memory_order_release);
  open_.fetch_add(1, std::memory_order_relaxed);
  return slot;
}

bool Registry::can_be_filled(Slot slot) const noexcept {
  if (slot == kNoSlot || slot > max_slots_) return false;
  const SlotState state = state_of(rows_[slot].word.load(std::memory_order_acquire));
  return state == SlotState::kHidden || state == SlotState::kVisible;
}

Status Registry::retire_locked(Slot slot) noexcept {
  if (!can_be_filled(slot))
    return {StatusCode::kNotFound, "slot: is neither hidden nor visible", slot};
  std::atomic<std::uint32_t>& word = rows_[slot].word;
  word.store(with_state(word.load(std::memory_order_relaxed), SlotState::kRetired),
             std::memory_order_release);
  retired_.fetch_add(1, std::memory_order_relaxed);
  return {};
}

Status Registry::publish(Slot slot, Slot retired) noexcept {
  const std::lock_guard lock(slots_mutex_);
  if (!can_be_filled(slot) || retired == slot ||
      state_of(rows_[slot].word.load(std::memory_order_relaxed)) != SlotState::kHidden)
    return {StatusCode::kNotFound, "slot: is not hidden, or is the one to retire", slot};
  if (retired != kNoSlot && !can_be_filled(retired))
    return {StatusCode::kNotFound, "retire: is neither hidden nor visible", retired};
  std::atomic<std::uint32_t>& word = rows_[slot].word;
  word.store(with_state(word.load(std::memory_order_relaxed), SlotState::kVisible),
             std::memory_order_release);
  return retired == kNoSlot ? Status() : retire_locked(retired);
}

Status Registry::retire(Slot slot) noexcept {
  const std::lock_guard lock(slots_mutex_);
  return retire_locked(slot);
}

SlotRow Registry::slot(Slot slot) noexcept {
  if (slot == kNoSlot || slot > max_slots_) return {};
  const std::uint32_t word = rows_[slot].word.load(std::memory_order_acquire);
  return {.slot = slot,
          .state = state_of(word),
          .rank = static_cast<std::uint8_t>(word >> 8),
          .group = static_cast<std::uint16_t>(word >> 16),
          .keys = rows_[slot].keys.load(std::memory_order_relaxed)};
}

std::vector<SlotRow> Registry::slots() noexcept {
  const std::lock_guard lock(slots_mutex_);
  std::vector<SlotRow> open;
  for (std::uint32_t number = 1; number < fresh_slot_; ++number) {
    const SlotRow row = slot(static_cast<Slot>(number));
    if (row.state != SlotState::kFree) open.push_back(row);
  }
  return open;
}

RegistryUsage Registry::usage() noexcept {
  return {.bytes = bytes_.load(std::memory_order_relaxed),
          .placements = placements_.load(std::memory_order_relaxed),
          .shared_tags = shared_tags_.load(std::memory_order_relaxed),
          .slots = open_.load(std::memory_order_relaxed),
          .retired = retired_.load(std::memory_order_relaxed),
          .rebuilds = rebuilds_.load(std::memory_order_relaxed),
          .refused = refused_.load(std::memory_order_relaxed)};
}

}  // namespace kvstrata
