// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "mover.h"

#include <algorithm>
#include <bit>

#include "fp8_kernel_body.h"

namespace kvstrata::cuda {
namespace {

// The most copies that one call hands to the driver.
constexpr std::size_t kBatchCopies = 4096;

// The most scales of the sections that are rounded together.
constexpr std::uint64_t kFp8Words = 1 << 18;

// The widest vector of which all addresses and distances of the launch are multiples.
unsigned vector_bytes(const BlockShape& shape, const Launch& launch) {
  std::uint64_t bits = 16 | shape.run_bytes();
  for (const CopyDim& dim : shape.dims()) {
    if (dim.count > 1) bits |= dim.stride;
  }
  for (std::uint32_t i = 0; i < launch.section_count; ++i) {
    const LaunchSection& section = launch.sections[i];
    bits |= section.base | section.block_stride | section.packed;
  }
  return 1U << std::countr_zero(bits);
}

}  // namespace

static_assert(kSkippedBlock == kSkipBlock);

Mover::~Mover() {
  if (!device_->owned()) return;
  const CurrentContext current(*device_);
  if (staging_bytes_ != 0) static_cast<void>(device_->driver().memory_free(staging_));
  if (words_ != 0) static_cast<void>(device_->driver().memory_free(words_));
  if (stream_ != nullptr) static_cast<void>(device_->driver().stream_destroy(stream_));
}

Failure Mover::open(bool urgent) {
  const Driver& driver = device_->driver();
  int least = 0;
  int greatest = 0;
  if (Failure failure = Device::check("cuCtxGetStreamPriorityRange",
                                      driver.stream_priorities(&least, &greatest))) {
    return failure;
  }
  return Device::check("cuStreamCreate", driver.stream_create(&stream_, kStreamNonBlocking,
                                                              urgent ? greatest : least));
}

Failure Mover::reserve(std::uint64_t staging_bytes) {
  Failure failure =
      Device::check("cuMemAlloc", device_->driver().memory_allocate(&staging_, staging_bytes));
  staging_bytes_ = failure ? 0 : staging_bytes;
  return failure;
}

Failure Mover::queue(Way way, CopyKind kind, const CopyPlan& plan,
                     std::span<const std::uint32_t> blocks, std::uint64_t payload,
                     const Pinning& pinning, std::size_t begin, std::size_t end) {
  if (way == Way::kKernel && pinning.mapped) {
    return launch(kind, plan, blocks,
                  pinning.device_address + plan.section_offset(begin, blocks.size()), begin, end);
  }
  if (plan.rounding()) {
    return queue_staged(kind, plan, blocks, payload, pinning, begin, end);
  }
  return queue_dma(kind, plan, blocks, payload, pinning, begin, end);
}

bool Mover::can_round(const CopyPlan& plan, std::size_t n_blocks) const noexcept {
  return plan.scale_bytes() <= sizeof(std::uint32_t) * kFp8Words &&
         plan.section_bytes(0, n_blocks) <= staging_bytes_;
}

Failure Mover::copy(CopyKind kind, DeviceAddress device, std::uint64_t host, std::uint64_t bytes) {
  const Driver& driver = device_->driver();
  void* const there = reinterpret_cast<void*>(host);
  return kind == CopyKind::kGather
             ? Device::check("cuMemcpyDtoHAsync",
                             driver.copy_to_host(there, device, bytes, stream_))
             : Device::check("cuMemcpyHtoDAsync",
                             driver.copy_to_device(device, there, bytes, stream_));
}

Failure Mover::queue_dma(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                         std::uint64_t payload, const Pinning& pinning, std::size_t begin,
                         std::size_t end) {
  const bool batched = device_->driver().copy_batch != nullptr && pinning.whole;
  const bool gather = kind == CopyKind::kGather;
  Failure failure;
  // The run that has not been sent, because the next run may continue it.
  DeviceAddress device = 0;
  std::uint64_t host = 0;
  std::uint64_t bytes = 0;
  const auto send = [&] {
    auto border = std::ranges::upper_bound(pinning.borders, host);
    while (bytes != 0 && !failure) {
      const std::uint64_t piece =
          border == pinning.borders.end() ? bytes : std::min(bytes, *border - host);
      if (batched) {
        targets_.push_back(gather ? host : device);
        sources_.push_back(gather ? device : host);
        sizes_.push_back(piece);
        if (sizes_.size() == kBatchCopies) failure = flush();
      } else {
        failure = copy(kind, device, host, piece);
      }
      device += piece;
      host += piece;
      bytes -= piece;
      if (border != pinning.borders.end()) ++border;
    }
  };
  std::uint64_t packed = payload + plan.section_offset(begin, blocks.size());
  for (std::size_t s = begin; s < end && !failure; ++s) {
    const CopySection& section = plan.sections()[s];
    const BlockShape& shape = plan.shape_of(s);
    for (const std::uint32_t block : blocks) {
      if (block == kSkipBlock) {
        packed += shape.block_bytes();
        continue;
      }
      shape.each_run(section.base + block * section.block_stride, [&](std::uint64_t run) {
        if (bytes == 0 || run != device + bytes || packed != host + bytes) {
          send();
          device = run;
          host = packed;
          bytes = 0;
        }
        bytes += shape.run_bytes();
        packed += shape.run_bytes();
      });
    }
  }
  send();
  return failure;
}

Failure Mover::flush() {
  if (sizes_.empty()) return Failure{};
  CopyAttributes attributes{kSourceInStreamOrder, {0, 0}, {0, 0}, kPreferOverlapWithCompute};
  std::size_t first = 0;
  std::size_t failed = 0;
  Failure failure = Device::check(
      "cuMemcpyBatchAsync",
      device_->driver().copy_batch(targets_.data(), sources_.data(), sizes_.data(), sizes_.size(),
                                   &attributes, &first, 1, &failed, stream_));
  forget();
  return failure;
}

void Mover::forget() noexcept {
  targets_.clear();
  sources_.clear();
  sizes_.clear();
}

Failure Mover::queue_staged(CopyKind kind, const CopyPlan& plan,
                            std::span<const std::uint32_t> blocks, std::uint64_t payload,
                            const Pinning& pinning, std::size_t begin, std::size_t end) {
  const auto transfer = [&](std::size_t first, std::size_t last) -> Failure {
    std::uint64_t host = payload + plan.section_offset(first, blocks.size());
    const std::uint64_t stop = payload + plan.section_offset(last, blocks.size());
    DeviceAddress device = staging_;
    auto border = std::ranges::upper_bound(pinning.borders, host);
    while (host != stop) {
      const std::uint64_t next = border == pinning.borders.end() ? stop : std::min(stop, *border++);
      if (Failure failure = copy(kind, device, host, next - host)) return failure;
      device += next - host;
      host = next;
    }
    return Failure{};
  };
  // The stream runs one round after the other, so the buffer is free again when the next round
  // begins.
  for (std::size_t s = begin, last = begin; s < end; s = last) {
    const std::uint64_t limit = plan.section_offset(s, blocks.size()) + staging_bytes_;
    while (last < end && plan.section_offset(last + 1, blocks.size()) <= limit)
      ++last;
    if (kind == CopyKind::kGather) {
      if (Failure failure = launch(kind, plan, blocks, staging_, s, last)) return failure;
      if (Failure failure = transfer(s, last)) return failure;
    } else {
      if (Failure failure = transfer(s, last)) return failure;
      if (Failure failure = launch(kind, plan, blocks, staging_, s, last)) return failure;
    }
  }
  return Failure{};
}

Failure Mover::launch(CopyKind kind, const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                      DeviceAddress packed, std::size_t begin, std::size_t end) {
  const std::uint64_t before = plan.section_offset(begin, blocks.size());
  std::vector<LaunchSection> sections;
  for (std::uint32_t index = 0; index < plan.shapes().size(); ++index) {
    sections.clear();
    for (std::size_t s = begin; s < end; ++s) {
      const CopySection& section = plan.sections()[s];
      if (section.shape != index) continue;
      sections.push_back({section.base, section.block_stride,
                          packed + plan.section_offset(s, blocks.size()) - before});
    }
    Failure failure = plan.rounding() ? launch_rounding(kind, plan, blocks, sections)
                                      : launch(kind, plan.shapes()[index], blocks, sections);
    if (failure) return failure;
  }
  return Failure{};
}

namespace {

// A launch with the fields that depend only on the shape; the caller sets the others.
Launch launch_of(const BlockShape& shape) {
  Launch launch{};
  for (int i = 0; i < 2; ++i) {
    const CopyDim& dim = shape.dims()[static_cast<std::size_t>(i) + 1];
    launch.dims[i] = {dim.stride, static_cast<std::uint32_t>(dim.count), 0};
  }
  launch.outer_stride = shape.dims()[0].stride;
  return launch;
}

// Sets the blocks of the launch: as many as it can take, from blocks[b] on.
void take_blocks(Launch& launch, std::span<const std::uint32_t> blocks, std::size_t b) {
  constexpr std::uint64_t kTile = kThreads * kUnroll;
  launch.block_count =
      static_cast<std::uint32_t>(std::min<std::size_t>(kLaunchBlocks, blocks.size() - b));
  std::copy_n(blocks.begin() + static_cast<std::ptrdiff_t>(b), launch.block_count, launch.blocks);
  const std::uint64_t vectors = std::uint64_t{launch.block_count} * launch.block_vectors;
  launch.tiles_per_section = static_cast<std::uint32_t>((vectors + kTile - 1) / kTile);
}

}  // namespace

Failure Mover::start(Function kernel, std::uint64_t tiles, void* parameter) {
  void* parameters[] = {parameter};
  const Result error = device_->driver().launch(
      kernel, static_cast<unsigned>(std::min<std::uint64_t>(tiles, max_thread_blocks_)), 1, 1,
      kThreads, 1, 1, 0, stream_, parameters, nullptr);
  return Device::check("cuLaunchKernel", error);
}

Failure Mover::launch(CopyKind kind, const BlockShape& shape, std::span<const std::uint32_t> blocks,
                      std::span<const LaunchSection> sections) {
  Launch launch = launch_of(shape);
  launch.gather = kind == CopyKind::kGather ? 1 : 0;
  for (; !sections.empty(); sections = sections.subspan(launch.section_count)) {
    launch.section_count =
        static_cast<std::uint32_t>(std::min<std::size_t>(kLaunchSections, sections.size()));
    std::copy_n(sections.begin(), launch.section_count, launch.sections);
    const unsigned vector = vector_bytes(shape, launch);
    launch.block_vectors = static_cast<std::uint32_t>(shape.block_bytes() / vector);
    launch.run_vectors = static_cast<std::uint32_t>(shape.run_bytes() / vector);
    for (std::size_t b = 0; b < blocks.size(); b += launch.block_count) {
      take_blocks(launch, blocks, b);
      const std::uint64_t tiles = std::uint64_t{launch.tiles_per_section} * launch.section_count;
      if (Failure failure = start(device_->kernel(vector), tiles, &launch)) return failure;
      for (std::uint32_t i = 0; i < launch.section_count; ++i) {
        launch.sections[i].packed += launch.block_count * shape.block_bytes();
      }
    }
  }
  return Failure{};
}

Failure Mover::launch_rounding(CopyKind kind, const CopyPlan& plan,
                               std::span<const std::uint32_t> blocks,
                               std::span<const LaunchSection> sections) {
  if (words_ == 0) {
    if (Failure failure = Device::check(
            "cuMemAlloc",
            device_->driver().memory_allocate(&words_, sizeof(std::uint32_t) * kFp8Words))) {
      words_ = 0;
      return failure;
    }
  }
  const std::size_t at_once =
      std::min<std::size_t>(kLaunchSections, kFp8Words / plan.rounding()->block.scales());
  // The stream runs one group of sections after the other, so the words are free again when the
  // next group begins.
  while (!sections.empty()) {
    const std::size_t count = std::min(at_once, sections.size());
    if (Failure failure = launch_passes(kind, plan, blocks, sections.first(count))) return failure;
    sections = sections.subspan(count);
  }
  return Failure{};
}

Failure Mover::launch_passes(CopyKind kind, const CopyPlan& plan,
                             std::span<const std::uint32_t> blocks,
                             std::span<const LaunchSection> sections) {
  const BlockShape& shape = plan.shapes().front();
  const Fp8Shape& array = plan.rounding()->block;
  Fp8Launch launch{};
  launch.copy = launch_of(shape);
  launch.copy.section_count = static_cast<std::uint32_t>(sections.size());
  launch.words = words_;
  launch.scales_per_section = static_cast<std::uint32_t>(array.scales());
  launch.heads = array.heads;
  launch.type = static_cast<std::uint32_t>(plan.rounding()->type);
  // The numbers of a vector must be contiguous in the blocks and in the record and share a scale.
  const std::uint32_t head = array.dim * (array.heads == 1 ? array.tokens : 1);
  std::uint64_t bits = 8 | head | shape.run_bytes() / 2;
  for (const CopyDim& dim : shape.dims()) {
    if (dim.count > 1) bits |= dim.stride / 2;
  }
  for (std::uint32_t i = 0; i < launch.copy.section_count; ++i) {
    LaunchSection& section = launch.copy.sections[i] = sections[i];
    section.packed += plan.scale_bytes();
    bits |= section.base / 2 | section.block_stride / 2 | section.packed;
  }
  const auto width = static_cast<unsigned>(std::countr_zero(bits));
  const auto block_numbers = static_cast<std::uint32_t>(array.numbers());
  launch.copy.block_vectors = block_numbers >> width;
  launch.copy.run_vectors = static_cast<std::uint32_t>(shape.run_bytes() / 2) >> width;
  launch.head_vectors = head >> width;
  launch.group_vectors = (array.tokens * array.heads * array.dim) >> width;

  const auto blockwise = [&](Fp8Pass pass) -> Failure {
    Fp8Launch piece = launch;
    piece.before_codes = plan.scale_bytes();
    piece.writes_scales = pass == Fp8Pass::kEncode ? 1 : 0;
    const Function kernel = device_->fp8_kernel(4 * static_cast<unsigned>(pass) + width);
    for (std::size_t b = 0; b < blocks.size(); b += piece.copy.block_count) {
      take_blocks(piece.copy, blocks, b);
      const std::uint64_t tiles =
          std::uint64_t{piece.copy.tiles_per_section} * piece.copy.section_count;
      if (Failure failure = start(kernel, tiles, &piece)) return failure;
      piece.writes_scales = 0;
      for (std::uint32_t i = 0; i < piece.copy.section_count; ++i)
        piece.copy.sections[i].packed += std::uint64_t{piece.copy.block_count} * block_numbers;
    }
    return Failure{};
  };
  if (kind == CopyKind::kGather) {
    if (Failure failure = Device::check(
            "cuMemsetD32Async",
            device_->driver().memory_fill(words_, 0, sections.size() * array.scales(), stream_))) {
      return failure;
    }
    if (Failure failure = blockwise(Fp8Pass::kLargest)) return failure;
    return blockwise(Fp8Pass::kEncode);
  }
  launch.before_codes = plan.scale_bytes();
  const std::uint64_t tiles = (sections.size() * array.scales() + kThreads - 1) / kThreads;
  if (Failure failure = start(device_->fp8_kernel(kFp8Kernels - 1), tiles, &launch)) return failure;
  return blockwise(Fp8Pass::kDecode);
}

}  // namespace kvstrata::cuda
