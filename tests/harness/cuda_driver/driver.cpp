// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A CUDA driver for tests on machines without a GPU: built as libcuda.so.1 and found by the loader
// before (or instead of) a real one. Device memory is host memory that the driver keeps account of,
// a stream is a thread, a kernel is its host twin from ext/cuda/kernel_body.h. The driver is strict
// where the behaviour of a real driver is undefined or slow:
//
//   - a copy from or to memory that is neither a device's nor registered runs in the call, after
//     the earlier work of its stream, and is counted ("pageable")
//   - a copy that crosses the border of two registrations, or leaves an allocation, is refused
//   - work that needs freed or unregistered memory ends with a sticky CUDA_ERROR_ILLEGAL_ADDRESS,
//     and so does a kernel that touches other memory than a device's or registered memory
//   - the copies of a batch run in random order
//
// Environment (simulated_cuda_set changes each of these later; it takes the part of the name after
// SIMULATED_CUDA_, in lower case):
//   SIMULATED_CUDA_DEVICES=1         SIMULATED_CUDA_VERSION=13000
//   SIMULATED_CUDA_MEMORY=1073741824 bytes of each device
//   SIMULATED_CUDA_REGISTER=bytes    most bytes that may be registered at once
//   SIMULATED_CUDA_HOLD_REGISTER=0   1: calls that register memory do not return
//   SIMULATED_CUDA_DELAY_US=0        longest random delay before each piece of work
//   SIMULATED_CUDA_SEED=number       seed of the random delays and orders
//   SIMULATED_CUDA_FAIL=call:n:number[,...]
//       the n-th call (n+: and all later ones) of this function returns that error. "copy" and
//       "kernel" count pieces of work as they run, which makes the error sticky; so do calls that
//       fail with a sticky number.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"
#include "fp8_kernel_body.h"
#include "kernel_body.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace kvstrata::cuda;

namespace {

constexpr Result kInvalidImage = 200;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotFound = 500;

struct Recording {
  bool come = false;
};

}  // namespace

namespace kvstrata::cuda {

struct ContextTag {
  int ordinal = 0;
  int retained = 0;
  Stream null_stream = nullptr;
};

struct Copy {
  std::uint64_t to, from, length;
  bool to_host;

  [[nodiscard]] std::uint64_t host() const { return to_host ? to : from; }
  [[nodiscard]] std::uint64_t device() const { return to_host ? from : to; }
};

struct StreamTag {
  int ordinal = 0;
  int priority = 0;
  std::deque<std::function<void()>> work;
  std::shared_ptr<std::vector<Copy>> open;  // the last of the work, when it may still grow
  bool running = false;
  bool ending = false;
  std::thread thread;
};

struct EventTag {
  int ordinal = 0;
  std::shared_ptr<Recording> latest;
};

struct ModuleTag {};

// One kernel: `number` is its index in kFp8KernelNames if `fp8` is true, otherwise in kKernelNames.
struct FunctionTag {
  const char* name = nullptr;
  bool fp8 = false;
  unsigned number = 0;
};

}  // namespace kvstrata::cuda

namespace {

struct Fault {
  std::uint64_t from = 0;
  bool forever = false;
  Result number = kSuccess;
};

struct Range {
  std::uint64_t length = 0;
  int ordinal = 0;
  bool ours = false;
};

struct SimulatedDriver {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::string> options;
  std::map<std::string, std::vector<Fault>> faults;
  std::map<std::string, std::uint64_t> calls;
  std::map<std::uint64_t, Range> memory;      // of devices
  std::map<std::uint64_t, Range> registered;  // of the host
  std::vector<ContextTag> contexts;
  std::vector<FunctionTag> functions;
  Result sticky = kSuccess;
  bool held = false;
  std::atomic<pid_t> initialised_by = 0;
  std::mt19937_64 random;

  SimulatedDriver() {
    const char* const names[] = {"devices",       "version",  "memory", "register",
                                 "hold_register", "delay_us", "seed",   "fail"};
    for (const char* name : names) {
      std::string variable = std::string("SIMULATED_CUDA_") + name;
      for (char& c : variable)
        c = static_cast<char>(std::toupper(c));
      if (const char* value = std::getenv(variable.c_str())) set(name, value);
    }
    for (unsigned i = 0; i < std::size(kKernelNames); ++i)
      functions.push_back({kKernelNames[i], false, i});
    for (unsigned i = 0; i < kFp8Kernels; ++i)
      functions.push_back({kFp8KernelNames[i], true, i});
    contexts.resize(static_cast<std::size_t>(option("devices", 1)));
    for (std::size_t i = 0; i < contexts.size(); ++i)
      contexts[i].ordinal = static_cast<int>(i);
  }

