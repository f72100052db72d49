// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Limits after which a live party counts as silent or too slow, as src/kvstrata/patience.py has
// them: tests multiply all of them by one factor. Python checks the variables.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string_view>

namespace kvstrata {

// `limit`, times KVSTRATA_PATIENCE in an environment with KVSTRATA_TESTING=1.
// REQUIRES: no other thread changes the environment.
inline std::chrono::nanoseconds patience(std::chrono::nanoseconds limit) noexcept {
  const char* const testing = std::getenv("KVSTRATA_TESTING");
  const char* const factor = std::getenv("KVSTRATA_PATIENCE");
  if (testing == nullptr || factor == nullptr || std::string_view(testing) != "1") return limit;
  return std::chrono::nanoseconds(static_cast<std::chrono::nanoseconds::rep>(
      std::clamp(std::atof(factor), 1.0, 1000.0) * static_cast<double>(limit.count())));
}

}  // namespace kvstrata
