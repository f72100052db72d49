// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/frames.h"

#include <cstring>

#include "record/record.h"

namespace kvstrata::disk {

Status write_frame(const PlacedFrame& placed, const std::uint8_t* record) noexcept {
  FileBlock header;
  encode(placed.header, &header);
  const std::uint64_t offset = std::uint64_t{placed.block} * kFileBlockBytes;
  if (record == nullptr) {
    const WritePart parts[] = {{header.bytes.data(), kFileBlockBytes}};
    return placed.file->write(parts, offset);
  }
  const std::uint64_t length = placed.header.record_bytes;
  const std::uint64_t whole = length / kFileBlockBytes * kFileBlockBytes;
  FileBlock tail;
  std::memcpy(tail.bytes.data(), record + whole, length - whole);
  const WritePart parts[] = {{header.bytes.data(), kFileBlockBytes},
                             {record, whole},
                             {tail.bytes.data(), length > whole ? kFileBlockBytes : 0}};
  return placed.file->write(parts, offset);
}

bool read_frame(File& file, const DiskPlace& place, const Digest& key, std::uint64_t generation,
                std::uint8_t* out, Status* status) noexcept {
  FileBlock header;
  FileBlock tail;
  const std::uint64_t whole = place.record_bytes / kFileBlockBytes * kFileBlockBytes;
  const std::uint64_t rest = place.record_bytes - whole;
  const ReadPart parts[] = {{header.bytes.data(), kFileBlockBytes},
                            {out, whole},
                            {tail.bytes.data(), rest > 0 ? kFileBlockBytes : 0}};
  *status = file.read(parts, std::uint64_t{place.block} * kFileBlockBytes);
  if (!status->ok()) return false;
  std::memcpy(out + whole, tail.bytes.data(), rest);
  return is_frame_of(header, place, key, generation);
}

bool is_frame_of(const FileBlock& block, const DiskPlace& place, const Digest& key,
                 std::uint64_t generation) {
  const std::optional<FrameHeader> found = decode_frame(block);
  return found.has_value() && found->kind == FrameKind::kRecord && found->key == key &&
         found->segment == place.segment && found->generation == generation &&
         found->name.sequence == place.sequence && found->record_bytes == place.record_bytes;
}

bool may_stay(const std::uint8_t* record, std::uint32_t length, const Digest& key) noexcept {
  const Status status = verify_stored_record(record, length, &key);
  return status.ok() || status.code() == StatusCode::kIncompatible;
}

DiskPlace place_of(const PlacedFrame& placed) noexcept {
  return DiskPlace{.sequence = placed.header.name.sequence,
                   .segment = placed.segment,
                   .block = placed.block,
                   .record_bytes = static_cast<std::uint32_t>(placed.header.record_bytes),
                   .used = 0,
                   .parent = placed.parent};
}

}  // namespace kvstrata::disk
