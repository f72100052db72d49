// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Writing, reading and checking one frame. These functions have no state and take no lock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "disk/format.h"
#include "disk/index.h"

namespace kvstrata::disk {

// A frame that has its place in a segment.
struct PlacedFrame {
  std::shared_ptr<File> file;
  FrameHeader header;
  std::uint32_t segment = 0;
  std::uint32_t block = 0;
  std::uint64_t parent = 0;  // see DiskPlace
};

// Writes a placed frame. `record` has header.record_bytes bytes; nullptr: only the header is
// written. After an error any part of the frame may have been written.
Status write_frame(const PlacedFrame& placed, const std::uint8_t* record) noexcept;

// Reads a frame's record, place.record_bytes long, into `out`. False with an error in `status`: the
// place could not be read. False with OK in `status`: another frame, or none, lies there. REQUIRES:
// the segment is pinned.
bool read_frame(File& file, const DiskPlace& place, const Digest& key, std::uint64_t generation,
                std::uint8_t* out, Status* status) noexcept;

// Whether the block is the header of this record's frame.
bool is_frame_of(const FileBlock& block, const DiskPlace& place, const Digest& key,
                 std::uint64_t generation);

// Whether a stored record may be kept: it is sound, or it has a format version that this program
// cannot judge.
bool may_stay(const std::uint8_t* record, std::uint32_t length, const Digest& key) noexcept;

// After read_frame() has returned false with this status: true if the frame is missing, false if
// the medium failed to read it.
inline bool is_missing(const Status& status) noexcept {
  return status.ok() || status.code() == StatusCode::kOutOfRange;
}

// Bytes of the frame at this place.
inline std::uint64_t frame_bytes_of(const DiskPlace& place) noexcept {
  return kFrameHeaderBytes + whole_blocks(place.record_bytes);
}

DiskPlace place_of(const PlacedFrame& placed) noexcept;

}  // namespace kvstrata::disk
