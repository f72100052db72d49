// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What one thread of the kernels does that round KV to 8-bit floats on its way into a record and
// back, for device and host as kernel_body.h.
//
// A section is stored as its scales and, right behind them, one code for each number, as fp8_encode
// gives them for the packed section. Two launches make a rectangle of sections, the second on the
// stream behind the first, so neither needs a barrier:
//
//   store  largest  the largest magnitude of each group's numbers, into words on the device that
//                   were zero before (of all blocks of a section, in several launches if need be)
//          encode   scales from those words, codes from the blocks
//   load   scales   the record's scales into those words: host memory is read once
//          decode   codes into the blocks
//
// Numbers that are infinite or none leave kNoScale in the place of their scale.
#pragma once

#include <type_traits>

#include "kernel_body.h"
#include "kvstrata/fp8_scalar.h"

namespace kvstrata::cuda {

enum class Fp8Pass : std::uint8_t { kLargest = 0, kEncode = 1, kDecode = 2, kScales = 3 };

// By pass, for vectors of 1, 2, 4 and 8 numbers; kScales is one for all.
inline constexpr unsigned kFp8Kernels = 13;
inline constexpr const char* kFp8KernelNames[kFp8Kernels] = {
    "kvstrata_fp8_largest_1", "kvstrata_fp8_largest_2", "kvstrata_fp8_largest_4",
    "kvstrata_fp8_largest_8", "kvstrata_fp8_encode_1",  "kvstrata_fp8_encode_2",
    "kvstrata_fp8_encode_4",  "kvstrata_fp8_encode_8",  "kvstrata_fp8_decode_1",
    "kvstrata_fp8_decode_2",  "kvstrata_fp8_decode_4",  "kvstrata_fp8_decode_8",
    "kvstrata_fp8_scales"};

// The parameter of one launch. In `copy` all sizes of blocks and runs count vectors of numbers; the
// `packed` of a section is the first code of its first block, a multiple of as many bytes as a
// vector has numbers.
struct Fp8Launch {
  Launch copy;
  std::uint64_t words;         // address of a word for each scale, section after section
  std::uint64_t before_codes;  // bytes from a section's first scale to its first code here
  std::uint32_t scales_per_section;
  std::uint32_t heads;
  std::uint32_t head_vectors;   // of one token
  std::uint32_t group_vectors;  // of one block
  std::uint32_t type;           // Fp8Source
  std::uint32_t writes_scales;  // encode: 1 in one of the launches for the same sections
};
static_assert(sizeof(Fp8Launch) <= 4096, "the parameters of a kernel are limited to 4 KB");

// Where the codes of a section's first block in this launch lie.
KVSTRATA_HOST_DEVICE inline std::uint64_t codes_address(const Fp8Launch& launch, std::uint32_t s) {
  return launch.copy.sections[s].packed;
}

template <unsigned kNumbers>
struct Fp8Vector;
template <>
struct Fp8Vector<1> {
  using Numbers = std::uint16_t;
  using Codes = std::uint8_t;
};
template <>
struct Fp8Vector<2> {
  using Numbers = std::uint32_t;
  using Codes = std::uint16_t;
};
template <>
struct Fp8Vector<4> {
  using Numbers = std::uint64_t;
  using Codes = std::uint32_t;
};
template <>
struct Fp8Vector<8> {
  using Numbers = Vector16;
  using Codes = std::uint64_t;
};

// A number or code of a vector, `i` a constant once loops are unrolled. Both are little-endian.
KVSTRATA_HOST_DEVICE inline std::uint16_t number_in(std::uint64_t numbers, unsigned i) {
  return static_cast<std::uint16_t>(numbers >> (16 * i));
}

KVSTRATA_HOST_DEVICE inline std::uint16_t number_in(Vector16 numbers, unsigned i) {
  return number_in(i < 4 ? numbers.low : numbers.high, i % 4);
}

KVSTRATA_HOST_DEVICE inline void put_number(std::uint64_t& numbers, unsigned i, std::uint16_t one) {
  numbers |= std::uint64_t{one} << (16 * i);
}

KVSTRATA_HOST_DEVICE inline void put_number(Vector16& numbers, unsigned i, std::uint16_t one) {
  put_number(i < 4 ? numbers.low : numbers.high, i % 4, one);
}

// The word of the scale of vector `v` of section `s`.
KVSTRATA_HOST_DEVICE inline std::uint64_t word_address(const Fp8Launch& launch, std::uint32_t s,
                                                       std::uint32_t v) {
  const std::uint32_t within = v % launch.copy.block_vectors;
  const std::uint32_t group = within / launch.group_vectors;
  const std::uint32_t head = within / launch.head_vectors % launch.heads;
  const std::uint64_t index =
      std::uint64_t{s} * launch.scales_per_section + group * launch.heads + head;
  return launch.words + 4 * index;
}

KVSTRATA_HOST_DEVICE inline void raise_word(std::uint64_t address, std::uint32_t value) {
  auto* const word = reinterpret_cast<std::uint32_t*>(address);
#ifdef __CUDA_ARCH__
  // Words only grow: most vectors find a larger one, and leave it at a read.
  if (__ldcg(word) < value) atomicMax(word, value);
#else
  if (*word < value) *word = value;
#endif
}

// Scales need no alignment: the codes before them may be an odd number.
KVSTRATA_HOST_DEVICE inline void store_word(std::uint64_t to, std::uint32_t word) {
  if (to % 4 == 0) return store_vector<std::uint32_t>(to, word);
  for (unsigned i = 0; i < 4; ++i)
    store_vector<std::uint8_t>(to + i, static_cast<std::uint8_t>(word >> (8 * i)));
}

KVSTRATA_HOST_DEVICE inline std::uint32_t load_word(std::uint64_t from) {
  if (from % 4 == 0) return load_vector<std::uint32_t>(from);
  std::uint32_t word = 0;
  for (unsigned i = 0; i < 4; ++i)
    word |= std::uint32_t{load_vector<std::uint8_t>(from + i)} << (8 * i);
  return word;
}

// Calls each(word of the scale, its place in the record) for this thread's share of all scales.
template <typename Each>
KVSTRATA_HOST_DEVICE inline void each_scale(const Fp8Launch& launch, std::uint32_t thread,
                                            std::uint32_t thread_block, std::uint32_t thread_blocks,
                                            const Each& each) {
  const std::uint32_t count = launch.copy.section_count * launch.scales_per_section;
  for (std::uint32_t i = thread_block * kThreads + thread; i < count;
       i += thread_blocks * kThreads) {
    const std::uint32_t s = i / launch.scales_per_section;
    const std::uint32_t within = i - s * launch.scales_per_section;
    each(launch.words + 4 * std::uint64_t{i},
         codes_address(launch, s) - launch.before_codes + 4 * std::uint64_t{within});
  }
}

template <Fp8Source kType, unsigned kNumbers>
KVSTRATA_HOST_DEVICE inline void store_codes(std::uint64_t word, std::uint64_t to,
                                             typename Fp8Vector<kNumbers>::Numbers numbers) {
  const auto largest = static_cast<std::uint16_t>(load_vector<std::uint32_t>(word));
  const float factor = fp8::factor_of(fp8::scale_of(kType, largest));
  std::uint64_t codes = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (unsigned i = 0; i < kNumbers; ++i) {
    codes |= std::uint64_t{fp8::encode<kType>(number_in(numbers, i), factor)} << (8 * i);
  }
  using Codes = typename Fp8Vector<kNumbers>::Codes;
  store_vector<Codes>(to, static_cast<Codes>(codes));
}

template <Fp8Source kType, unsigned kNumbers>
KVSTRATA_HOST_DEVICE inline void store_numbers(std::uint64_t word, std::uint64_t to,
                                               std::uint64_t codes) {
  const float scale = fp8::float_of(load_vector<std::uint32_t>(word));
  using Numbers = typename Fp8Vector<kNumbers>::Numbers;
  std::conditional_t<kNumbers == 8, Vector16, std::uint64_t> numbers{};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (unsigned i = 0; i < kNumbers; ++i) {
    put_number(numbers, i, fp8::decode<kType>(static_cast<std::uint8_t>(codes >> (8 * i)), scale));
  }
  store_vector<Numbers>(to, static_cast<Numbers>(numbers));
}

// All tiles of the passes that touch blocks, as copy_tiles.
template <Fp8Pass kPass, Fp8Source kType, unsigned kNumbers>
KVSTRATA_HOST_DEVICE inline void fp8_tiles(const Fp8Launch& launch, std::uint32_t thread,
                                           std::uint32_t thread_block,
                                           std::uint32_t thread_blocks) {
  using Numbers = typename Fp8Vector<kNumbers>::Numbers;
  using Codes = typename Fp8Vector<kNumbers>::Codes;
  using Held = std::conditional_t<kPass == Fp8Pass::kDecode, Codes, Numbers>;
  const Launch& copy = launch.copy;
  const std::uint32_t vectors = copy.block_count * copy.block_vectors;
  const std::uint64_t tiles = std::uint64_t{copy.section_count} * copy.tiles_per_section;
  for (std::uint64_t tile = thread_block; tile < tiles; tile += thread_blocks) {
    const auto s = static_cast<std::uint32_t>(tile / copy.tiles_per_section);
    const auto first =
        (tile - std::uint64_t{s} * copy.tiles_per_section) * (kThreads * kUnroll) + thread;
    const std::uint64_t packed = codes_address(launch, s);
    std::uint64_t blocks[kUnroll];
    Held held[kUnroll];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      const std::uint64_t v = first + i * kThreads;
      blocks[i] = 0;
      if (v >= vectors) continue;
      blocks[i] = engine_address<Numbers>(copy, copy.sections[s], static_cast<std::uint32_t>(v));
      if (blocks[i] == 0) continue;
      held[i] = load_vector<Held>(kPass == Fp8Pass::kDecode ? packed + v * kNumbers : blocks[i]);
    }
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      if (blocks[i] == 0) continue;
      const auto v = static_cast<std::uint32_t>(first + i * kThreads);
      const std::uint64_t word = word_address(launch, s, v);
      if constexpr (kPass == Fp8Pass::kLargest) {
        std::uint16_t largest = 0;
        for (unsigned n = 0; n < kNumbers; ++n) {
          const std::uint16_t magnitude = fp8::magnitude_of(number_in(held[i], n));
          largest = magnitude > largest ? magnitude : largest;
        }
        raise_word(word, largest);
      } else if constexpr (kPass == Fp8Pass::kEncode) {
        store_codes<kType, kNumbers>(word, packed + std::uint64_t{v} * kNumbers, held[i]);
      } else {
        store_numbers<kType, kNumbers>(word, blocks[i], held[i]);
      }
    }
  }
}

