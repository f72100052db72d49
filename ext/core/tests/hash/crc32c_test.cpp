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

TEST(several_runs_equal_the_definition_with_whole_pages_and_without) {
  constexpr std::size_t kMost = 40 * (4096 + 256);
  const auto bytes = noise(kMost + 1, 3);
  std::vector<unsigned char> space(kMost + 128);
  auto* const out = space.data() + (64 - reinterpret_cast<std::uintptr_t>(space.data()) % 64);
  std::size_t wrong = 0;
  for (const std::size_t run_bytes :
       {4096u, 8192u, 4096u + 256u, 33u * 4096u, 33u * 4096u + 256u}) {
    for (std::size_t count = 1; count * run_bytes <= kMost; ++count) {
      std::vector<CopyRun> runs(count);  // the sources in reverse order, none aligned
      std::uint32_t expected = 7;
      for (std::size_t i = 0; i < count; ++i) {
        const unsigned char* src = bytes.data() + (count - 1 - i) * run_bytes + 1;
        runs[i] = CopyRun{out + i * run_bytes, src};
        expected = crc32c(src, run_bytes, expected);
      }
      std::memset(out, kGuard, kMost);
      wrong += copy_crc32c_runs(runs.data(), count, run_bytes, 7) != expected;
      copy_fence();
      for (const CopyRun& run : runs) {
        wrong += std::memcmp(run.dst, run.src, run_bytes) != 0;
      }
      wrong += out[count * run_bytes] != (count * run_bytes < kMost ? kGuard : out[kMost]);
    }
  }
  CHECK_EQ(wrong, 0u);
  CHECK_EQ(crc32c(bytes.data(), kMost + 1), bitwise(bytes.data(), kMost + 1));
}
