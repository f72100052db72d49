// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Gather and scatter: between the engine's paged blocks and the record of one chunk, checksum
// included.
//
// A plan describes the engine's memory once. It has sections (typically one a layer); each is a
// base address, a distance between blocks, and one of the plan's shapes of a block: up to three
// outer dimensions (count, stride), outermost first, around a contiguous run of bytes. What a
// section stores is, for each block in the order given, its runs in the order of the dimensions,
// packed: so the stored bytes do not depend on the engine's strides.
//
// The engine's memory and the extent are the caller's; both must stay mapped during a call. Plans
// are immutable and may be shared by threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvstrata/crc32c.h"
#include "kvstrata/fp8.h"
#include "kvstrata/record.h"
#include "kvstrata/status.h"

namespace kvstrata {

struct CopySection {
  std::uint64_t base;          // address of block 0
  std::uint64_t block_stride;  // bytes from one block to the next
  std::uint32_t shape = 0;     // index of a shape of the plan
};

struct CopyDim {
  std::uint64_t count;
  std::uint64_t stride;  // bytes
};

// How the bytes that a section stores of one block lie in the engine's memory.
class BlockShape {
 public:
  static constexpr std::size_t kMaxDims = 3;

  // kBadArgument names the argument: run_bytes of 0, more than kMaxDims dimensions, a count of 0, a
  // block beyond the address space or of 4 GiB.
  static Status create(std::span<const CopyDim> dims, std::uint64_t run_bytes,
                       BlockShape* out) noexcept;

  // What is contiguous is merged, and dimensions that are not used have the count 1.
  [[nodiscard]] std::span<const CopyDim, kMaxDims> dims() const noexcept { return dims_; }
  [[nodiscard]] std::uint64_t run_bytes() const noexcept { return run_bytes_; }
  [[nodiscard]] std::uint64_t block_bytes() const noexcept { return block_bytes_; }
  // From the first byte of a block to the end of the last one.
  [[nodiscard]] std::uint64_t span_bytes() const noexcept { return span_bytes_; }

  // Where each run of a block at `base` begins, in the order in which they are stored.
  template <typename Visit>
  void each_run(std::uint64_t base, Visit visit) const {
    for (std::uint64_t i = 0; i < dims_[0].count; ++i) {
      for (std::uint64_t j = 0; j < dims_[1].count; ++j) {
        const std::uint64_t row = base + i * dims_[0].stride + j * dims_[1].stride;
        for (std::uint64_t k = 0; k < dims_[2].count; ++k) {
          visit(row + k * dims_[2].stride);
        }
      }
    }
  }

 private:
  CopyDim dims_[kMaxDims] = {{1, 0}, {1, 0}, {1, 0}};  // outermost first, what can be merged merged
  std::uint64_t run_bytes_ = 0;
  std::uint64_t block_bytes_ = 0;
  std::uint64_t span_bytes_ = 0;
};

// In the block list of a scatter: this block's bytes are verified but written nowhere, because the
// engine has them already.
inline constexpr std::uint32_t kSkipBlock = UINT32_MAX;

// How sections are rounded on their way into a record: fp8_encode of the packed section, its scales
// first and then its codes. The shape is that of one block.
struct Rounding {
  Fp8Shape block;
  Fp8Source type = Fp8Source::kBfloat16;
};

class CopyPlan {
 public:
  // kBadArgument names the argument: no section, more than kMaxSections, a base of 0, a shape that
  // is not among the shapes, num_blocks of 0, a block beyond the address space.
  static Status create(std::vector<CopySection> sections, std::uint64_t num_blocks,
                       std::vector<BlockShape> shapes,
                       std::shared_ptr<const CopyPlan>* out) noexcept;

  // The same blocks for records whose sections are rounded; only an engine that can do that takes
  // such a plan, gather and scatter below cannot. kBadArgument, "rounding: ...": the plan has
  // several shapes, a block is no array of so many numbers of 16 bits, they do not lie at even
  // addresses.
  static Status rounded(const CopyPlan& plan, const Rounding& rounding,
                        std::shared_ptr<const CopyPlan>* out) noexcept;

  [[nodiscard]] std::size_t section_count() const noexcept { return sections_.size(); }
  [[nodiscard]] std::uint64_t num_blocks() const noexcept { return num_blocks_; }
  // The description itself, for engines of other kinds of memory. Valid as long as the plan.
  [[nodiscard]] std::span<const CopySection> sections() const noexcept { return sections_; }
  [[nodiscard]] const std::vector<BlockShape>& shapes() const noexcept { return shapes_; }
  [[nodiscard]] const BlockShape& shape_of(std::size_t section) const noexcept {
    return shapes_[sections_[section].shape];
  }

