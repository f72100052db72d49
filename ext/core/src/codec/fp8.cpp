// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "codec/fp8.h"

namespace kvstrata {

Status Fp8Shape::check() const noexcept {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 31;
  std::uint64_t numbers = 1;
  for (const std::uint32_t count : {blocks, groups, tokens, heads, dim}) {
    if (count == 0 || count > kMost || numbers * count > kMost) {
      return Status(StatusCode::kBadArgument,
                    "shape: every count must be at least 1, and their product at most 2^31", count);
    }
    numbers *= count;
  }
  if (std::uint64_t{blocks} * tokens * dim < 16) {
    return Status(StatusCode::kBadArgument, "shape: a scale needs at least 16 numbers",
                  static_cast<std::int64_t>(std::uint64_t{blocks} * tokens * dim), 16);
  }
  return Status();
}

}  // namespace kvstrata
