// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// CRC32C (Castagnoli, reflected polynomial 0x82F63B78, initial value and final XOR 0xFFFFFFFF: the
// CRC of RFC 3720), alone and folded into a copy so that the checksum rides on memory traffic that
// is paid anyway.
//
// Values compose: crc32c(b, m, crc32c(a, n)) is the CRC of a followed by b, and the CRC of nothing
// is 0. Any pointer alignment and any length work. `dst` and `src` must not overlap.
//
// Thread safety: everything here may be called from any thread; crc32c_set_path is for tests and
// `doctor` and affects calls that begin after it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvstrata/status.h"

namespace kvstrata {

// How the bytes are written. kStream bypasses the caches (non-temporal stores): right for data
// larger than the cache share of one core, and for everything that another core or a device reads.
// kCached leaves the destination in the cache. The kernels that have no streaming store ignore it.
enum class StoreHint : std::uint8_t { kStream = 0, kCached = 1 };

// Implementations, slowest first within one architecture.
enum class Crc32cPath : std::uint8_t {
  kTable = 0,       // eight bytes at a time by table; every CPU
  kArmCrc = 1,      // ARMv8 CRC32 instructions, three interleaved streams
  kSse42 = 2,       // x86 crc32 instruction, three interleaved streams
  kPclmul = 3,      // 128-bit carry-less multiply, four accumulators
  kVpclmul256 = 4,  // the same with 256-bit vectors (AVX2 CPUs without AVX-512)
  kVpclmul512 = 5,  // the same with 512-bit vectors
};
inline constexpr int kCrc32cPathCount = 6;

// Stable name of a path ("vpclmul512", ...).
const char* crc32c_path_name(Crc32cPath path) noexcept;
bool crc32c_path_supported(Crc32cPath path) noexcept;
// The path in use.
Crc32cPath crc32c_path() noexcept;
// kUnsupported when this CPU cannot run `path`; then nothing changes.
Status crc32c_set_path(Crc32cPath path) noexcept;
// Back to the best path of this CPU.
void crc32c_reset_path() noexcept;

// CRC of `n` bytes at `data`, continued from `crc`.
std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t crc = 0) noexcept;

// Copies `n` bytes and returns their CRC, continued from `crc`. On return all stores are ordered
// before later stores of this thread (streaming ones included).
std::uint32_t copy_crc32c(void* dst, const void* src, std::size_t n, std::uint32_t crc = 0,
                          StoreHint hint = StoreHint::kStream) noexcept;

// Concatenation by CRCs alone: combine(crc of a, crc of b) is the CRC of a followed by b, where b
// is `length` bytes long. Making one costs O(log length); worth keeping for equal lengths.
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

// One of several runs of equal length that are copied in order.
struct CopyRun {
  void* dst;
  const void* src;
};

// Copies `count` runs of `run_bytes` each; the CRC goes over the runs in order as if they were
// contiguous. Reads ahead across the border of two runs, so a list is faster than single calls.
// Streaming stores are NOT ordered on return: call copy_fence() before the bytes are published.
std::uint32_t copy_crc32c_runs(const CopyRun* runs, std::size_t count, std::size_t run_bytes,
                               std::uint32_t crc, StoreHint hint) noexcept;

// Orders streaming stores of this thread before its later stores.
void copy_fence() noexcept;

}  // namespace kvstrata
