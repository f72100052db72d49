// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A copy plan whose sections lie on a device, and the map of the host memory that the device
// reaches.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "device.h"
#include "kvstrata/copy.h"

namespace kvstrata::cuda {

// One description for all engines; immutable, shared by threads.
struct CudaPlan {
  std::shared_ptr<const CopyPlan> copy;
  std::shared_ptr<Device> device;
  std::shared_ptr<Moment> behind;  // null, or copies with this plan begin after it
  bool layerwise = false;          // a load goes section by section and can be awaited so

  // The text names the first section that is not memory of the device.
  static Failure create(std::shared_ptr<const CopyPlan> copy, std::shared_ptr<Device> device,
                        CudaPlan* out);
};

// What is registered of one range of host memory.
struct Pinning {
  bool whole = false;                // all of it is
  bool mapped = false;               // and the device sees it as one range
  DeviceAddress device_address = 0;  // where that begins
  // Addresses inside the range where one region ends: no copy of the driver may cross them.
  std::vector<std::uint64_t> borders;
};

// The regions that an engine was told of. Thread-safe.
class PinnedMemory {
 public:
  void add(std::shared_ptr<HostRegion> region);
  void remove(const HostRegion* region);
  [[nodiscard]] Pinning find(std::uint64_t address, std::uint64_t length) const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<HostRegion>> regions_;  // by address
};

}  // namespace kvstrata::cuda