// One thread of the kernel of that pass.
template <Fp8Pass kPass, unsigned kNumbers>
KVSTRATA_HOST_DEVICE inline void fp8_thread(const Fp8Launch& launch, std::uint32_t thread,
                                            std::uint32_t thread_block,
                                            std::uint32_t thread_blocks) {
  const auto type = static_cast<Fp8Source>(launch.type);
  if constexpr (kPass == Fp8Pass::kScales) {
    each_scale(launch, thread, thread_block, thread_blocks,
               [](std::uint64_t word, std::uint64_t scale) {
                 store_vector<std::uint32_t>(word, load_word(scale));
               });
    return;
  } else {
    if (kPass == Fp8Pass::kEncode && launch.writes_scales != 0) {
      each_scale(launch, thread, thread_block, thread_blocks,
                 [type](std::uint64_t word, std::uint64_t scale) {
                   const auto largest =
                       static_cast<std::uint16_t>(load_vector<std::uint32_t>(word));
                   store_word(scale, fp8::word_of(fp8::scale_of(type, largest)));
                 });
    }
    if (type == Fp8Source::kBfloat16) {
      fp8_tiles<kPass, Fp8Source::kBfloat16, kNumbers>(launch, thread, thread_block, thread_blocks);
    } else {
      fp8_tiles<kPass, Fp8Source::kFloat16, kNumbers>(launch, thread, thread_block, thread_blocks);
    }
  }
}

}  // namespace kvstrata::cuda
