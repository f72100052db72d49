// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "codec/planes.h"

#include "base/cpu.h"

#if defined(__x86_64__)
#define KVSTRATA_AVX2 __attribute__((target("avx2")))
#else
#define KVSTRATA_AVX2
#endif
#define KVSTRATA_INLINE __attribute__((always_inline)) inline

namespace kvstrata {
namespace {

// The compiler makes vector code of these loops, for the CPU of the function that they are part of.
KVSTRATA_INLINE void split(unsigned char* __restrict low, unsigned char* __restrict high,
                           const unsigned char* __restrict bytes, std::size_t pairs) noexcept {
  for (std::size_t i = 0; i < pairs; ++i) {
    low[i] = bytes[2 * i];
    high[i] = bytes[2 * i + 1];
  }
}

KVSTRATA_INLINE void join(unsigned char* __restrict bytes, const unsigned char* __restrict low,
                          const unsigned char* __restrict high, std::size_t pairs) noexcept {
  for (std::size_t i = 0; i < pairs; ++i) {
    bytes[2 * i] = low[i];
    bytes[2 * i + 1] = high[i];
  }
}

KVSTRATA_AVX2 void join_avx2(unsigned char* bytes, const unsigned char* low,
                             const unsigned char* high, std::size_t pairs) noexcept {
  join(bytes, low, high, pairs);
}

}  // namespace

void split_planes(void* planes, const void* bytes, std::size_t n) noexcept {
  auto* low = static_cast<unsigned char*>(planes);
  const auto* from = static_cast<const unsigned char*>(bytes);
  const std::size_t pairs = n / 2;
  split(low, low + (n - pairs), from, pairs);
  if (n % 2 != 0) low[pairs] = from[n - 1];
}

void join_planes(void* bytes, const void* planes, std::size_t n) noexcept {
  auto* to = static_cast<unsigned char*>(bytes);
  const auto* low = static_cast<const unsigned char*>(planes);
  const std::size_t pairs = n / 2;
  if (cpu_features().avx2) {
    join_avx2(to, low, low + (n - pairs), pairs);
  } else {
    join(to, low, low + (n - pairs), pairs);
  }
  if (n % 2 != 0) to[n - 1] = low[pairs];
}

}  // namespace kvstrata
