// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "paged_copy.h"

#include <cuda_runtime.h>

#include "paged_copy_plan.h"

#define KVSTRATA_EXPORT __attribute__((visibility("default")))

namespace kvstrata::cuda {
namespace {

enum class Direction { kGather, kScatter };

// Each thread issues all its loads of a tile before its first store, so that a few thread blocks
// keep a host link busy. The bytes are used once: the streaming hints leave the engine's data in
// L2.
template <Direction direction>
__global__ void __launch_bounds__(kThreads) paged_copy(const __grid_constant__ CopyLaunch launch) {
  const uint64_t tiles = launch.tile_count();
  for (uint64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Tile tile = tile_at(launch, index);
    const bool gather = direction == Direction::kGather;
    const uint4* source = reinterpret_cast<const uint4*>(gather ? tile.engine : tile.buffer);
    uint4* target = reinterpret_cast<uint4*>(gather ? tile.buffer : tile.engine);
    if (tile.bytes == kTileBytes) {
      uint4 held[kUnroll];
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        held[i] = __ldcs(source + i * kThreads + threadIdx.x);
      }
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        __stcs(target + i * kThreads + threadIdx.x, held[i]);
      }
    } else {
      const uint32_t vectors = static_cast<uint32_t>(tile.bytes / kVectorBytes);
      for (uint32_t i = threadIdx.x; i < vectors; i += kThreads) {
        __stcs(target + i, __ldcs(source + i));
      }
    }
  }
}

template <Direction direction>
int copy(const KvstrataPagedView* view, const int32_t* block_ids, uint32_t block_count,
         uint64_t buffer, uint64_t section_stride_bytes, uint32_t max_thread_blocks, void* stream) {
  if (view == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (view->section_count == 0 || block_count == 0) {
    return cudaSuccess;
  }
  if (!arguments_are_valid(view->sections, view->section_count, view->engine_block_count,
                           view->block_stride_bytes, view->run_bytes, block_ids, block_count,
                           buffer, section_stride_bytes, max_thread_blocks)) {
    return cudaErrorInvalidValue;
  }
  return for_each_launch(
      view->sections, view->section_count, view->block_stride_bytes, view->run_bytes, block_ids,
      block_count, buffer, section_stride_bytes, [&](CopyLaunch& launch) -> int {
        const uint64_t tiles = launch.tile_count();
        const dim3 grid(
            static_cast<uint32_t>(tiles < max_thread_blocks ? tiles : max_thread_blocks));
        void* parameters[] = {&launch};
        const cudaError_t error =
            cudaLaunchKernel(reinterpret_cast<const void*>(&paged_copy<direction>), grid,
                             dim3(kThreads), parameters, 0, static_cast<cudaStream_t>(stream));
        if (error != cudaSuccess) {
          // The error is reported here and must not surface in the next call of somebody else.
          (void)cudaGetLastError();
        }
        return error;
      });
}

}  // namespace
}  // namespace kvstrata::cuda

using kvstrata::cuda::Direction;

extern "C" {

KVSTRATA_EXPORT int kvstrata_cuda_gather(const KvstrataPagedView* view, const int32_t* block_ids,
                                         uint32_t block_count, void* buffer,
                                         uint64_t section_stride_bytes, uint32_t max_thread_blocks,
                                         void* stream) {
  return kvstrata::cuda::copy<Direction::kGather>(view, block_ids, block_count,
                                                  reinterpret_cast<uint64_t>(buffer),
                                                  section_stride_bytes, max_thread_blocks, stream);
}

KVSTRATA_EXPORT int kvstrata_cuda_scatter(const KvstrataPagedView* view, const int32_t* block_ids,
                                          uint32_t block_count, const void* buffer,
                                          uint64_t section_stride_bytes, uint32_t max_thread_blocks,
                                          void* stream) {
  return kvstrata::cuda::copy<Direction::kScatter>(view, block_ids, block_count,
                                                   reinterpret_cast<uint64_t>(buffer),
                                                   section_stride_bytes, max_thread_blocks, stream);
}

KVSTRATA_EXPORT const char* kvstrata_cuda_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

KVSTRATA_EXPORT int kvstrata_cuda_abi_version(void) {
  return KVSTRATA_CUDA_ABI_VERSION;
}

}  // extern "C"
