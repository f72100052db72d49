// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Gather and scatter: copies, with checksums, between the paged blocks of a serving engine and the
// record of one chunk.
//
// A plan describes the engine's memory once. It has sections (typically one per layer). A section
// is a base address, a distance between blocks, and one of the plan's block shapes: up to three
// outer dimensions (count, stride), outermost first, around a contiguous run of bytes. In the
// record, a section holds the runs of each block in the order of the dimensions, for the blocks in
// the given order, without gaps; so the stored bytes do not depend on the engine's strides.
//
// "The engine" in this file is the serving engine. Its memory and the extent belong to the caller;
// both must stay mapped during a call. Plans are immutable, and threads may share them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "codec/fp8.h"
#include "hash/crc32c.h"
#include "record/record.h"

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

// The places of the bytes of one block of a section in the engine's memory.
class BlockShape {
 public:
  static constexpr std::size_t kMaxDims = 3;

  // kBadArgument names the argument: run_bytes is 0, there are more than kMaxDims dimensions, a
  // count is 0, or a block leaves the address space or has 4 GiB or more.
  static Status create(std::span<const CopyDim> dims, std::uint64_t run_bytes,
                       BlockShape* out) noexcept;

  // Contiguous dimensions are merged; unused dimensions come first and have the count 1.
  [[nodiscard]] std::span<const CopyDim, kMaxDims> dims() const noexcept { return dims_; }
  [[nodiscard]] std::uint64_t run_bytes() const noexcept { return run_bytes_; }
  [[nodiscard]] std::uint64_t block_bytes() const noexcept { return block_bytes_; }
  // The distance from the first byte of a block to the end of its last byte.
  [[nodiscard]] std::uint64_t span_bytes() const noexcept { return span_bytes_; }

  // Calls visit(address) for the beginning of each run of the block at `base`, in stored order.
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
  CopyDim dims_[kMaxDims] = {{1, 0}, {1, 0}, {1, 0}};  // outermost first, merged
  std::uint64_t run_bytes_ = 0;
  std::uint64_t block_bytes_ = 0;
  std::uint64_t span_bytes_ = 0;
};

// In the block list of a scatter: the bytes of this block are verified but not copied, because the
// engine has them already.
inline constexpr std::uint32_t kSkipBlock = UINT32_MAX;

// How a gather rounds sections: the record holds the results of fp8_encode() for each packed
// section, first the scales and then the codes.
struct Rounding {
  Fp8Shape block;  // the shape of one block
  Fp8Source type = Fp8Source::kBfloat16;
};

class CopyPlan {
 public:
  // kBadArgument names the argument: there is no section or more than kMaxSections, a base is 0, a
  // section's shape is not among `shapes`, num_blocks is 0 or does not fit 32 bits, or a block
  // leaves the address space. After an error `*out` is unchanged.
  static Status create(std::vector<CopySection> sections, std::uint64_t num_blocks,
                       std::vector<BlockShape> shapes,
                       std::shared_ptr<const CopyPlan>* out) noexcept;

  // Makes a plan of the same blocks for records with rounded sections. Only a copy engine that can
  // round accepts such a plan; gather() and scatter() below cannot. kBadArgument, "rounding: ...":
  // the plan has several shapes, its blocks are not arrays of rounding.block.numbers() 16-bit
  // numbers, or the numbers do not lie at even addresses.
  static Status rounded(const CopyPlan& plan, const Rounding& rounding,
                        std::shared_ptr<const CopyPlan>* out) noexcept;

  [[nodiscard]] std::size_t section_count() const noexcept { return sections_.size(); }
  [[nodiscard]] std::uint64_t num_blocks() const noexcept { return num_blocks_; }
  // The description itself, for copy engines of other kinds of memory. Valid as long as the plan.
  [[nodiscard]] std::span<const CopySection> sections() const noexcept { return sections_; }
  [[nodiscard]] const std::vector<BlockShape>& shapes() const noexcept { return shapes_; }
  [[nodiscard]] const BlockShape& shape_of(std::size_t section) const noexcept {
    return shapes_[sections_[section].shape];
  }

