// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What one number becomes, and what a scale is made of: the arithmetic of fp8.h, compiled for the
// CPU's codec and for the kernels of a GPU alike. Every step is one IEEE operation in single
// precision, so both make the same bits where nothing is contracted or flushed to zero
// (nvcc -fmad=false -ftz=false -prec-div=true).
#pragma once

#include <bit>
#include <cstdint>

#include "kvstrata/host_device.h"

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
    // Adding 1/2 leaves units of 2^-24 as the last place.
    const std::uint32_t small = word_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const std::uint32_t code = magnitude < 0x38800000u ? small : normal;
    return static_cast<std::uint16_t>((code < 0x7bffu ? code : 0x7bffu) | ((bits >> 16) & 0x8000u));
  }
}

// Bits of a number without its sign; they order as the magnitudes do.
KVSTRATA_HOST_DEVICE inline std::uint16_t magnitude_of(std::uint16_t bits) {
  return bits & 0x7fffu;
}

// The scale of a group whose largest magnitude is that; none (a NaN, kNoScale) where a number is
// infinite or none itself.
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

// Whether `fp8_encode` could have written that scale, given by its bits.
KVSTRATA_HOST_DEVICE inline bool is_scale(std::uint32_t bits) {
  return bits < 0x7f800000u;
}

// What numbers are multiplied with before they are rounded.
KVSTRATA_HOST_DEVICE inline float factor_of(float scale) {
  return 1.0f / scale;
}

template <Fp8Source kType>
KVSTRATA_HOST_DEVICE inline std::uint8_t encode(std::uint16_t number, float factor) {
  const std::uint32_t bits = word_of(number_of<kType>(number) * factor);
  std::uint32_t magnitude = bits & 0x7fffffffu;
  magnitude = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;  // 448
  const std::uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - 960u;
  // Adding 2^14 leaves units of 2^-9, those below the least normal number, as the last place.
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
