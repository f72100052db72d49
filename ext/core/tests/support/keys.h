// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Keys for tests.
#pragma once

#include <cstdint>

#include "pool/index.h"

namespace kvstrata {

// Spread like a hash: splitmix64 per word.
inline Key make_key(std::uint64_t number) {
  Key key{};
  for (std::uint64_t i = 0; i < 4; ++i) {
    std::uint64_t z = (number * 4 + i + 1) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    key.word[i] = z ^ (z >> 31);
  }
  return key;
}

}  // namespace kvstrata
