// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "record/record.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "base/crew.h"
#include "hash/crc32c.h"

namespace kvstrata {
namespace {

using Magic = std::array<char, 8>;
constexpr Magic kOuterMagic = {'K', 'V', 'S', 'T', 'R', 'A', 'T', 'A'};
constexpr Magic kInnerMagic = {'K', 'V', 'C', 'H', 'U', 'N', 'K', '1'};

struct OuterHeader {
  Magic magic;
  std::uint16_t version;
  std::uint16_t flags;
  std::uint32_t header_bytes;
  Digest key;
  Digest identity;
  std::array<unsigned char, 8> codecs;
  std::uint64_t stored_bytes;
  std::uint32_t stored_crc;
  std::uint32_t reserved0;
  std::uint64_t created_unix_ms;
  std::array<unsigned char, 140> reserved1;
  std::uint32_t crc;
};

struct InnerHeader {
  Magic magic;
  std::uint16_t version;
  std::uint16_t flags;
  std::uint32_t section_count;
  std::uint64_t payload_offset;
  std::uint64_t payload_bytes;
  Digest key;
  Digest identity;
  Digest slice_digest;
  Digest parent_key;
  std::uint32_t chunk_tokens;
  std::array<unsigned char, 88> reserved;
  std::uint32_t crc;
};

struct Headers {
  OuterHeader outer;
  InnerHeader inner;
};

constexpr std::size_t kTableOffset = 512;
static_assert(sizeof(OuterHeader) == 256 && offsetof(OuterHeader, identity) == 48 &&
              offsetof(OuterHeader, stored_bytes) == 88 &&
              offsetof(OuterHeader, created_unix_ms) == 104 && offsetof(OuterHeader, crc) == 252);
static_assert(sizeof(InnerHeader) == 256 && offsetof(InnerHeader, payload_bytes) == 24 &&
              offsetof(InnerHeader, slice_digest) == 96 &&
              offsetof(InnerHeader, chunk_tokens) == 160 && offsetof(InnerHeader, crc) == 252);
static_assert(sizeof(Headers) == kTableOffset && sizeof(Section) == 16);

template <std::size_t kBytes>
bool all_zero(const std::array<unsigned char, kBytes>& bytes) noexcept {
  return bytes == std::array<unsigned char, kBytes>{};
}

bool all_zero(const unsigned char* bytes, std::uint64_t n) noexcept {
  unsigned char seen = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    seen |= bytes[i];
  }
  return seen == 0;
}

std::uint64_t now_unix_ms() noexcept {
  return static_cast<std::uint64_t>(now_unix_ns() / 1'000'000);
}

Status corrupt(const char* message, std::uint64_t found = 0, std::uint64_t expected = 0) noexcept {
  return Status(StatusCode::kCorrupt, message, static_cast<std::int64_t>(found),
                static_cast<std::int64_t>(expected), -1);
}

Status too_short(std::uint64_t length, std::uint64_t needed) noexcept {
  return Status(StatusCode::kOutOfRange, "length: ends before the record does",
                static_cast<std::int64_t>(length), static_cast<std::int64_t>(needed), -1);
}

Status check_outer(const OuterHeader& outer) noexcept {
  if (outer.magic != kOuterMagic) {
    return corrupt("outer.magic: not a record");
  }
  if (outer.crc != crc32c(&outer, offsetof(OuterHeader, crc))) {
    return corrupt("outer.crc: the outer header was altered");
  }
  if (outer.version != kRecordVersion) {
    return Status(StatusCode::kIncompatible, "outer.version: written by another format version",
                  outer.version, kRecordVersion, -1);
  }
  if (outer.flags != 0) {
    return Status(StatusCode::kIncompatible, "outer.flags: unknown flag", outer.flags, 0, -1);
  }
  if (outer.reserved0 != 0 || !all_zero(outer.reserved1)) {
    return corrupt("outer.reserved: not zero");
  }
  return Status();
}

// Checks the fields of the inner header that say how long the section table is. The header's CRC
// covers the table too, so it is checked with the table.
Status check_inner(const Headers& h) noexcept {
  const auto& [outer, inner] = h;
  if (inner.magic != kInnerMagic) {
    return corrupt("inner.magic: not a chunk");
  }
  if (inner.section_count == 0 || inner.section_count > kMaxSections) {
    return corrupt("inner.section_count: out of range", inner.section_count, kMaxSections);
  }
  if (outer.header_bytes != record_header_bytes(inner.section_count)) {
    return corrupt("outer.header_bytes: does not fit the section count", outer.header_bytes,
                   record_header_bytes(inner.section_count));
  }
  return Status();
}

Status check_agreement(const Headers& h) noexcept {
  const auto& [outer, inner] = h;
  if (inner.version != kRecordVersion) {
    return Status(StatusCode::kIncompatible, "inner.version: written by another format version",
                  inner.version, kRecordVersion, -1);
  }
  if (inner.flags != 0) {
    return Status(StatusCode::kIncompatible, "inner.flags: unknown flag", inner.flags, 0, -1);
  }
  if (!all_zero(inner.reserved)) {
    return corrupt("inner.reserved: not zero");
  }
  if (outer.key != inner.key) {
    return corrupt("key: outer and inner header differ");
  }
  if (outer.identity != inner.identity) {
    return corrupt("identity: outer and inner header differ");
  }
  if (inner.payload_offset != outer.header_bytes) {
    return corrupt("inner.payload_offset: is not the end of the header", inner.payload_offset,
                   outer.header_bytes);
  }
  const bool plain = all_zero(outer.codecs);
  if (plain && outer.stored_bytes != inner.payload_bytes) {
    return corrupt("outer.stored_bytes: differs from the payload without a codec",
                   outer.stored_bytes, inner.payload_bytes);
  }
  return Status();
}

// Copies each row before it is checked, so that the caller gets exactly the checked rows.
Status read_table(const unsigned char* record, const Headers& h, Section* sections,
                  std::size_t capacity) noexcept {
  constexpr std::size_t kBatch = 64;
  std::array<Section, kBatch> rows;
  std::uint32_t crc = crc32c(&h.inner, offsetof(InnerHeader, crc));
  std::uint64_t next = 0;
  std::int64_t unpacked = -1;
  for (std::uint32_t at = 0; at < h.inner.section_count; at += kBatch) {
    const std::size_t n = std::min<std::size_t>(kBatch, h.inner.section_count - at);
    std::memcpy(rows.data(), record + kTableOffset + at * sizeof(Section), n * sizeof(Section));
    crc = crc32c(rows.data(), n * sizeof(Section), crc);
    for (std::size_t i = 0; i < n; ++i) {
      if ((rows[i].offset != next || rows[i].length == 0) && unpacked < 0) {
        unpacked = static_cast<std::int64_t>(at + i);
      }
      next += rows[i].length;  // at most 2^16 times 2^32
      if (at + i < capacity) {
        sections[at + i] = rows[i];
      }
    }
  }
  if (crc != h.inner.crc) {
    return corrupt("inner.crc: the inner header or the section table was altered");
  }
  if (unpacked >= 0) {
    return corrupt("sections: a section is empty or does not begin at the end of the previous one",
                   static_cast<std::uint64_t>(unpacked));
  }
  if (next != h.inner.payload_bytes) {
    return corrupt("inner.payload_bytes: is not the sum of the sections", h.inner.payload_bytes,
                   next);
  }
  return Status();
}

// The CRC of all sections, one after the other, computed from their CRCs. The sections of one
// layout have the same length, so the combiner is made once.
std::uint32_t combined_crc(const Section* sections, std::uint64_t count) noexcept {
  std::uint32_t crc = 0;
  Crc32cCombiner combiner(0);
  for (std::uint64_t i = 0; i < count; ++i) {
    if (combiner.length() != sections[i].length) {
      combiner = Crc32cCombiner(sections[i].length);
    }
    crc = combiner.combine(crc, sections[i].crc);
  }
  return crc;
}

}  // namespace

