// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kernel_body.h"

#define KVSTRATA_KERNEL(bytes, Vector)                                               \
  extern "C" __global__ void __launch_bounds__(kvstrata::cuda::kThreads)             \
      kvstrata_copy_##bytes(const __grid_constant__ kvstrata::cuda::Launch launch) { \
    kvstrata::cuda::copy_tiles<Vector>(launch, threadIdx.x, blockIdx.x, gridDim.x);  \
  }

KVSTRATA_KERNEL(1, std::uint8_t)
KVSTRATA_KERNEL(2, std::uint16_t)
KVSTRATA_KERNEL(4, std::uint32_t)
KVSTRATA_KERNEL(8, std::uint64_t)
KVSTRATA_KERNEL(16, kvstrata::cuda::Vector16)
