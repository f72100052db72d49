// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The record: what an extent holds, and what every L2 medium holds for the empty codec chain. This
// file and record.cpp are the only code that writes or checks its bytes; docs/formats.md describes
// them so that another program can.
//
//   outer header (256) | inner header (256) | section table (16 each) | zeros up to H | payload
//
// A record is trusted in three steps, each of which stands on the one before: the headers are sound
// (read_record_header), they name what was asked for (key), every section is what its CRC says
// (verify_record, or the scatter that copies it).
//
// No function reads outside [record, record + length), whatever the bytes say, and none needs them
// to hold still: every field is copied before it is checked. Thread-safe as far as the bytes are.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvstrata/digest.h"
#include "kvstrata/status.h"

namespace kvstrata {

inline constexpr std::uint16_t kRecordVersion = 1;
inline constexpr std::uint64_t kRecordAlignment = 4096;
inline constexpr std::uint32_t kMaxSections = 65'536;
// Inner flag: the section CRCs are not computed yet. Nobody may serve or move such a record.
inline constexpr std::uint16_t kRecordCrcPending = 1;

// What the writer says about a chunk.
struct RecordSpec {
  Digest key{};       // storage key
  Digest identity{};  // root of the key chain
  Digest slice_digest{};
  Digest parent_key{};  // storage key of the chunk before, of the same slice; zeros if none
  std::uint32_t chunk_tokens = 0;
  std::uint64_t created_unix_ms = 0;  // 0: now
};

// One row of the section table.
struct Section {
  std::uint64_t offset;  // from the start of the payload
  std::uint32_t length;
  std::uint32_t crc;
};

struct RecordHeader {
  RecordSpec spec;
  std::uint64_t header_bytes = 0;   // H: where the payload begins
  std::uint64_t payload_bytes = 0;  // as copied out of the engine
  std::uint64_t stored_bytes = 0;   // as stored behind the header; payload_bytes without a codec
  std::uint32_t stored_crc = 0;
  std::uint32_t section_count = 0;
  std::uint16_t flags = 0;
  std::array<unsigned char, 8> codecs{};

  // Never wraps: read_record_header has checked it against a length.
  [[nodiscard]] std::uint64_t record_bytes() const noexcept { return header_bytes + stored_bytes; }
  [[nodiscard]] bool crc_pending() const noexcept { return (flags & kRecordCrcPending) != 0; }
  [[nodiscard]] bool plain() const noexcept { return codecs == decltype(codecs){}; }
};

// H for so many sections. REQUIRES: section_count <= kMaxSections.
constexpr std::uint64_t record_header_bytes(std::uint32_t section_count) noexcept {
  return (512 + 16 * std::uint64_t{section_count} + kRecordAlignment - 1) / kRecordAlignment *
         kRecordAlignment;
}

// H + payload_bytes. kBadArgument when section_count is not in [1, kMaxSections] or the payload is
// empty or too large for its sections.
Status record_bytes(std::uint64_t section_count, std::uint64_t payload_bytes,
                    std::uint64_t* out) noexcept;

// Writes both headers, the table and the zeros behind it; the payload (sections packed, in order)
// is already there. `offset` of the sections is set by this function, length and crc are taken. The
// magic is written last, so an interrupted call leaves nothing that passes for a record.
// kBadArgument: the address, section_count, an empty section, or `length` too small.
Status write_record_header(void* record, std::uint64_t length, const RecordSpec& spec,
                           Section* sections, std::uint64_t section_count) noexcept;

// kBadArgument unless a record may be written there: not null, a multiple of 8.
Status check_record_address(const void* record) noexcept;

// Destroys the magic: call it before bytes of an extent are overwritten. Several threads may do it
// at once. REQUIRES: check_record_address(record); 8 bytes.
void invalidate_record(void* record) noexcept;

// Computes the section CRCs of a payload that is in place and writes the header. `section_lengths`
// has section_count entries.
Status seal_record(void* record, std::uint64_t length, const RecordSpec& spec,
                   const std::uint32_t* section_lengths, std::uint64_t section_count) noexcept;

// How the payload of an encoded record is stored (docs/formats.md names the codec numbers).
struct RecordEncoding {
  std::array<unsigned char, 8> codecs{};
  std::uint64_t stored_bytes = 0;
  std::uint32_t stored_crc = 0;
};

// As write_record_header, for a payload that lies behind the header in its encoded form; `sections`
// speak of the payload before encoding (which a lossy codec has rounded already).
// kBadArgument also when no codec is named or nothing is stored.
Status write_encoded_header(void* record, std::uint64_t length, const RecordSpec& spec,
                            Section* sections, std::uint64_t section_count,
                            const RecordEncoding& encoding) noexcept;

// Checks everything about the headers and the table (magics, versions, CRCs, reserved zeros, packed
// sections, agreement of both headers, that the whole record fits in `length`) and nothing about
// the payload. Up to `capacity` rows of the table go to `sections`.
//   kOutOfRange    `length` ends before the record does
//   kIncompatible  another format version; an unknown flag
//   kCorrupt       anything else; the message names the field
Status read_record_header(const void* record, std::uint64_t length, RecordHeader* header,
                          Section* sections = nullptr, std::size_t capacity = 0) noexcept;

// Whether a record with these sound headers is the one that was asked for (any key if nullptr),
// with a payload whose sections can be checked: kStale, kIncompatible or kBusy as of verify_record.
Status check_is_wanted(const RecordHeader& header, const Digest* expected_key) noexcept;

// Bytes of the outer header, the first of a record.
inline constexpr std::size_t kOuterHeaderBytes = 256;

// What these first bytes say about the record they belong to: its key and its whole length. Errors
// are those of read_record_header about the outer header. REQUIRES: kOuterHeaderBytes bytes.
Status read_outer_header(const void* record, Digest* key, std::uint64_t* record_bytes) noexcept;

// read_record_header, check_is_wanted and the CRC of every section.
//   kStale         sound headers, other key
//   kIncompatible  also: the payload is encoded, so its sections cannot be checked
//   kBusy          the CRCs are pending
//   kCorrupt       detail(2) is the first bad section, or -1 for the headers
Status verify_record(const void* record, std::uint64_t length, const Digest* expected_key) noexcept;

// As verify_record, for what a medium holds: of an encoded record the stored bytes are checked,
// which says that they are what was written and nothing about what they decode to.
Status verify_stored_record(const void* record, std::uint64_t length,
                            const Digest* expected_key) noexcept;

}  // namespace kvstrata