  // In a forked child no lock may be taken: one that another thread held is never free there.
  [[nodiscard]] bool forked() const { return initialised_by != 0 && initialised_by != getpid(); }

  std::int64_t option(const char* name, std::int64_t otherwise) {
    const auto found = options.find(name);
    return found == options.end() ? otherwise : std::strtoll(found->second.c_str(), nullptr, 0);
  }

  void set(const std::string& name, const std::string& value) {
    options[name] = value;
    if (name == "seed") random.seed(std::strtoull(value.c_str(), nullptr, 0));
    if (name != "fail") return;
    faults.clear();
    calls.clear();
    for (std::size_t at = 0; at < value.size();) {
      const std::size_t end = std::min(value.find(',', at), value.size());
      const std::string one = value.substr(at, end - at);
      const std::size_t first = one.find(':');
      const std::size_t second = one.find(':', first + 1);
      char* rest = nullptr;
      Fault fault;
      fault.from = std::strtoull(one.c_str() + first + 1, &rest, 0);
      fault.forever = *rest == '+';
      fault.number = static_cast<Result>(std::strtol(one.c_str() + second + 1, nullptr, 0));
      faults[one.substr(0, first)].push_back(fault);
      at = end + 1;
    }
  }

  // REQUIRES: mutex is held.
  Result count(const char* name) {
    const std::uint64_t n = ++calls[name];
    if (sticky != kSuccess) return sticky;
    for (const Fault& fault : faults[name]) {
      if (n == fault.from || (fault.forever && n > fault.from)) {
        if (is_sticky(fault.number)) sticky = fault.number;
        return fault.number;
      }
    }
    return kSuccess;
  }

  static const std::pair<const std::uint64_t, Range>* holding(
      const std::map<std::uint64_t, Range>& ranges, std::uint64_t address) {
    auto next = ranges.upper_bound(address);
    if (next == ranges.begin()) return nullptr;
    --next;
    return address < next->first + next->second.length ? &*next : nullptr;
  }

  static bool inside(const std::map<std::uint64_t, Range>& ranges, std::uint64_t address,
                     std::uint64_t length) {
    const auto* range = holding(ranges, address);
    return range != nullptr && address + length <= range->first + range->second.length;
  }

  // Whether the ranges cover all these bytes; several adjacent registrations may do so together.
  static bool covered(const std::map<std::uint64_t, Range>& ranges, std::uint64_t address,
                      std::uint64_t length) {
    const std::uint64_t end = address + length;
    while (address < end) {
      const auto* range = holding(ranges, address);
      if (range == nullptr) return false;
      address = range->first + range->second.length;
    }
    return true;
  }

