// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fp8_kernel_body.h"
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

#define KVSTRATA_FP8_KERNEL(name, pass, numbers)                                               \
  extern "C" __global__ void __launch_bounds__(kvstrata::cuda::kThreads)                       \
      kvstrata_fp8_##name(const __grid_constant__ kvstrata::cuda::Fp8Launch launch) {          \
    kvstrata::cuda::fp8_thread<kvstrata::cuda::Fp8Pass::pass, numbers>(launch, threadIdx.x,    \
                                                                       blockIdx.x, gridDim.x); \
  }

KVSTRATA_FP8_KERNEL(largest_1, kLargest, 1)
KVSTRATA_FP8_KERNEL(largest_2, kLargest, 2)
KVSTRATA_FP8_KERNEL(largest_4, kLargest, 4)
KVSTRATA_FP8_KERNEL(largest_8, kLargest, 8)
KVSTRATA_FP8_KERNEL(encode_1, kEncode, 1)
KVSTRATA_FP8_KERNEL(encode_2, kEncode, 2)
KVSTRATA_FP8_KERNEL(encode_4, kEncode, 4)
KVSTRATA_FP8_KERNEL(encode_8, kEncode, 8)
KVSTRATA_FP8_KERNEL(decode_1, kDecode, 1)
KVSTRATA_FP8_KERNEL(decode_2, kDecode, 2)
KVSTRATA_FP8_KERNEL(decode_4, kDecode, 4)
KVSTRATA_FP8_KERNEL(decode_8, kDecode, 8)
KVSTRATA_FP8_KERNEL(scales, kScales, 1)
