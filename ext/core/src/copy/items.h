// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The items of copy jobs, their outcomes, and how their work is cut into units. The copy engines of
// the CPU and of a GPU share this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/copy.h"

namespace kvstrata {

// The approximate size of a unit of work.
inline constexpr std::uint64_t kCopyUnitBytes = 2 << 20;
inline constexpr std::size_t kMaxCopyItems = 65'536;  // per job

enum class CopyKind : std::uint8_t { kGather = 0, kScatter = 1 };

// The outcome of one item. The numeric values are part of the binding.
enum class CopyOutcome : std::uint8_t {
  kOk = 0,
  kStale = 1,      // the record belongs to another chunk or identity; no block was touched
  kCorrupt = 2,    // the headers or a section do not match their CRC
  kMismatch = 3,   // a sound record that does not fit the plan: other shape, version or encoding
  kCancelled = 4,  // nothing was copied
  kFailed = 5,     // on a GPU: a CUDA error, or numbers that cannot be rounded
};

// The outcome that a Status of check_record_for_scatter or verify_record stands for.
CopyOutcome copy_outcome(const Status& status) noexcept;

struct CopyItem {
  std::vector<std::uint32_t> blocks;
  void* record = nullptr;    // the extent, which belongs to the caller
  std::uint64_t length = 0;  // of the extent
  RecordSpec spec;           // gather: for the header; scatter: only the expected key and identity
};

// Checks the items of a job: there are between 1 and kMaxCopyItems, and each fits the plan.
// kBadArgument / kOutOfRange with detail(2) = index of the item, or -1.
Status check_items(CopyKind kind, const CopyPlan& plan, std::span<const CopyItem> items) noexcept;

// The end of the unit of work that begins with section `begin`: the unit has at most
// kCopyUnitBytes, or is a single section. REQUIRES: plan.payload_bytes(n_blocks) is ok;
// begin < plan.section_count().
std::size_t unit_end(const CopyPlan& plan, std::uint64_t n_blocks, std::size_t begin) noexcept;

}  // namespace kvstrata
