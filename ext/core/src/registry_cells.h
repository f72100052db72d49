// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// How cells and lists of holders look and are read; see kvstrata/registry.h.
//
//   cell of one holder   stored bits of the tag << 16 | slot
//   cell of a list       number of the list << 36 | the lowest 20 stored bits << 16 |
//                        kListed
//   empty                0
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <bit>

#include "kvstrata/registry.h"

namespace kvstrata {

template <typename T>
inline T load_shared(const T& word) noexcept {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}
template <typename T>
inline void store_shared(T& word, T value) noexcept {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}

// The bits in which all cells of a tag agree, those of them that are looked at first.
inline constexpr std::uint64_t kCommonCellBits = 0xFFFF0000;

struct Registry::List {
  std::uint64_t tag_and_class;  // the bits of a tag that do not count hold the size class
  std::uint64_t count;
  Slot slots[1];

  static constexpr std::uint64_t kHeaderBytes = 16;

  static constexpr std::uint32_t capacity(std::uint32_t cls) noexcept {
    return static_cast<std::uint32_t>((list_bytes(cls) - kHeaderBytes) / sizeof(Slot));
  }
  Tag tag() const noexcept { return load_shared(tag_and_class) & kTagMask; }
  // In range, and so is what lies within the capacity, whatever is in this memory by now.
  std::uint32_t size_class() const noexcept {
    const std::uint64_t cls = load_shared(tag_and_class) & ~kTagMask;
    return cls < kListClasses ? static_cast<std::uint32_t>(cls) : kListClasses - 1;
  }
  std::uint32_t size() const noexcept {
    const std::uint64_t size = load_shared(count);
    const std::uint32_t most = capacity(size_class());
    return size < most ? static_cast<std::uint32_t>(size) : most;
  }
  Slot* begin() noexcept { return slots; }
};

// Both without a branch on what is there, and in few instructions: a processor asks for what the
// next tags need only as far ahead as it sees, and a wrong guess ends that.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
// Each 8 bytes are read at once, and in order, as by load_shared.
inline __m128i low_halves(const void* four_cells) noexcept {
  const auto* const at = static_cast<const __m128*>(four_cells);
  return _mm_castps_si128(_mm_shuffle_ps(at[0], at[1], _MM_SHUFFLE(2, 0, 2, 0)));
}

inline std::uint32_t alike_in(__m128i values, __m128i bits, __m128i wanted) noexcept {
  const __m128i alike = _mm_cmpeq_epi32(_mm_and_si128(values, bits), wanted);
  return static_cast<std::uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(alike)));
}

inline std::uint32_t Registry::used_cells(const Cell* line) noexcept {
  const __m128i slot_bits = _mm_set1_epi32(0xFFFF);
  const __m128i none = _mm_setzero_si128();
  const std::uint32_t empty = alike_in(low_halves(line), slot_bits, none) |
                              alike_in(low_halves(line + 4), slot_bits, none) << 4;
  return static_cast<std::uint32_t>(std::countr_zero(empty | 1u << kLineCells));
}

inline std::uint32_t Registry::alike_cells(const Cell* line, Cell wanted) noexcept {
  const __m128i bits = _mm_set1_epi32(static_cast<int>(kCommonCellBits));
  const __m128i common = _mm_set1_epi32(static_cast<int>(wanted & kCommonCellBits));
  return alike_in(low_halves(line), bits, common) | alike_in(low_halves(line + 4), bits, common)
                                                        << 4;
}
#else
inline std::uint32_t Registry::used_cells(const Cell* line) noexcept {
  std::uint32_t used = 0;
  for (std::uint32_t at = 0; at < kLineCells; ++at)
    used += load_shared(line[at]) != 0;
  return used;
}

inline std::uint32_t Registry::alike_cells(const Cell* line, Cell wanted) noexcept {
  std::uint32_t alike = 0;
  for (std::uint32_t at = 0; at < kLineCells; ++at)
    alike |= static_cast<std::uint32_t>(((load_shared(line[at]) ^ wanted) & kCommonCellBits) == 0)
             << at;
  return alike;
}
#endif

inline Registry::Cell* Registry::line_at(std::uint32_t partition,
                                         std::uint32_t line) const noexcept {
  const std::uint32_t segment =
      segments_[std::size_t{partition} * max_segments_ + line / kSegmentLines].load(
          std::memory_order_acquire);
  return reinterpret_cast<Cell*>(cells_.at(segment * kSegmentBytes)) +
         line % kSegmentLines * kLineCells;
}

inline Registry::List* Registry::list_of(Cell cell) const noexcept {
  return reinterpret_cast<List*>(lists_.at((cell >> 36) * 64));
}

inline Tag Registry::tag_of(std::uint32_t partition, Cell cell) const noexcept {
  if (static_cast<Slot>(cell) == kListed) return list_of(cell)->tag();
  return Tag{partition} << 54 | cell >> 16 << 6;
}

// Calls found(slot, its row) for each visible holder. False: the writer was at this partition, and
// what was found means nothing.
template <typename Found>
bool Registry::try_read(Tag tag, Found found) const noexcept {
  const std::uint32_t partition = partition_of(tag);
  const std::uint64_t header = headers_[partition].load(std::memory_order_acquire);
  if ((header >> 32 & 1) != 0) return false;
  const std::uint32_t lines = static_cast<std::uint32_t>(header) * kSegmentLines;
  if (lines == 0) return true;
  const Cell wanted = stored_of(tag) << 16;
  const auto found_if_visible = [&](Slot slot) {
    // Any number stands here once the memory serves somebody else.
    if (slot > max_slots_) return;
    const std::uint32_t row = rows_[slot].word.load(std::memory_order_acquire);
    if (state_of(row) == SlotState::kVisible) found(slot, row);
  };
  std::uint32_t number = home_of(tag, lines);
  for (std::uint32_t probed = 0; probed <= kMaxProbeLines; ++probed) {
    const Cell* const line = line_at(partition, number);
    const bool full = load_shared(line[kLineCells - 1]) != 0;
    for (std::uint32_t alike = alike_cells(line, wanted); alike != 0; alike &= alike - 1) {
      const Cell cell = load_shared(line[std::countr_zero(alike)]);
      if (static_cast<Slot>(cell) != kListed) {
        if ((cell ^ wanted) >> 16 == 0) found_if_visible(static_cast<Slot>(cell));
        continue;
      }
      List* const list = list_of(cell);
      if (list->tag() != tag) continue;
      const std::uint32_t size = list->size();
      for (std::uint32_t i = 0; i < size; ++i)
        found_if_visible(load_shared(list->begin()[i]));
    }
    if (!full) break;
    if (++number == lines) number = 0;
  }
  std::atomic_signal_fence(std::memory_order_acquire);
  return headers_[partition].load(std::memory_order_relaxed) == header;
}

}  // namespace kvstrata