Status record_bytes(std::uint64_t section_count, std::uint64_t payload_bytes,
                    std::uint64_t* out) noexcept {
  if (section_count == 0 || section_count > kMaxSections) {
    return Status(StatusCode::kBadArgument, "section_count: must be between 1 and the limit",
                  static_cast<std::int64_t>(section_count), kMaxSections);
  }
  if (payload_bytes < section_count || payload_bytes > section_count * UINT32_MAX) {
    return Status(StatusCode::kBadArgument,
                  "payload_bytes: every section needs 1 byte and holds at most 4 GiB - 1",
                  static_cast<std::int64_t>(payload_bytes),
                  static_cast<std::int64_t>(section_count));
  }
  *out = record_header_bytes(static_cast<std::uint32_t>(section_count)) + payload_bytes;
  return Status();
}

Status check_record_address(const void* record) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(record);
  if (address == 0 || address % alignof(std::uint64_t) != 0) {
    return Status(StatusCode::kBadArgument, "address: must be a multiple of 8 and not 0",
                  static_cast<std::int64_t>(address), alignof(std::uint64_t));
  }
  return Status();
}

void invalidate_record(void* record) noexcept {
  // Several threads that copy into one record may do this at the same time.
  std::atomic_ref<std::uint64_t>(*static_cast<std::uint64_t*>(record))
      .store(0, std::memory_order_relaxed);
}

