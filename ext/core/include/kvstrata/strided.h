// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Strided copies between payloads: what a recut of records is made of (keys/recut.py plans it).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvstrata/status.h"

namespace kvstrata {

struct StridedLoop {
  std::uint64_t count;
  std::uint64_t source_stride;  // bytes
  std::uint64_t target_stride;
};

struct StridedCopy {
  static constexpr std::size_t kMaxLoops = 8;

  std::uint32_t source;  // which of the sources
  std::uint32_t loop_count;
  std::uint64_t source_offset;  // bytes
  std::uint64_t target_offset;
  std::uint64_t run_bytes;
  std::array<StridedLoop, kMaxLoops> loops;  // the first loop_count, outermost first
};

// Copies run by run into `target`, which overlaps no source. Bytes that no copy names stay as they
// are. kBadArgument, with detail(2) = index of the copy: it leaves its source or the target, has no
// source, or is empty; nothing was written then.
Status copy_strided(std::span<const StridedCopy> copies,
                    std::span<const std::span<const unsigned char>> sources,
                    std::span<unsigned char> target) noexcept;

}  // namespace kvstrata
