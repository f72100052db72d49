// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/items.h"

namespace kvstrata {

CopyOutcome copy_outcome(const Status& status) noexcept {
  switch (status.code()) {
    case StatusCode::kOk:
      return CopyOutcome::kOk;
    case StatusCode::kStale:
      return CopyOutcome::kStale;
    case StatusCode::kIncompatible:
      return CopyOutcome::kMismatch;
    default:  // kCorrupt, and kOutOfRange: the record is longer than its extent
      return CopyOutcome::kCorrupt;
  }
}

Status check_items(CopyKind kind, const CopyPlan& plan, std::span<const CopyItem> items) noexcept {
  if (items.empty() || items.size() > kMaxCopyItems) {
    return Status(StatusCode::kBadArgument, "items: must have between 1 and 65536 entries",
                  static_cast<std::int64_t>(items.size()), kMaxCopyItems, -1);
  }
  const auto check = [&](const CopyItem& item) -> Status {
    std::uint64_t needed = 0;
    KVSTRATA_RETURN_IF_ERROR(plan.record_bytes(item.blocks.size(), &needed));
    KVSTRATA_RETURN_IF_ERROR(plan.check_blocks(item.blocks, kind == CopyKind::kScatter));
    KVSTRATA_RETURN_IF_ERROR(check_record_address(item.record));
    if (item.length < needed) {
      return Status(StatusCode::kBadArgument, "extent_len: too small for the record",
                    static_cast<std::int64_t>(item.length), static_cast<std::int64_t>(needed));
    }
    return Status();
  };
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (const Status status = check(items[i]); !status.ok()) {
      return Status(status.code(), status.message(), status.detail(0), status.detail(1),
                    static_cast<std::int64_t>(i));
    }
  }
  return Status();
}

std::size_t unit_end(const CopyPlan& plan, std::uint64_t n_blocks, std::size_t begin) noexcept {
  const std::uint64_t limit = plan.section_offset(begin, n_blocks) + kCopyUnitBytes;
  std::size_t end = begin + 1;
  while (end < plan.section_count() && plan.section_offset(end + 1, n_blocks) <= limit) {
    ++end;
  }
  return end;
}

}  // namespace kvstrata
