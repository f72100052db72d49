// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// One GPU as this process sees it: its primary context (which the serving engine uses as well), our
// kernels in this context, a pool of events, and ranges of host memory registered with the context.
//
// Thread-safe. A driver does not survive a fork: in a forked child these objects do nothing, and
// their destructors leak the resources of the driver.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"
#include "fp8_kernel_body.h"

namespace kvstrata::cuda {

struct DeviceFacts {
  int ordinal = 0;
  std::string name;
  int capability_major = 0;
  int capability_minor = 0;
  std::uint64_t memory_bytes = 0;
  std::string pci_bus_id;
  bool can_register_host = false;
};

// Reads the facts without touching the device's context. A failure's text names the ordinal.
Failure read_facts(int ordinal, DeviceFacts* out);

class Moment;

class Device : public std::enable_shared_from_this<Device> {
 public:
  // Opens the device, or returns the object of an earlier call that still has an owner. `image` is
  // the fatbin of our kernels, and only the call that makes the object uses it. If `image` is
  // empty, the device has no kernels, and `reason` says why.
  static Failure open(int ordinal, const std::string& image, const std::string& reason,
                      std::shared_ptr<Device>* out);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] const Driver& driver() const noexcept { return *driver_; }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] Context context() const noexcept { return context_; }
  // The kernel that copies in vectors of vector_bytes (1, 2, 4, 8, 16); null without kernels.
  [[nodiscard]] Function kernel(unsigned vector_bytes) const noexcept;
  // The kernel kFp8KernelNames[number]; null without kernels.
  [[nodiscard]] Function fp8_kernel(unsigned number) const noexcept { return fp8_kernels_[number]; }
  // "", or why there are no kernels.
  [[nodiscard]] const std::string& no_kernels() const noexcept { return no_kernels_; }
  // False in a forked child.
  [[nodiscard]] bool owned() const noexcept;

  // Takes an event out of the pool, or makes one. It is not recorded on a stream yet.
  Failure take_event(std::shared_ptr<Moment>* out);

  // The failure of a call of the driver that returned `number`; converts to false for kSuccess.
  static Failure check(const char* call, Result number) { return Failure{number, call, ""}; }

 private:
  friend class Moment;

  Device() = default;
  void load_kernels(const std::string& image, const std::string& reason);

  const Driver* driver_ = nullptr;
  int ordinal_ = 0;
  DeviceId id_ = 0;
  Context context_ = nullptr;
  Module module_ = nullptr;
  std::array<Function, 5> kernels_{};
  std::array<Function, kFp8Kernels> fp8_kernels_{};
  std::string no_kernels_;
  int owner_ = 0;
  std::mutex mutex_;
  std::vector<Event> idle_events_;
};

// Makes the device's context current in the calling thread until the object is destroyed. `device`
// must outlive it.
class CurrentContext {
 public:
  explicit CurrentContext(const Device& device) : device_(device) {
    pushed_ = device.driver().context_push(device.context());
  }
  ~CurrentContext() {
    Context before = nullptr;
    if (pushed_ == kSuccess) static_cast<void>(device_.driver().context_pop(&before));
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  [[nodiscard]] Failure failure() const { return Failure{pushed_, "cuCtxPushCurrent", ""}; }

 private:
  const Device& device_;
  Result pushed_;
};

// A point in a stream's work. The destructor returns the event to the device's pool. This is sound
// even while streams wait for the event: a wait refers to the record that preceded it, not to a
// later record of the same event.
class Moment {
 public:
  Moment(std::shared_ptr<Device> device, Event event) noexcept
      : device_(std::move(device)), event_(event) {}
  ~Moment();
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;

  [[nodiscard]] Device& device() const noexcept { return *device_; }
  [[nodiscard]] Event event() const noexcept { return event_; }

  // REQUIRES, for the next three: the device's context is current.
  Failure record(Stream stream);
  Failure make_wait(Stream stream) const;  // later work of `stream` begins after the moment
  Failure wait() const;                    // blocks this thread

 private:
  std::shared_ptr<Device> device_;
  Event event_;
};

// Host memory that is registered with a device: the device reaches it by DMA and at
// device_address(). The caller owns the memory and keeps it mapped until unregister() has returned
// or this object is destroyed.
class HostRegion {
 public:
  static Failure create(std::shared_ptr<Device> device, std::uint64_t address, std::uint64_t length,
                        std::shared_ptr<HostRegion>* out);
  ~HostRegion();
  HostRegion(const HostRegion&) = delete;
  HostRegion& operator=(const HostRegion&) = delete;

  [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
  [[nodiscard]] DeviceAddress device_address() const noexcept { return device_address_; }
  [[nodiscard]] bool registered() const noexcept { return registered_.load(); }

  // Idempotent; the destructor calls it too. REQUIRES: no copy from or to the memory is under way.
  Failure unregister();

 private:
  HostRegion() = default;

  std::shared_ptr<Device> device_;
  std::uint64_t address_ = 0;
  std::uint64_t length_ = 0;
  DeviceAddress device_address_ = 0;
  std::atomic<bool> registered_{false};
};

}  // namespace kvstrata::cuda