namespace {

// Writes the header of a record; `encoding` is null for a plain record.
Status write_header(void* record, std::uint64_t length, const RecordSpec& spec, Section* sections,
                    std::uint64_t section_count, const RecordEncoding* encoding) noexcept {
  KVSTRATA_RETURN_IF_ERROR(check_record_address(record));
  if (section_count == 0 || section_count > kMaxSections) {
    return Status(StatusCode::kBadArgument, "section_count: must be between 1 and the limit",
                  static_cast<std::int64_t>(section_count), kMaxSections);
  }
  std::uint64_t payload_bytes = 0;
  for (std::uint64_t i = 0; i < section_count; ++i) {
    if (sections[i].length == 0) {
      return Status(StatusCode::kBadArgument, "section_lengths: a section may not be empty", 0, 1,
                    static_cast<std::int64_t>(i));
    }
    sections[i].offset = payload_bytes;
    payload_bytes += sections[i].length;
  }
  const auto count = static_cast<std::uint32_t>(section_count);
  const std::uint64_t header_bytes = record_header_bytes(count);
  const std::uint64_t stored_bytes = encoding != nullptr ? encoding->stored_bytes : payload_bytes;
  if (length < header_bytes || length - header_bytes < stored_bytes) {
    return Status(StatusCode::kBadArgument, "length: too small for the record",
                  static_cast<std::int64_t>(length),
                  static_cast<std::int64_t>(header_bytes + stored_bytes));
  }

  Headers h{};
  h.inner.magic = kInnerMagic;
  h.inner.version = kRecordVersion;
  h.inner.section_count = count;
  h.inner.payload_offset = header_bytes;
  h.inner.payload_bytes = payload_bytes;
  h.inner.key = spec.key;
  h.inner.identity = spec.identity;
  h.inner.slice_digest = spec.slice_digest;
  h.inner.parent_key = spec.parent_key;
  h.inner.chunk_tokens = spec.chunk_tokens;
  h.inner.crc = crc32c(sections, section_count * sizeof(Section),
                       crc32c(&h.inner, offsetof(InnerHeader, crc)));
  h.outer.magic = kOuterMagic;
  h.outer.version = kRecordVersion;
  h.outer.header_bytes = static_cast<std::uint32_t>(header_bytes);
  h.outer.key = spec.key;
  h.outer.identity = spec.identity;
  h.outer.stored_bytes = stored_bytes;
  if (encoding != nullptr) {
    h.outer.codecs = encoding->codecs;
    h.outer.stored_crc = encoding->stored_crc;
  } else {
    h.outer.stored_crc = combined_crc(sections, section_count);
  }
  h.outer.created_unix_ms = spec.created_unix_ms != 0 ? spec.created_unix_ms : now_unix_ms();
  h.outer.crc = crc32c(&h.outer, offsetof(OuterHeader, crc));

  auto* bytes = static_cast<unsigned char*>(record);
  const std::uint64_t table_end = kTableOffset + section_count * sizeof(Section);
  invalidate_record(record);
  std::memcpy(bytes + sizeof(Magic), reinterpret_cast<const unsigned char*>(&h) + sizeof(Magic),
              sizeof h - sizeof(Magic));
  std::memcpy(bytes + kTableOffset, sections, section_count * sizeof(Section));
  std::memset(bytes + table_end, 0, header_bytes - table_end);
  std::atomic_ref<std::uint64_t>(*static_cast<std::uint64_t*>(record))
      .store(std::bit_cast<std::uint64_t>(kOuterMagic), std::memory_order_release);
  return Status();
}

}  // namespace