  [[nodiscard]] std::uint64_t largest_block_bytes() const noexcept { return largest_block_bytes_; }

  [[nodiscard]] const std::optional<Rounding>& rounding() const noexcept { return rounding_; }
  // Bytes of a section's scales, 0 where it is not rounded.
  [[nodiscard]] std::uint64_t scale_bytes() const noexcept {
    return rounding_ ? sizeof(float) * rounding_->block.scales() : 0;
  }

  // REQUIRES, for both: payload_bytes(n_blocks) is ok.
  // Bytes of a section of so many blocks in a record.
  [[nodiscard]] std::uint32_t section_bytes(std::size_t section,
                                            std::uint64_t n_blocks) const noexcept {
    return static_cast<std::uint32_t>(section_offset(section + 1, n_blocks) -
                                      section_offset(section, n_blocks));
  }
  // Where a section begins in such a payload; for section_count(), where the payload ends.
  [[nodiscard]] std::uint64_t section_offset(std::size_t section,
                                             std::uint64_t n_blocks) const noexcept {
    return section * scale_bytes() + n_blocks * bytes_before_[section] / (rounding_ ? 2 : 1);
  }

  // kBadArgument when n_blocks is 0 or a section would not fit its 32-bit length.
  Status payload_bytes(std::uint64_t n_blocks, std::uint64_t* out) const noexcept;
  Status record_bytes(std::uint64_t n_blocks, std::uint64_t* out) const noexcept;
  // kOutOfRange: detail is (block id, num_blocks, its index). Only a scatter may skip blocks.
  Status check_blocks(std::span<const std::uint32_t> blocks, bool may_skip) const noexcept;

  // Copies sections [begin, end) of the blocks into their place in the payload, and writes the CRC
  // of section s to crcs[s - begin]. Ends with the stores ordered. REQUIRES: nothing is rounded;
  // check_blocks(blocks) and payload_bytes(blocks.size()) are ok; the payload is large enough;
  // begin <= end <= section_count().
  void gather(std::span<const std::uint32_t> blocks, void* payload, std::size_t begin,
              std::size_t end, std::uint32_t* crcs) const noexcept;
  // The other direction; crcs receives what was read, for the caller to compare.
  void scatter(std::span<const std::uint32_t> blocks, const void* payload, std::size_t begin,
               std::size_t end, std::uint32_t* crcs) const noexcept;

 private:
  CopyPlan() = default;

  template <bool kGather>
  void copy(std::span<const std::uint32_t> blocks, std::uint64_t payload, std::size_t begin,
            std::size_t end, std::uint32_t* crcs) const noexcept;

  std::vector<CopySection> sections_;
  std::vector<BlockShape> shapes_;
  std::vector<std::uint64_t> bytes_before_;  // of one block, in the sections before each; the sum
  std::uint64_t num_blocks_ = 0;
  std::uint64_t largest_block_bytes_ = 0;
  std::optional<Rounding> rounding_;
};

// Gathers the blocks into a whole record: payload, CRCs and sealed header. While it runs the extent
// holds no valid record. kBadArgument / kOutOfRange: nothing was written.
Status gather_record(const CopyPlan& plan, std::span<const std::uint32_t> blocks, void* record,
                     std::uint64_t length, const RecordSpec& spec) noexcept;

// Checks the header against `expected_key` and the plan, then scatters the payload into the blocks
// and checks each section's CRC.
//   kBadArgument / kOutOfRange  of the arguments: no block was touched
//   kStale         sound headers, other key: likewise
//   kIncompatible  other format version, encoded, or another shape than the plan's: likewise
//   kBusy          CRCs pending: likewise
//   kCorrupt       detail(2) = -1: the headers, no block was touched; otherwise the first bad
//   section:
//                  the contents of the blocks are undefined and must not be used
Status scatter_record(const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                      const void* record, std::uint64_t length,
                      const Digest& expected_key) noexcept;

// The part of scatter_record that comes before the copy. On success the CRCs of sections
// [begin, end) stand in expected_crcs. REQUIRES: as for CopyPlan::scatter; `length` fits the plan's
// record.
Status check_record_for_scatter(const CopyPlan& plan, std::uint64_t n_blocks, const void* record,
                                std::uint64_t length, const Digest& expected_key, std::size_t begin,
                                std::size_t end, std::uint32_t* expected_crcs) noexcept;

}  // namespace kvstrata
