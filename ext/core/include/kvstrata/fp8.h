// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// bf16 or fp16 numbers as 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa, largest 448) with
// a scale per head and chunk.
//
// Numbers of one group share the scale s = max(largest |x| of the group / 448, 2^-126). With x' for
// what decodes, before it is rounded to its 16-bit type:
//
//   |x' - x| <= max(|x| / 16, s / 1024) * (1 + 2^-20)
//
// The rounding adds half a unit in the last place of x' (|x'| / 256 for bf16, |x'| / 2048 for
// fp16).
//
// All paths compute the same bits. Thread-safe; source and destination must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvstrata/fp8_scalar.h"
#include "kvstrata/status.h"

namespace kvstrata {

// A section as an array [blocks][groups][tokens][heads][dim] of numbers, packed; there is one scale
// for each pair of group and head, shared by all blocks, tokens and the whole dim. Where K and V or
// the heads lie before the tokens they are groups, behind them heads.
struct Fp8Shape {
  std::uint32_t blocks = 0;
  std::uint32_t groups = 0;
  std::uint32_t tokens = 0;
  std::uint32_t heads = 0;
  std::uint32_t dim = 0;

  // kBadArgument unless every count is at least 1, there are at most 2^31 numbers and at least 16
  // numbers for each scale.
  [[nodiscard]] Status check() const noexcept;
  // REQUIRES: check() is ok.
  [[nodiscard]] std::size_t numbers() const noexcept {
    return std::size_t{blocks} * groups * tokens * heads * dim;
  }
  [[nodiscard]] std::size_t scales() const noexcept { return std::size_t{groups} * heads; }
};

// codes: numbers() bytes; scales: scales() floats (bytes without alignment).
// kUnsupported: a number is infinite or none; codes and scales are undefined then.
Status fp8_encode(const Fp8Shape& shape, Fp8Source type, const void* numbers, void* codes,
                  void* scales) noexcept;

// numbers: numbers() times 2 bytes. Any codes and scales decode to some numbers.
void fp8_decode(const Fp8Shape& shape, Fp8Source type, const void* codes, const void* scales,
                void* numbers) noexcept;

// The implementations, the better ones later.
enum class Fp8Path : std::uint8_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };
inline constexpr int kFp8PathCount = 3;
const char* fp8_path_name(Fp8Path path) noexcept;
bool fp8_path_supported(Fp8Path path) noexcept;
Fp8Path fp8_path() noexcept;
// kUnsupported when this CPU cannot run it; then nothing changes. For tests and benchmarks.
Status fp8_set_path(Fp8Path path) noexcept;
void fp8_reset_path() noexcept;

}  // namespace kvstrata
