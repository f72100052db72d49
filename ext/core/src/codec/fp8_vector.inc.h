// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The kernels of fp8.cpp for vectors of KVSTRATA_FP8_LANES numbers. fp8.cpp includes this file once
// per target (KVSTRATA_FP8_TARGET). Each vector lane computes the same bits as the scalar kernels.

using Halves = std::uint16_t __attribute__((vector_size(2 * KVSTRATA_FP8_LANES)));
using Codes = std::uint8_t __attribute__((vector_size(KVSTRATA_FP8_LANES)));
using Words = std::uint32_t __attribute__((vector_size(4 * KVSTRATA_FP8_LANES)));
using Signed = std::int32_t __attribute__((vector_size(4 * KVSTRATA_FP8_LANES)));
using Floats = float __attribute__((vector_size(4 * KVSTRATA_FP8_LANES)));

constexpr std::size_t kLanes = KVSTRATA_FP8_LANES;

template <Fp8Source kType>
KVSTRATA_FP8_TARGET inline void encode_lanes(const std::uint16_t* from, std::uint8_t* to,
                                             float factor) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words number = __builtin_convertvector(halves, Words);
  Words bits;
  if constexpr (kType == Fp8Source::kBfloat16) {
    bits = number << 16;
  } else {
    const Words magnitude = number & 0x7fffu;
    const Words normal = (magnitude << 13) + (112u << 23);
    const Floats tiny = __builtin_convertvector((Signed)magnitude, Floats) * 0x1p-24f;
    bits = (magnitude < 0x400u ? (Words)tiny : normal) | ((number & 0x8000u) << 16);
  }
  bits = (Words)((Floats)bits * factor);
  Words magnitude = bits & 0x7fffffffu;
  magnitude = magnitude < 0x43e00000u ? magnitude : (Words{} + 0x43e00000u);
  const Words normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - 960u;
  const Words small = (Words)((Floats)magnitude + 16384.0f) - 0x46800000u;
  const Words code = (magnitude < 0x3c800000u ? small : normal) | ((bits >> 24) & 0x80u);
  const Codes codes = __builtin_convertvector(code, Codes);
  std::memcpy(to, &codes, sizeof codes);
}

template <Fp8Source kType>
KVSTRATA_FP8_TARGET inline void decode_lanes(const std::uint8_t* from, std::uint16_t* to,
                                             float scale) {
  Codes codes;
  std::memcpy(&codes, from, sizeof codes);
  const Words code = __builtin_convertvector(codes, Words);
  const Words low = code & 0x7fu;
  const Words scaled_up = (low << 20) + (120u << 23);
  const Floats tiny = __builtin_convertvector((Signed)low, Floats) * 0x1p-9f;
  const Words one = low < 8u ? (Words)tiny : scaled_up;
  const Words bits = (Words)((Floats)one * scale) | ((code & 0x80u) << 24);
  Words half;
  if constexpr (kType == Fp8Source::kBfloat16) {
    half = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  } else {
    const Words magnitude = bits & 0x7fffffffu;
    const Words normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
    const Words small = (Words)((Floats)magnitude + 0.5f) - 0x3f000000u;
    const Words found = magnitude < 0x38800000u ? small : normal;
    half = (found < 0x7bffu ? found : (Words{} + 0x7bffu)) | ((bits >> 16) & 0x8000u);
  }
  const Halves halves = __builtin_convertvector(half, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

KVSTRATA_FP8_TARGET std::uint16_t largest(const std::uint16_t* from, std::size_t n) {
  Halves most{};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Halves halves;
    std::memcpy(&halves, from + i, sizeof halves);
    halves &= 0x7fff;
    most = halves > most ? halves : most;
  }
  std::uint16_t found = scalar::largest(from + i, n - i);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    found = most[lane] > found ? most[lane] : found;
  }
  return found;
}

template <Fp8Source kType>
KVSTRATA_FP8_TARGET void encode(const std::uint16_t* from, std::uint8_t* to, std::size_t n,
                                float factor) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    encode_lanes<kType>(from + i, to + i, factor);
  }
  scalar::encode<kType>(from + i, to + i, n - i, factor);
}

template <Fp8Source kType>
KVSTRATA_FP8_TARGET void decode(const std::uint8_t* from, std::uint16_t* to, std::size_t n,
                                float scale) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    decode_lanes<kType>(from + i, to + i, scale);
  }
  scalar::decode<kType>(from + i, to + i, n - i, scale);
}

constexpr Kernel kKernel = {
    &largest,
    {&encode<Fp8Source::kBfloat16>, &encode<Fp8Source::kFloat16>},
    {&decode<Fp8Source::kBfloat16>, &decode<Fp8Source::kFloat16>},
};
