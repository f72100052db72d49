// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The record: the bytes of one chunk in an extent of the pool, and in every L2 medium (there
// possibly encoded). Only this file and record.cpp write or check these bytes;
// docs/internals/formats.md describes them so that another program can.
//
//   outer header (256) | inner header (256) | section table (16 each) | zeros up to H | payload
//
// A record is checked in three steps, each of which relies on the one before: the headers are sound
// (read_record_header), the record is the requested one (check_is_wanted), and every section
// matches its CRC (verify_record, or the scatter that copies the sections).
//
// No function reads outside [record, record + length), whatever the bytes say. The bytes may change
// during a call, because every field is copied before it is checked. Thread-safe for different
// records, and for readers of the same record.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kvstrata/digest.h"

namespace kvstrata {

class Crew;  // base/crew.h

inline constexpr std::uint16_t kRecordVersion = 1;
inline constexpr std::uint64_t kRecordAlignment = 4096;
inline constexpr std::uint32_t kMaxSections = 65'536;

// The fields of the headers that the writer of a chunk supplies.
struct RecordSpec {
  Digest key{};       // storage key
  Digest identity{};  // root of the key chain
  Digest slice_digest{};
  Digest parent_key{};  // storage key of the previous chunk, same slice; zeros for the first chunk
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
  std::uint64_t payload_bytes = 0;  // before encoding
  std::uint64_t stored_bytes = 0;   // after the header; payload_bytes without a codec
  std::uint32_t stored_crc = 0;
  std::uint32_t section_count = 0;
  std::array<unsigned char, 8> codecs{};

  // Does not wrap: read_record_header has checked the sum against a length.
  [[nodiscard]] std::uint64_t record_bytes() const noexcept { return header_bytes + stored_bytes; }
  [[nodiscard]] bool plain() const noexcept { return codecs == decltype(codecs){}; }
};

// H of a record with section_count sections. REQUIRES: section_count <= kMaxSections.
constexpr std::uint64_t record_header_bytes(std::uint32_t section_count) noexcept {
  return (512 + 16 * std::uint64_t{section_count} + kRecordAlignment - 1) / kRecordAlignment *
         kRecordAlignment;
}

// Computes H + payload_bytes. kBadArgument: section_count is not in [1, kMaxSections], or the
// payload is too small or too large for its sections.
Status record_bytes(std::uint64_t section_count, std::uint64_t payload_bytes,
                    std::uint64_t* out) noexcept;

// Writes both headers, the section table and the zeros after it; the payload (the sections in
// order, packed) is already in place. Uses length and crc of each section, and sets its offset. The
// magic is written last, so an interrupted call leaves no valid record. kBadArgument: the address
// or section_count is wrong, a section is empty, or `length` is too small.
Status write_record_header(void* record, std::uint64_t length, const RecordSpec& spec,
                           Section* sections, std::uint64_t section_count) noexcept;

// kBadArgument unless a record may be written at this address: not null, a multiple of 8.
Status check_record_address(const void* record) noexcept;

// Destroys the magic; to be called before bytes of an extent are overwritten. Several threads may
// call it for the same record. REQUIRES: check_record_address(record) is ok; 8 bytes are writable.
void invalidate_record(void* record) noexcept;

// Computes the section CRCs of a payload that is already in place and writes the header.
// `section_lengths` has section_count entries.
Status seal_record(void* record, std::uint64_t length, const RecordSpec& spec,
                   const std::uint32_t* section_lengths, std::uint64_t section_count) noexcept;

// How the payload of an encoded record is stored (docs/internals/formats.md names the codec
// numbers).
struct RecordEncoding {
  std::array<unsigned char, 8> codecs{};
  std::uint64_t stored_bytes = 0;
  std::uint32_t stored_crc = 0;
};

// As write_record_header, for a payload that is in place in its encoded form. `sections` describe
// the payload before encoding (after the rounding of a lossy codec). kBadArgument also if
// `encoding` names no codec or has no stored bytes.
Status write_encoded_header(void* record, std::uint64_t length, const RecordSpec& spec,
                            Section* sections, std::uint64_t section_count,
                            const RecordEncoding& encoding) noexcept;

// Checks the headers and the section table completely (magics, versions, CRCs, reserved zeros,
// packed sections, agreement of both headers, that the whole record fits in `length`) and does not
// read the payload. Writes up to `capacity` rows of the table to `sections`.
//   kOutOfRange    `length` ends before the record does
//   kIncompatible  another format version; an unknown flag
//   kCorrupt       anything else; the message names the field
Status read_record_header(const void* record, std::uint64_t length, RecordHeader* header,
                          Section* sections = nullptr, std::size_t capacity = 0) noexcept;

// Checks that a record with these sound headers has the expected key and identity (any if nullptr),
// and that its sections can be verified. kStale and kIncompatible as in verify_record.
Status check_is_wanted(const RecordHeader& header, const Digest* expected_key,
                       const Digest* expected_identity = nullptr) noexcept;

// The bytes of the outer header, with which a record begins.
inline constexpr std::size_t kOuterHeaderBytes = 256;

// The parent's key as the record's inner header states it, unchecked. Zeros if `length` ends within
// the headers.
Digest parent_of_record(const void* record, std::uint64_t length) noexcept;

// Does the checks of read_record_header and check_is_wanted, and checks the CRC of every section.
//   kStale         the headers are sound, but the key is another one
//   kIncompatible  also: the payload is encoded, so its sections cannot be verified
//   kCorrupt       detail(2) is the first corrupt section, or -1 for the headers
Status verify_record(const void* record, std::uint64_t length, const Digest* expected_key) noexcept;

// As verify_record, for a record in a medium, which may be encoded. The stored bytes of an encoded
// record are checked against their CRC: they are the bytes that were written, but may not decode.
Status verify_stored_record(const void* record, std::uint64_t length,
                            const Digest* expected_key) noexcept;

struct StoredRecord {
  const void* bytes = nullptr;  // `length` bytes, which must outlive the call
  std::uint64_t length = 0;
  Digest key{};
  Status status;  // the result, of verify_stored_record
};

// Verifies all records, in the calling thread and in idle threads of the crew; returns when done.
void verify_each(Crew& crew, std::span<StoredRecord> records);

}  // namespace kvstrata
