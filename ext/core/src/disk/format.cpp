// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/format.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "hash/crc32c.h"
#include "record/record.h"

namespace kvstrata {

namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

using Magic = std::array<char, 8>;

constexpr Magic kSegmentMagic{'K', 'V', 'S', 'E', 'G', 'M', 'N', 'T'};
constexpr Magic kFrameMagic{'K', 'V', 'F', 'R', 'A', 'M', 'E', '1'};
constexpr Magic kTableMagic{'K', 'V', 'T', 'A', 'B', 'L', 'E', '1'};

struct SegmentOnDisk {
  Magic magic;
  std::uint16_t version;
  std::uint16_t flags;
  std::uint32_t segment;
  std::uint64_t generation;
  std::uint64_t length;
  std::uint64_t synced;
  std::uint32_t reserved;
  std::uint32_t crc;
};
static_assert(sizeof(SegmentOnDisk) == 48);

struct FrameOnDisk {
  Magic magic;
  std::uint16_t kind;
  std::uint16_t flags;
  std::uint32_t tombstones;
  std::uint32_t segment;
  std::uint32_t head_crc;
  std::uint64_t generation;
  std::uint64_t run;
  std::uint64_t sequence;
  std::uint64_t previous_run;
  std::uint64_t previous_sequence;
  std::uint64_t synced;
  std::uint64_t record_bytes;
  std::array<unsigned char, 32> key;
  std::array<unsigned char, 36> reserved1;
  std::uint32_t crc;  // of all bytes before it and of the keys behind it
};
static_assert(sizeof(FrameOnDisk) == 152 && offsetof(FrameOnDisk, crc) == 148);
static_assert(sizeof(FrameOnDisk) + kTombstonesOfFrame * sizeof(Digest) <= kFrameHeaderBytes);

struct EntryOnDisk {
  std::array<unsigned char, 32> key;
  std::uint64_t sequence;
  std::uint32_t block;
  std::uint32_t record_bytes;
  std::uint16_t kind;
  std::array<unsigned char, 6> reserved;
};
static_assert(sizeof(EntryOnDisk) == 56);

// The last bytes of the segment.
struct TableEndOnDisk {
  Magic magic;
  std::uint32_t segment;
  std::uint32_t entries;
  std::uint64_t generation;
  std::uint64_t last_run;
  std::uint64_t last_sequence;
  std::uint64_t end;
  std::array<unsigned char, 8> reserved;
  std::uint32_t entries_crc;
  std::uint32_t crc;
};
static_assert(sizeof(TableEndOnDisk) == 64);

template <typename T>
T read_at(const FileBlock& block, std::size_t offset) noexcept {
  T value;
  std::memcpy(&value, block.bytes.data() + offset, sizeof(T));
  return value;
}

std::uint32_t frame_crc(const FileBlock& block, std::uint32_t tombstones) noexcept {
  const std::uint32_t crc = crc32c(block.bytes.data(), offsetof(FrameOnDisk, crc));
  return crc32c(block.bytes.data() + sizeof(FrameOnDisk), tombstones * sizeof(Digest), crc);
}

TableEndOnDisk table_end(const FileBlock& last) noexcept {
  return read_at<TableEndOnDisk>(last, kFileBlockBytes - sizeof(TableEndOnDisk));
}

bool is_sound(const TableEndOnDisk& end) noexcept {
  return end.magic == kTableMagic && end.crc == crc32c(&end, offsetof(TableEndOnDisk, crc));
}

bool known(std::uint16_t kind) noexcept {
  return kind >= static_cast<std::uint16_t>(FrameKind::kRecord) &&
         kind <= static_cast<std::uint16_t>(FrameKind::kClear);
}

}  // namespace

