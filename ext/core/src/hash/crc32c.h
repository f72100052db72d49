// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// CRC32C (Castagnoli: reflected polynomial 0x82F63B78, initial value and final XOR 0xFFFFFFFF, as
// in RFC 3720), alone or as part of a copy, to which it adds no memory traffic.
//
// CRCs compose: crc32c(b, m, crc32c(a, n)) is the CRC of a followed by b, and the CRC of no bytes
// is 0. Pointers may have any alignment and lengths any value. `dst` and `src` must not overlap.
//
// Copies write with streaming stores (past the caches) where the CPU has them. The implementation
// is the fastest that the CPU and KVSTRATA_SIMD (base/cpu.h) allow: tables, CRC instructions in
// three interleaved streams, or carry-less multiplication of 256- or 512-bit vectors. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstrata {

// The name of the implementation in use ("vpclmul512", ...).
const char* crc32c_path() noexcept;

// The CRC of `n` bytes at `data`, continued from `crc`.
std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t crc = 0) noexcept;

// Computes the CRC of a concatenation from the CRCs of its parts: combine(crc of a, crc of b) is
// the CRC of a followed by b, where b has `length` bytes. Construction takes O(log length), so keep
// the object for further parts of the same length.
class Crc32cCombiner {
 public:
  explicit Crc32cCombiner(std::uint64_t length) noexcept;
  [[nodiscard]] std::uint32_t combine(std::uint32_t crc_a, std::uint32_t crc_b) const noexcept;
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }

 private:
  std::uint64_t length_;
  std::uint32_t factor_;
};

// One run of a copy of several runs of equal length.
struct CopyRun {
  void* dst;
  const void* src;
};

// Copies `count` runs of `run_bytes` each, and returns the CRC of the runs in order, as if they
// were contiguous, continued from `crc`. Prefetches across the border of two runs, so one call is
// faster than a call per run. Streaming stores are NOT ordered on return: call copy_fence() before
// the bytes are published.
std::uint32_t copy_crc32c_runs(const CopyRun* runs, std::size_t count, std::size_t run_bytes,
                               std::uint32_t crc) noexcept;

// Orders streaming stores of this thread before its later stores.
void copy_fence() noexcept;

}  // namespace kvstrata
