// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What the disk log writes around records, byte by byte; docs/formats.md says the same in words.
//
// A log is a folder of segments. A segment is one file of fixed length:
//
//   header (4096) | frame | frame | ... | what is left | table (whole blocks)
//
// A frame is one block of its own, then, for a record, the record in whole blocks. Each frame names
// the segment's generation and the frame before it, so that what an earlier generation, or a write
// that was lost, left behind is never taken for the log's next frame. The table lists the frames of
// a full segment; it is written when all of them are on the medium.
//
// Everything that is checked by a CRC here lies in one block of 512 bytes or is worthless when
// torn.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvstrata/digest.h"
#include "kvstrata/files.h"

namespace kvstrata {

inline constexpr std::uint16_t kDiskVersion = 2;
inline constexpr std::uint64_t kFrameHeaderBytes = kFileBlockBytes;
inline constexpr std::uint64_t kSegmentHeaderBytes = kFileBlockBytes;

constexpr std::uint64_t whole_blocks(std::uint64_t bytes) noexcept {
  return (bytes + kFileBlockBytes - 1) / kFileBlockBytes * kFileBlockBytes;
}

// One block in memory that direct files can take.
struct DiskBlock {
  alignas(4096) std::array<unsigned char, kFileBlockBytes> bytes{};
};

struct SegmentHeader {
  std::uint32_t segment = 0;     // its number, as in the file's name
  std::uint64_t generation = 0;  // one more each time the segment is used again
  std::uint64_t length = 0;      // of the file
  // Every frame up to this one was on the medium, or gone, when the header was written.
  std::uint64_t synced = 0;
};

enum class FrameKind : std::uint16_t {
  kRecord = 1,
  kTombstones = 2,  // its keys' earlier records are gone
  kClear = 3,       // all earlier records are gone
  kSkip = 4,        // a frame that could not be written; `record_bytes` says how long it was to be
};

// Names a frame; runs are random numbers, one for each time that the log is opened.
struct FrameName {
  std::uint64_t run = 0;
  std::uint64_t sequence = 0;  // 1, 2, ... through all segments
  bool operator==(const FrameName&) const = default;
};

struct FrameHeader {
  FrameKind kind = FrameKind::kRecord;
  std::uint32_t segment = 0;
  std::uint64_t generation = 0;
  FrameName name{};
  FrameName previous{};      // of the same segment and generation; zeros for the first
  std::uint64_t synced = 0;  // as in SegmentHeader, when this frame got its place
  std::uint64_t record_bytes = 0;
  Digest key{};
  // Of the record's first bytes (head_crc_of): ties the frame to this record and no earlier one of
  // the key, which may lie there where a write was cut short.
  std::uint32_t head_crc = 0;
  std::vector<Digest> tombstones{};

  [[nodiscard]] std::uint64_t frame_bytes() const noexcept {
    return kFrameHeaderBytes + whole_blocks(record_bytes);
  }
};

// CRC32C of the outer header up to its own CRC, or of the whole where that is shorter; that header
// has the payload's CRC.
std::uint32_t head_crc_of(const void* record, std::uint64_t length) noexcept;

inline constexpr std::size_t kTombstonesOfFrame = 123;

struct TableEntry {
  Digest key{};
  std::uint64_t sequence = 0;
  std::uint32_t block = 0;  // where the frame begins, in blocks from the start of the file
  std::uint32_t record_bytes = 0;
  FrameKind kind = FrameKind::kRecord;
};

struct SegmentTable {
  std::uint32_t segment = 0;
  std::uint64_t generation = 0;
  FrameName last;         // the segment's last frame
  std::uint64_t end = 0;  // where it ends
  std::vector<TableEntry> entries;
};

void encode(const SegmentHeader& header, DiskBlock* out) noexcept;
void encode(const FrameHeader& header, DiskBlock* out) noexcept;

enum class BlockState : std::uint8_t {
  kGood,
  kEmpty,  // only zeros
  kBad,    // no header of ours, or altered
  kOther,  // written by another version
};

BlockState decode(const DiskBlock& block, SegmentHeader* out) noexcept;
// Nothing where the block is no sound frame header.
std::optional<FrameHeader> decode_frame(const DiskBlock& block);

// Whole blocks that a table of so many entries takes.
std::uint64_t table_bytes(std::uint64_t entries) noexcept;
// `out` gets table_bytes(entries) bytes; the table lies at the end of the segment.
void encode(const SegmentTable& table, std::vector<DiskBlock>* out);
// From the last block of a segment: how long the table is, if there is one of this generation.
std::optional<std::uint64_t> table_length(const DiskBlock& last, std::uint32_t segment,
                                          std::uint64_t generation) noexcept;
// From all blocks of the table. Nothing where it is not sound.
std::optional<SegmentTable> decode_table(std::span<const DiskBlock> blocks);

}  // namespace kvstrata
