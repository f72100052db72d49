// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "base/cpu.h"

#include <cstdint>
#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvstrata {
namespace {

#if defined(__x86_64__)
std::uint64_t read_xcr0() noexcept {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}
#endif

CpuFeatures probe() noexcept {
  CpuFeatures f;
#if defined(__x86_64__)
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  f.intel = __get_cpuid(0, &a, &b, &c, &d) != 0 && b == signature_INTEL_ebx;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) {
    return f;
  }
  f.ssse3 = (c & (1u << 9)) != 0;
  f.sse42 = (c & (1u << 20)) != 0;
  f.pclmul = (c & (1u << 1)) != 0;
  const bool osxsave = (c & (1u << 27)) != 0;
  // XCR0 bits 1-2: SSE and AVX state; bits 5-7: opmask and both halves of the zmm state.
  const std::uint64_t xcr0 = osxsave ? read_xcr0() : 0;
  const bool os_avx = (xcr0 & 0x6) == 0x6;
  const bool os_avx512 = (xcr0 & 0xe6) == 0xe6;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) {
    f.sha_ni = (b & (1u << 29)) != 0 && f.ssse3;
    f.avx2 = os_avx && (b & (1u << 5)) != 0;
    const unsigned wanted = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
    f.avx512 = os_avx512 && (b & wanted) == wanted;
    f.vpclmulqdq = os_avx && (c & (1u << 10)) != 0;
  }
#elif defined(__aarch64__) && defined(__linux__)
  const unsigned long caps = getauxval(AT_HWCAP);
  f.arm_crc32 = (caps & HWCAP_CRC32) != 0;
  f.arm_sha2 = (caps & HWCAP_SHA2) != 0;
#endif
  return f;
}

CpuFeatures allowed() noexcept {
  const char* const limit = std::getenv("KVSTRATA_SIMD");
  const std::string_view name = limit == nullptr ? "" : limit;
  if (name == "none") {
    return CpuFeatures();
  }
  CpuFeatures f = probe();
  f.avx512 = f.avx512 && name != "avx2" && name != "sse";
  f.avx2 = f.avx2 && name != "sse";
  return f;
}

}  // namespace

const CpuFeatures& cpu_features() noexcept {
  static const CpuFeatures features = allowed();
  return features;
}

}  // namespace kvstrata
