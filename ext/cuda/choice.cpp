// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "choice.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace kvstrata::cuda {
namespace {

// If dma has at least this share of the fastest way's speed, dma is chosen: it leaves all
// multiprocessors to the model. A forward pass that waits for its loads took 4 ms longer with dma,
// 17 ms with kernels that alone were a tenth faster.
constexpr double kAsFast = 0.6;

// The most device memory that a measurement uses, and the least bytes that it moves in each
// direction.
constexpr std::uint64_t kScratchBytes = 64 << 20;
constexpr std::uint64_t kMeasuredBytes = 64 << 20;

// How often that is done; the fastest counts, since clocks and link wake up slowly.
constexpr int kRepeats = 3;

// Strides and areas keep their alignment modulo this.
constexpr std::uint64_t kAlignment = 4096;

// Owns the memory of a measurement.
struct Scratch {
  const Driver& driver;
  DeviceAddress device = 0;
  void* host = nullptr;

  ~Scratch() {
    if (device != 0) static_cast<void>(driver.memory_free(device));
    if (host != nullptr) static_cast<void>(driver.host_free(host));
  }
};

// The same number of block numbers in a smaller range, which starts at 0: neighbours stay
// neighbours, and skipped blocks stay skipped. `*used` is the end of the range.
std::vector<std::uint32_t> like(std::span<const std::uint32_t> blocks, std::uint32_t* used) {
  std::vector<std::uint32_t> known(blocks.begin(), blocks.end());
  std::erase(known, kSkipBlock);
  std::ranges::sort(known);
  known.erase(std::unique(known.begin(), known.end()), known.end());
  std::vector<std::uint32_t> mine;
  mine.reserve(blocks.size());
  std::vector<std::uint32_t> place(known.size());
  for (std::size_t i = 1; i < known.size(); ++i) {
    place[i] = place[i - 1] + (known[i] == known[i - 1] + 1 ? 1 : 2);
  }
  for (const std::uint32_t block : blocks) {
    const auto found = std::ranges::lower_bound(known, block);
    mine.push_back(block == kSkipBlock ? kSkipBlock
                                       : place[static_cast<std::size_t>(found - known.begin())]);
  }
  *used = place.empty() ? 1 : place.back() + 1;
  return mine;
}

// The same shape for a cache of `used` blocks. A dimension that leads past the next blocks, such as
// that of K and V in two planes, has a stride that grows with the cache; here it is as short as it
// can be, with the same alignment.
Status brought_near(const BlockShape& shape, std::uint64_t block_stride, std::uint32_t used,
                    BlockShape* out) {
  std::vector<CopyDim> dims;
  std::uint64_t inner = shape.run_bytes();
  for (auto dim = shape.dims().rbegin(); dim != shape.dims().rend(); ++dim) {
    CopyDim near = *dim;
    if (near.stride > block_stride) {
      const std::uint64_t cache = (used - 1) * block_stride + inner;
      const std::uint64_t least =
          (cache + kAlignment - 1) / kAlignment * kAlignment + near.stride % kAlignment;
      near.stride = std::min(near.stride, least);
    }
    inner += (near.count - 1) * near.stride;
    dims.insert(dims.begin(), near);
  }
  return BlockShape::create(dims, shape.run_bytes(), out);
}

}  // namespace

Failure first_choice(const Device& device, const EngineOptions& options, Choice* out) {
  const std::string& no_kernels = device.no_kernels();
  if (options.rounds && !options.choose && options.way == Way::kDma) {
    return Failure{-1, "", "engine: 'dma' cannot round KV; use 'kernel', 'staged' or 'auto'"};
  }
  if (options.rounds && !no_kernels.empty()) {
    return Failure{-1, "", "kernels: needed to round KV, and " + no_kernels};
  }
  *out = Choice{.way = options.way, .reason = "configured"};
  if (options.choose) {
    out->reason = "not measured yet: ";
    if (options.rounds) {
      out->way = Way::kKernel;
      out->reason += "only the kernels can round";
    } else if (device.driver().copy_batch == nullptr && no_kernels.empty()) {
      out->way = Way::kKernel;
      out->reason += "the driver has no batched copies (CUDA 12.8)";
    } else {
      out->way = Way::kDma;
      out->reason += "the device's copy engines leave all multiprocessors to the model";
    }
  } else if (out->way != Way::kDma && !no_kernels.empty()) {
    out->reason = std::string("not ") + kWayNames[static_cast<int>(out->way)] + ": " + no_kernels;
    out->way = Way::kDma;
  }
  return Failure{};
}