  [[nodiscard]] const std::optional<Rounding>& rounding() const noexcept { return rounding_; }
  // Bytes of the scales of each section; 0 if the plan does not round.
  [[nodiscard]] std::uint64_t scale_bytes() const noexcept {
    return rounding_ ? sizeof(float) * rounding_->block.scales() : 0;
  }

  // Bytes of a section in a record of n_blocks blocks. REQUIRES: payload_bytes(n_blocks) is ok.
  [[nodiscard]] std::uint32_t section_bytes(std::size_t section,
                                            std::uint64_t n_blocks) const noexcept {
    return static_cast<std::uint32_t>(section_offset(section + 1, n_blocks) -
                                      section_offset(section, n_blocks));
  }
  // Where a section begins in the payload of n_blocks blocks; for section_count(), where the
  // payload ends. REQUIRES: payload_bytes(n_blocks) is ok.
  [[nodiscard]] std::uint64_t section_offset(std::size_t section,
                                             std::uint64_t n_blocks) const noexcept {
    return section * scale_bytes() + n_blocks * bytes_before_[section] / (rounding_ ? 2 : 1);
  }

  // Bytes of the payload, and of the whole record, of n_blocks blocks. kBadArgument: n_blocks is 0,
  // or the length of a section would not fit 32 bits.
  Status payload_bytes(std::uint64_t n_blocks, std::uint64_t* out) const noexcept;
  Status record_bytes(std::uint64_t n_blocks, std::uint64_t* out) const noexcept;
  // kOutOfRange: a block is not one of the plan's; detail is (block id, num_blocks, index). Only a
  // scatter may skip blocks.
  Status check_blocks(std::span<const std::uint32_t> blocks, bool may_skip) const noexcept;

  // Copies sections [begin, end) of the blocks to their places in the payload and writes the CRC of
  // section s to crcs[s - begin]. On return the stores are ordered before later stores (see
  // copy_fence()). REQUIRES: the plan does not round; check_blocks(blocks) and
  // payload_bytes(blocks.size()) are ok; the payload is large enough; begin <= end <=
  // section_count().
  void gather(std::span<const std::uint32_t> blocks, void* payload, std::size_t begin,
              std::size_t end, std::uint32_t* crcs) const noexcept;
  // Copies from the payload to the blocks. `crcs` receives the CRCs of the bytes that were read;
  // the caller compares them with the record's. REQUIRES: as for gather(), except that a block may
  // be kSkipBlock.
  void scatter(std::span<const std::uint32_t> blocks, const void* payload, std::size_t begin,
               std::size_t end, std::uint32_t* crcs) const noexcept;

 private:
  CopyPlan() = default;

  template <bool kGather>
  void copy(std::span<const std::uint32_t> blocks, std::uint64_t payload, std::size_t begin,
            std::size_t end, std::uint32_t* crcs) const noexcept;

  std::vector<CopySection> sections_;
  std::vector<BlockShape> shapes_;
  // Bytes of one block in all sections before section i; the last entry is the sum of all.
  std::vector<std::uint64_t> bytes_before_;
  std::uint64_t num_blocks_ = 0;
  std::uint64_t largest_block_bytes_ = 0;
  std::optional<Rounding> rounding_;
};

// The checks before a scatter: the record's headers against the key and the identity of `wanted`
// and against the plan. On success expected_crcs receives the recorded CRCs of sections [begin,
// end).
//   kStale         the headers are sound, but the key or the identity is another one
//   kIncompatible  another format version, an encoded payload, or other sections than the plan's
//   kCorrupt       the headers are damaged
// REQUIRES: plan.payload_bytes(n_blocks) is ok; begin <= end <= plan.section_count(); `length`,
// that of the extent, is enough for the plan's record.
Status check_record_for_scatter(const CopyPlan& plan, std::uint64_t n_blocks, const void* record,
                                std::uint64_t length, const RecordSpec& wanted, std::size_t begin,
                                std::size_t end, std::uint32_t* expected_crcs) noexcept;

}  // namespace kvstrata
