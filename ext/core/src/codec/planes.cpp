// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "codec/planes.h"

#include "base/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvstrata {
namespace {

// The functions of one path. Both work on whole pairs of bytes.
struct Kernel {
  void (*split)(unsigned char* low, unsigned char* high, const unsigned char* bytes,
                std::size_t pairs);
  void (*join)(unsigned char* bytes, const unsigned char* low, const unsigned char* high,
               std::size_t pairs);
};

void split_scalar(unsigned char* low, unsigned char* high, const unsigned char* bytes,
                  std::size_t pairs) {
  for (std::size_t i = 0; i < pairs; ++i) {
    low[i] = bytes[2 * i];
    high[i] = bytes[2 * i + 1];
  }
}

void join_scalar(unsigned char* bytes, const unsigned char* low, const unsigned char* high,
                 std::size_t pairs) {
  for (std::size_t i = 0; i < pairs; ++i) {
    bytes[2 * i] = low[i];
    bytes[2 * i + 1] = high[i];
  }
}

constexpr Kernel kScalarKernel = {&split_scalar, &join_scalar};

#if defined(__x86_64__)

__attribute__((target("avx2"))) void split_avx2(unsigned char* low, unsigned char* high,
                                                const unsigned char* bytes, std::size_t pairs) {
  const __m256i low_mask = _mm256_set1_epi16(0x00ff);
  std::size_t i = 0;
  for (; i + 32 <= pairs; i += 32) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 2 * i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 2 * i + 32));
    // Packing treats the two halves of a vector separately; the permutation reorders the quarters.
    const __m256i l =
        _mm256_packus_epi16(_mm256_and_si256(a, low_mask), _mm256_and_si256(b, low_mask));
    const __m256i h = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i), _mm256_permute4x64_epi64(l, 0xd8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i), _mm256_permute4x64_epi64(h, 0xd8));
  }
  split_scalar(low + i, high + i, bytes + 2 * i, pairs - i);
}

__attribute__((target("avx2"))) void join_avx2(unsigned char* bytes, const unsigned char* low,
                                               const unsigned char* high, std::size_t pairs) {
  std::size_t i = 0;
  for (; i + 32 <= pairs; i += 32) {
    const __m256i l = _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + i)), 0xd8);
    const __m256i h = _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high + i)), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + 2 * i), _mm256_unpacklo_epi8(l, h));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + 2 * i + 32), _mm256_unpackhi_epi8(l, h));
  }
  join_scalar(bytes + 2 * i, low + i, high + i, pairs - i);
}

constexpr Kernel kAvx2Kernel = {&split_avx2, &join_avx2};

__attribute__((target("avx512f,avx512bw"))) void split_avx512(unsigned char* low,
                                                              unsigned char* high,
                                                              const unsigned char* bytes,
                                                              std::size_t pairs) {
  constexpr __mmask32 kAll = 0xffffffff;
  std::size_t i = 0;
  for (; i + 32 <= pairs; i += 32) {
    const __m512i a = _mm512_loadu_si512(bytes + 2 * i);
    // The masked form, because GCC 12 warns that the plain form reads an uninitialised register.
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i), _mm512_maskz_cvtepi16_epi8(kAll, a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i),
                        _mm512_maskz_cvtepi16_epi8(kAll, _mm512_srli_epi16(a, 8)));
  }
  split_scalar(low + i, high + i, bytes + 2 * i, pairs - i);
}

__attribute__((target("avx512f,avx512bw"))) void join_avx512(unsigned char* bytes,
                                                             const unsigned char* low,
                                                             const unsigned char* high,
                                                             std::size_t pairs) {
  std::size_t i = 0;
  for (; i + 32 <= pairs; i += 32) {
    const __m512i l =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + i)));
    const __m512i h =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high + i)));
    _mm512_storeu_si512(bytes + 2 * i, _mm512_or_si512(l, _mm512_slli_epi16(h, 8)));
  }
  join_scalar(bytes + 2 * i, low + i, high + i, pairs - i);
}

constexpr Kernel kAvx512Kernel = {&split_avx512, &join_avx512};

#endif

struct Choice {
  const char* name;
  const Kernel* kernel;
};

const Choice& best() noexcept {
  static const Choice choice = []() -> Choice {
    [[maybe_unused]] const CpuFeatures& cpu = cpu_features();
#if defined(__x86_64__)
    if (cpu.avx512) return {"avx512", &kAvx512Kernel};
    if (cpu.avx2) return {"avx2", &kAvx2Kernel};
#endif
    return {"scalar", &kScalarKernel};
  }();
  return choice;
}

}  // namespace

void split_planes(void* planes, const void* bytes, std::size_t n) noexcept {
  auto* low = static_cast<unsigned char*>(planes);
  const auto* from = static_cast<const unsigned char*>(bytes);
  const std::size_t pairs = n / 2;
  best().kernel->split(low, low + (n - pairs), from, pairs);
  if (n % 2 != 0) {
    low[pairs] = from[n - 1];
  }
}

void join_planes(void* bytes, const void* planes, std::size_t n) noexcept {
  auto* to = static_cast<unsigned char*>(bytes);
  const auto* low = static_cast<const unsigned char*>(planes);
  const std::size_t pairs = n / 2;
  best().kernel->join(to, low, low + (n - pairs), pairs);
  if (n % 2 != 0) {
    to[n - 1] = low[pairs];
  }
}

const char* planes_path() noexcept {
  return best().name;
}

}  // namespace kvstrata
