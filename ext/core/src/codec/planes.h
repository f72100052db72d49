// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Byte planes of 16-bit numbers: all first bytes, then all second bytes. The bytes that hold the
// exponents of bf16 or fp16 numbers resemble each other; side by side they compress better.
//
// Lossless for any bytes. An odd last byte becomes the last byte of the first plane. Thread-safe.
// Source and destination must not overlap; they may have any alignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace kvstrata {

// `n` bytes each way: planes[0 .. ceil(n/2)) = bytes 0, 2, 4, ...; planes[ceil(n/2) .. n) = bytes
// 1, 3, 5, ...
void split_planes(void* planes, const void* bytes, std::size_t n) noexcept;

// The inverse of split_planes.
void join_planes(void* bytes, const void* planes, std::size_t n) noexcept;

// The implementations, from the slowest to the fastest.
enum class PlanesPath : std::uint8_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };
inline constexpr int kPlanesPathCount = 3;
const char* planes_path_name(PlanesPath path) noexcept;
bool planes_path_supported(PlanesPath path) noexcept;
PlanesPath planes_path() noexcept;
// For tests and benchmarks; affects calls that begin afterwards. kUnsupported when this CPU cannot
// run `path`; then nothing changes.
Status planes_set_path(PlanesPath path) noexcept;
// Chooses the best path of this CPU again.
void planes_reset_path() noexcept;

}  // namespace kvstrata