Status write_record_header(void* record, std::uint64_t length, const RecordSpec& spec,
                           Section* sections, std::uint64_t section_count) noexcept {
  return write_header(record, length, spec, sections, section_count, nullptr);
}

Status write_encoded_header(void* record, std::uint64_t length, const RecordSpec& spec,
                            Section* sections, std::uint64_t section_count,
                            const RecordEncoding& encoding) noexcept {
  if (all_zero(encoding.codecs)) {
    return Status(StatusCode::kBadArgument, "codecs: an encoded record names at least one");
  }
  if (encoding.stored_bytes == 0) {
    return Status(StatusCode::kBadArgument, "stored_bytes: may not be 0");
  }
  return write_header(record, length, spec, sections, section_count, &encoding);
}

Status seal_record(void* record, std::uint64_t length, const RecordSpec& spec,
                   const std::uint32_t* section_lengths, std::uint64_t section_count) noexcept {
  KVSTRATA_RETURN_IF_ERROR(check_record_address(record));
  std::uint64_t payload_bytes = 0;
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(section_count, kMaxSections); ++i) {
    payload_bytes += section_lengths[i];
  }
  std::uint64_t needed = 0;
  KVSTRATA_RETURN_IF_ERROR(record_bytes(section_count, payload_bytes, &needed));
  if (length < needed) {
    return Status(StatusCode::kBadArgument, "length: too small for the record",
                  static_cast<std::int64_t>(length), static_cast<std::int64_t>(needed));
  }
  std::vector<Section> sections(section_count);
  const auto* payload = static_cast<const unsigned char*>(record) + (needed - payload_bytes);
  for (std::uint64_t i = 0; i < section_count; ++i) {
    sections[i] = Section{0, section_lengths[i], crc32c(payload, section_lengths[i])};
    payload += section_lengths[i];
  }
  return write_record_header(record, length, spec, sections.data(), section_count);
}

Digest parent_of_record(const void* record, std::uint64_t length) noexcept {
  Headers headers{};
  if (length >= sizeof headers) std::memcpy(&headers, record, sizeof headers);
  return headers.inner.parent_key;
}

Status read_record_header(const void* record, std::uint64_t length, RecordHeader* header,
                          Section* sections, std::size_t capacity) noexcept {
  if (length < sizeof(Headers)) {
    return too_short(length, sizeof(Headers));
  }
  const auto* bytes = static_cast<const unsigned char*>(record);
  Headers h;
  std::memcpy(&h, bytes, sizeof h);
  KVSTRATA_RETURN_IF_ERROR(check_outer(h.outer));
  KVSTRATA_RETURN_IF_ERROR(check_inner(h));
  if (length < h.outer.header_bytes) {
    return too_short(length, h.outer.header_bytes);
  }
  KVSTRATA_RETURN_IF_ERROR(read_table(bytes, h, sections, capacity));
  KVSTRATA_RETURN_IF_ERROR(check_agreement(h));
  if (h.outer.stored_bytes > length - h.outer.header_bytes) {
    return Status(StatusCode::kOutOfRange, "length: ends before the record does",
                  static_cast<std::int64_t>(length),
                  static_cast<std::int64_t>(h.outer.stored_bytes), -1);
  }
  const std::uint64_t table_end = kTableOffset + h.inner.section_count * sizeof(Section);
  if (!all_zero(bytes + table_end, h.outer.header_bytes - table_end)) {
    return corrupt("header: the bytes after the section table are not zero");
  }
  header->spec = RecordSpec{h.inner.key,        h.inner.identity,     h.inner.slice_digest,
                            h.inner.parent_key, h.inner.chunk_tokens, h.outer.created_unix_ms};
  header->header_bytes = h.outer.header_bytes;
  header->payload_bytes = h.inner.payload_bytes;
  header->stored_bytes = h.outer.stored_bytes;
  header->stored_crc = h.outer.stored_crc;
  header->section_count = h.inner.section_count;
  header->codecs = h.outer.codecs;
  return Status();
}

