// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "hash/crc32c.h"

#include <cstring>
#include <random>
#include <vector>

#include "support/check.h"

using namespace kvstrata;

namespace {

// The definition, bit by bit.
std::uint32_t bitwise(const unsigned char* p, std::size_t n, std::uint32_t crc = 0) {
  std::uint32_t v = ~crc;
  for (std::size_t i = 0; i < n; ++i) {
    v ^= p[i];
    for (int b = 0; b < 8; ++b) {
      v = (v >> 1) ^ ((v & 1u) != 0 ? 0x82f63b78u : 0u);
    }
  }
  return ~v;
}

std::vector<unsigned char> noise(std::size_t n, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<unsigned char> bytes(n);
  for (auto& b : bytes) {
    b = static_cast<unsigned char>(random());
  }
  return bytes;
}

constexpr unsigned char kGuard = 0xa5;

}  // namespace

TEST(every_length_and_alignment_equals_the_definition) {
  const auto bytes = noise(600 + 64, 1);
  std::size_t wrong = 0;
  for (std::size_t at = 0; at < 64; ++at) {
    for (std::size_t n = 0; n <= 600; ++n) {
      wrong += crc32c(bytes.data() + at, n) != bitwise(bytes.data() + at, n);
    }
  }
  CHECK_EQ(wrong, 0u);
}

TEST(copy_moves_exactly_its_bytes_at_every_length_and_alignment) {
  const auto bytes = noise(4096, 2);
  alignas(64) static unsigned char out[4096];
  std::size_t wrong = 0;
  for (std::size_t n = 0; n <= 600; ++n) {
    const unsigned char* src = bytes.data() + n % 64;
    const std::uint32_t expected = bitwise(src, n);
    for (std::size_t to = 0; to < 64; ++to) {
      std::memset(out, kGuard, to + n + 128);
      const CopyRun run{out + 64 + to, src};
      wrong += copy_crc32c_runs(&run, 1, n, 0) != expected;
      copy_fence();
      wrong += std::memcmp(out + 64 + to, src, n) != 0;
      wrong += out[63 + to] != kGuard || out[64 + to + n] != kGuard;
    }
  }
  CHECK_EQ(wrong, 0u);
}
