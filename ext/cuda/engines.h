// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The three ways to move a record's sections between a device's blocks and host memory. All only
// queue work on a stream and never wait for it.
//
//   dma     the copy engines of the device, run by run (contiguous runs joined); where the driver
//           has it, many runs in one call. Takes no multiprocessor. Any host memory: a copy from or
//           to memory that is not registered blocks the calling thread.
//   kernel  a few thread blocks read and write registered host memory straight.
//   staged  the kernel packs into (or unpacks from) a buffer on the device, one large DMA does the
//           rest. Any host memory.
//
// A record that the chosen way cannot take (memory that is not registered, a section larger than
// the staging buffer) goes by dma. A plan with a rounding goes by the kernels of fp8_kernel_body.h:
// straight where the way is kernel and the memory registered, else staged, never by dma.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvstrata/copy_engine.h"
#include "plan.h"

namespace kvstrata::cuda {

struct LaunchSection;

enum class Way : std::uint8_t { kDma = 0, kKernel = 1, kStaged = 2 };
inline constexpr const char* kWayNames[] = {"dma", "kernel", "staged"};

// A stream of our own with what copies on it need. Used by one thread at a time.
class Mover {
 public:
  Mover(std::shared_ptr<Device> device, unsigned max_thread_blocks) noexcept
      : device_(std::move(device)), max_thread_blocks_(max_thread_blocks) {}
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // REQUIRES, for all: the device's context is current.
  // `urgent`: the highest priority that the device has, else the lowest.
  Failure open(bool urgent);
  // Takes the staging buffer that kStaged needs, and every plan with a rounding.
  Failure reserve(std::uint64_t staging_bytes);
  void give_back() noexcept;

  [[nodiscard]] Stream stream() const noexcept { return stream_; }

  // Queues the copies of sections [begin, end) of one record whose payload lies at `payload` and is
  // registered as `pinning` says; flush() must follow, after one record or many, which may then
  // share a call of the driver. After a failure a part of them may be queued. REQUIRES of a plan
  // with a rounding: cannot_round() says nothing.
  Failure queue(Way way, CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                std::uint64_t payload, const Pinning& pinning, std::size_t begin, std::size_t end);
  // "", or why a plan with a rounding cannot go by the staging buffer.
  [[nodiscard]] std::string cannot_round(const CopyPlan& plan, std::size_t n_blocks) const;
  Failure flush();
  // Drops what flush() would hand to the driver.
  void forget() noexcept;

 private:
  Failure queue_dma(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                    std::uint64_t payload, const Pinning& pinning, std::size_t begin,
                    std::size_t end);
  Failure queue_staged(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                       std::uint64_t payload, const Pinning& pinning, std::size_t begin,
                       std::size_t end);
  // `packed` is the device's address of section `begin`. Takes a launch for each shape.
  Failure launch(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                 DeviceAddress packed, std::size_t begin, std::size_t end);
  Failure launch(CopyKind kind, const BlockShape& shape, std::span<const std::uint32_t> blocks,
                 std::span<const LaunchSection> sections);
  Failure start(Function kernel, std::uint64_t tiles, void* parameter);
  // The two launches of a rectangle of sections.
  Failure launch_rounding(CopyKind kind, const CopyPlan& plan,
                          std::span<const std::uint32_t> blocks,
                          std::span<const LaunchSection> sections);
  Failure launch_passes(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                        std::span<const LaunchSection> sections);
  Failure copy(CopyKind kind, DeviceAddress device, std::uint64_t host, std::uint64_t bytes);

  const std::shared_ptr<Device> device_;
  const unsigned max_thread_blocks_;
  Stream stream_ = nullptr;
  DeviceAddress staging_ = 0;
  std::uint64_t staging_bytes_ = 0;
  DeviceAddress words_ = 0;  // of kFp8Words, while plans with a rounding were queued
  std::vector<DeviceAddress> targets_, sources_;  // of a batch
  std::vector<std::size_t> sizes_;
};

}  // namespace kvstrata::cuda
