// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <dlfcn.h>

#include <cstring>
#include <mutex>

namespace kvstrata::cuda {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";
constexpr int kOldestVersion = 12'000;
// The first version with cuMemcpyBatchAsync. A newer driver returns the function with the signature
// of the version that is asked for (the signature of CUDA 13 has no failed index).
constexpr int kBatchVersion = 12'080;

Failure unusable(std::string text) {
  return Failure{-1, "", std::move(text)};
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Failure fill(Driver* driver) {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return unusable(std::string("no NVIDIA driver: ") + dlerror() +
                    "; install the driver on the host; start a container with access to GPUs "
                    "(docker run --gpus all)");
  }
#define KVSTRATA_FIND(name, symbol, ...)                                            \
  driver->name = reinterpret_cast<decltype(driver->name)>(dlsym(library, #symbol)); \
  if (driver->name == nullptr) {                                                    \
    return unusable(std::string(kLibrary) + " has no " #symbol                      \
                                            "; update the driver to CUDA 12.0 "     \
                                            "(525) or newer");                      \
  }
  KVSTRATA_CUDA_FUNCTIONS(KVSTRATA_FIND)
#undef KVSTRATA_FIND
  if (const Result error = driver->driver_version(&driver->version); error != kSuccess) {
    return Failure{error, "cuDriverGetVersion", ""};
  }
  if (driver->version < kOldestVersion) {
    return unusable("the driver supports CUDA " + version_text(driver->version) +
                    "; update it to CUDA 12.0 (525) or newer");
  }
  if (const Result error = driver->init(0); error == kNoDevice) {
    return unusable(
        "the driver finds no GPU; nvidia-smi lists them, CUDA_VISIBLE_DEVICES may hide them");
  } else if (error != kSuccess) {
    return Failure{error, "cuInit", ""};
  }
  if (const Result error = driver->device_count(&driver->devices); error != kSuccess) {
    return Failure{error, "cuDeviceGetCount", ""};
  }
  if (driver->devices == 0) {
    return unusable(
        "the driver finds no GPU; nvidia-smi lists them, CUDA_VISIBLE_DEVICES may hide them");
  }
  void* batch = nullptr;
  int found = 0;
  if (driver->version >= kBatchVersion &&
      driver->find("cuMemcpyBatchAsync", &batch, kBatchVersion, 0, &found) == kSuccess) {
    driver->copy_batch = reinterpret_cast<decltype(driver->copy_batch)>(batch);
  }
  return Failure{};
}

// Advice for a user about an error; "" if we have none.
const char* remedy(const char* call, Result number) {
  if (std::strcmp(call, "cuMemHostRegister") == 0) {
    switch (number) {
      case kOutOfMemory:
        return "the host's memory cannot be pinned: raise the limit of locked memory (ulimit -l, "
               "in a container --ulimit memlock=-1) or of the memory cgroup, or make the pool "
               "smaller";
      case kNotPermitted:
      case kNotSupported:
        return "this machine does not let host memory be pinned (virtualised GPU, WSL, no "
               "permission); copies go on unpinned, at a fraction of the speed";
      case kAlreadyRegistered:
        return "another part of this process has pinned that memory already";
      default:
        return "";
    }
  }
  switch (number) {
    case kNotInitialized:
      return "CUDA does not survive a fork: start the process anew (multiprocessing: spawn)";
    case kOutOfMemory:
      return "the GPU's memory is used up: lower gpu_memory_utilization of the engine or the "
             "staging of the copy engine";
    case kNoBinary:
    case kUnsupportedPtx:
      return "the kernels were built by a toolkit newer than this driver, or for other GPUs: "
             "update the driver or rebuild with this machine's nvcc";
    default:
      return is_sticky(number) ? "the GPU context of this process is lost; restart the process"
                               : "";
  }
}

}  // namespace

bool is_sticky(Result number) noexcept {
  switch (number) {
    case 4:    // DEINITIALIZED
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case kIllegalAddress:
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case kMisalignedAddress:
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
    case 810:  // MPS_CLIENT_TERMINATED
    case 911:  // EXTERNAL_DEVICE
    case 999:  // UNKNOWN
      return true;
    default:
      return false;
  }
}

Failure Driver::load(const Driver** out) {
  static std::mutex mutex;
  static Driver* loaded = nullptr;
  const std::lock_guard lock(mutex);
  if (loaded == nullptr) {
    auto* driver = new Driver;
    if (Failure failure = fill(driver)) {
      if (failure.number > 0) failure.text = driver->explain(failure);
      delete driver;
      return failure;
    }
    loaded = driver;
  }
  *out = loaded;
  return Failure{};
}

const char* Driver::name_of(Result number) const noexcept {
  const char* name = nullptr;
  return error_name(number, &name) == kSuccess && name != nullptr ? name : "CUDA_ERROR_UNKNOWN";
}

std::string Driver::explain(const Failure& failure) const {
  if (!failure.text.empty()) return failure.text;
  const char* meaning = nullptr;
  if (error_text(failure.number, &meaning) != kSuccess || meaning == nullptr) meaning = "unknown";
  std::string text = std::string(failure.call) + ": " + name_of(failure.number) + " (" +
                     std::to_string(failure.number) + ", " + meaning + ")";
  const char* const advice = remedy(failure.call, failure.number);
  return *advice == 0 ? text : text + "; " + advice;
}

}  // namespace kvstrata::cuda
