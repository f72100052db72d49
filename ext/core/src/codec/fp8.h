// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Lossy codec: bf16 or fp16 numbers as 8-bit floats (e4m3: 4 bits of exponent, 3 bits of mantissa,
// largest value 448) with a scale per head and chunk.
//
// The scale of a set of numbers is s = max(largest |x| / 448, 2^-126). For a number x of the set,
// let x' be its decoded value before the final rounding to 16 bits:
//
//   |x' - x| <= max(|x| / 16, s / 1024) * (1 + 2^-20)
//
// The final rounding adds at most half a unit in the last place of x' (|x'| / 256 for bf16,
// |x'| / 2048 for fp16).
//
// The kernels of the copy engine for GPUs encode and decode (fp8_kernel_body.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "codec/fp8_scalar.h"

namespace kvstrata {

// The shape of a section: a packed array [blocks][groups][tokens][heads][dim] of numbers. Each pair
// of a group and a head has a scale, which all blocks, tokens and elements of dim share. `groups`
// counts the combinations of those axes of the KV array (K and V, heads) that come before the
// tokens, `heads` of those that come after the tokens.
struct Fp8Shape {
  std::uint32_t blocks = 0;
  std::uint32_t groups = 0;
  std::uint32_t tokens = 0;
  std::uint32_t heads = 0;
  std::uint32_t dim = 0;

  // kBadArgument unless every count is at least 1, the array has at most 2^31 numbers, and each
  // scale is shared by at least 16 numbers.
  [[nodiscard]] Status check() const noexcept;
  // Both REQUIRE that check() is ok.
  [[nodiscard]] std::size_t numbers() const noexcept {
    return std::size_t{blocks} * groups * tokens * heads * dim;
  }
  [[nodiscard]] std::size_t scales() const noexcept { return std::size_t{groups} * heads; }
};

}  // namespace kvstrata
