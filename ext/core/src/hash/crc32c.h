// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// CRC32C (Castagnoli: reflected polynomial 0x82F63B78, initial value and final XOR 0xFFFFFFFF, as
// in RFC 3720), alone or as part of a copy, to which it adds no memory traffic.
//
// CRCs compose: crc32c(b, m, crc32c(a, n)) is the CRC of a followed by b, and the CRC of no bytes
// is 0. Pointers may have any alignment and lengths any value. `dst` and `src` must not overlap.
//
// Thread-safe. crc32c_set_path() is for tests and `doctor`, and affects calls that begin after it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace kvstrata {

// How a copy writes. kStream bypasses the caches (non-temporal stores), for data that is larger
// than one core's share of the cache or that another core or a device reads. kCached leaves the
// destination in the cache. Kernels without streaming stores ignore the hint.
enum class StoreHint : std::uint8_t { kStream = 0, kCached = 1 };

// The implementations, in each architecture from the slowest to the fastest.
enum class Crc32cPath : std::uint8_t {
  kTable = 0,       // tables, eight bytes at a time; every CPU
  kArmCrc = 1,      // ARMv8 CRC32 instructions, three interleaved streams
  kSse42 = 2,       // x86 crc32 instruction, three interleaved streams
  kPclmul = 3,      // 128-bit carry-less multiply, four accumulators
  kVpclmul256 = 4,  // the same with 256-bit vectors (AVX2 CPUs without AVX-512)
  kVpclmul512 = 5,  // the same with 512-bit vectors
};
inline constexpr int kCrc32cPathCount = 6;

// The stable name of a path ("vpclmul512", ...).
const char* crc32c_path_name(Crc32cPath path) noexcept;
bool crc32c_path_supported(Crc32cPath path) noexcept;
// The path in use.
Crc32cPath crc32c_path() noexcept;
// kUnsupported: this CPU cannot run `path`; nothing changes.
Status crc32c_set_path(Crc32cPath path) noexcept;
// Chooses the best path of this CPU again.
void crc32c_reset_path() noexcept;

// The CRC of `n` bytes at `data`, continued from `crc`.
std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t crc = 0) noexcept;

// Copies `n` bytes and returns their CRC, continued from `crc`. On return all stores, including
// streaming stores, are ordered before later stores of this thread.
std::uint32_t copy_crc32c(void* dst, const void* src, std::size_t n, std::uint32_t crc = 0,
                          StoreHint hint = StoreHint::kStream) noexcept;

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

inline std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b,
                                    std::uint64_t length_b) noexcept {
  return Crc32cCombiner(length_b).combine(crc_a, crc_b);
}

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
                               std::uint32_t crc, StoreHint hint) noexcept;

// Orders streaming stores of this thread before its later stores.
void copy_fence() noexcept;

}  // namespace kvstrata
