// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The kernels of fp8_kernel_body.h, thread by thread on the host, against the CPU's codec: the same
// bits for any numbers.
#include "fp8_kernel_body.h"

#include <cstring>
#include <random>
#include <vector>

#include "codec/fp8.h"
#include "support/check.h"

using namespace kvstrata;
using namespace kvstrata::cuda;

namespace {

// Sections of blocks with `gap` bytes between runs of `run` numbers, and what their record holds.
struct Case {
  Fp8Shape shape;  // of one section; its blocks are those of the record
  std::uint32_t run = 0;
  std::uint32_t gap = 0;
  std::uint32_t sections = 1;
};

using Bytes = std::vector<unsigned char>;

struct World {
  const Case& what;
  Bytes memory;
  std::vector<std::uint32_t> blocks;
  std::size_t block_stride;
  std::size_t section_stride;

  World(const Case& of, std::uint64_t seed) : what(of) {
    const std::size_t block_numbers = of.shape.numbers() / of.shape.blocks;
    block_stride = block_numbers / of.run * (2 * of.run + of.gap);
    section_stride = 2 * of.shape.blocks * block_stride;
    memory.resize(of.sections * section_stride + 64);
    std::mt19937_64 random(seed);
    for (std::uint32_t b = 0; b < of.shape.blocks; ++b)
      blocks.push_back(2 * b + random() % 2);
  }

  [[nodiscard]] unsigned char* first() {
    return memory.data() + (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16);
  }
  [[nodiscard]] std::size_t section_numbers() const { return what.shape.numbers(); }
  [[nodiscard]] std::size_t record_section() const {
    return 4 * what.shape.scales() + section_numbers();
  }

  // Copies a section's numbers, packed, into the blocks or out of them.
  void packed(std::uint32_t section, std::uint16_t* numbers, bool into) {
    const std::size_t runs = section_numbers() / what.shape.blocks / what.run;
    for (const std::uint32_t block : blocks) {
      for (std::size_t r = 0; r < runs; ++r, numbers += what.run) {
        unsigned char* const at = first() + section * section_stride + block * block_stride +
                                  r * (2 * what.run + what.gap);
        if (into) {
          std::memcpy(at, numbers, 2 * what.run);
        } else {
          std::memcpy(numbers, at, 2 * what.run);
        }
      }
    }
  }

