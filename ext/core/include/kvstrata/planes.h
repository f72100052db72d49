// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Byte planes of 16-bit numbers: all first bytes, then all second bytes. The bytes that hold the
// exponents of bf16 or fp16 lie together then, where a compressor finds that they are alike.
//
// Lossless for any bytes. An odd last byte is the last of the first plane. Thread-safe; source and
// destination must not overlap, and need no alignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvstrata/status.h"

namespace kvstrata {

// planes[0 .. ceil(n/2)) = bytes 0, 2, 4, ...; planes[ceil(n/2) .. n) = bytes 1, 3, 5, ...
void split_planes(void* planes, const void* bytes, std::size_t n) noexcept;

// The inverse.
void join_planes(void* bytes, const void* planes, std::size_t n) noexcept;

// The implementations, the better ones later.
enum class PlanesPath : std::uint8_t { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };
inline constexpr int kPlanesPathCount = 3;
const char* planes_path_name(PlanesPath path) noexcept;
bool planes_path_supported(PlanesPath path) noexcept;
PlanesPath planes_path() noexcept;
// kUnsupported when this CPU cannot run it; then nothing changes. For tests and benchmarks.
Status planes_set_path(PlanesPath path) noexcept;
void planes_reset_path() noexcept;

}  // namespace kvstrata