  bool any_registered(std::uint64_t address, std::uint64_t length) {
    const auto next = registered.lower_bound(address);
    return holding(registered, address) != nullptr ||
           (next != registered.end() && next->first < address + length);
  }
};

SimulatedDriver& driver() {
  static SimulatedDriver* const one = new SimulatedDriver;  // streams outlive main()
  return *one;
}

thread_local std::vector<Context> current;

// The beginning of every call.
struct Call {
  explicit Call(const char* name) : lock(driver().mutex, std::defer_lock) {
    if (driver().forked()) return;
    lock.lock();
    result = driver().count(name);
    if (result == kSuccess && driver().initialised_by == 0) result = kNotInitialized;
  }
  std::unique_lock<std::mutex> lock;
  Result result = kNotInitialized;
};

#define ENTER(name)                                  \
  Call call_(name);                                  \
  if (call_.result != kSuccess) return call_.result; \
  [[maybe_unused]] SimulatedDriver& d = driver()

void sleep_a_little() {
  SimulatedDriver& d = driver();
  std::int64_t delay = 0;
  {
    const std::lock_guard lock(d.mutex);
    const std::int64_t most = d.option("delay_us", 0);
    if (most > 0) delay = static_cast<std::int64_t>(d.random() % static_cast<std::uint64_t>(most));
  }
  if (delay > 0) usleep(static_cast<useconds_t>(delay));
}

void work(Stream stream) {
  SimulatedDriver& d = driver();
  std::unique_lock lock(d.mutex);
  for (;;) {
    d.changed.wait(lock, [&] { return (!stream->work.empty() && !d.held) || stream->ending; });
    if (stream->work.empty()) return;
    const std::function<void()> next = std::move(stream->work.front());
    stream->work.pop_front();
    stream->running = true;
    lock.unlock();
    sleep_a_little();
    next();
    lock.lock();
    stream->running = false;
    d.changed.notify_all();
  }
}

// REQUIRES: the mutex is held.
Stream make_stream(int ordinal, int priority) {
  auto* const stream = new StreamTag;
  stream->ordinal = ordinal;
  stream->priority = priority;
  stream->thread = std::thread([stream] { work(stream); });
  return stream;
}

Stream real(Stream stream) {
  if (stream != nullptr) return stream;
  ContextTag& context = *current.back();
  if (context.null_stream == nullptr) {
    context.null_stream = make_stream(context.ordinal, 0);
    context.null_stream->thread.detach();
  }
  return context.null_stream;
}

void push(Stream stream, std::function<void()> next) {
  stream->open = nullptr;
  stream->work.push_back(std::move(next));
  driver().changed.notify_all();
}

void wait_idle(std::unique_lock<std::mutex>& lock, Stream stream) {
  driver().changed.wait(lock, [&] {
    return driver().sticky != kSuccess || (stream->work.empty() && !stream->running);
  });
}

// Makes the context's error sticky when a piece of work meets one.
bool begin_work(const char* name, const std::function<Result()>& allowed) {
  SimulatedDriver& d = driver();
  const std::lock_guard lock(d.mutex);
  Result error = d.count(name);
  if (error == kSuccess) error = allowed();
  if (error == kSuccess) return true;
  if (d.sticky == kSuccess) d.sticky = error;
  d.changed.notify_all();
  return false;
}

void run_copy(const Copy& copy, bool pageable) {
  if (begin_work("copy", [&] {
        SimulatedDriver& d = driver();
        const bool there =
            pageable || SimulatedDriver::inside(d.registered, copy.host(), copy.length);
        return there && SimulatedDriver::inside(d.memory, copy.device(), copy.length)
                   ? kSuccess
                   : kIllegalAddress;
      })) {
    std::memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from),
                copy.length);
  }
}

// REQUIRES: the mutex is held by `lock`.
Result queue_copy(std::unique_lock<std::mutex>& lock, const Copy& copy, Stream stream) {
  SimulatedDriver& d = driver();
  if (!SimulatedDriver::inside(d.memory, copy.device(), copy.length)) return kInvalidValue;
  if (SimulatedDriver::inside(d.registered, copy.host(), copy.length)) {
    push(stream, [copy] { run_copy(copy, false); });
    return kSuccess;
  }
  if (d.any_registered(copy.host(), copy.length)) return kInvalidValue;
  ++d.calls["pageable"];
  wait_idle(lock, stream);
  if (d.sticky != kSuccess) return d.sticky;
  lock.unlock();
  run_copy(copy, true);
  lock.lock();
  return d.sticky;
}

// Whether a kernel may touch all of that. REQUIRES: the mutex is held.
bool reachable(std::uint64_t at, std::uint64_t length) {
  return SimulatedDriver::inside(driver().memory, at, length) ||
         SimulatedDriver::covered(driver().registered, at, length);
}

// Checks all blocks of a launch; `bits` receives the OR of their addresses.
Result check_blocks(const Launch& launch, unsigned vector, std::uint64_t* bits) {
  SimulatedDriver& d = driver();
  const std::uint64_t runs = launch.block_vectors / launch.run_vectors;
  const std::uint64_t inner = std::uint64_t{launch.dims[0].count} * launch.dims[1].count;
  const std::uint64_t span = (runs / inner - 1) * launch.outer_stride +
                             (launch.dims[0].count - 1) * launch.dims[0].stride +
                             (launch.dims[1].count - 1) * launch.dims[1].stride +
                             std::uint64_t{launch.run_vectors} * vector;
  for (std::uint32_t s = 0; s < launch.section_count; ++s) {
    const LaunchSection& section = launch.sections[s];
    for (std::uint32_t b = 0; b < launch.block_count; ++b) {
      if (launch.blocks[b] == kSkippedBlock) continue;
      const std::uint64_t at = section.base + launch.blocks[b] * section.block_stride;
      *bits |= at;
      if (!SimulatedDriver::inside(d.memory, at, span)) return kIllegalAddress;
    }
  }
  return kSuccess;
}

