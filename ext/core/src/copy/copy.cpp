// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/copy.h"

#include <algorithm>
#include <array>
#include <utility>

namespace kvstrata {
namespace {

// Runs per call of the kernel, which reads ahead within one call only.
constexpr std::size_t kRunBatch = 128;

bool add(std::uint64_t a, std::uint64_t b, std::uint64_t* out) noexcept {
  return !__builtin_add_overflow(a, b, out);
}

bool multiply(std::uint64_t a, std::uint64_t b, std::uint64_t* out) noexcept {
  return !__builtin_mul_overflow(a, b, out);
}

Status bad(const char* message, std::uint64_t value, std::uint64_t limit = 0,
           std::uint64_t index = 0) noexcept {
  return Status(StatusCode::kBadArgument, message, static_cast<std::int64_t>(value),
                static_cast<std::int64_t>(limit), static_cast<std::int64_t>(index));
}

// On every supported platform, user-space addresses are below this limit.
constexpr std::uint64_t kAddressLimit = std::uint64_t{1} << 62;

}  // namespace

Status BlockShape::create(std::span<const CopyDim> dims, std::uint64_t run_bytes,
                          BlockShape* out) noexcept {
  if (run_bytes == 0) {
    return bad("run_bytes: must be positive", run_bytes);
  }
  if (dims.size() > kMaxDims) {
    return bad("dims: at most 3 outer dimensions", dims.size(), kMaxDims);
  }
  BlockShape shape;
  shape.span_bytes_ = run_bytes;
  std::uint64_t runs = 1;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    std::uint64_t reach = 0;
    if (dims[i].count == 0) {
      return bad("dims: a count must be positive", 0, 1, i);
    }
    if (!multiply(dims[i].count - 1, dims[i].stride, &reach) ||
        !add(shape.span_bytes_, reach, &shape.span_bytes_) ||
        !multiply(runs, dims[i].count, &runs)) {
      return bad("dims: the block leaves the address space", dims[i].stride, kAddressLimit, i);
    }
  }
  if (!multiply(runs, run_bytes, &shape.block_bytes_) || shape.block_bytes_ > UINT32_MAX) {
    return bad("run_bytes: a block holds at most 4 GiB - 1 per section", run_bytes, UINT32_MAX);
  }
  // From the innermost dimension outwards: a contiguous dimension becomes part of the run, a
  // dimension of one element is dropped, and two dimensions are merged if one can describe both.
  std::array<CopyDim, kMaxDims> kept;
  std::size_t n = 0;
  for (std::size_t i = dims.size(); i-- > 0;) {
    const CopyDim& d = dims[i];
    if (d.count == 1) {
      continue;
    }
    if (n == 0 && d.stride == run_bytes) {
      run_bytes *= d.count;
    } else if (n > 0 && d.stride == kept[n - 1].count * kept[n - 1].stride) {
      kept[n - 1].count *= d.count;
    } else {
      kept[n++] = d;
    }
  }
  for (std::size_t i = 0; i < n; ++i) {
    shape.dims_[kMaxDims - 1 - i] = kept[i];
  }
  shape.run_bytes_ = run_bytes;
  *out = shape;
  return Status();
}