  Fp8Launch launch(unsigned numbers, Fp8Source type, unsigned char* record, std::uint32_t* words) {
    Fp8Launch launch{};
    const Fp8Shape& shape = what.shape;
    const std::uint32_t block_numbers = shape.groups * shape.tokens * shape.heads * shape.dim;
    Launch& copy = launch.copy;
    for (std::uint32_t s = 0; s < what.sections; ++s) {
      copy.sections[s] = {
          reinterpret_cast<std::uint64_t>(first() + s * section_stride), block_stride,
          reinterpret_cast<std::uint64_t>(record) + 4 * shape.scales() + s * record_section()};
    }
    std::copy(blocks.begin(), blocks.end(), copy.blocks);
    copy.dims[0] = {0, 1, 0};
    copy.dims[1] = {2 * std::uint64_t{what.run} + what.gap, block_numbers / what.run, 0};
    copy.section_count = what.sections;
    copy.block_count = shape.blocks;
    copy.block_vectors = block_numbers / numbers;
    copy.run_vectors = what.run / numbers;
    const std::uint64_t vectors = std::uint64_t{shape.blocks} * copy.block_vectors;
    copy.tiles_per_section =
        static_cast<std::uint32_t>((vectors + kThreads * kUnroll - 1) / (kThreads * kUnroll));
    launch.words = reinterpret_cast<std::uint64_t>(words);
    launch.before_codes = 4 * shape.scales();
    launch.scales_per_section = static_cast<std::uint32_t>(shape.scales());
    launch.heads = shape.heads;
    launch.head_vectors = shape.heads == 1 ? 1 : shape.dim / numbers;
    launch.group_vectors = shape.tokens * shape.heads * shape.dim / numbers;
    launch.type = static_cast<std::uint32_t>(type);
    launch.writes_scales = 1;
    return launch;
  }
};

template <Fp8Pass kPass, unsigned kNumbers>
void run(const Fp8Launch& launch) {
  constexpr std::uint32_t kBlocks = 3;
  for (std::uint32_t block = kBlocks; block-- > 0;) {
    for (std::uint32_t thread = 0; thread < kThreads; ++thread)
      fp8_thread<kPass, kNumbers>(launch, thread, block, kBlocks);
  }
}

std::vector<std::uint16_t> any_numbers(std::size_t n, Fp8Source type, std::mt19937_64& random) {
  const std::uint16_t infinity = type == Fp8Source::kBfloat16 ? 0x7f80 : 0x7c00;
  // All sizes, one magnitude, subnormal numbers alone, zeros alone.
  const auto kind = random() % 4;
  std::vector<std::uint16_t> numbers(n);
  for (std::uint16_t& number : numbers) {
    do {
      number = static_cast<std::uint16_t>(random());
      if (kind == 1) number = static_cast<std::uint16_t>((number & 0x83ff) | 0x3c00);
      if (kind == 2) number &= 0x807f;
      if (kind == 3) number &= 0x8000;
    } while ((number & 0x7fff) >= infinity);
  }
  return numbers;
}

template <unsigned kNumbers>
void check(const Case& what, Fp8Source type, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  World world(what, seed);
  if (what.sections > 1 && world.record_section() % kNumbers != 0) return;
  const std::size_t n = world.section_numbers();
  const std::size_t scales = 4 * what.shape.scales();
  // As far from a multiple of 16 as this vector may be.
  Bytes room(what.sections * world.record_section() + 64);
  unsigned char* record = room.data();
  while ((reinterpret_cast<std::uintptr_t>(record) + scales) % 16 != kNumbers % 16)
    ++record;
  std::vector<std::uint16_t> numbers;
  for (std::uint32_t s = 0; s < what.sections; ++s) {
    std::vector<std::uint16_t> section = any_numbers(n, type, random);
    world.packed(s, section.data(), true);
    numbers.insert(numbers.end(), section.begin(), section.end());
  }
  std::vector<std::uint32_t> words(what.sections * what.shape.scales());
  const Fp8Launch launch = world.launch(kNumbers, type, record, words.data());
  run<Fp8Pass::kLargest, kNumbers>(launch);
  run<Fp8Pass::kEncode, kNumbers>(launch);
  Bytes expected(what.sections * world.record_section());
  for (std::uint32_t s = 0; s < what.sections; ++s) {
    unsigned char* const section = expected.data() + s * world.record_section();
    CHECK_OK(fp8_encode(what.shape, type, numbers.data() + s * n, section + scales, section));
  }
  CHECK(std::memcmp(record, expected.data(), expected.size()) == 0);

  const Bytes gaps = world.memory;
  for (std::uint32_t s = 0; s < what.sections; ++s) {
    std::vector<std::uint16_t> none(n, 0x1234);
    world.packed(s, none.data(), true);
  }
  run<Fp8Pass::kScales, 1>(launch);
  run<Fp8Pass::kDecode, kNumbers>(launch);
  for (std::uint32_t s = 0; s < what.sections; ++s) {
    std::vector<std::uint16_t> back(n), wanted(n);
    const unsigned char* const section = expected.data() + s * world.record_section();
    fp8_decode(what.shape, type, section + scales, section, wanted.data());
    world.packed(s, back.data(), false);
    CHECK(back == wanted);
    world.packed(s, numbers.data() + s * n, true);
  }
  CHECK(world.memory == gaps);  // nothing but the numbers was written
}

constexpr Fp8Source kTypes[] = {Fp8Source::kBfloat16, Fp8Source::kFloat16};

}  // namespace