std::uint32_t head_crc_of(const void* record, std::uint64_t length) noexcept {
  // The header's own CRC is left out: the CRC of bytes followed by their CRC is always the same.
  constexpr std::uint64_t kBeforeItsCrc = kOuterHeaderBytes - sizeof(std::uint32_t);
  return crc32c(record, std::min(length, kBeforeItsCrc));
}

void encode(const SegmentHeader& header, FileBlock* out) noexcept {
  SegmentOnDisk disk{.magic = kSegmentMagic,
                     .version = kDiskVersion,
                     .flags = 0,
                     .segment = header.segment,
                     .generation = header.generation,
                     .length = header.length,
                     .synced = header.synced,
                     .reserved = 0,
                     .crc = 0};
  disk.crc = crc32c(&disk, offsetof(SegmentOnDisk, crc));
  out->bytes.fill(0);
  std::memcpy(out->bytes.data(), &disk, sizeof(disk));
}

BlockState decode(const FileBlock& block, SegmentHeader* out) noexcept {
  const auto disk = read_at<SegmentOnDisk>(block, 0);
  if (disk.magic != kSegmentMagic) {
    const bool empty = std::all_of(block.bytes.begin(), block.bytes.end(),
                                   [](unsigned char byte) { return byte == 0; });
    return empty ? BlockState::kEmpty : BlockState::kBad;
  }
  if (disk.crc != crc32c(&disk, offsetof(SegmentOnDisk, crc))) return BlockState::kBad;
  if (disk.version != kDiskVersion || disk.flags != 0) return BlockState::kOther;
  *out = SegmentHeader{.segment = disk.segment,
                       .generation = disk.generation,
                       .length = disk.length,
                       .synced = disk.synced};
  return BlockState::kGood;
}

void encode(const FrameHeader& header, FileBlock* out) noexcept {
  const auto tombstones = static_cast<std::uint32_t>(header.tombstones.size());
  FrameOnDisk disk{.magic = kFrameMagic,
                   .kind = static_cast<std::uint16_t>(header.kind),
                   .flags = 0,
                   .tombstones = tombstones,
                   .segment = header.segment,
                   .head_crc = header.head_crc,
                   .generation = header.generation,
                   .run = header.name.run,
                   .sequence = header.name.sequence,
                   .previous_run = header.previous.run,
                   .previous_sequence = header.previous.sequence,
                   .synced = header.synced,
                   .record_bytes = header.record_bytes,
                   .key = header.key,
                   .reserved1 = {},
                   .crc = 0};
  out->bytes.fill(0);
  std::memcpy(out->bytes.data(), &disk, sizeof(disk));
  for (std::size_t i = 0; i < header.tombstones.size(); ++i)
    std::memcpy(out->bytes.data() + sizeof(disk) + i * sizeof(Digest), header.tombstones[i].data(),
                sizeof(Digest));
  disk.crc = frame_crc(*out, tombstones);
  std::memcpy(out->bytes.data() + offsetof(FrameOnDisk, crc), &disk.crc, sizeof(disk.crc));
}

bool begins_as_frame(const FileBlock& block) noexcept {
  return read_at<Magic>(block, 0) == kFrameMagic;
}

std::optional<FrameHeader> decode_frame(const FileBlock& block) {
  const auto disk = read_at<FrameOnDisk>(block, 0);
  if (disk.magic != kFrameMagic || disk.flags != 0 || !known(disk.kind) ||
      disk.tombstones > kTombstonesOfFrame || disk.crc != frame_crc(block, disk.tombstones))
    return std::nullopt;
  FrameHeader header{.kind = static_cast<FrameKind>(disk.kind),
                     .segment = disk.segment,
                     .generation = disk.generation,
                     .name = {.run = disk.run, .sequence = disk.sequence},
                     .previous = {.run = disk.previous_run, .sequence = disk.previous_sequence},
                     .synced = disk.synced,
                     .record_bytes = disk.record_bytes,
                     .key = disk.key,
                     .head_crc = disk.head_crc,
                     .tombstones = std::vector<Digest>(disk.tombstones)};
  for (std::size_t i = 0; i < header.tombstones.size(); ++i)
    std::memcpy(header.tombstones[i].data(), block.bytes.data() + sizeof(disk) + i * sizeof(Digest),
                sizeof(Digest));
  return header;
}

