// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The work of one thread of the copy kernels, in code that the host compiles as well: nvcc compiles
// it into the kernels (kernels.cu), and the simulated driver of the tests calls it directly.
//
// A launch copies a rectangle of at most kLaunchSections x kLaunchBlocks blocks of one shape
// between their places in the serving engine's memory and a packed buffer. Its parameters (4 KB at
// most) contain all that it needs, so no upload precedes it and no array must outlive it. The
// packed bytes of a section (less than 4 GiB) are cut into tiles of kThreads * kUnroll vectors;
// thread block i of n takes tiles i, i + n, ... A thread issues all its loads of a tile before its
// first store, so that a few thread blocks keep a host link busy.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace kvstrata::cuda {

inline constexpr std::uint32_t kLaunchSections = 112;
inline constexpr std::uint32_t kLaunchBlocks = 320;
inline constexpr std::uint32_t kThreads = 512;
inline constexpr std::uint32_t kUnroll = 8;
inline constexpr std::uint32_t kSkippedBlock = UINT32_MAX;

// Names of the kernels for vectors of 1, 2, 4, 8 and 16 bytes.
inline constexpr const char* kKernelNames[] = {
    "kvstrata_copy_1", "kvstrata_copy_2", "kvstrata_copy_4", "kvstrata_copy_8", "kvstrata_copy_16"};

struct LaunchSection {
  std::uint64_t base;
  std::uint64_t block_stride;
  std::uint64_t packed;  // address of the launch's first block in the packed buffer
};

struct LaunchDim {
  std::uint64_t stride;
  std::uint32_t count;
  std::uint32_t reserved;
};

// The parameter of one launch, passed by value. All bytes and strides, and the addresses, are
// multiples of the vector.
struct Launch {
  LaunchSection sections[kLaunchSections];
  std::uint32_t blocks[kLaunchBlocks];
  LaunchDim dims[2];           // the two inner dimensions, outer first
  std::uint64_t outer_stride;  // of the outermost dimension, which needs no count
  std::uint32_t section_count;
  std::uint32_t block_count;
  std::uint32_t block_vectors;
  std::uint32_t run_vectors;
  std::uint32_t tiles_per_section;
  std::uint32_t gather;  // 1: blocks -> packed, 0: packed -> blocks
};
static_assert(sizeof(Launch) <= 4096, "the parameters of a kernel are limited to 4 KB");

struct alignas(16) Vector16 {
  std::uint64_t low, high;
};

template <typename Vector>
KVSTRATA_HOST_DEVICE inline Vector load_vector(std::uint64_t from) {
  return *reinterpret_cast<const Vector*>(from);
}

template <typename Vector>
KVSTRATA_HOST_DEVICE inline void store_vector(std::uint64_t to, Vector value) {
  *reinterpret_cast<Vector*>(to) = value;
}

#ifdef __CUDA_ARCH__
// Each byte is used once: the streaming hints leave the serving engine's data in the L2 cache.
template <>
__device__ inline Vector16 load_vector<Vector16>(std::uint64_t from) {
  const ulonglong2 value = __ldcs(reinterpret_cast<const ulonglong2*>(from));
  return Vector16{value.x, value.y};
}

template <>
__device__ inline void store_vector<Vector16>(std::uint64_t to, Vector16 value) {
  __stcs(reinterpret_cast<ulonglong2*>(to), make_ulonglong2(value.low, value.high));
}
#endif

// The address in the serving engine's memory of vector `v` of a section's packed bytes; 0 if its
// block is skipped.
template <typename Vector>
KVSTRATA_HOST_DEVICE inline std::uint64_t engine_address(const Launch& launch,
                                                         const LaunchSection& section,
                                                         std::uint32_t v) {
  const std::uint32_t block = v / launch.block_vectors;
  const std::uint32_t id = launch.blocks[block];
  if (id == kSkippedBlock) return 0;
  std::uint32_t within = v - block * launch.block_vectors;
  std::uint64_t address = section.base + id * section.block_stride;
  if (launch.run_vectors != launch.block_vectors) {
    std::uint32_t run = within / launch.run_vectors;
    within -= run * launch.run_vectors;
    const std::uint32_t row = run / launch.dims[1].count;
    address += (run - row * launch.dims[1].count) * launch.dims[1].stride;
    const std::uint32_t plane = row / launch.dims[0].count;
    address += (row - plane * launch.dims[0].count) * launch.dims[0].stride;
    address += plane * launch.outer_stride;
  }
  return address + within * sizeof(Vector);
}

template <typename Vector>
KVSTRATA_HOST_DEVICE inline void copy_tiles(const Launch& launch, std::uint32_t thread,
                                            std::uint32_t thread_block,
                                            std::uint32_t thread_blocks) {
  const std::uint32_t vectors = launch.block_count * launch.block_vectors;
  const std::uint64_t tiles = std::uint64_t{launch.section_count} * launch.tiles_per_section;
  for (std::uint64_t tile = thread_block; tile < tiles; tile += thread_blocks) {
    const auto s = static_cast<std::uint32_t>(tile / launch.tiles_per_section);
    const auto first =
        (tile - std::uint64_t{s} * launch.tiles_per_section) * (kThreads * kUnroll) + thread;
    const LaunchSection& section = launch.sections[s];
    std::uint64_t target[kUnroll];
    Vector held[kUnroll];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      const std::uint64_t v = first + i * kThreads;
      target[i] = 0;
      if (v >= vectors) continue;
      const std::uint64_t there = section.packed + v * sizeof(Vector);
      const std::uint64_t here =
          engine_address<Vector>(launch, section, static_cast<std::uint32_t>(v));
      if (here == 0) continue;
      target[i] = launch.gather != 0 ? there : here;
      held[i] = load_vector<Vector>(launch.gather != 0 ? here : there);
    }
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (std::uint32_t i = 0; i < kUnroll; ++i) {
      if (target[i] != 0) store_vector<Vector>(target[i], held[i]);
    }
  }
}

}  // namespace kvstrata::cuda
