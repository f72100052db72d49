// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The two ways to move a record's sections between a device's blocks and host memory. Both only
// queue work on a stream and never wait for it.
//
//   dma     the device's copy engines copy one contiguous run at a time. If the driver has
//           cuMemcpyBatchAsync and the whole record is registered, one call takes many runs. Uses
//           no multiprocessor. Takes any host memory, but a copy from or to memory that is not
//           registered blocks the calling thread.
//   kernel  a few thread blocks read and write registered host memory directly. A record in other
//           memory goes by dma.
//
// A plan with a rounding uses the kernels of fp8_kernel_body.h: on registered host memory directly,
// on other memory through a buffer on the device and one large DMA.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "copy/items.h"
#include "plan.h"

namespace kvstrata::cuda {

struct LaunchSection;

enum class Way : std::uint8_t { kDma = 0, kKernel = 1 };

// A stream of its own, and the device memory that copies on it need. Used by one thread at a time.
class Mover {
 public:
  Mover(std::shared_ptr<Device> device, unsigned max_thread_blocks) noexcept
      : device_(std::move(device)), max_thread_blocks_(max_thread_blocks) {}
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // REQUIRES, for all: the device's context is current.
  // Creates the stream. `urgent`: with the highest priority that the device has, else the lowest.
  Failure open(bool urgent);
  // Allocates the staging buffer, which every plan with a rounding needs.
  Failure reserve(std::uint64_t staging_bytes);

  [[nodiscard]] Stream stream() const noexcept { return stream_; }

  // Queues the copies of sections [begin, end) of one record whose payload lies at `payload` and is
  // registered as `pinning` says. flush() must follow, after one record or after many, whose copies
  // then share calls of the driver. After a failure some of the copies may be queued. REQUIRES, if
  // the plan has a rounding: can_round().
  Failure queue(Way way, CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                std::uint64_t payload, const Pinning& pinning, std::size_t begin, std::size_t end);
  // Whether the staging buffer can take a section of this plan with a rounding.
  [[nodiscard]] bool can_round(const CopyPlan& plan, std::size_t n_blocks) const noexcept;
  // Hands the copies that queue() has collected to the driver; after a failure they are dropped.
  Failure flush();
  // Drops the copies that flush() would hand to the driver.
  void forget() noexcept;

 private:
  Failure queue_dma(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                    std::uint64_t payload, const Pinning& pinning, std::size_t begin,
                    std::size_t end);
  Failure queue_staged(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                       std::uint64_t payload, const Pinning& pinning, std::size_t begin,
                       std::size_t end);
  // Launches the kernels for sections [begin, end), shape by shape. `packed`: the device's address
  // of the packed bytes of section `begin`.
  Failure launch(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                 DeviceAddress packed, std::size_t begin, std::size_t end);
  Failure launch(CopyKind kind, const BlockShape& shape, std::span<const std::uint32_t> blocks,
                 std::span<const LaunchSection> sections);
  Failure start(Function kernel, std::uint64_t tiles, void* parameter);
  // Rounds sections of one shape, as many at once as there are words for scales.
  Failure launch_rounding(CopyKind kind, const CopyPlan& plan,
                          std::span<const std::uint32_t> blocks,
                          std::span<const LaunchSection> sections);
  // The two launches that round these sections together.
  Failure launch_passes(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                        std::span<const LaunchSection> sections);
  Failure copy(CopyKind kind, DeviceAddress device, std::uint64_t host, std::uint64_t bytes);

  const std::shared_ptr<Device> device_;
  const unsigned max_thread_blocks_;
  Stream stream_ = nullptr;
  DeviceAddress staging_ = 0;
  std::uint64_t staging_bytes_ = 0;
  DeviceAddress words_ = 0;  // kFp8Words of 32 bits; 0 before the first plan with a rounding
  std::vector<DeviceAddress> targets_, sources_;  // the copies that flush() hands to the driver
  std::vector<std::size_t> sizes_;                // and the bytes of each
};

}  // namespace kvstrata::cuda