Status check_is_wanted(const RecordHeader& header, const Digest* expected_key,
                       const Digest* expected_identity) noexcept {
  if (expected_key != nullptr && header.spec.key != *expected_key) {
    return Status(StatusCode::kStale, "key: the record belongs to another chunk", 0, 0, -1);
  }
  if (expected_identity != nullptr && header.spec.identity != *expected_identity) {
    return Status(StatusCode::kStale, "identity: the record belongs to another identity", 0, 0, -1);
  }
  if (!header.plain()) {
    return Status(StatusCode::kIncompatible, "outer.codec: decode the payload first",
                  header.codecs[0], 0, -1);
  }
  return Status();
}

Status verify_record(const void* record, std::uint64_t length,
                     const Digest* expected_key) noexcept {
  RecordHeader header;
  constexpr std::size_t kUsual = 256;  // enough for all but the largest models; on the stack
  std::array<Section, kUsual> few;
  KVSTRATA_RETURN_IF_ERROR(read_record_header(record, length, &header, few.data(), few.size()));
  const Section* sections = few.data();
  std::vector<Section> many;
  if (header.section_count > kUsual) {
    const std::uint32_t capacity = header.section_count;
    many.resize(capacity);
    KVSTRATA_RETURN_IF_ERROR(read_record_header(record, length, &header, many.data(), capacity));
    if (header.section_count != capacity) {
      return corrupt("inner.section_count: changed while it was read");
    }
    sections = many.data();
  }
  KVSTRATA_RETURN_IF_ERROR(check_is_wanted(header, expected_key));
  const auto* payload = static_cast<const unsigned char*>(record) + header.header_bytes;
  for (std::uint32_t i = 0; i < header.section_count; ++i) {
    const std::uint32_t crc = crc32c(payload + sections[i].offset, sections[i].length);
    if (crc != sections[i].crc) {
      return Status(StatusCode::kCorrupt, "sections: the CRC of a section differs", crc,
                    sections[i].crc, i);
    }
  }
  if (combined_crc(sections, header.section_count) != header.stored_crc) {
    return corrupt("outer.stored_crc: differs from the CRC of the sections", header.stored_crc);
  }
  return Status();
}

Status verify_stored_record(const void* record, std::uint64_t length,
                            const Digest* expected_key) noexcept {
  RecordHeader header;
  KVSTRATA_RETURN_IF_ERROR(read_record_header(record, length, &header));
  if (header.record_bytes() != length)
    return corrupt("outer.stored_bytes: more bytes are stored", header.record_bytes(), length);
  if (header.plain()) {
    return verify_record(record, length, expected_key);
  }
  header.codecs = {};  // check_is_wanted refuses encoded records; its other checks apply
  KVSTRATA_RETURN_IF_ERROR(check_is_wanted(header, expected_key));
  const std::uint32_t crc =
      crc32c(static_cast<const unsigned char*>(record) + header.header_bytes, header.stored_bytes);
  if (crc != header.stored_crc) {
    return corrupt("outer.stored_crc: differs from the CRC of the stored bytes", crc,
                   header.stored_crc);
  }
  return Status();
}

void verify_each(Crew& crew, std::span<StoredRecord> records) {
  crew.each(records.size(), [&](std::size_t i) {
    StoredRecord& record = records[i];
    record.status = verify_stored_record(record.bytes, record.length, &record.key);
  });
}

}  // namespace kvstrata