Result check_launch(const Launch& launch, unsigned vector) {
  std::uint64_t bits = 0;
  if (const Result error = check_blocks(launch, vector, &bits); error != kSuccess) return error;
  for (std::uint32_t s = 0; s < launch.section_count; ++s) {
    bits |= launch.sections[s].packed;
    const std::uint64_t length = std::uint64_t{launch.block_count} * launch.block_vectors * vector;
    if (!reachable(launch.sections[s].packed, length)) return kIllegalAddress;
  }
  return bits % vector == 0 ? kSuccess : kMisalignedAddress;
}

Result check_fp8(const Fp8Launch& launch, Fp8Pass pass, unsigned numbers) {
  const Launch& copy = launch.copy;
  const std::uint64_t scales = 4 * std::uint64_t{launch.scales_per_section};
  if (!SimulatedDriver::inside(driver().memory, launch.words, copy.section_count * scales)) {
    return kIllegalAddress;
  }
  const bool codes = pass == Fp8Pass::kEncode || pass == Fp8Pass::kDecode;
  const bool of_record = pass == Fp8Pass::kScales || launch.writes_scales != 0;
  for (std::uint32_t s = 0; s < copy.section_count; ++s) {
    const std::uint64_t at = codes_address(launch, s);
    const std::uint64_t length = std::uint64_t{copy.block_count} * copy.block_vectors * numbers;
    if ((of_record && !reachable(at - launch.before_codes, scales)) ||
        (codes && !reachable(at, length))) {
      return kIllegalAddress;
    }
    if (codes && at % numbers != 0) return kMisalignedAddress;
  }
  if (pass == Fp8Pass::kScales) return kSuccess;
  std::uint64_t bits = 0;
  if (const Result error = check_blocks(copy, 2 * numbers, &bits); error != kSuccess) return error;
  return bits % (2 * numbers) == 0 ? kSuccess : kMisalignedAddress;
}

template <typename Vector>
void run_threads(const Launch& launch, unsigned thread_blocks) {
  for (std::uint32_t block = thread_blocks; block-- > 0;) {
    for (std::uint32_t thread = 0; thread < kThreads; ++thread) {
      copy_tiles<Vector>(launch, thread, block, thread_blocks);
    }
  }
}

void run_kernel(const Launch& launch, unsigned vector, unsigned thread_blocks) {
  if (!begin_work("kernel", [&] { return check_launch(launch, vector); })) return;
  switch (vector) {
    case 1:
      return run_threads<std::uint8_t>(launch, thread_blocks);
    case 2:
      return run_threads<std::uint16_t>(launch, thread_blocks);
    case 4:
      return run_threads<std::uint32_t>(launch, thread_blocks);
    case 8:
      return run_threads<std::uint64_t>(launch, thread_blocks);
    default:
      return run_threads<Vector16>(launch, thread_blocks);
  }
}

template <Fp8Pass kPass, unsigned kNumbers>
void run_fp8(const Fp8Launch& launch, unsigned thread_blocks) {
  if (!begin_work("kernel", [&] { return check_fp8(launch, kPass, kNumbers); })) return;
  for (std::uint32_t block = thread_blocks; block-- > 0;) {
    for (std::uint32_t thread = 0; thread < kThreads; ++thread)
      fp8_thread<kPass, kNumbers>(launch, thread, block, thread_blocks);
  }
}

using RunFp8 = void (*)(const Fp8Launch& launch, unsigned thread_blocks);

template <Fp8Pass kPass>
RunFp8 fp8_of(unsigned width) {
  const RunFp8 runs[] = {run_fp8<kPass, 1>, run_fp8<kPass, 2>, run_fp8<kPass, 4>,
                         run_fp8<kPass, 8>};
  return runs[width];
}

// In the order of kFp8KernelNames.
RunFp8 fp8_kernel(unsigned number) {
  switch (static_cast<Fp8Pass>(number / 4)) {
    case Fp8Pass::kLargest:
      return fp8_of<Fp8Pass::kLargest>(number % 4);
    case Fp8Pass::kEncode:
      return fp8_of<Fp8Pass::kEncode>(number % 4);
    case Fp8Pass::kDecode:
      return fp8_of<Fp8Pass::kDecode>(number % 4);
    default:
      return run_fp8<Fp8Pass::kScales, 1>;
  }
}