Status CopyPlan::create(std::vector<CopySection> sections, std::uint64_t num_blocks,
                        std::vector<BlockShape> shapes,
                        std::shared_ptr<const CopyPlan>* out) noexcept {
  if (sections.empty() || sections.size() > kMaxSections) {
    return bad("section_bases: must have between 1 and 65536 entries", sections.size(),
               kMaxSections);
  }
  if (num_blocks == 0 || num_blocks > UINT32_MAX) {
    return bad("num_blocks: must be between 1 and 2^32 - 1", num_blocks, UINT32_MAX);
  }
  for (std::size_t i = 0; i < sections.size(); ++i) {
    std::uint64_t end = 0;
    if (sections[i].base == 0) {
      return bad("section_bases: an address may not be 0", 0, 0, i);
    }
    if (sections[i].shape >= shapes.size()) {
      return bad("section_shapes: not one of the shapes", sections[i].shape, shapes.size(), i);
    }
    if (!multiply(num_blocks - 1, sections[i].block_stride, &end) ||
        !add(end, shapes[sections[i].shape].span_bytes(), &end) ||
        !add(end, sections[i].base, &end) || end > kAddressLimit) {
      return bad("block_stride: the last block leaves the address space", sections[i].block_stride,
                 kAddressLimit, i);
    }
  }
  const std::shared_ptr<CopyPlan> plan(new CopyPlan);
  plan->bytes_before_.reserve(sections.size() + 1);
  std::uint64_t before = 0;  // at most 65536 times 4 GiB
  for (const CopySection& section : sections) {
    const std::uint64_t block_bytes = shapes[section.shape].block_bytes();
    plan->bytes_before_.push_back(before);
    before += block_bytes;
    plan->largest_block_bytes_ = std::max(plan->largest_block_bytes_, block_bytes);
  }
  plan->bytes_before_.push_back(before);
  plan->sections_ = std::move(sections);
  plan->shapes_ = std::move(shapes);
  plan->num_blocks_ = num_blocks;
  *out = plan;
  return Status();
}

Status CopyPlan::rounded(const CopyPlan& plan, const Rounding& rounding,
                         std::shared_ptr<const CopyPlan>* out) noexcept {
  const BlockShape& shape = plan.shapes_.front();
  if (plan.shapes_.size() != 1) {
    return bad("rounding: the sections have blocks of several shapes", plan.shapes_.size(), 1);
  }
  KVSTRATA_RETURN_IF_ERROR(rounding.block.check());
  if (rounding.block.numbers() * 2 != shape.block_bytes()) {
    return bad("rounding: a block's size differs from that of the shape", shape.block_bytes(),
               rounding.block.numbers() * 2);
  }
  std::uint64_t bits = shape.run_bytes();
  for (const CopyDim& dim : shape.dims())
    bits |= dim.count > 1 ? dim.stride : 0;
  for (const CopySection& section : plan.sections_)
    bits |= section.base | section.block_stride;
  if (bits % 2 != 0) {
    return bad("rounding: the numbers of 16 bits do not lie at even addresses", bits % 2, 0);
  }
  std::shared_ptr<CopyPlan> made(new CopyPlan(plan));
  made->rounding_ = rounding;
  *out = std::move(made);
  return Status();
}

Status CopyPlan::payload_bytes(std::uint64_t n_blocks, std::uint64_t* out) const noexcept {
  if (n_blocks == 0) {
    return bad("block_ids: must not be empty", 0, 1);
  }
  if (n_blocks > UINT32_MAX / largest_block_bytes_) {
    return bad("block_ids: a section holds at most 4 GiB - 1; use smaller chunks", n_blocks,
               UINT32_MAX / largest_block_bytes_);
  }
  *out = section_offset(sections_.size(), n_blocks);
  return Status();
}

Status CopyPlan::record_bytes(std::uint64_t n_blocks, std::uint64_t* out) const noexcept {
  std::uint64_t payload = 0;
  KVSTRATA_RETURN_IF_ERROR(payload_bytes(n_blocks, &payload));
  return kvstrata::record_bytes(sections_.size(), payload, out);
}

Status CopyPlan::check_blocks(std::span<const std::uint32_t> blocks, bool may_skip) const noexcept {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i] >= num_blocks_ && !(may_skip && blocks[i] == kSkipBlock)) {
      return Status(StatusCode::kOutOfRange, "block_ids: not a block of the plan", blocks[i],
                    static_cast<std::int64_t>(num_blocks_), static_cast<std::int64_t>(i));
    }
  }
  return Status();
}

