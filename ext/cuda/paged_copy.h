// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Gather and scatter between an engine's paged KV blocks and one contiguous buffer, on the GPU.
//
// A chunk of KV is `section_count` sections (one a layer, or two where K and V lie apart) of
// `block_count` runs of `run_bytes`. In the engine, run b of section s lies at
//     sections[s] + block_ids[b] * block_stride_bytes
// and in the buffer at
//     buffer + s * section_stride_bytes + b * run_bytes.
// The buffer may be device memory or host memory that the device can address (pinned, or registered
// with cudaHostRegister), so that one kernel moves a chunk between the engine and the shared pool.
//
// The launchers take the stream, read all arrays behind their arguments before they return, and
// never synchronise: the copy has ended when work queued on the stream after it begins. Until then
// the engine's blocks and the buffer must stay; the arrays need not. The current device of the
// calling thread must be the stream's.
//
// They return a cudaError_t as an int: 0 when everything was queued. cudaErrorInvalidValue (1) says
// that an argument breaks a rule below; then nothing was queued. Another error may leave the first
// part of the copy queued, so the caller must treat the target as garbage. Any thread may call
// them.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVSTRATA_CUDA_ABI_VERSION 1

typedef struct {
  // Device addresses of block 0 of each section, each a multiple of 16.
  const uint64_t* sections;
  uint32_t section_count;
  // Blocks in the engine's cache: every block id must be below it.
  uint32_t engine_block_count;
  // From a block to the next within a section; a multiple of 16, at least run_bytes.
  uint64_t block_stride_bytes;
  // Bytes copied of each block; a multiple of 16, not 0.
  uint64_t run_bytes;
} KvstrataPagedView;

// Engine blocks -> buffer. `buffer` is a multiple of 16, `section_stride_bytes` a multiple of 16
// and at least block_count * run_bytes. At most `max_thread_blocks` thread blocks run, each filling
// one multiprocessor's share: it bounds what the copy takes from the engine's own kernels. At
// least 1. Zero sections or blocks is a copy of nothing and succeeds.
int kvstrata_cuda_gather(const KvstrataPagedView* view, const int32_t* block_ids,
                         uint32_t block_count, void* buffer, uint64_t section_stride_bytes,
                         uint32_t max_thread_blocks, void* stream);

// Buffer -> engine blocks; the same rules. A block id that stands twice is written twice, in no
// particular order.
int kvstrata_cuda_scatter(const KvstrataPagedView* view, const int32_t* block_ids,
                          uint32_t block_count, const void* buffer, uint64_t section_stride_bytes,
                          uint32_t max_thread_blocks, void* stream);

// Name and meaning of a returned error; a string with static storage.
const char* kvstrata_cuda_error_string(int error);

// KVSTRATA_CUDA_ABI_VERSION of the library, to be compared with the caller's before any other call.
int kvstrata_cuda_abi_version(void);

#ifdef __cplusplus
}
#endif
