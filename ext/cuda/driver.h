// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver API, found at run time: a table of the functions that we call, filled from
// libcuda.so.1. Neither building nor loading this code needs CUDA; on a machine without a driver,
// load() says what is missing. Types and numbers are the documented ABI of cuda.h
// (tests/driver_abi_test.cpp compares them with the toolkit's on machines with a toolkit).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvstrata::cuda {

using Result = int;                   // CUresult
using DeviceId = int;                 // CUdevice
using DeviceAddress = std::uint64_t;  // CUdeviceptr
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;

// CUmemcpyAttributes: how the copies of a batch may access their memory.
struct CopyAttributes {
  int source_order;
  struct {
    int type, id;
  } source_hint, target_hint;
  unsigned flags;
};

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kNoBinary = 209;
inline constexpr Result kUnsupportedPtx = 222;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kMisalignedAddress = 716;
inline constexpr Result kAlreadyRegistered = 712;
inline constexpr Result kNotRegistered = 713;
inline constexpr Result kNotPermitted = 800;
inline constexpr Result kNotSupported = 801;

inline constexpr int kUnifiedAddressing = 41;  // CU_DEVICE_ATTRIBUTE_*
inline constexpr int kCapabilityMajor = 75;
inline constexpr int kCapabilityMinor = 76;
inline constexpr int kHostRegisterSupported = 99;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kRegisterPortable = 1;
inline constexpr unsigned kRegisterDeviceMap = 2;
inline constexpr int kPointerMemoryType = 2;  // CU_POINTER_ATTRIBUTE_*
inline constexpr int kPointerDeviceOrdinal = 9;
inline constexpr unsigned kMemoryTypeDevice = 2;
inline constexpr int kSourceInStreamOrder = 1;
inline constexpr unsigned kPreferOverlapWithCompute = 1;

// X(name in the table, symbol in the library, parameters...)
#define KVSTRATA_CUDA_FUNCTIONS(X)                                                                \
  X(init, cuInit, unsigned)                                                                       \
  X(driver_version, cuDriverGetVersion, int*)                                                     \
  X(device_count, cuDeviceGetCount, int*)                                                         \
  X(device_get, cuDeviceGet, DeviceId*, int)                                                      \
  X(device_name, cuDeviceGetName, char*, int, DeviceId)                                           \
  X(device_memory, cuDeviceTotalMem_v2, std::size_t*, DeviceId)                                   \
  X(device_attribute, cuDeviceGetAttribute, int*, int, DeviceId)                                  \
  X(device_pci_bus_id, cuDeviceGetPCIBusId, char*, int, DeviceId)                                 \
  X(primary_context_retain, cuDevicePrimaryCtxRetain, Context*, DeviceId)                         \
  X(primary_context_release, cuDevicePrimaryCtxRelease_v2, DeviceId)                              \
  X(context_push, cuCtxPushCurrent_v2, Context)                                                   \
  X(context_pop, cuCtxPopCurrent_v2, Context*)                                                    \
  X(stream_priorities, cuCtxGetStreamPriorityRange, int*, int*)                                   \
  X(stream_create, cuStreamCreateWithPriority, Stream*, unsigned, int)                            \
  X(stream_destroy, cuStreamDestroy_v2, Stream)                                                   \
  X(stream_wait_event, cuStreamWaitEvent, Stream, Event, unsigned)                                \
  X(stream_synchronize, cuStreamSynchronize, Stream)                                              \
  X(event_create, cuEventCreate, Event*, unsigned)                                                \
  X(event_destroy, cuEventDestroy_v2, Event)                                                      \
  X(event_record, cuEventRecord, Event, Stream)                                                   \
  X(event_synchronize, cuEventSynchronize, Event)                                                 \
  X(memory_allocate, cuMemAlloc_v2, DeviceAddress*, std::size_t)                                  \
  X(memory_free, cuMemFree_v2, DeviceAddress)                                                     \
  X(memory_fill, cuMemsetD32Async, DeviceAddress, unsigned, std::size_t, Stream)                  \
  X(host_allocate, cuMemHostAlloc, void**, std::size_t, unsigned)                                 \
  X(host_free, cuMemFreeHost, void*)                                                              \
  X(host_register, cuMemHostRegister_v2, void*, std::size_t, unsigned)                            \
  X(host_unregister, cuMemHostUnregister, void*)                                                  \
  X(host_device_pointer, cuMemHostGetDevicePointer_v2, DeviceAddress*, void*, unsigned)           \
  X(copy_to_device, cuMemcpyHtoDAsync_v2, DeviceAddress, const void*, std::size_t, Stream)        \
  X(copy_to_host, cuMemcpyDtoHAsync_v2, void*, DeviceAddress, std::size_t, Stream)                \
  X(module_load, cuModuleLoadData, Module*, const void*)                                          \
  X(module_unload, cuModuleUnload, Module)                                                        \
  X(module_function, cuModuleGetFunction, Function*, Module, const char*)                         \
  X(launch, cuLaunchKernel, Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
    unsigned, Stream, void**, void**)                                                             \
  X(pointer_attribute, cuPointerGetAttribute, void*, int, DeviceAddress)                          \
  X(error_name, cuGetErrorName, Result, const char**)                                             \
  X(error_text, cuGetErrorString, Result, const char**)                                           \
  X(find, cuGetProcAddress_v2, const char*, void**, int, std::uint64_t, int*)

// The outcome of a call of the driver, or of a function here; success converts to false.
struct Failure {
  Result number = kSuccess;  // -1: not an error of CUDA, `text` says what is wrong
  const char* call = "";     // the function of the driver
  std::string text;

  explicit operator bool() const noexcept { return number != kSuccess; }
};

// Whether this error is sticky: after it no call on the process's context succeeds any more.
[[nodiscard]] bool is_sticky(Result number) noexcept;

struct Driver {
#define KVSTRATA_DECLARE(name, symbol, ...) Result (*name)(__VA_ARGS__) = nullptr;
  KVSTRATA_CUDA_FUNCTIONS(KVSTRATA_DECLARE)
#undef KVSTRATA_DECLARE
  // cuMemcpyBatchAsync as of CUDA 12.8 (destinations, sources, sizes, count, attributes, their
  // first copies, their count, index of the failed copy, stream); null if the driver is older.
  Result (*copy_batch)(DeviceAddress*, DeviceAddress*, std::size_t*, std::size_t, CopyAttributes*,
                       std::size_t*, std::size_t, std::size_t*, Stream) = nullptr;
  int version = 0;  // 12080 is 12.8
  int devices = 0;

  // The driver of this process, loaded and initialised by the first call that succeeds and kept for
  // the life of the process. Failures have the number -1 or the driver's, and a text for users.
  static Failure load(const Driver** out);

  // The name (CUDA_ERROR_...) of an error.
  [[nodiscard]] const char* name_of(Result number) const noexcept;
  // One sentence: the call, the error's name and meaning and, if we know, what to do.
  [[nodiscard]] std::string explain(const Failure& failure) const;
};

}  // namespace kvstrata::cuda
