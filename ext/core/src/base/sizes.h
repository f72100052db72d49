// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvstrata {

// The smallest multiple of `unit` that is not less than `bytes`. REQUIRES: `unit` is a power of
// two; the result fits in 64 bits.
constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) noexcept {
  return (bytes + unit - 1) & ~(unit - 1);
}

}  // namespace kvstrata