TEST(records_and_blocks_are_bit_for_bit_the_codecs) {
  const Case cases[] = {
      {{3, 2, 16, 8, 64}, 2 * 16 * 8 * 64, 0, 2},  // tokens outside heads, dense blocks
      {{3, 1, 16, 4, 32}, 32, 64, 3},              // the same with heads apart
      {{4, 8, 16, 2, 64}, 16 * 2 * 64, 32, 2},     // heads outside tokens, K and V as heads
      {{5, 1, 16, 1, 576}, 16 * 576, 16, 2},       // a latent: one scale
      {{300, 1, 16, 1, 16}, 16 * 16, 0, 1},        // many tokens in one group
      {{1, 1, 4, 1, 16}, 64, 0, 5},
  };
  for (const Case& what : cases) {
    CHECK_OK(what.shape.check());
    for (const Fp8Source type : kTypes) {
      for (std::uint64_t seed = 0; seed < 8; ++seed) {
        check<1>(what, type, seed);
        check<2>(what, type, seed);
        check<4>(what, type, seed);
        check<8>(what, type, seed);
      }
    }
  }
}

TEST(odd_heads_go_number_by_number) {
  const Case what{{3, 2, 5, 3, 7}, 7, 2, 3};
  CHECK_OK(what.shape.check());
  for (const Fp8Source type : kTypes) {
    for (std::uint64_t seed = 0; seed < 20; ++seed)
      check<1>(what, type, seed);
  }
}

TEST(each_finite_number_is_coded_as_the_codec_does_beside_any_largest) {
  const Case what{{1, 1, 1, 1, 1 << 15}, 1 << 15, 0, 1};
  for (const Fp8Source type : kTypes) {
    const std::uint32_t infinity = type == Fp8Source::kBfloat16 ? 0x7f80 : 0x7c00;
    for (std::uint32_t largest = 1; largest < infinity; largest += 997) {
      World world(what, 1);
      std::vector<std::uint16_t> numbers(1 << 15);
      for (std::uint32_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = static_cast<std::uint16_t>(i % (largest + 1) | (i % 2 << 15));
      }
      numbers[7] = static_cast<std::uint16_t>(largest);
      world.packed(0, numbers.data(), true);
      Bytes record(world.record_section() + 32), expected(world.record_section());
      unsigned char* const at =
          record.data() + (20 - reinterpret_cast<std::uintptr_t>(record.data()) % 8) % 8;
      std::uint32_t word = 0;
      Fp8Launch launch = world.launch(4, type, at, &word);
      run<Fp8Pass::kLargest, 4>(launch);
      CHECK_EQ(word, largest);
      run<Fp8Pass::kEncode, 4>(launch);
      CHECK_OK(fp8_encode(what.shape, type, numbers.data(), expected.data() + 4, expected.data()));
      CHECK(std::memcmp(at, expected.data(), expected.size()) == 0);
    }
  }
}

TEST(a_number_that_is_none_leaves_no_scale_and_the_other_groups_theirs) {
  const Case what{{2, 2, 4, 2, 16}, 256, 0, 1};
  for (const Fp8Source type : kTypes) {
    for (const std::uint16_t bad : {0x7f80, 0xff80, 0x7fff, 0xffff}) {
      std::mt19937_64 random(3);
      World world(what, 3);
      std::vector<std::uint16_t> numbers = any_numbers(what.shape.numbers(), type, random);
      numbers[16] = bad;  // block 0, group 0, token 0, head 1
      world.packed(0, numbers.data(), true);
      Bytes room(world.record_section() + 16);
      unsigned char* const record =
          room.data() + (16 - reinterpret_cast<std::uintptr_t>(room.data()) % 16);
      std::vector<std::uint32_t> words(4);
      const Fp8Launch launch = world.launch(8, type, record, words.data());
      run<Fp8Pass::kLargest, 8>(launch);
      run<Fp8Pass::kEncode, 8>(launch);
      for (std::uint32_t i = 0; i < 4; ++i) {
        std::uint32_t scale = 0;
        std::memcpy(&scale, record + 4 * i, sizeof scale);
        CHECK_EQ(fp8::is_scale(scale), i != 1);
      }
    }
  }
}
