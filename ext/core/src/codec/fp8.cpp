// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "codec/fp8.h"

#include <cstring>
#include <memory>
#include <new>

#include "base/cpu.h"

namespace kvstrata {
namespace {

// The functions of one path. Each works on a run of n numbers that share a scale. `encode` and
// `decode` are indexed by Fp8Source - 1; `largest` is the same for both types.
struct Kernel {
  std::uint16_t (*largest)(const std::uint16_t* from, std::size_t n);
  void (*encode[2])(const std::uint16_t* from, std::uint8_t* to, std::size_t n, float factor);
  void (*decode[2])(const std::uint8_t* from, std::uint16_t* to, std::size_t n, float scale);
};

namespace scalar {

// The bits of the largest magnitude of n numbers (see fp8::magnitude_of).
std::uint16_t largest(const std::uint16_t* from, std::size_t n) {
  std::uint16_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint16_t magnitude = fp8::magnitude_of(from[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

template <Fp8Source kType>
void encode(const std::uint16_t* from, std::uint8_t* to, std::size_t n, float factor) {
  for (std::size_t i = 0; i < n; ++i)
    to[i] = fp8::encode<kType>(from[i], factor);
}

template <Fp8Source kType>
void decode(const std::uint8_t* from, std::uint16_t* to, std::size_t n, float scale) {
  for (std::size_t i = 0; i < n; ++i)
    to[i] = fp8::decode<kType>(from[i], scale);
}

constexpr Kernel kKernel = {
    &largest,
    {&encode<Fp8Source::kBfloat16>, &encode<Fp8Source::kFloat16>},
    {&decode<Fp8Source::kBfloat16>, &decode<Fp8Source::kFloat16>},
};

}  // namespace scalar

#if defined(__x86_64__)
namespace avx2 {
#define KVSTRATA_FP8_TARGET __attribute__((target("avx2")))
#define KVSTRATA_FP8_LANES 8
#include "codec/fp8_vector.inc.h"
#undef KVSTRATA_FP8_LANES
#undef KVSTRATA_FP8_TARGET
}  // namespace avx2

namespace avx512 {
#define KVSTRATA_FP8_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define KVSTRATA_FP8_LANES 16
#include "codec/fp8_vector.inc.h"
#undef KVSTRATA_FP8_LANES
#undef KVSTRATA_FP8_TARGET
}  // namespace avx512
#endif

const Kernel& best() noexcept {
  static const Kernel& choice = []() -> const Kernel& {
    [[maybe_unused]] const CpuFeatures& cpu = cpu_features();
#if defined(__x86_64__)
    if (cpu.avx512) return avx512::kKernel;
    if (cpu.avx2) return avx2::kKernel;
#endif
    return scalar::kKernel;
  }();
  return choice;
}

// Calls visit(index of the first number, count, index of the scale) for each run of numbers with
// the same scale, in order.
template <typename Visit>
void for_runs(const Fp8Shape& shape, const Visit& visit) {
  // With a single head, all tokens of a group are one run.
  const std::size_t tokens = shape.heads == 1 ? 1 : shape.tokens;
  const std::size_t run = std::size_t{shape.dim} * (shape.heads == 1 ? shape.tokens : 1);
  std::size_t at = 0;
  for (std::uint32_t block = 0; block < shape.blocks; ++block) {
    for (std::uint32_t group = 0; group < shape.groups; ++group) {
      for (std::size_t token = 0; token < tokens; ++token) {
        for (std::uint32_t head = 0; head < shape.heads; ++head) {
          visit(at, run, std::size_t{group} * shape.heads + head);
          at += run;
        }
      }
    }
  }
}

float load_scale(const void* scales, std::size_t index) noexcept {
  float scale;
  std::memcpy(&scale, static_cast<const unsigned char*>(scales) + index * sizeof scale,
              sizeof scale);
  return scale;
}

}  // namespace

Status Fp8Shape::check() const noexcept {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 31;
  std::uint64_t numbers = 1;
  for (const std::uint32_t count : {blocks, groups, tokens, heads, dim}) {
    if (count == 0 || count > kMost || numbers * count > kMost) {
      return Status(StatusCode::kBadArgument,
                    "shape: every count must be at least 1, and their product at most 2^31", count);
    }
    numbers *= count;
  }
  if (std::uint64_t{blocks} * tokens * dim < 16) {
    return Status(StatusCode::kBadArgument, "shape: a scale needs at least 16 numbers",
                  static_cast<std::int64_t>(std::uint64_t{blocks} * tokens * dim), 16);
  }
  return Status();
}

Status fp8_encode(const Fp8Shape& shape, Fp8Source type, const void* numbers, void* codes,
                  void* scales) noexcept {
  const Kernel& kernel = best();
  const auto* from = static_cast<const std::uint16_t*>(numbers);
  auto* to = static_cast<std::uint8_t*>(codes);
  const std::size_t count = shape.scales();
  const std::unique_ptr<std::uint16_t[]> largest(new (std::nothrow) std::uint16_t[count]());
  const std::unique_ptr<float[]> factors(new (std::nothrow) float[count]);
  if (largest == nullptr || factors == nullptr) {
    return Status(StatusCode::kNoSpace, "scales: no memory", static_cast<std::int64_t>(count));
  }
  for_runs(shape, [&](std::size_t at, std::size_t n, std::size_t scale) {
    const std::uint16_t found = kernel.largest(from + at, n);
    largest[scale] = found > largest[scale] ? found : largest[scale];
  });
  for (std::size_t i = 0; i < count; ++i) {
    const float scale = fp8::scale_of(type, largest[i]);
    if (scale != scale) {
      return Status(StatusCode::kUnsupported, "numbers: a number is infinite or a NaN",
                    static_cast<std::int64_t>(i));
    }
    std::memcpy(static_cast<unsigned char*>(scales) + i * sizeof scale, &scale, sizeof scale);
    factors[i] = fp8::factor_of(scale);
  }
  const auto encode = kernel.encode[static_cast<int>(type) - 1];
  for_runs(shape, [&](std::size_t at, std::size_t n, std::size_t scale) {
    encode(from + at, to + at, n, factors[scale]);
  });
  return Status();
}

void fp8_decode(const Fp8Shape& shape, Fp8Source type, const void* codes, const void* scales,
                void* numbers) noexcept {
  const auto decode = best().decode[static_cast<int>(type) - 1];
  const auto* from = static_cast<const std::uint8_t*>(codes);
  auto* to = static_cast<std::uint16_t*>(numbers);
  for_runs(shape, [&](std::size_t at, std::size_t n, std::size_t scale) {
    decode(from + at, to + at, n, load_scale(scales, scale));
  });
}

}  // namespace kvstrata
