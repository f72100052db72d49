// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Strided copies between payloads. A recut of records consists of them (kvstrata/keys/recut.py
// plans them).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace kvstrata {

struct StridedLoop {
  std::uint64_t count;
  std::uint64_t source_stride;  // bytes
  std::uint64_t target_stride;
};

struct StridedCopy {
  static constexpr std::size_t kMaxLoops = 8;

  std::uint32_t source;  // index of the source
  std::uint32_t loop_count;
  std::uint64_t source_offset;  // bytes
  std::uint64_t target_offset;
  std::uint64_t run_bytes;
  std::array<StridedLoop, kMaxLoops> loops;  // the first loop_count, outermost first
};

// Copies run by run into `target`, which must not overlap any source. Bytes of the target that no
// copy covers stay as they are. kBadArgument, with detail(2) = index of the copy: the copy leaves
// its source or the target, names a source that does not exist, has more than kMaxLoops loops, or
// is empty; then nothing was written.
Status copy_strided(std::span<const StridedCopy> copies,
                    std::span<const std::span<const unsigned char>> sources,
                    std::span<unsigned char> target) noexcept;

}  // namespace kvstrata
