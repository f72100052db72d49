// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

namespace kvstrata {

// The wall clock, which may jump: for times in files and messages, never for waits.
inline std::int64_t now_unix_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace kvstrata