template <bool kGather>
void CopyPlan::copy(std::span<const std::uint32_t> blocks, std::uint64_t payload, std::size_t begin,
                    std::size_t end, std::uint32_t* crcs) const noexcept {
  const std::uint64_t first = section_offset(begin, blocks.size());
  std::array<CopyRun, kRunBatch> runs;
  std::uint64_t packed = payload + first;
  for (std::size_t s = begin; s < end; ++s) {
    const CopySection& section = sections_[s];
    const BlockShape& shape = shapes_[section.shape];
    const std::uint64_t run_bytes = shape.run_bytes();
    const std::uint64_t block_bytes = shape.block_bytes();
    std::uint32_t crc = 0;
    std::size_t filled = 0;
    const auto push = [&](std::uint64_t engine) {
      auto* const here = reinterpret_cast<void*>(engine);
      auto* const there = reinterpret_cast<void*>(packed);
      runs[filled++] = kGather ? CopyRun{there, here} : CopyRun{here, there};
      packed += run_bytes;
      if (filled == kRunBatch) {
        crc = copy_crc32c_runs(runs.data(), filled, run_bytes, crc);
        filled = 0;
      }
    };
    for (const std::uint32_t block : blocks) {
      if (!kGather && block == kSkipBlock) {
        crc = copy_crc32c_runs(runs.data(), filled, run_bytes, crc);
        filled = 0;
        crc = crc32c(reinterpret_cast<const void*>(packed), block_bytes, crc);
        packed += block_bytes;
        continue;
      }
      const std::uint64_t base = section.base + block * section.block_stride;
      if (block_bytes == run_bytes) {
        push(base);
      } else {
        shape.each_run(base, push);
      }
    }
    crcs[s - begin] = copy_crc32c_runs(runs.data(), filled, run_bytes, crc);
  }
  copy_fence();
}

void CopyPlan::gather(std::span<const std::uint32_t> blocks, void* payload, std::size_t begin,
                      std::size_t end, std::uint32_t* crcs) const noexcept {
  copy<true>(blocks, reinterpret_cast<std::uint64_t>(payload), begin, end, crcs);
}

void CopyPlan::scatter(std::span<const std::uint32_t> blocks, const void* payload,
                       std::size_t begin, std::size_t end, std::uint32_t* crcs) const noexcept {
  copy<false>(blocks, reinterpret_cast<std::uint64_t>(payload), begin, end, crcs);
}

Status check_record_for_scatter(const CopyPlan& plan, std::uint64_t n_blocks, const void* record,
                                std::uint64_t length, const RecordSpec& wanted, std::size_t begin,
                                std::size_t end, std::uint32_t* expected_crcs) noexcept {
  constexpr std::size_t kUsual = 256;  // enough for the sections of all but the largest models
  const std::size_t count = plan.section_count();
  std::array<Section, kUsual> few;
  std::vector<Section> many(count > kUsual ? count : 0);
  Section* const sections = many.empty() ? few.data() : many.data();
  RecordHeader header;
  const Status read = read_record_header(record, length, &header, sections, count);
  if (read.code() == StatusCode::kOutOfRange) {  // the extent is long enough for the plan's record
    return Status(StatusCode::kCorrupt, "header: describes a record longer than the extent",
                  read.detail(0), read.detail(1), -1);
  }
  KVSTRATA_RETURN_IF_ERROR(read);
  KVSTRATA_RETURN_IF_ERROR(check_is_wanted(header, &wanted.key, &wanted.identity));
  if (header.section_count != count) {
    return Status(StatusCode::kIncompatible, "section_count: differs from the plan's",
                  header.section_count, static_cast<std::int64_t>(count), -1);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t section_bytes = plan.section_bytes(i, n_blocks);
    if (sections[i].length != section_bytes) {
      return Status(StatusCode::kIncompatible, "sections: a length differs from the plan's",
                    sections[i].length, section_bytes, static_cast<std::int64_t>(i));
    }
  }
  for (std::size_t i = begin; i < end; ++i) {
    expected_crcs[i - begin] = sections[i].crc;
  }
  return Status();
}

}  // namespace kvstrata
