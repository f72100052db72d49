// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of fp8.h for one number and one scale, compiled for the GPU's kernels and for
// their tests on a CPU. Every step is one IEEE operation in single precision, so both compute the
// same bits, provided that the compiler contracts nothing and flushes nothing to zero (nvcc
// -fmad=false -ftz=false -prec-div=true).
#pragma once

#include <bit>
#include <cstdint>

#include "base/host_device.h"

namespace kvstrata {

enum class Fp8Source : std::uint8_t { kBfloat16 = 1, kFloat16 = 2 };

namespace fp8 {

KVSTRATA_HOST_DEVICE inline float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

KVSTRATA_HOST_DEVICE inline std::uint32_t word_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  return std::bit_cast<std::uint32_t>(value);
#endif
}

template <Fp8Source kType>
KVSTRATA_HOST_DEVICE inline float number_of(std::uint16_t bits) {
  if constexpr (kType == Fp8Source::kBfloat16) {
    return float_of(std::uint32_t{bits} << 16);
  } else {
    const std::uint32_t magnitude = bits & 0x7fffu;
    const float normal = float_of((magnitude << 13) + (112u << 23));
    const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
    const float value = magnitude < 0x400u ? small : normal;
    return float_of(word_of(value) | ((bits & 0x8000u) << 16));
  }
}

template <Fp8Source kType>
KVSTRATA_HOST_DEVICE inline std::uint16_t bits_of(float value) {
  const std::uint32_t bits = word_of(value);
  if constexpr (kType == Fp8Source::kBfloat16) {
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  } else {
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t normal =
        ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
    // After the addition of 1/2, the last place of the sum is 2^-24, fp16's smallest step.
    const std::uint32_t small = word_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const std::uint32_t code = magnitude < 0x38800000u ? small : normal;
    return static_cast<std::uint16_t>((code < 0x7bffu ? code : 0x7bffu) | ((bits >> 16) & 0x8000u));
  }
}

// The bits of a number without its sign. As integers they have the same order as the magnitudes.
KVSTRATA_HOST_DEVICE inline std::uint16_t magnitude_of(std::uint16_t bits) {
  return bits & 0x7fffu;
}

// The scale of a set of numbers whose largest magnitude is `largest`; kNoScale, which is a NaN, if
// `largest` is infinite or a NaN.
inline constexpr std::uint32_t kNoScale = 0x7fc00000u;
KVSTRATA_HOST_DEVICE inline float scale_of(Fp8Source type, std::uint16_t largest) {
  constexpr float kLargestCode = 448.0f;
  constexpr float kLeastScale = 0x1p-126f;
  const bool wide = type == Fp8Source::kBfloat16;
  if (largest >= (wide ? 0x7f80u : 0x7c00u)) return float_of(kNoScale);
  const float number =
      wide ? number_of<Fp8Source::kBfloat16>(largest) : number_of<Fp8Source::kFloat16>(largest);
  const float scale = number / kLargestCode;
  return scale > kLeastScale ? scale : kLeastScale;
}

// True for the bits of a scale that can be written: a finite number without a sign.
KVSTRATA_HOST_DEVICE inline bool is_scale(std::uint32_t bits) {
  return bits < 0x7f800000u;
}

// The factor by which encode() multiplies a number before rounding it.
KVSTRATA_HOST_DEVICE inline float factor_of(float scale) {
  return 1.0f / scale;
}

template <Fp8Source kType>
KVSTRATA_HOST_DEVICE inline std::uint8_t encode(std::uint16_t number, float factor) {
  const std::uint32_t bits = word_of(number_of<kType>(number) * factor);
  std::uint32_t magnitude = bits & 0x7fffffffu;
  magnitude = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;  // 448
  const std::uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - 960u;
  // After the addition of 2^14, the last place of the sum is 2^-9, the step of e4m3's subnormals.
  const std::uint32_t small = word_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
  const std::uint32_t code = magnitude < 0x3c800000u ? small : normal;
  return static_cast<std::uint8_t>(code | ((bits >> 24) & 0x80u));
}

template <Fp8Source kType>
KVSTRATA_HOST_DEVICE inline std::uint16_t decode(std::uint8_t code, float scale) {
  const std::uint32_t magnitude = code & 0x7fu;
  const float normal = float_of((magnitude << 20) + (120u << 23));
  const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f;
  const float value = (magnitude < 8u ? small : normal) * scale;
  return bits_of<kType>(float_of(word_of(value) | ((code & 0x80u) << 24)));
}

}  // namespace fp8
}  // namespace kvstrata
