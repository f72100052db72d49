// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstring>

#include "kvstrata/digest.h"

namespace kvstrata {

// Hash of a key for unordered containers: the key's first bytes, which are evenly distributed
// because a key is a SHA-256 digest.
struct KeyHash {
  std::size_t operator()(const Digest& key) const noexcept {
    std::size_t bits;
    std::memcpy(&bits, key.data(), sizeof(bits));
    return bits;
  }
};

}  // namespace kvstrata
