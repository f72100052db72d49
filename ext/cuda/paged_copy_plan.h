// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// How a paged copy is cut into launches and how each thread block walks its part. Plain C++ with no
// CUDA in it, so that the whole walk is also tested on the CPU.
//
// A launch copies a rectangle of at most kMaxSections x kMaxBlocks runs; all that it needs travels
// in its kernel parameters (at most 4 KB), so no upload precedes it and no array must outlive it.
// The runs are cut into tiles of kTileBytes, and thread block i of n takes the tiles i, i + n, i +
// 2n, ...
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVSTRATA_HOST_DEVICE __host__ __device__
#else
#define KVSTRATA_HOST_DEVICE
#endif

namespace kvstrata::cuda {

inline constexpr uint32_t kMaxSections = 256;
inline constexpr uint32_t kMaxBlocks = 448;
inline constexpr uint32_t kThreads = 512;
// Loads that each thread has in flight: 32 KiB per thread block cover the latency of a host link.
inline constexpr uint32_t kUnroll = 4;
inline constexpr uint32_t kVectorBytes = 16;
inline constexpr uint64_t kTileBytes = uint64_t{kThreads} * kUnroll * kVectorBytes;

// Parameters of one launch, passed by value.
struct CopyLaunch {
  uint64_t sections[kMaxSections];
  int32_t block_ids[kMaxBlocks];
  uint64_t buffer;
  uint64_t block_stride_bytes;
  uint64_t run_bytes;
  uint64_t section_stride_bytes;
  uint32_t section_count;
  uint32_t block_count;
  uint32_t tiles_per_run;
  uint32_t reserved;

  KVSTRATA_HOST_DEVICE uint64_t tile_count() const {
    return uint64_t{section_count} * block_count * tiles_per_run;
  }
};
static_assert(sizeof(CopyLaunch) + 64 <= 4096, "kernel parameters are limited to 4 KB");

// Where one tile lies: addresses of its first byte on both sides, and its length.
struct Tile {
  uint64_t engine;
  uint64_t buffer;
  uint64_t bytes;
};

KVSTRATA_HOST_DEVICE inline Tile tile_at(const CopyLaunch& launch, uint64_t index) {
  const uint64_t run = index / launch.tiles_per_run;
  const uint64_t offset = (index - run * launch.tiles_per_run) * kTileBytes;
  const uint32_t section = static_cast<uint32_t>(run / launch.block_count);
  const uint32_t block = static_cast<uint32_t>(run - uint64_t{section} * launch.block_count);
  const uint64_t left = launch.run_bytes - offset;
  return Tile{
      launch.sections[section] +
          static_cast<uint64_t>(launch.block_ids[block]) * launch.block_stride_bytes + offset,
      launch.buffer + section * launch.section_stride_bytes + block * launch.run_bytes + offset,
      left < kTileBytes ? left : kTileBytes,
  };
}

// Whether the arguments of a copy keep the rules of paged_copy.h.
inline bool arguments_are_valid(const uint64_t* sections, uint32_t section_count,
                                uint32_t engine_block_count, uint64_t block_stride_bytes,
                                uint64_t run_bytes, const int32_t* block_ids, uint32_t block_count,
                                uint64_t buffer, uint64_t section_stride_bytes,
                                uint32_t max_thread_blocks) {
  const uint64_t strides = block_stride_bytes | run_bytes | section_stride_bytes | buffer;
  if (strides % kVectorBytes != 0 || run_bytes == 0 || max_thread_blocks == 0 || buffer == 0) {
    return false;
  }
  // A tile index and every product below stay far from wrapping within these bounds.
  if (run_bytes > (uint64_t{1} << 40) || block_stride_bytes > (uint64_t{1} << 40)) {
    return false;
  }
  if (block_stride_bytes < run_bytes || section_stride_bytes / run_bytes < block_count) {
    return false;
  }
  if (sections == nullptr || block_ids == nullptr) {
    return false;
  }
  for (uint32_t s = 0; s < section_count; ++s) {
    if (sections[s] == 0 || sections[s] % kVectorBytes != 0) {
      return false;
    }
  }
  for (uint32_t b = 0; b < block_count; ++b) {
    if (block_ids[b] < 0 || static_cast<uint32_t>(block_ids[b]) >= engine_block_count) {
      return false;
    }
  }
  return true;
}

// Cuts valid arguments into launches and hands each to `submit(launch)`, which returns 0 to go on;
// the first other value ends the walk and is returned.
template <typename Submit>
int for_each_launch(const uint64_t* sections, uint32_t section_count, uint64_t block_stride_bytes,
                    uint64_t run_bytes, const int32_t* block_ids, uint32_t block_count,
                    uint64_t buffer, uint64_t section_stride_bytes, Submit submit) {
  CopyLaunch launch{};
  launch.block_stride_bytes = block_stride_bytes;
  launch.run_bytes = run_bytes;
  launch.section_stride_bytes = section_stride_bytes;
  launch.tiles_per_run = static_cast<uint32_t>((run_bytes + kTileBytes - 1) / kTileBytes);
  for (uint32_t s = 0; s < section_count; s += kMaxSections) {
    launch.section_count = section_count - s < kMaxSections ? section_count - s : kMaxSections;
    for (uint32_t i = 0; i < launch.section_count; ++i) {
      launch.sections[i] = sections[s + i];
    }
    for (uint32_t b = 0; b < block_count; b += kMaxBlocks) {
      launch.block_count = block_count - b < kMaxBlocks ? block_count - b : kMaxBlocks;
      for (uint32_t i = 0; i < launch.block_count; ++i) {
        launch.block_ids[i] = block_ids[b + i];
      }
      launch.buffer = buffer + s * section_stride_bytes + b * run_bytes;
      if (const int error = submit(launch); error != 0) {
        return error;
      }
    }
  }
  return 0;
}

}  // namespace kvstrata::cuda
