// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The work of one thread of the kernels that round KV to 8-bit floats on its way into a record and
// back. The code is compiled for device and host, as kernel_body.h is.
//
// A section is stored as its scales and, right behind them, one code for each number, as fp8.h
// defines them for the packed section. A rectangle of sections takes two passes; the second is on
// the stream behind the first, so neither needs a barrier:
//
//   store  largest  writes the largest magnitude under each scale into words on the device, which
//                   were zero before (one launch or several, until all blocks were read)
//          encode   computes scales from those words, and codes from the blocks
//   load   scales   copies the record's scales into those words, so that host memory is read once
//          decode   computes the blocks from the codes
//
// If a number is infinite or a NaN, its scale is kNoScale.
#pragma once

#include <type_traits>

#include "codec/fp8_scalar.h"
#include "kernel_body.h"

namespace kvstrata::cuda {

enum class Fp8Pass : std::uint8_t { kLargest = 0, kEncode = 1, kDecode = 2, kScales = 3 };

// By pass, each for vectors of 1, 2, 4 and 8 numbers; kScales has one kernel for all.
inline constexpr unsigned kFp8Kernels = 13;
inline constexpr const char* kFp8KernelNames[kFp8Kernels] = {
    "kvstrata_fp8_largest_1", "kvstrata_fp8_largest_2", "kvstrata_fp8_largest_4",
    "kvstrata_fp8_largest_8", "kvstrata_fp8_encode_1",  "kvstrata_fp8_encode_2",
    "kvstrata_fp8_encode_4",  "kvstrata_fp8_encode_8",  "kvstrata_fp8_decode_1",
    "kvstrata_fp8_decode_2",  "kvstrata_fp8_decode_4",  "kvstrata_fp8_decode_8",
    "kvstrata_fp8_scales"};

// The parameter of one launch. In `copy` all sizes of blocks and runs count vectors of numbers, and
// the `packed` of a section is the address of the first code of its first block, a multiple of the
// numbers of a vector.
struct Fp8Launch {
  Launch copy;
  std::uint64_t words;         // address of a word for each scale, section after section
  std::uint64_t before_codes;  // bytes from a section's first scale to its first code here
  std::uint32_t scales_per_section;
  std::uint32_t heads;
  std::uint32_t head_vectors;   // of one token
  std::uint32_t group_vectors;  // of one block
  std::uint32_t type;           // Fp8Source
  std::uint32_t writes_scales;  // encode: 1 in the first of the launches for the same sections
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

// Number i of a vector, which is little-endian. `i` is a constant once loops are unrolled.
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
  // Words only grow, so a vector that reads a larger value skips the atomic operation; most do.
  if (__ldcg(word) < value) atomicMax(word, value);
#else
  if (*word < value) *word = value;
#endif
}

// Writes a scale at any alignment: the number of codes before it may be odd.
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

// Does this thread's share of all tiles, as copy_tiles() does, in the passes that touch blocks.
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

// The work of one thread of the kernel of pass kPass.
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
