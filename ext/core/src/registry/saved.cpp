// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The placements of the registry in a file: its partitions one after another, each as
//
//   lines u32 · cells u32 · bytes of the lists u32 · CRC32C of all else u32
//   · how many cells each line has u8 · cells u64 · the list of each cell that names one
//
// little-endian. The lines are restored as they were, which takes a tenth of the time in which
// their placements would be admitted. A cell's number of a list means nothing in the file.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "hash/crc32c.h"
#include "registry/cells.h"
#include "registry/registry.h"

namespace kvstrata {

struct Registry::Saved {
  std::uint32_t lines;
  std::uint32_t cells;
  std::uint32_t lists_bytes;
  std::uint32_t crc;

  static constexpr std::size_t kHeadBytes = 16;
  static constexpr std::size_t kBeforeCrcBytes = 12;

  const std::uint8_t* rest = nullptr;  // what follows the head

  std::uint64_t rest_bytes() const noexcept {
    return lines + std::uint64_t{cells} * sizeof(Cell) + lists_bytes;
  }
  std::uint32_t true_crc() const noexcept {
    return crc32c(rest, rest_bytes(), crc32c(this, kBeforeCrcBytes));
  }
};

namespace {

constexpr Status kWrong{StatusCode::kCorrupt, "snapshot: the placements in it are damaged"};

Status read_all(int file, void* to, std::size_t bytes, std::uint64_t offset) noexcept {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t got = ::pread(file, static_cast<std::uint8_t*>(to) + done, bytes - done,
                                static_cast<off_t>(offset + done));
    if (got == 0) return kWrong;
    if (got < 0 && errno != EINTR)
      return {StatusCode::kOsError, "snapshot: the placements in it cannot be read", errno};
    done += got > 0 ? static_cast<std::size_t>(got) : 0;
  }
  return {};
}

}  // namespace

void Registry::dump(std::uint32_t partition, std::vector<std::uint8_t>* bytes) noexcept {
  std::vector<std::uint8_t> lists;
  const std::lock_guard turn(turns_);
  Saved saved{
      .lines = lines_of(partition), .cells = rooms_[partition].cells, .lists_bytes = 0, .crc = 0};
  const std::size_t begin = bytes->size() + Saved::kHeadBytes;
  bytes->resize(begin + saved.rest_bytes());
  std::uint8_t* const used = bytes->data() + begin;
  std::uint8_t* to = used + saved.lines;
  for (std::uint32_t number = 0; number < saved.lines; ++number) {
    Cell* const line = line_at(partition, number);
    used[number] = static_cast<std::uint8_t>(used_cells(line));
    std::memcpy(to, line, used[number] * sizeof(Cell));
    to += used[number] * sizeof(Cell);
    for (std::uint32_t at = 0; at < used[number]; ++at) {
      if (static_cast<Slot>(line[at]) != kListed) continue;
      const List* const list = list_of(line[at]);
      const auto* const first = reinterpret_cast<const std::uint8_t*>(list);
      lists.insert(lists.end(), first, first + List::kHeaderBytes + list->size() * sizeof(Slot));
    }
  }
  saved.lists_bytes = static_cast<std::uint32_t>(lists.size());
  bytes->insert(bytes->end(), lists.begin(), lists.end());
  saved.rest = bytes->data() + begin;
  saved.crc = saved.true_crc();
  std::memcpy(bytes->data() + begin - Saved::kHeadBytes, &saved, Saved::kHeadBytes);
}

