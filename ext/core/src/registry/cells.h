// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The bits of cells and lists of holders, and how readers read them; see registry/registry.h.
//
//   cell of one holder   stored bits of the tag << 17 | kMore if the tag may have others | slot
//   cell of a list       number of the list << 36 | the lowest 19 stored bits << 17 | kListed
//   empty cell           0
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>

#include "registry/registry.h"

namespace kvstrata {

template <typename T>
inline T load_shared(const T& word) noexcept {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}
template <typename T>
inline void store_shared(T& word, T value) noexcept {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}

// Bits that are equal in all cells of a tag, in the lower half of a cell; compared first.
inline constexpr std::uint64_t kCommonCellBits = 0xFFFE0000;
// Set in a cell whose tag has, or had, other cells: a look-up must go on after it.
inline constexpr int kMoreShift = 16;
inline constexpr std::uint64_t kMore = std::uint64_t{1} << kMoreShift;
inline constexpr int kStoredShift = 17;
// The bits of a cell that names a list, except the number of the list.
inline constexpr std::uint64_t kListCellBits = (std::uint64_t{1} << 36) - 1;

struct Registry::List {
  std::uint64_t tag_and_class;  // the size class in the 7 bits that a tag does not use
  std::uint64_t count;
  Slot slots[1];

  static constexpr std::uint64_t kHeaderBytes = 16;

  static constexpr std::uint32_t capacity(std::uint32_t cls) noexcept {
    return static_cast<std::uint32_t>((list_bytes(cls) - kHeaderBytes) / sizeof(Slot));
  }
  Tag tag() const noexcept { return load_shared(tag_and_class) & kTagMask; }
  // A reader may call this and size() on memory that no longer is this list: both results are in
  // range whatever the memory contains.
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

// used_cells() and alike_cells() take few instructions and do not branch on the contents: a
// processor starts the memory accesses of the next tags only as far ahead as it decodes, and a
// mispredicted branch throws these accesses away.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
// The lower halves of four cells. Each cell is read whole and in order, as load_shared would.
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
  const std::uint64_t begin = headers_[partition].begin.load(std::memory_order_acquire);
  return reinterpret_cast<Cell*>(cells_.at(begin + line * kLineBytes));
}

inline Registry::List* Registry::list_of(Cell cell) const noexcept {
  return reinterpret_cast<List*>(lists_.at((cell >> 36) * 64));
}

inline Registry::Cell Registry::name_of(const List* list) const noexcept {
  const auto offset = reinterpret_cast<const std::uint8_t*>(list) - lists_.at(0);
  return static_cast<Cell>(offset) / 64 << 36;
}

inline Tag Registry::tag_of(std::uint32_t partition, Cell cell) const noexcept {
  if (static_cast<Slot>(cell) == kListed) return list_of(cell)->tag();
  return Tag{partition} << 54 | cell >> kStoredShift << (64 - kTagBits);
}

// Calls found(slot, row) for each visible holder. False: the writer was changing this partition, so
// the caller must drop the holders that this call found.
//
// Handles a tag with at most one holder, in its home line, with few instructions and well-predicted
// branches, so that a processor requests the lines of several look-ups before the first one
// arrives. Leaves every other case to try_read_all().
template <typename Found>
inline bool Registry::try_read(Tag tag, Found found) const noexcept {
  const Header& header = headers_[partition_of(tag)];
  const std::uint64_t word = header.word.load(std::memory_order_acquire);
  const auto* const line = reinterpret_cast<const Cell*>(
      cells_.at(header.begin.load(std::memory_order_acquire) +
                home_of(tag, static_cast<std::uint32_t>(word)) * kLineBytes));
  const Cell wanted = cell_of(tag);
  const std::uint32_t alike = alike_cells(line, wanted);
  if ((word >> 32 & 1) != 0 || (alike & (alike - 1)) != 0) [[unlikely]]
    return try_read_all(tag, found);
  if (alike != 0) [[likely]] {
    const Cell cell = load_shared(line[std::countr_zero(alike)]);
    const auto slot = static_cast<Slot>(cell);
    if ((cell ^ wanted) >> kMoreShift != 0 || slot > max_slots_) [[unlikely]]
      return try_read_all(tag, found);
    const std::uint32_t row = rows_[slot].load(std::memory_order_acquire);
    if (state_of(row) == SlotState::kVisible) found(slot, row);
  } else if (load_shared(line[kLineCells - 1]) != 0) [[unlikely]] {
    return try_read_all(tag, found);
  }
  std::atomic_signal_fence(std::memory_order_acquire);
  return header.word.load(std::memory_order_relaxed) == word;
}

template <typename Found>
[[gnu::noinline]] bool Registry::try_read_all(Tag tag, Found found) const noexcept {
  const std::uint32_t partition = partition_of(tag);
  const std::uint64_t header = headers_[partition].word.load(std::memory_order_acquire);
  if ((header >> 32 & 1) != 0) return false;
  const auto lines = static_cast<std::uint32_t>(header);
  const Cell wanted = cell_of(tag);
  const auto found_if_visible = [&](Slot slot) {
    // A list whose memory was reused may contain any number.
    if (slot > max_slots_) return;
    const std::uint32_t row = rows_[slot].load(std::memory_order_acquire);
    if (state_of(row) == SlotState::kVisible) found(slot, row);
  };
  std::uint32_t number = home_of(tag, lines);
  for (std::uint32_t probed = 0; probed <= kMaxProbeLines; ++probed) {
    const Cell* const line = line_at(partition, number);
    bool last = load_shared(line[kLineCells - 1]) == 0;
    for (std::uint32_t alike = alike_cells(line, wanted); alike != 0; alike &= alike - 1) {
      const Cell cell = load_shared(line[std::countr_zero(alike)]);
      if (static_cast<Slot>(cell) != kListed) {
        if ((cell ^ wanted) >> kStoredShift != 0) continue;
        last |= (cell & kMore) == 0;
        found_if_visible(static_cast<Slot>(cell));
        continue;
      }
      List* const list = list_of(cell);
      if (list->tag() != tag) continue;
      last = true;
      const std::uint32_t size = list->size();
      for (std::uint32_t i = 0; i < size; ++i)
        found_if_visible(load_shared(list->begin()[i]));
    }
    if (last) break;
    if (++number == lines) number = 0;
  }
  std::atomic_signal_fence(std::memory_order_acquire);
  return headers_[partition].word.load(std::memory_order_relaxed) == header;
}

// Calls work(tag) for each tag; stops and returns false as soon as work() returns false. Memory
// serves many requests at once, so all home lines of a group of tags are prefetched first, then the
// lines that follow full lines; only then are the lines read.
template <typename Work>
bool Registry::in_groups(TagSpan tags, Work work) const noexcept {
  std::array<const Cell*, kGroupKeys> lines;
  for (std::size_t begin = 0; begin < tags.size(); begin += kGroupKeys) {
    const std::size_t end = std::min(begin + kGroupKeys, tags.size());
    for (std::size_t at = begin; at < end; ++at) {
      const std::uint32_t partition = partition_of(tags[at]);
      lines[at - begin] = line_at(partition, home_of(tags[at], lines_of(partition)));
      __builtin_prefetch(lines[at - begin]);
    }
    for (std::size_t at = begin; at < end; ++at) {
      const Cell* const line = lines[at - begin];
      __builtin_prefetch(line + (load_shared(line[kLineCells - 1]) != 0 ? kLineCells : 0));
    }
    for (std::size_t at = begin; at < end; ++at) {
      if (!work(tags[at])) return false;
    }
  }
  return true;
}

}  // namespace kvstrata
