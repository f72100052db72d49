// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Byte planes of 16-bit numbers: all first bytes, then all second bytes. The bytes that hold the
// exponents of bf16 or fp16 numbers resemble each other; side by side they compress better.
//
// Lossless for any bytes. An odd last byte becomes the last byte of the first plane. Thread-safe.
// Source and destination must not overlap; they may have any alignment.
#pragma once

#include <cstddef>

namespace kvstrata {

// `n` bytes each way: planes[0 .. ceil(n/2)) = bytes 0, 2, 4, ...; planes[ceil(n/2) .. n) = bytes
// 1, 3, 5, ...
void split_planes(void* planes, const void* bytes, std::size_t n) noexcept;

// The inverse of split_planes.
void join_planes(void* bytes, const void* planes, std::size_t n) noexcept;

}  // namespace kvstrata
