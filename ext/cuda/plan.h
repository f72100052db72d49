// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A copy plan whose sections lie on a device, and the map of the host memory that is registered for
// the device.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "copy/copy.h"
#include "device.h"

namespace kvstrata::cuda {

// A plan, its device, and the moment behind which its copies begin. Immutable; shared by copy
// engines and threads.
struct CudaPlan {
  std::shared_ptr<const CopyPlan> copy;
  std::shared_ptr<Device> device;
  std::shared_ptr<Moment> behind;  // if not null, copies with this plan begin after this moment
  bool layerwise = false;          // a load copies, and can be awaited, section by section

  // A failure's text names the first section that is not memory of the device.
  static Failure create(std::shared_ptr<const CopyPlan> copy, std::shared_ptr<Device> device,
                        CudaPlan* out);
};

// How much of one range of host memory is registered.
struct Pinning {
  bool whole = false;                // all of the range is registered
  bool mapped = false;               // and the device sees it as one contiguous range
  DeviceAddress device_address = 0;  // the device's address of the range, if `mapped`
  // Host addresses inside the range at which a region begins or ends, in ascending order. No copy
  // by the driver may cross one.
  std::vector<std::uint64_t> borders;
};

// The regions of host memory that were added to a copy engine. Thread-safe.
class PinnedMemory {
 public:
  // Keeps the region alive until remove().
  void add(std::shared_ptr<HostRegion> region);
  void remove(const HostRegion* region);
  // How much of [address, address + length) the added regions cover.
  [[nodiscard]] Pinning find(std::uint64_t address, std::uint64_t length) const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<HostRegion>> regions_;  // in the order of their addresses
};

}  // namespace kvstrata::cuda
