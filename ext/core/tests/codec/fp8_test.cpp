// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "codec/fp8.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "hash/crc32c.h"
#include "support/check.h"

using namespace kvstrata;

namespace {

using Numbers = std::vector<std::uint16_t>;

// Any finite bits: exponents of all sizes, zeros and subnormal numbers among them.
Numbers finite(std::size_t n, Fp8Source type, unsigned seed) {
  std::mt19937 random(seed);
  const std::uint16_t infinity = type == Fp8Source::kBfloat16 ? 0x7f80 : 0x7c00;
  Numbers numbers(n);
  for (auto& number : numbers) {
    do {
      number = static_cast<std::uint16_t>(random());
    } while ((number & 0x7fff) >= infinity);
  }
  return numbers;
}

struct Coded {
  std::vector<std::uint8_t> codes;
  std::vector<unsigned char> scales;
};

Coded encode(const Fp8Shape& shape, Fp8Source type, const Numbers& numbers) {
  Coded coded{std::vector<std::uint8_t>(shape.numbers()),
              std::vector<unsigned char>(4 * shape.scales())};
  CHECK_OK(fp8_encode(shape, type, numbers.data(), coded.codes.data(), coded.scales.data()));
  return coded;
}

}  // namespace

// The Makefile runs this program with each value of KVSTRATA_SIMD, and each makes these bits.
TEST(every_implementation_makes_the_same_bits) {
  const Fp8Shape shapes[] = {
      {2, 3, 16, 1, 17}, {1, 2, 4, 3, 33}, {3, 1, 1, 1, 100}, {1, 1, 1, 1, 16}};
  std::uint32_t crc = 0;
  for (const Fp8Source type : {Fp8Source::kBfloat16, Fp8Source::kFloat16}) {
    for (const Fp8Shape& shape : shapes) {
      CHECK_OK(shape.check());
      const Coded coded = encode(shape, type, finite(shape.numbers(), type, 7));
      Numbers back(shape.numbers());
      fp8_decode(shape, type, coded.codes.data(), coded.scales.data(), back.data());
      crc = crc32c(coded.codes.data(), coded.codes.size(), crc);
      crc = crc32c(coded.scales.data(), coded.scales.size(), crc);
      crc = crc32c(back.data(), back.size() * sizeof back[0], crc);
    }
  }
  CHECK_EQ(crc, 1928307636u);
}

TEST(numbers_that_are_none_are_refused) {
  const Fp8Shape shape{1, 1, 1, 1, 16};
  for (const Fp8Source type : {Fp8Source::kBfloat16, Fp8Source::kFloat16}) {
    for (const std::uint16_t bad : {0x7f80, 0xff80, 0x7fff, 0xffff}) {
      Numbers numbers(16, 0x3c00);
      numbers[7] = bad;
      std::vector<unsigned char> room(16 + 4);
      CHECK(fp8_encode(shape, type, numbers.data(), room.data(), room.data() + 16).code() ==
            StatusCode::kUnsupported);
    }
  }
}

TEST(shapes_that_make_no_sense_are_refused) {
  CHECK(!Fp8Shape{}.check().ok());
  CHECK(!(Fp8Shape{1, 1, 1, 1, 15}).check().ok());
  CHECK(!(Fp8Shape{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}).check().ok());
  CHECK((Fp8Shape{1 << 15, 1, 1 << 8, 1, 1 << 8}).check().ok());
}
