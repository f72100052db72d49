// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The bytes that the disk log writes around records; docs/internals/formats.md describes the same
// bytes.
//
// A log is a folder of segments. A segment is one file of fixed length:
//
//   header (4096) | frame | frame | ... | unused | table (whole blocks)
//
// A frame is one header block and, if it holds a record, the record in whole blocks. Each frame
// names the segment's generation, so that bytes from an earlier generation are never taken for the
// log's next frame, and the frame before it, so that a missing frame is noticed. The table lists
// the frames of a segment that is full or whose log was closed; it is written when all of them are
// on the medium, and overwritten before the segment gets another frame.
//
// The bytes under one CRC either lie in one block of 512 bytes, which a power cut cannot tear, or
// do not count if they are torn.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "files/block.h"
#include "kvstrata/digest.h"

namespace kvstrata {

inline constexpr std::uint16_t kDiskVersion = 2;
inline constexpr std::uint64_t kFrameHeaderBytes = kFileBlockBytes;
inline constexpr std::uint64_t kSegmentHeaderBytes = kFileBlockBytes;

struct SegmentHeader {
  std::uint32_t segment = 0;     // its number, as in the file's name
  std::uint64_t generation = 0;  // 1 more each time that the segment is used again
  std::uint64_t length = 0;      // of the file
  // When the header was written, every frame up to this sequence was on the medium, or its segment
  // had retired.
  std::uint64_t synced = 0;
};

enum class FrameKind : std::uint16_t {
  kRecord = 1,
  kTombstones = 2,  // removes all earlier records of its keys
  kClear = 3,       // removes all earlier records
};

// Identifies a frame. The run is a random number, a new one each time that the log is opened.
struct FrameName {
  std::uint64_t run = 0;
  std::uint64_t sequence = 0;  // ascending, through all segments
  bool operator==(const FrameName&) const = default;
};

struct FrameHeader {
  FrameKind kind = FrameKind::kRecord;
  std::uint32_t segment = 0;
  std::uint64_t generation = 0;
  FrameName name{};
  FrameName previous{};      // the frame before in this segment and generation; zeros: none
  std::uint64_t synced = 0;  // as in SegmentHeader, when this frame got its place
  std::uint64_t record_bytes = 0;
  Digest key{};
  // CRC of the record's first bytes (head_crc_of). Ties the frame to this very record: after an
  // interrupted write an earlier record of the key may lie in its place.
  std::uint32_t head_crc = 0;
  std::vector<Digest> tombstones{};

  [[nodiscard]] std::uint64_t frame_bytes() const noexcept {
    return kFrameHeaderBytes + whole_blocks(record_bytes);
  }
};

// CRC32C of the record's outer header up to that header's own CRC, or of the whole record if it is
// shorter. The outer header contains the payload's CRC.
std::uint32_t head_crc_of(const void* record, std::uint64_t length) noexcept;

inline constexpr std::size_t kTombstonesOfFrame = 123;

struct TableEntry {
  Digest key{};
  std::uint64_t sequence = 0;
  std::uint32_t block = 0;  // where the frame begins, in blocks from the start of the file
  std::uint32_t record_bytes = 0;
  FrameKind kind = FrameKind::kRecord;
};

// Appends the entries of a frame that begins at this block: one, or one per key of tombstones.
void add_entries(const FrameHeader& header, std::uint32_t block, std::vector<TableEntry>* table);

struct SegmentTable {
  std::uint32_t segment = 0;
  std::uint64_t generation = 0;
  FrameName last;         // the segment's last frame
  std::uint64_t end = 0;  // where it ends
  std::vector<TableEntry> entries;
};

void encode(const SegmentHeader& header, FileBlock* out) noexcept;
void encode(const FrameHeader& header, FileBlock* out) noexcept;

enum class BlockState : std::uint8_t {
  kGood,
  kEmpty,  // only zeros
  kBad,    // not a header of ours, or damaged
  kOther,  // written by another version: its checksum is right
};

BlockState decode(const FileBlock& block, SegmentHeader* out) noexcept;
// Whether the block begins as a frame header does, sound or damaged.
bool begins_as_frame(const FileBlock& block) noexcept;
// nullopt: the block is not a sound frame header.
std::optional<FrameHeader> decode_frame(const FileBlock& block);

// Bytes of a table with this many entries, in whole blocks.
std::uint64_t table_bytes(std::uint64_t entries) noexcept;
// `out` gets table_bytes(entries) bytes, which the caller writes at the end of the segment.
void encode(const SegmentTable& table, std::vector<FileBlock>* out);
// The table's length in bytes, as the last block of the segment states it. nullopt: the segment has
// no table of this generation.
std::optional<std::uint64_t> table_length(const FileBlock& last, std::uint32_t segment,
                                          std::uint64_t generation) noexcept;
// Decodes all blocks of a table. nullopt: it is not sound.
std::optional<SegmentTable> decode_table(std::span<const FileBlock> blocks);

}  // namespace kvstrata
