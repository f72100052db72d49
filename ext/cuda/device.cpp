// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <unistd.h>

#include <bit>
#include <map>

namespace kvstrata::cuda {
namespace {

Failure find_device(int ordinal, const Driver** driver, DeviceId* id) {
  if (Failure failure = Driver::load(driver)) return failure;
  if (ordinal < 0 || ordinal >= (*driver)->devices) {
    return Failure{-1, "",
                   "device: " + std::to_string(ordinal) + " is not one of this process's " +
                       std::to_string((*driver)->devices) + " GPUs (counted from 0)"};
  }
  return Device::check("cuDeviceGet", (*driver)->device_get(id, ordinal));
}

}  // namespace

Failure read_facts(int ordinal, DeviceFacts* out) {
  const Driver* driver = nullptr;
  DeviceId id = 0;
  if (Failure failure = find_device(ordinal, &driver, &id)) return failure;
  char name[256] = "";
  char bus[32] = "";
  std::size_t memory = 0;
  if (Failure f = Device::check("cuDeviceGetName", driver->device_name(name, sizeof name, id))) {
    return f;
  }
  if (Failure f = Device::check("cuDeviceTotalMem", driver->device_memory(&memory, id))) return f;
  if (Failure f =
          Device::check("cuDeviceGetPCIBusId", driver->device_pci_bus_id(bus, sizeof bus, id))) {
    return f;
  }
  // An attribute that an older driver does not know leaves the value as it is.
  const auto attribute = [&](int which, int otherwise) {
    int value = otherwise;
    return driver->device_attribute(&value, which, id) == kSuccess ? value : otherwise;
  };
  *out = DeviceFacts{
      .ordinal = ordinal,
      .name = name,
      .capability_major = attribute(kCapabilityMajor, 0),
      .capability_minor = attribute(kCapabilityMinor, 0),
      .memory_bytes = memory,
      .pci_bus_id = bus,
      .can_register_host =
          attribute(kHostRegisterSupported, 0) != 0 && attribute(kUnifiedAddressing, 0) != 0,
  };
  return Failure{};
}

Failure Device::open(int ordinal, const std::string& image, const std::string& reason,
                     std::shared_ptr<Device>* out) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Device>> opened;
  const Driver* driver = nullptr;
  DeviceId id = 0;
  if (Failure failure = find_device(ordinal, &driver, &id)) return failure;
  const std::lock_guard lock(mutex);
  if (std::shared_ptr<Device> device = opened[ordinal].lock(); device && device->owned()) {
    *out = std::move(device);
    return Failure{};
  }
  std::shared_ptr<Device> device(new Device);
  device->driver_ = driver;
  device->ordinal_ = ordinal;
  device->id_ = id;
  device->owner_ = getpid();
  if (Failure failure = check("cuDevicePrimaryCtxRetain",
                              driver->primary_context_retain(&device->context_, id))) {
    device->context_ = nullptr;
    return failure;
  }
  device->load_kernels(image, reason);
  opened[ordinal] = device;
  *out = std::move(device);
  return Failure{};
}

void Device::load_kernels(const std::string& image, const std::string& reason) {
  if (image.empty()) {
    no_kernels_ = reason;
    return;
  }
  const CurrentContext current(*this);
  Failure failure = current.failure();
  if (!failure) failure = check("cuModuleLoadData", driver_->module_load(&module_, image.data()));
  for (std::size_t i = 0; i < kernels_.size() && !failure; ++i) {
    failure = check("cuModuleGetFunction",
                    driver_->module_function(&kernels_[i], module_, kKernelNames[i]));
  }
  for (std::size_t i = 0; i < fp8_kernels_.size() && !failure; ++i) {
    failure = check("cuModuleGetFunction",
                    driver_->module_function(&fp8_kernels_[i], module_, kFp8KernelNames[i]));
  }
  if (failure) {
    kernels_ = {};
    fp8_kernels_ = {};
    no_kernels_ = driver_->explain(failure);
  }
}

Device::~Device() {
  if (context_ == nullptr || !owned()) return;
  {
    const CurrentContext current(*this);
    for (Event event : idle_events_)
      static_cast<void>(driver_->event_destroy(event));
    if (module_ != nullptr) static_cast<void>(driver_->module_unload(module_));
  }
  static_cast<void>(driver_->primary_context_release(id_));
}

bool Device::owned() const noexcept {
  return owner_ == getpid();
}

Function Device::kernel(unsigned vector_bytes) const noexcept {
  return kernels_[static_cast<std::size_t>(std::countr_zero(vector_bytes))];
}

Failure Device::take_event(std::shared_ptr<Moment>* out) {
  Event event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_events_.empty()) {
      event = idle_events_.back();
      idle_events_.pop_back();
    }
  }
  if (event == nullptr) {
    const CurrentContext current(*this);
    if (Failure failure = current.failure()) return failure;
    if (Failure failure =
            check("cuEventCreate",
                  driver_->event_create(&event, kEventBlockingSync | kEventDisableTiming))) {
      return failure;
    }
  }
  *out = std::make_shared<Moment>(shared_from_this(), event);
  return Failure{};
}

Moment::~Moment() {
  if (!device_->owned()) return;
  const std::lock_guard lock(device_->mutex_);
  device_->idle_events_.push_back(event_);
}

Failure Moment::record(Stream stream) {
  return Device::check("cuEventRecord", device_->driver().event_record(event_, stream));
}

Failure Moment::make_wait(Stream stream) const {
  return Device::check("cuStreamWaitEvent", device_->driver().stream_wait_event(stream, event_, 0));
}

Failure Moment::wait() const {
  return Device::check("cuEventSynchronize", device_->driver().event_synchronize(event_));
}

Failure HostRegion::create(std::shared_ptr<Device> device, std::uint64_t address,
                           std::uint64_t length, std::shared_ptr<HostRegion>* out) {
  const Driver& driver = device->driver();
  const CurrentContext current(*device);
  if (Failure failure = current.failure()) return failure;
  void* const where = reinterpret_cast<void*>(address);
  std::shared_ptr<HostRegion> region(new HostRegion);
  if (Failure failure = Device::check(
          "cuMemHostRegister",
          driver.host_register(where, length, kRegisterPortable | kRegisterDeviceMap))) {
    return failure;
  }
  region->device_ = std::move(device);
  region->address_ = address;
  region->length_ = length;
  region->registered_ = true;
  if (Failure failure =
          Device::check("cuMemHostGetDevicePointer",
                        driver.host_device_pointer(&region->device_address_, where, 0))) {
    return failure;  // the destructor of `region` unregisters the memory
  }
  *out = std::move(region);
  return Failure{};
}

HostRegion::~HostRegion() {
  static_cast<void>(unregister());
}

Failure HostRegion::unregister() {
  if (!registered_.exchange(false) || !device_->owned()) return Failure{};
  const CurrentContext current(*device_);
  if (Failure failure = current.failure()) return failure;
  return Device::check("cuMemHostUnregister",
                       device_->driver().host_unregister(reinterpret_cast<void*>(address_)));
}

}  // namespace kvstrata::cuda
