// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The types and numbers of driver.h against the toolkit's cuda.h, where there is one: everything
// here is checked by compiling it.
#include "driver.h"

#include <type_traits>

#include "support/check.h"

#if __has_include(<cuda.h>) && __has_include(<cudaTypedefs.h>)
#include <cuda.h>
#include <cudaTypedefs.h>

namespace {

namespace ours = kvstrata::cuda;

template <typename A, typename B>
constexpr bool passed_alike =
    sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;

template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};

template <typename R, typename... A, typename S, typename... B>
struct SameCall<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B)) {
      return false;
    } else {
      return passed_alike<R, S> && (passed_alike<A, B> && ...);
    }
  }();
};

#define KVSTRATA_COMPARE(name, symbol, ...) \
  static_assert(SameCall<decltype(ours::Driver::name), decltype(&::symbol)>::value, #symbol);
KVSTRATA_CUDA_FUNCTIONS(KVSTRATA_COMPARE)
#undef KVSTRATA_COMPARE

#if CUDA_VERSION >= 12080
static_assert(SameCall<decltype(ours::Driver::copy_batch), PFN_cuMemcpyBatchAsync_v12080>::value);
static_assert(sizeof(ours::CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(ours::CopyAttributes, source_hint) ==
              offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(ours::CopyAttributes, target_hint) ==
              offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(ours::CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(ours::kSourceInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(ours::kPreferOverlapWithCompute == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
#endif

static_assert(ours::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(ours::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(ours::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(ours::kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(ours::kNoBinary == CUDA_ERROR_NO_BINARY_FOR_GPU);
static_assert(ours::kUnsupportedPtx == CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
static_assert(ours::kIllegalAddress == CUDA_ERROR_ILLEGAL_ADDRESS);
static_assert(ours::kMisalignedAddress == CUDA_ERROR_MISALIGNED_ADDRESS);
static_assert(ours::kAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(ours::kNotRegistered == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
static_assert(ours::kNotPermitted == CUDA_ERROR_NOT_PERMITTED);
static_assert(ours::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(ours::kUnifiedAddressing == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
static_assert(ours::kCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ours::kCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(ours::kHostRegisterSupported == CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
static_assert(ours::kEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(ours::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ours::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(ours::kRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(ours::kPointerMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(ours::kPointerDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(ours::kMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);

TEST(the_driver_that_we_describe_is_the_one_of_cuda_h) {
  for (const CUresult lost :
       {CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_ILLEGAL_INSTRUCTION, CUDA_ERROR_MISALIGNED_ADDRESS,
        CUDA_ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_ASSERT,
        CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_UNKNOWN}) {
    CHECK(ours::is_sticky(lost));
  }
  for (const CUresult passing :
       {CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NOT_PERMITTED,
        CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED}) {
    CHECK(!ours::is_sticky(passing));
  }
}

}  // namespace
#else
TEST(there_is_no_cuda_h_to_compare_with) {
  std::puts("driver_abi_test: no cuda.h on this machine (CUDA_HOME), nothing was compared");
}
#endif
