// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <algorithm>
#include <string>

namespace kvstrata::cuda {

Failure CudaPlan::create(std::shared_ptr<const CopyPlan> copy, std::shared_ptr<Device> device,
                         CudaPlan* out) {
  const Driver& driver = device->driver();
  const CurrentContext current(*device);
  if (Failure failure = current.failure()) return failure;
  std::size_t index = 0;
  for (const CopySection& section : copy->sections()) {
    const std::string name = "section_bases[" + std::to_string(index++) + "]: ";
    unsigned type = 0;
    int ordinal = -1;
    const Result known = driver.pointer_attribute(&type, kPointerMemoryType, section.base);
    if (is_sticky(known)) return Failure{known, "cuPointerGetAttribute", ""};
    if (known != kSuccess || type != kMemoryTypeDevice) {
      return Failure{-1, "",
                     name + "not memory of a GPU; pass tensors on device " +
                         std::to_string(device->ordinal())};
    }
    const Result placed = driver.pointer_attribute(&ordinal, kPointerDeviceOrdinal, section.base);
    if (placed != kSuccess) return Failure{placed, "cuPointerGetAttribute", ""};
    if (ordinal != device->ordinal()) {
      return Failure{-1, "",
                     name + "lies on device " + std::to_string(ordinal) + ", the plan is for " +
                         std::to_string(device->ordinal())};
    }
  }
  *out = CudaPlan{std::move(copy), std::move(device), nullptr, false};
  return Failure{};
}

void PinnedMemory::add(std::shared_ptr<HostRegion> region) {
  const std::lock_guard lock(mutex_);
  const auto place = std::ranges::upper_bound(regions_, region->address(), {},
                                              [](const auto& known) { return known->address(); });
  regions_.insert(place, std::move(region));
}

void PinnedMemory::remove(const HostRegion* region) {
  const std::lock_guard lock(mutex_);
  std::erase_if(regions_, [&](const auto& known) { return known.get() == region; });
}

Pinning PinnedMemory::find(std::uint64_t address, std::uint64_t length) const {
  Pinning found;
  const std::uint64_t end = address + length;
  const std::lock_guard lock(mutex_);
  auto next = std::ranges::upper_bound(regions_, address, {},
                                       [](const auto& known) { return known->address(); });
  if (next != regions_.begin()) --next;
  std::uint64_t covered = address;
  bool gap = false;
  bool one_range = true;
  for (; next != regions_.end() && (*next)->address() < end; ++next) {
    const HostRegion& region = **next;
    const std::uint64_t region_end = region.address() + region.length();
    if (region_end <= address || !region.registered()) continue;
    if (region.address() > covered) {
      gap = true;
      found.borders.push_back(region.address());
    }
    const std::uint64_t here = std::max(address, region.address());
    const DeviceAddress device = region.device_address() + (here - region.address());
    if (here == address) {
      found.device_address = device;
    } else if (device != found.device_address + (here - address)) {
      one_range = false;
    }
    covered = region_end;
    if (region_end < end) found.borders.push_back(region_end);
  }
  found.whole = !gap && covered >= end;
  found.mapped = found.whole && one_range;
  return found;
}

}  // namespace kvstrata::cuda