Result copy_batch(DeviceAddress* to, DeviceAddress* from, std::size_t* sizes, std::size_t count,
                  CopyAttributes* attributes, std::size_t* first, std::size_t attribute_count,
                  std::size_t* failed, Stream stream) {
  ENTER("cuMemcpyBatchAsync");
  if (stream == nullptr || count == 0 || attribute_count == 0 || first[0] != 0 ||
      attributes[0].source_order < 1 || attributes[0].source_order > 3) {
    return kInvalidValue;
  }
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < count; ++i) {
    const bool to_host = SimulatedDriver::inside(d.memory, from[i], sizes[i]);
    const Copy copy{to[i], from[i], sizes[i], to_host};
    if (!SimulatedDriver::inside(d.memory, copy.device(), sizes[i]) ||
        !SimulatedDriver::inside(d.registered, copy.host(), sizes[i])) {
      *failed = i;
      return kInvalidValue;
    }
    copies.push_back(copy);
  }
  std::shuffle(copies.begin(), copies.end(), d.random);
  push(stream, [copies] {
    for (const Copy& copy : copies)
      run_copy(copy, false);
  });
  return kSuccess;
}

Result copy_batch_of_13(DeviceAddress* to, DeviceAddress* from, std::size_t* sizes,
                        std::size_t count, CopyAttributes* attributes, std::size_t* first,
                        std::size_t attribute_count, Stream stream) {
  std::size_t failed = 0;
  return copy_batch(to, from, sizes, count, attributes, first, attribute_count, &failed, stream);
}

}  // namespace

// Controls of the tests.

EXPORT void simulated_cuda_set(const char* name, const char* value) {
  const std::lock_guard lock(driver().mutex);
  driver().set(name, value);
  driver().changed.notify_all();
}

// Calls of a function so far, or "copy", "kernel", "pageable".
EXPORT std::uint64_t simulated_cuda_calls(const char* name) {
  const std::lock_guard lock(driver().mutex);
  return driver().calls[name];
}

// Makes memory of the test a part of a device's memory, for tensors that torch made on the CPU.
EXPORT void simulated_cuda_adopt(std::uint64_t address, std::uint64_t length, int ordinal) {
  const std::lock_guard lock(driver().mutex);
  driver().memory[address] = Range{length, ordinal, false};
}

// While held, no stream begins another piece of work.
EXPORT void simulated_cuda_hold(int held) {
  const std::lock_guard lock(driver().mutex);
  driver().held = held != 0;
  driver().changed.notify_all();
}

// The driver.

EXPORT Result cuInit(unsigned) {
  SimulatedDriver& d = driver();
  if (d.forked()) return kNotInitialized;
  const std::lock_guard lock(d.mutex);
  if (d.contexts.empty()) return kNoDevice;
  d.initialised_by = getpid();
  return d.count("cuInit");
}

