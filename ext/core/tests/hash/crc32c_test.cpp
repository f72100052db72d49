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

// The Makefile runs this program with each value of KVSTRATA_SIMD.
TEST(known_values) {
  CHECK_EQ(crc32c("123456789", 9), 0xe3069283u);
  CHECK_EQ(crc32c("", 0), 0u);
  const std::vector<unsigned char> zeros(32, 0);
  const std::vector<unsigned char> ones(32, 0xff);
  CHECK_EQ(crc32c(zeros.data(), 32), 0x8a9136aau);  // RFC 3720, B.4
  CHECK_EQ(crc32c(ones.data(), 32), 0x62a8ab43u);
}

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

TEST(crc_of_parts_composes) {
  const auto bytes = noise(10'000, 5);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (const std::size_t cut : {0u, 1u, 7u, 255u, 256u, 1024u, 4097u, 9'999u, 10'000u}) {
    const std::uint32_t a = crc32c(bytes.data(), cut);
    CHECK_EQ(crc32c(bytes.data() + cut, bytes.size() - cut, a), whole);
    const std::uint32_t b = crc32c(bytes.data() + cut, bytes.size() - cut);
    CHECK_EQ(Crc32cCombiner(bytes.size() - cut).combine(a, b), whole);
  }
}

TEST(a_list_of_runs_equals_one_contiguous_string) {
  std::mt19937_64 random(6);
  const auto bytes = noise(1 << 18, 7);
  std::vector<unsigned char> packed;
  std::vector<CopyRun> runs;
  alignas(64) static unsigned char out[1 << 18];
  for (int round = 0; round < 300; ++round) {
    // Runs that are whole multiples of the kernels' step, and runs that are not.
    const std::size_t run = random() % 2 == 0 ? 256 * (1 + random() % 30) : 1 + random() % 3000;
    const std::size_t count = 1 + random() % 30;
    const std::size_t dst_stride = run + random() % 2 * 64 * (random() % 8) + random() % 2;
    const std::size_t to = random() % 2 * (random() % 64);
    if (to + dst_stride * count + 1 > sizeof out) {
      continue;
    }
    packed.clear();
    runs.clear();
    for (std::size_t i = 0; i < count; ++i) {  // sources in any order, also repeated
      const auto* p = bytes.data() + random() % (bytes.size() - run);
      packed.insert(packed.end(), p, p + run);
      runs.push_back(CopyRun{out + to + i * dst_stride, p});
    }
    const std::uint32_t expected = bitwise(packed.data(), packed.size());
    std::memset(out, kGuard, to + dst_stride * count + 1);
    CHECK_EQ(copy_crc32c_runs(runs.data(), count, run, 0), expected);
    copy_fence();
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      wrong += std::memcmp(runs[i].dst, packed.data() + i * run, run) != 0;
      if (dst_stride > run || i + 1 == count) {
        wrong += static_cast<unsigned char*>(runs[i].dst)[run] != kGuard;
      }
    }
    CHECK_EQ(wrong, 0u);
  }
}
