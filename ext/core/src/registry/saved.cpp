// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The placements of the registry in a file: its partitions one after another, each as
//
//   lines u32 · cells u32 · bytes of what follows the CRC u32 · CRC32C of all else u32
//   · for each line: number of its cells u8 · the cells u64 · the list of each cell that names one
//
// little-endian. The lines are restored as they were, which takes a twentieth of the time in which
// their placements would be admitted. A cell's number of a list means nothing in the file.
#include <algorithm>
#include <cstring>

#include "files/files.h"
#include "hash/crc32c.h"
#include "registry/cells.h"
#include "registry/registry.h"

namespace kvstrata {

struct Registry::Saved {
  std::uint32_t lines;
  std::uint32_t cells;
  std::uint32_t bytes;
  std::uint32_t crc;

  std::uint32_t true_crc(const std::uint8_t* rest) const noexcept {
    return crc32c(rest, bytes, crc32c(this, offsetof(Saved, crc)));
  }
};

constexpr Status kWrong{StatusCode::kCorrupt, "snapshot: the placements in it are damaged"};
constexpr Status kTooLarge{StatusCode::kNoSpace, "max_bytes: the snapshot needs a larger registry"};

void Registry::dump(std::uint32_t partition, std::vector<std::uint8_t>* bytes) noexcept {
  const std::size_t begin = bytes->size(), rest = begin + sizeof(Saved);
  const auto append = [bytes](const void* from, std::size_t count) {
    const auto* const first = static_cast<const std::uint8_t*>(from);
    bytes->insert(bytes->end(), first, first + count);
  };
  const std::lock_guard turn(turns_);
  Saved saved{.lines = lines_of(partition), .cells = rooms_[partition].cells, .bytes = 0, .crc = 0};
  bytes->reserve(rest + saved.lines + saved.cells * sizeof(Cell));
  append(&saved, sizeof saved);
  for (std::uint32_t number = 0; number < saved.lines; ++number) {
    Cell* const line = line_at(partition, number);
    const auto used = static_cast<std::uint8_t>(used_cells(line));
    append(&used, 1);
    append(line, used * sizeof(Cell));
    for (const Cell cell : std::span(line, used)) {
      if (static_cast<Slot>(cell) == kListed)
        append(list_of(cell), List::kHeaderBytes + list_of(cell)->size() * sizeof(Slot));
    }
  }
  saved.bytes = static_cast<std::uint32_t>(bytes->size() - rest);
  saved.crc = saved.true_crc(bytes->data() + rest);
  std::memcpy(bytes->data() + begin, &saved, sizeof saved);
}

// Counts the placements of each slot in `keys`.
Status Registry::restore_partition(std::uint32_t partition, const Saved& saved,
                                   const std::uint8_t* from, const Slot* slot_of,
                                   std::uint64_t* keys) noexcept {
  if (saved.crc != saved.true_crc(from) || saved.lines % kPieceLines != 0) return kWrong;
  if (saved.lines == 0) return {};
  const std::uint8_t* const end = from + saved.bytes;
  const auto take = [&](void* to, std::size_t count) {
    if (count > static_cast<std::size_t>(end - from)) return false;
    std::memcpy(to, from, count);
    from += count;
    return true;
  };
  const std::lock_guard turn(turns_);
  std::uint64_t begin = 0;
  if (saved.lines > max_lines_ || !take_lines(saved.lines * kLineBytes, &begin)) return kTooLarge;
  for (std::uint32_t number = 0; number < saved.lines; ++number) {
    auto* const line = reinterpret_cast<Cell*>(cells_.at(begin + number * kLineBytes));
    std::uint8_t used = 0;
    std::array<Cell, kLineCells> cells;
    if (!take(&used, 1) || used > kLineCells || !take(cells.data(), used * sizeof(Cell)))
      return kWrong;
    for (std::size_t at = 0; at < used; ++at) {
      if (static_cast<Slot>(cells[at]) != kListed) [[likely]] {
        const Slot slot = slot_of[static_cast<Slot>(cells[at])];
        ++keys[slot];
        store_shared(line[at], (cells[at] & ~Cell{0xFFFF}) | slot);
        continue;
      }
      List head;
      if (!take(&head, List::kHeaderBytes)) return kWrong;
      List* const list = take_list(head.size_class());
      if (list == nullptr) return kTooLarge;
      if (!take(list->begin(), head.size() * sizeof(Slot))) return kWrong;
      for (Slot& slot : std::span(list->begin(), head.size())) {
        slot = slot_of[slot];
        ++keys[slot];
      }
      store_shared(list->tag_and_class, head.tag() | head.size_class());
      store_shared(list->count, std::uint64_t{head.size()});
      shared_tags_.fetch_add(1, std::memory_order_relaxed);
      store_shared(line[at], name_of(list) | (cells[at] & kListCellBits));
    }
  }
  rooms_[partition].cells = saved.cells;
  use_lines(partition, begin, saved.lines);
  return {};
}

Status Registry::restore(const std::string& path, std::uint64_t begin, std::uint64_t end,
                         std::span<const Slot> slot_of, std::uint64_t* added) noexcept {
  if (slot_of.size() != std::size_t{kListed} + 1 ||
      !std::ranges::all_of(slot_of, [&](Slot slot) { return can_be_filled(slot); }))
    return {StatusCode::kBadArgument,
            "slot_of: must name a hidden or visible slot for each number"};
  std::unique_ptr<File> file;
  KVSTRATA_RETURN_IF_ERROR(posix_files().open(path, FileMode::kRead, false, &file));
  std::vector<std::uint64_t> keys(max_slots_ + 1);
  std::vector<std::uint8_t> rest;
  Status status;
  const auto read = [&](void* to, std::size_t bytes) {
    const ReadPart part{to, bytes};
    status = bytes <= end - begin ? file->read({&part, 1}, begin) : kWrong;
    begin += bytes;
    return status.ok();
  };
  for (std::uint32_t partition = 0; partition < kPartitions && status.ok(); ++partition) {
    Saved saved{};
    if (!read(&saved, sizeof saved)) break;
    if (saved.bytes <= end - begin) rest.resize(std::max<std::size_t>(rest.size(), saved.bytes));
    if (!read(rest.data(), saved.bytes)) break;
    status = restore_partition(partition, saved, rest.data(), slot_of.data(), keys.data());
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
