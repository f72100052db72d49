// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// How much of a test runs: the gate (`make test`), or everything (`make test-all`, which sets
// ALL_TESTS=1).
#pragma once

#include <cstdlib>
#include <string_view>

namespace kvstrata::testing {

// The sizes, seeds or numbers of rounds of this run.
template <typename T>
T amount(T gate, T everything) {
  static const char* const tests = std::getenv("ALL_TESTS");
  return tests != nullptr && std::string_view(tests) == "1" ? everything : gate;
}

}  // namespace kvstrata::testing