Failure measure(const std::shared_ptr<Device>& device, const CopyPlan& plan,
                std::span<const std::uint32_t> blocks, std::uint64_t host, std::uint64_t host_bytes,
                const PinnedMemory& pinned, const EngineOptions& options, Measured* out) {
  const Driver& driver = device->driver();
  const CurrentContext current(*device);
  if (Failure failure = current.failure()) return failure;
  std::uint64_t payload = 0;
  if (const Status status = plan.payload_bytes(blocks.size(), &payload); !status.ok()) {
    return Failure{-1, "", status.message()};
  }
  std::uint32_t used = 1;
  const std::vector<std::uint32_t> mine = like(blocks, &used);

  // A plan of the same blocks on memory of our own. Sections share areas if the memory is too small
  // for all.
  std::vector<BlockShape> shapes;
  std::vector<std::uint64_t> strides;  // by shape, between blocks
  std::uint64_t area = 0;
  for (std::uint32_t index = 0; index < plan.shapes().size(); ++index) {
    std::uint64_t stride = 0;
    for (const CopySection& section : plan.sections()) {
      if (section.shape == index) stride = std::max(stride, section.block_stride);
    }
    BlockShape near;
    if (const Status status = brought_near(plan.shapes()[index], stride, used, &near);
        !status.ok()) {
      return Failure{-1, "", status.message()};
    }
    area = std::max(area, (used - 1) * stride + near.span_bytes());
    shapes.push_back(near);
    strides.push_back(stride);
  }
  area = (area + kAlignment - 1) / kAlignment * kAlignment;
  if (area > kScratchBytes) {
    return Failure{-1, "", "blocks: too far apart in memory to be measured in 64 MiB"};
  }
  const std::size_t areas = std::min<std::size_t>(kScratchBytes / area, plan.section_count());
  Scratch scratch{driver};
  if (Failure failure =
          Device::check("cuMemAlloc", driver.memory_allocate(&scratch.device, areas * area))) {
    return failure;
  }
  std::vector<CopySection> sections;
  for (std::size_t s = 0; s < plan.section_count(); ++s) {
    const std::uint32_t shape = plan.sections()[s].shape;
    sections.push_back({scratch.device + s % areas * area, strides[shape], shape});
  }
  std::shared_ptr<const CopyPlan> alike;
  if (const Status status = CopyPlan::create(std::move(sections), used, std::move(shapes), &alike);
      !status.ok()) {
    return Failure{-1, "", status.message()};
  }
  if (plan.rounding()) {
    if (const Status status = CopyPlan::rounded(*alike, *plan.rounding(), &alike); !status.ok()) {
      return Failure{-1, "", status.message()};
    }
  }
  Pinning pinning;
  if (host_bytes == 0) {
    if (Failure failure =
            Device::check("cuMemHostAlloc", driver.host_allocate(&scratch.host, payload, 0))) {
      return failure;
    }
    host = reinterpret_cast<std::uint64_t>(scratch.host);
    pinning = Pinning{.whole = true, .mapped = true, .device_address = host, .borders = {}};
  } else if (host_bytes < payload) {
    return Failure{-1, "",
                   "length: " + std::to_string(host_bytes) + " bytes, a record's payload has " +
                       std::to_string(payload)};
  } else {
    pinning = pinned.find(host, payload);
  }

  Mover mover(device, options.max_sms);
  if (Failure failure = mover.open(true)) return failure;
  for (const Way way : {Way::kDma, Way::kKernel, Way::kStaged}) {
    const auto index = static_cast<std::size_t>(way);
    if (way == Way::kDma && plan.rounding()) {
      out->why_not[index] = "it cannot round";
      continue;
    }
    if (way != Way::kDma && !device->no_kernels().empty()) {
      out->why_not[index] = device->no_kernels();
      continue;
    }
    if (way == Way::kKernel && !pinning.mapped) {
      out->why_not[index] = "the host memory is not registered";
      continue;
    }
    if (way == Way::kStaged) {
      if (Failure failure = mover.reserve(options.staging_bytes)) {
        out->why_not[index] = driver.explain(failure);
        continue;
      }
      if (std::string why = mover.cannot_round(*alike, mine.size());
          alike->rounding() && !why.empty()) {
        out->why_not[index] = std::move(why);
        continue;
      }
    }
    const auto round = [&](std::uint64_t bytes) -> Failure {
      for (std::uint64_t done = 0; done < bytes; done += payload) {
        for (const CopyKind kind : {CopyKind::kGather, CopyKind::kScatter}) {
          if (Failure failure =
                  mover.queue(way, kind, *alike, mine, host, pinning, 0, alike->section_count())) {
            return failure;
          }
          if (Failure failure = mover.flush()) return failure;
        }
      }
      return Device::check("cuStreamSynchronize", driver.stream_synchronize(mover.stream()));
    };
    if (Failure failure = round(1)) return failure;  // warm
    const std::uint64_t rounds = (kMeasuredBytes + payload - 1) / payload;
    for (int i = 0; i < kRepeats; ++i) {
      const auto begun = std::chrono::steady_clock::now();
      if (Failure failure = round(kMeasuredBytes)) return failure;
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
      out->gb_per_s[index] = std::max(out->gb_per_s[index],
                                      2e-9 * static_cast<double>(rounds * payload) / took.count());
    }
  }
  return Failure{};
}

Failure best_choice(const Measured& measured, bool rounds, Choice* out) {
  const double* const speed = measured.gb_per_s;
  auto best = static_cast<std::size_t>(std::max_element(speed, speed + 3) - speed);
  if (speed[0] >= kAsFast * speed[best]) best = 0;
  if (rounds && best == 0) {
    return Failure{-1, "", "plan: no way that can round it could be measured"};
  }
  out->way = static_cast<Way>(best);
  out->reason = best == 0 ? "measured: fast enough, and it leaves all multiprocessors to the model"
                          : "measured: the fastest";
  for (std::size_t i = 0; i < 3; ++i) {
    out->gb_per_s[i] = speed[i];
    if (!measured.why_not[i].empty()) {
      out->reason += std::string("; not ") + kWayNames[i] + ": " + measured.why_not[i];
    }
  }
  return Failure{};
}

void choose_without_staging(const std::string& why, Choice* choice) {
  choice->way = choice->gb_per_s[1] > choice->gb_per_s[0] ? Way::kKernel : Way::kDma;
  choice->reason = "not staged: " + why;
}

}  // namespace kvstrata::cuda
