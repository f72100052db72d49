// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The slots, the memory and the counts of the registry; read.cpp has the look-ups, write.cpp the
// changes of the map.
#include "registry/registry.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <system_error>

#include "base/threads.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvstrata {

namespace {

constexpr std::uint64_t kHugePageBytes = 2 << 20;
// A cell has 28 bits for the number of a list, which counts units of 64 bytes.
constexpr std::uint64_t kMaxListsBytes = std::uint64_t{64} << 28;
// The thread touches pages ahead of the writer for 1/kAheadShare of the bytes in use, which is
// about as much as the report of one of 100 instances needs.
constexpr std::uint64_t kAheadShare = 64;
// The approximate memory of an entry of free_lines_.
constexpr std::uint64_t kFreeLinesBytes = 64;

std::uint32_t with_state(std::uint32_t word, SlotState state) {
  return (word & ~0xFFu) | static_cast<std::uint32_t>(state);
}

}  // namespace

Registry::Arena::~Arena() {
  if (thread_.joinable()) {
    touch(kEnd);
    thread_.join();
  }
  if (mapped_ != nullptr) ::munmap(mapped_, mapped_bytes_);
}

bool Registry::Arena::reserve(std::uint64_t bytes, std::uint64_t beyond_bytes) noexcept {
  mapped_bytes_ = bytes + kHugePageBytes + beyond_bytes;
  void* const mapped = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return false;
  mapped_ = mapped;
  auto address = reinterpret_cast<std::uintptr_t>(mapped);
  address = (address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  begin_ = reinterpret_cast<std::uint8_t*>(address);
  // With small pages, address translation takes half of a look-up's time. The advice may fail.
  ::madvise(begin_, bytes, MADV_HUGEPAGE);
  return true;
}

std::uint64_t Registry::Arena::touched_bytes(std::uint64_t used) noexcept {
  return (used + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

bool Registry::Arena::start_touching() noexcept try {
  thread_ = start_thread([this] { touch_all(); });
  return true;
} catch (const std::system_error&) {
  return false;
}

void Registry::Arena::touch(std::uint64_t bytes) noexcept {
  wanted_bytes_.store(bytes, std::memory_order_relaxed);
  wanted_bytes_.notify_one();
}

void Registry::Arena::touch_all() noexcept {
  std::uint64_t touched = 0;
  for (std::uint64_t wanted = 0; wanted != kEnd;
       wanted = wanted_bytes_.load(std::memory_order_relaxed)) {
    if (touched >= wanted) {
      wanted_bytes_.wait(wanted, std::memory_order_relaxed);
    } else {
      // Kernels before 5.14 do not know this advice; then the writer's own stores touch the page.
      ::madvise(begin_ + touched, kHugePageBytes, MADV_POPULATE_WRITE);
      touched += kHugePageBytes;
    }
  }
}

Status Registry::create(std::uint64_t max_bytes, std::uint32_t max_slots,
                        std::unique_ptr<Registry>* made) noexcept {
  std::unique_ptr<Registry> registry(new (std::nothrow) Registry);
  const Status no_memory{StatusCode::kNoSpace, "max_bytes: no memory for so large a registry"};
  if (registry == nullptr) return no_memory;
  registry->max_bytes_ = max_bytes;
  registry->max_slots_ = max_slots;
  // A partition may grow to twice its even share.
  registry->max_lines_ =
      (static_cast<std::uint32_t>(2 * max_bytes / kLineBytes / kPieceLines / kPartitions) + 1) *
      kPieceLines;
  registry->headers_.reset(new (std::nothrow) Header[kPartitions]{});
  registry->rows_.reset(new (std::nothrow) Row[max_slots + 1]{});
  registry->keys_.reset(new (std::nothrow) std::atomic<std::uint64_t>[max_slots + 1] {});
  // A reader may combine a partition's new beginning with its old number of lines, and may take any
  // words in a list for the header of another list: hence the readable bytes beyond both arenas.
  if (!registry->headers_ || !registry->rows_ || !registry->keys_ ||
      !registry->cells_.reserve(max_bytes, registry->max_lines_ * kLineBytes) ||
      !registry->lists_.reserve(std::min(max_bytes, kMaxListsBytes), list_bytes(kListClasses - 1)))
    return no_memory;
  if (!registry->cells_.start_touching())
    return {StatusCode::kNoSpace, "max_bytes: no thread for the registry"};
  registry->count_bytes();
  *made = std::move(registry);
  return {};
}

Registry::~Registry() = default;

void Registry::count_bytes() noexcept {
  std::uint64_t bytes =
      sizeof(Registry) + kPartitions * sizeof(Header) +
      (max_slots_ + 1) * (sizeof(Row) + sizeof(keys_[0])) + free_lines_.size() * kFreeLinesBytes +
      Arena::touched_bytes(soon_used_bytes()) + Arena::touched_bytes(used_lists_bytes_);
  for (const auto& freed : free_lists_)
    bytes += freed.capacity() * 4;
  bytes_.store(bytes, std::memory_order_relaxed);
}

std::uint64_t Registry::soon_used_bytes() const noexcept {
  return std::min(used_cells_bytes_ + used_cells_bytes_ / kAheadShare, max_bytes_);
}

bool Registry::has_room_for(std::uint64_t line_bytes, std::uint64_t list_bytes) const noexcept {
  return used_cells_bytes_ + line_bytes + used_lists_bytes_ + list_bytes <= max_bytes_ &&
         used_lists_bytes_ + list_bytes <= kMaxListsBytes;
}

Slot Registry::open_slot(std::uint16_t group) noexcept {
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
  rows_[slot].store(with_state(std::uint32_t{group} << 16, SlotState::kHidden),
                    std::memory_order_release);
  open_.fetch_add(1, std::memory_order_relaxed);
  return slot;
}

bool Registry::can_be_filled(Slot slot) const noexcept {
  if (slot == kNoSlot || slot > max_slots_) return false;
  const SlotState state = state_of(rows_[slot].load(std::memory_order_acquire));
  return state == SlotState::kHidden || state == SlotState::kVisible;
}

Status Registry::retire_locked(Slot slot) noexcept {
  if (!can_be_filled(slot))
    return {StatusCode::kNotFound, "slot: is neither hidden nor visible", slot};
  Row& word = rows_[slot];
  word.store(with_state(word.load(std::memory_order_relaxed), SlotState::kRetired),
             std::memory_order_release);
  retired_.fetch_add(1, std::memory_order_relaxed);
  return {};
}

Status Registry::publish(Slot slot, Slot retired) noexcept {
  const std::lock_guard lock(slots_mutex_);
  if (!can_be_filled(slot) || retired == slot ||
      state_of(rows_[slot].load(std::memory_order_relaxed)) != SlotState::kHidden)
    return {StatusCode::kNotFound, "slot: is not hidden, or is the one to retire", slot};
  if (retired != kNoSlot && !can_be_filled(retired))
    return {StatusCode::kNotFound, "retire: is neither hidden nor visible", retired};
  Row& word = rows_[slot];
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
  const std::uint32_t word = rows_[slot].load(std::memory_order_acquire);
  return {.slot = slot,
          .state = state_of(word),
          .group = static_cast<std::uint16_t>(word >> 16),
          .keys = keys_[slot].load(std::memory_order_relaxed)};
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