std::uint64_t table_bytes(std::uint64_t entries) noexcept {
  return whole_blocks(entries * sizeof(EntryOnDisk) + sizeof(TableEndOnDisk));
}

void encode(const SegmentTable& table, std::vector<FileBlock>* out) {
  out->assign(table_bytes(table.entries.size()) / kFileBlockBytes, FileBlock{});
  unsigned char* const bytes = out->data()->bytes.data();
  for (std::size_t i = 0; i < table.entries.size(); ++i) {
    const TableEntry& entry = table.entries[i];
    const EntryOnDisk disk{.key = entry.key,
                           .sequence = entry.sequence,
                           .block = entry.block,
                           .record_bytes = entry.record_bytes,
                           .kind = static_cast<std::uint16_t>(entry.kind),
                           .reserved = {}};
    std::memcpy(bytes + i * sizeof(disk), &disk, sizeof(disk));
  }
  TableEndOnDisk end{.magic = kTableMagic,
                     .segment = table.segment,
                     .entries = static_cast<std::uint32_t>(table.entries.size()),
                     .generation = table.generation,
                     .last_run = table.last.run,
                     .last_sequence = table.last.sequence,
                     .end = table.end,
                     .reserved = {},
                     .entries_crc = crc32c(bytes, table.entries.size() * sizeof(EntryOnDisk)),
                     .crc = 0};
  end.crc = crc32c(&end, offsetof(TableEndOnDisk, crc));
  std::memcpy(bytes + out->size() * kFileBlockBytes - sizeof(end), &end, sizeof(end));
}

std::optional<std::uint64_t> table_length(const FileBlock& last, std::uint32_t segment,
                                          std::uint64_t generation) noexcept {
  const TableEndOnDisk end = table_end(last);
  if (!is_sound(end) || end.segment != segment || end.generation != generation) return std::nullopt;
  return table_bytes(end.entries);
}

std::optional<SegmentTable> decode_table(std::span<const FileBlock> blocks) {
  const TableEndOnDisk end = table_end(blocks.back());
  const unsigned char* const bytes = blocks.front().bytes.data();
  if (!is_sound(end) || table_bytes(end.entries) != blocks.size_bytes() ||
      end.entries_crc != crc32c(bytes, end.entries * sizeof(EntryOnDisk)))
    return std::nullopt;
  SegmentTable table{.segment = end.segment,
                     .generation = end.generation,
                     .last = {.run = end.last_run, .sequence = end.last_sequence},
                     .end = end.end,
                     .entries = std::vector<TableEntry>(end.entries)};
  for (std::size_t i = 0; i < table.entries.size(); ++i) {
    EntryOnDisk disk;
    std::memcpy(&disk, bytes + i * sizeof(disk), sizeof(disk));
    if (!known(disk.kind)) return std::nullopt;
    table.entries[i] = TableEntry{.key = disk.key,
                                  .sequence = disk.sequence,
                                  .block = disk.block,
                                  .record_bytes = disk.record_bytes,
                                  .kind = static_cast<FrameKind>(disk.kind)};
  }
  return table;
}

void add_entries(const FrameHeader& header, std::uint32_t block, std::vector<TableEntry>* table) {
  TableEntry entry{.key = header.key,
                   .sequence = header.name.sequence,
                   .block = block,
                   .record_bytes = static_cast<std::uint32_t>(header.record_bytes),
                   .kind = header.kind};
  if (header.kind != FrameKind::kTombstones) table->push_back(entry);
  for (const Digest& key : header.tombstones) {
    entry.key = key;
    table->push_back(entry);
  }
}

}  // namespace kvstrata