EXPORT Result cuDriverGetVersion(int* version) {
  const std::lock_guard lock(driver().mutex);
  *version = static_cast<int>(driver().option("version", 13'000));
  return kSuccess;
}

EXPORT Result cuGetErrorName(Result number, const char** name) {
  static const std::map<Result, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
      {kNoBinary, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {kMisalignedAddress, "CUDA_ERROR_MISALIGNED_ADDRESS"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"},
      {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED"},
      {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
  };
  const auto found = names.find(number);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : kSuccess;
}

EXPORT Result cuGetErrorString(Result, const char** text) {
  *text = "simulated";
  return kSuccess;
}

EXPORT Result cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = static_cast<int>(d.contexts.size());
  return kSuccess;
}

EXPORT Result cuDeviceGet(DeviceId* device, int ordinal) {
  ENTER("cuDeviceGet");
  if (ordinal < 0 || ordinal >= static_cast<int>(d.contexts.size())) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORT Result cuDeviceGetName(char* name, int length, DeviceId device) {
  ENTER("cuDeviceGetName");
  std::snprintf(name, static_cast<std::size_t>(length), "Simulated GPU %d", device);
  return kSuccess;
}

EXPORT Result cuDeviceTotalMem_v2(std::size_t* bytes, DeviceId) {
  ENTER("cuDeviceTotalMem");
  *bytes = static_cast<std::size_t>(d.option("memory", 1 << 30));
  return kSuccess;
}

EXPORT Result cuDeviceGetAttribute(int* value, int attribute, DeviceId) {
  ENTER("cuDeviceGetAttribute");
  static const std::map<int, int> values = {
      {kUnifiedAddressing, 1},
      {kCapabilityMajor, 9},
      {kCapabilityMinor, 0},
      {kHostRegisterSupported, 1},
  };
  const auto found = values.find(attribute);
  if (found == values.end()) return kInvalidValue;
  *value = found->second;
  return kSuccess;
}

EXPORT Result cuDeviceGetPCIBusId(char* id, int length, DeviceId device) {
  ENTER("cuDeviceGetPCIBusId");
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
  return kSuccess;
}

EXPORT Result cuDevicePrimaryCtxRetain(Context* context, DeviceId device) {
  ENTER("cuDevicePrimaryCtxRetain");
  *context = &d.contexts[static_cast<std::size_t>(device)];
  ++(*context)->retained;
  return kSuccess;
}

EXPORT Result cuDevicePrimaryCtxRelease_v2(DeviceId device) {
  ENTER("cuDevicePrimaryCtxRelease");
  ContextTag& context = d.contexts[static_cast<std::size_t>(device)];
  if (context.retained == 0) return kInvalidContext;
  --context.retained;
  return kSuccess;
}

EXPORT Result cuCtxPushCurrent_v2(Context context) {
  ENTER("cuCtxPushCurrent");
  current.push_back(context);
  return kSuccess;
}

EXPORT Result cuCtxSetCurrent(Context context) {
  ENTER("cuCtxSetCurrent");
  current.assign(1, context);
  return kSuccess;
}

EXPORT Result cuCtxPopCurrent_v2(Context* context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}

#define ENTER_CONTEXT(name) \
  ENTER(name);              \
  if (current.empty()) return kInvalidContext

EXPORT Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER_CONTEXT("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

EXPORT Result cuStreamCreateWithPriority(Stream* stream, unsigned, int priority) {
  ENTER_CONTEXT("cuStreamCreate");
  *stream = make_stream(current.back()->ordinal, priority);
  return kSuccess;
}

EXPORT Result cuStreamDestroy_v2(Stream stream) {
  {
    ENTER_CONTEXT("cuStreamDestroy");
    stream->ending = true;
    d.changed.notify_all();
  }
  stream->thread.join();
  delete stream;
  return kSuccess;
}

EXPORT Result cuStreamSynchronize(Stream stream) {
  ENTER_CONTEXT("cuStreamSynchronize");
  wait_idle(call_.lock, real(stream));
  return d.sticky;
}

EXPORT Result cuEventCreate(Event* event, unsigned) {
  ENTER_CONTEXT("cuEventCreate");
  *event = new EventTag{current.back()->ordinal, nullptr};
  return kSuccess;
}

EXPORT Result cuEventDestroy_v2(Event event) {
  ENTER_CONTEXT("cuEventDestroy");
  delete event;
  return kSuccess;
}

EXPORT Result cuEventRecord(Event event, Stream stream) {
  ENTER_CONTEXT("cuEventRecord");
  stream = real(stream);
  if (event->ordinal != stream->ordinal) return kInvalidHandle;
  const auto recording = std::make_shared<Recording>();
  event->latest = recording;
  push(stream, [recording] {
    const std::lock_guard lock(driver().mutex);
    recording->come = true;
    driver().changed.notify_all();
  });
  return kSuccess;
}

EXPORT Result cuEventSynchronize(Event event) {
  ENTER_CONTEXT("cuEventSynchronize");
  const std::shared_ptr<Recording> recording = event->latest;
  d.changed.wait(call_.lock,
                 [&] { return d.sticky != kSuccess || recording == nullptr || recording->come; });
  return d.sticky;
}

EXPORT Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  ENTER_CONTEXT("cuStreamWaitEvent");
  const std::shared_ptr<Recording> recording = event->latest;
  if (recording == nullptr) return kSuccess;
  push(real(stream), [recording] {
    std::unique_lock lock(driver().mutex);
    driver().changed.wait(lock, [&] { return driver().sticky != kSuccess || recording->come; });
  });
  return kSuccess;
}

EXPORT Result cuMemAlloc_v2(DeviceAddress* address, std::size_t length) {
  ENTER_CONTEXT("cuMemAlloc");
  std::uint64_t used = 0;
  for (const auto& [at, range] : d.memory)
    used += range.ours && range.ordinal == current.back()->ordinal ? range.length : 0;
  if (length == 0) return kInvalidValue;
  if (used + length > static_cast<std::uint64_t>(d.option("memory", 1 << 30))) return kOutOfMemory;
  // Behind the memory lies one more page, which nobody may touch.
  const std::size_t whole = (length + 4095) / 4096 * 4096 + 4096;
  void* const memory =
      mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  mprotect(static_cast<char*>(memory) + whole - 4096, 4096, PROT_NONE);
  *address = reinterpret_cast<std::uint64_t>(memory);
  d.memory[*address] = Range{length, current.back()->ordinal, true};
  return kSuccess;
}

EXPORT Result cuMemFree_v2(DeviceAddress address) {
  ENTER_CONTEXT("cuMemFree");
  const auto found = d.memory.find(address);
  if (found == d.memory.end()) return kInvalidValue;
  munmap(reinterpret_cast<void*>(address), (found->second.length + 4095) / 4096 * 4096 + 4096);
  d.memory.erase(found);
  return kSuccess;
}

EXPORT Result cuMemsetD32Async(DeviceAddress to, unsigned word, std::size_t count, Stream stream) {
  ENTER_CONTEXT("cuMemsetD32Async");
  if (!SimulatedDriver::inside(d.memory, to, 4 * count) || to % 4 != 0) return kInvalidValue;
  push(real(stream), [to, word, count] {
    if (begin_work("fill", [&] {
          return SimulatedDriver::inside(driver().memory, to, 4 * count) ? kSuccess
                                                                         : kIllegalAddress;
        })) {
      std::fill_n(reinterpret_cast<std::uint32_t*>(to), count, word);
    }
  });
  return kSuccess;
}

EXPORT Result cuMemHostAlloc(void** memory, std::size_t length, unsigned) {
  ENTER_CONTEXT("cuMemHostAlloc");
  *memory = std::aligned_alloc(4096, (length + 4095) / 4096 * 4096);
  if (*memory == nullptr) return kOutOfMemory;
  d.registered[reinterpret_cast<std::uint64_t>(*memory)] = Range{length, 0, true};
  return kSuccess;
}

EXPORT Result cuMemFreeHost(void* memory) {
  ENTER_CONTEXT("cuMemFreeHost");
  if (d.registered.erase(reinterpret_cast<std::uint64_t>(memory)) == 0) return kInvalidValue;
  std::free(memory);
  return kSuccess;
}

EXPORT Result cuMemHostRegister_v2(void* memory, std::size_t length, unsigned) {
  ENTER_CONTEXT("cuMemHostRegister");
  d.changed.wait(call_.lock, [&] { return d.option("hold_register", 0) == 0; });
  const auto address = reinterpret_cast<std::uint64_t>(memory);
  std::uint64_t sum = length;
  for (const auto& [at, range] : d.registered)
    sum += range.length;
  if (d.any_registered(address, length)) return kAlreadyRegistered;
  if (sum > static_cast<std::uint64_t>(d.option("register", INT64_MAX))) return kOutOfMemory;
  d.registered[address] = Range{length, 0, false};
  return kSuccess;
}

EXPORT Result cuMemHostUnregister(void* memory) {
  ENTER_CONTEXT("cuMemHostUnregister");
  return d.registered.erase(reinterpret_cast<std::uint64_t>(memory)) != 0 ? kSuccess
                                                                          : kNotRegistered;
}

EXPORT Result cuMemHostGetDevicePointer_v2(DeviceAddress* address, void* memory, unsigned) {
  ENTER_CONTEXT("cuMemHostGetDevicePointer");
  *address = reinterpret_cast<std::uint64_t>(memory);
  return SimulatedDriver::inside(d.registered, *address, 1) ? kSuccess : kInvalidValue;
}

EXPORT Result cuMemcpyHtoDAsync_v2(DeviceAddress to, const void* from, std::size_t length,
                                   Stream stream) {
  ENTER_CONTEXT("cuMemcpyHtoDAsync");
  const Copy copy{to, reinterpret_cast<std::uint64_t>(from), length, false};
  return queue_copy(call_.lock, copy, real(stream));
}

EXPORT Result cuMemcpyDtoHAsync_v2(void* to, DeviceAddress from, std::size_t length,
                                   Stream stream) {
  ENTER_CONTEXT("cuMemcpyDtoHAsync");
  const Copy copy{reinterpret_cast<std::uint64_t>(to), from, length, true};
  return queue_copy(call_.lock, copy, real(stream));
}

// Copies between any addresses, as engines do by kernels of their own. Copies that are queued
// without a pause form one piece of work.
EXPORT Result cuMemcpyAsync(DeviceAddress to, DeviceAddress from, std::size_t length,
                            Stream caller) {
  ENTER_CONTEXT("cuMemcpyAsync");
  const Copy copy{to, from, length, false};
  if (!reachable(to, length) || !reachable(from, length)) return kInvalidValue;
  const Stream stream = real(caller);
  if (stream->open != nullptr) {
    stream->open->push_back(copy);
    return kSuccess;
  }
  const auto batch = std::make_shared<std::vector<Copy>>(1, copy);
  push(stream, [stream, batch] {
    if (begin_work("copy", [&] {
          if (stream->open == batch) stream->open = nullptr;
          const bool there = std::all_of(batch->begin(), batch->end(), [](const Copy& one) {
            return reachable(one.to, one.length) && reachable(one.from, one.length);
          });
          return there ? kSuccess : kIllegalAddress;
        })) {
      for (const Copy& one : *batch)
        std::memcpy(reinterpret_cast<void*>(one.to), reinterpret_cast<const void*>(one.from),
                    one.length);
    }
  });
  stream->open = batch;
  return kSuccess;
}

// For the tests themselves: not queued, no fault.
EXPORT Result cuMemcpyHtoD_v2(DeviceAddress to, const void* from, std::size_t length) {
  const std::lock_guard lock(driver().mutex);
  if (!SimulatedDriver::inside(driver().memory, to, length)) return kInvalidValue;
  std::memcpy(reinterpret_cast<void*>(to), from, length);
  return kSuccess;
}

EXPORT Result cuMemcpyDtoH_v2(void* to, DeviceAddress from, std::size_t length) {
  const std::lock_guard lock(driver().mutex);
  if (!SimulatedDriver::inside(driver().memory, from, length)) return kInvalidValue;
  std::memcpy(to, reinterpret_cast<const void*>(from), length);
  return kSuccess;
}

EXPORT Result cuModuleLoadData(Module* module, const void* image) {
  ENTER_CONTEXT("cuModuleLoadData");
  std::uint32_t magic = 0;
  std::memcpy(&magic, image, sizeof magic);
  if (magic != 0xba55ed50) return kInvalidImage;
  *module = new ModuleTag;
  return kSuccess;
}

EXPORT Result cuModuleUnload(Module module) {
  ENTER_CONTEXT("cuModuleUnload");
  delete module;
  return kSuccess;
}

EXPORT Result cuModuleGetFunction(Function* function, Module, const char* name) {
  ENTER_CONTEXT("cuModuleGetFunction");
  for (FunctionTag& known : d.functions) {
    if (std::strcmp(name, known.name) == 0) {
      *function = &known;
      return kSuccess;
    }
  }
  return kNotFound;
}

EXPORT Result cuLaunchKernel(Function function, unsigned grid, unsigned, unsigned, unsigned threads,
                             unsigned, unsigned, unsigned, Stream stream, void** parameters,
                             void**) {
  ENTER_CONTEXT("cuLaunchKernel");
  if (threads != kThreads || grid == 0) return kInvalidValue;
  const auto queue = [&](auto launch, auto run) {
    std::memcpy(launch.get(), parameters[0], sizeof *launch);
    push(real(stream), [launch, run, grid] { run(*launch, grid); });
  };
  if (function->fp8) {
    queue(std::make_shared<Fp8Launch>(), fp8_kernel(function->number));
  } else {
    const unsigned vector = 1U << function->number;
    queue(std::make_shared<Launch>(), [vector](const Launch& launch, unsigned thread_blocks) {
      run_kernel(launch, vector, thread_blocks);
    });
  }
  return kSuccess;
}

EXPORT Result cuPointerGetAttribute(void* value, int attribute, DeviceAddress address) {
  ENTER_CONTEXT("cuPointerGetAttribute");
  const auto* device = SimulatedDriver::holding(d.memory, address);
  if (device == nullptr && !SimulatedDriver::inside(d.registered, address, 1)) return kInvalidValue;
  if (attribute == kPointerMemoryType) {
    *static_cast<unsigned*>(value) = device != nullptr ? kMemoryTypeDevice : 1;
    return kSuccess;
  }
  if (attribute != kPointerDeviceOrdinal) return kInvalidValue;
  *static_cast<int*>(value) = device != nullptr ? device->second.ordinal : 0;
  return kSuccess;
}

EXPORT Result cuGetProcAddress_v2(const char* symbol, void** function, int version, std::uint64_t,
                                  int* found) {
  ENTER("cuGetProcAddress");
  *found = 1;
  *function = nullptr;
  if (std::strcmp(symbol, "cuMemcpyBatchAsync") != 0) return kNotFound;
  *found = 2;
  if (version < 12'080 || d.option("version", 13'000) < 12'080) return kNotFound;
  *found = 0;
  *function = version < 13'000 ? reinterpret_cast<void*>(&copy_batch)
                               : reinterpret_cast<void*>(&copy_batch_of_13);
  return kSuccess;
}
