// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

#include "base/sizes.h"
#include "files/files.h"

namespace kvstrata {

// A buffer of one file block, aligned so that a direct file (File::direct) reads into it and writes
// from it without a copy.
struct FileBlock {
  alignas(kFileBlockBytes) std::array<unsigned char, kFileBlockBytes> bytes{};
};

// `bytes` rounded up to whole blocks. REQUIRES: the result fits into 64 bits.
constexpr std::uint64_t whole_blocks(std::uint64_t bytes) noexcept {
  return round_up(bytes, kFileBlockBytes);
}

}  // namespace kvstrata