// Counts the placements of each slot in `keys`.
Status Registry::restore_partition(std::uint32_t partition, const Saved& saved, const Slot* slot_of,
                                   std::uint64_t* keys) noexcept {
  if (saved.crc != saved.true_crc() || saved.lines % kPieceLines != 0 ||
      saved.cells > std::uint64_t{saved.lines} * kLineCells)
    return kWrong;
  if (saved.lines == 0) return {};
  const std::lock_guard turn(turns_);
  std::uint64_t begin = 0;
  if (saved.lines > max_lines_ || !take_lines(saved.lines * kLineBytes, &begin))
    return {StatusCode::kNoSpace, "max_bytes: the snapshot needs a larger registry"};
  const std::uint8_t* from = saved.rest + saved.lines;
  const std::uint8_t* lists = from + saved.cells * sizeof(Cell);
  const std::uint8_t* const end = lists + saved.lists_bytes;
  const std::uint8_t* const cells_end = lists;
  for (std::uint32_t number = 0; number < saved.lines; ++number) {
    const std::size_t used = saved.rest[number];
    if (used > kLineCells || used * sizeof(Cell) > static_cast<std::size_t>(cells_end - from))
      return kWrong;
    Cell* const line = reinterpret_cast<Cell*>(cells_.at(begin + number * kLineBytes));
    for (std::size_t at = 0; at < used; ++at, from += sizeof(Cell)) {
      Cell cell;
      std::memcpy(&cell, from, sizeof cell);
      if (static_cast<Slot>(cell) == kListed) [[unlikely]] {
        List head;
        if (end - lists < static_cast<std::ptrdiff_t>(List::kHeaderBytes)) return kWrong;
        std::memcpy(&head, lists, List::kHeaderBytes);
        lists += List::kHeaderBytes;
        const std::uint32_t size = head.size();
        if (end - lists < static_cast<std::ptrdiff_t>(size * sizeof(Slot))) return kWrong;
        List* const list = take_list(head.size_class());
        if (list == nullptr)
          return {StatusCode::kNoSpace, "max_bytes: the snapshot needs a larger registry"};
        store_shared(list->tag_and_class, head.tag() | head.size_class());
        for (std::uint32_t i = 0; i < size; ++i, lists += sizeof(Slot)) {
          Slot slot;
          std::memcpy(&slot, lists, sizeof slot);
          store_shared(list->begin()[i], slot_of[slot]);
          ++keys[slot_of[slot]];
        }
        store_shared(list->count, std::uint64_t{size});
        shared_tags_.fetch_add(1, std::memory_order_relaxed);
        store_shared(line[at], name_of(list) | (cell & kListCellBits));
        continue;
      }
      const Slot slot = slot_of[static_cast<Slot>(cell)];
      ++keys[slot];
      store_shared(line[at], (cell & ~Cell{0xFFFF}) | slot);
    }
  }
  rooms_[partition].cells = saved.cells;
  use_lines(partition, begin, saved.lines);
  return {};
}

Status Registry::restore(int file, std::uint64_t begin, std::uint64_t end,
                         std::span<const Slot> slot_of, std::uint64_t* added) noexcept {
  if (slot_of.size() != std::size_t{kListed} + 1 ||
      !std::ranges::all_of(slot_of, [&](Slot slot) { return can_be_filled(slot); }))
    return {StatusCode::kBadArgument,
            "slot_of: must name a hidden or visible slot for each number"};
  std::vector<std::uint64_t> keys(max_slots_ + 1);
  std::vector<std::uint8_t> rest;
  Status status = begin <= end ? Status() : kWrong;
  for (std::uint32_t partition = 0; partition < kPartitions && status.ok(); ++partition) {
    Saved saved{};
    if (end - begin < Saved::kHeadBytes) status = kWrong;
    if (status.ok()) status = read_all(file, &saved, Saved::kHeadBytes, begin);
    begin += Saved::kHeadBytes;
    if (status.ok() && saved.rest_bytes() > end - begin) status = kWrong;
    if (!status.ok()) break;
    rest.resize(std::max(rest.size(), std::size_t{saved.rest_bytes()}));
    saved.rest = rest.data();
    status = read_all(file, rest.data(), saved.rest_bytes(), begin);
    begin += saved.rest_bytes();
    if (status.ok()) status = restore_partition(partition, saved, slot_of.data(), keys.data());
  }
  if (status.ok() && begin != end) status = kWrong;
  const std::lock_guard turn(turns_);
  for (std::uint32_t slot = 1; slot <= max_slots_; ++slot) {
    count_keys(static_cast<Slot>(slot), static_cast<std::int64_t>(keys[slot]));
    *added += keys[slot];
  }
  count_bytes();
  return status;
}

}  // namespace kvstrata
