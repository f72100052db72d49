// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "codec/planes.h"

#include <random>
#include <vector>

#include "support/check.h"

using namespace kvstrata;

namespace {

using Bytes = std::vector<unsigned char>;

Bytes noise(std::size_t n) {
  std::mt19937 random(static_cast<unsigned>(n));
  Bytes bytes(n);
  for (auto& b : bytes)
    b = static_cast<unsigned char>(random());
  return bytes;
}

}  // namespace

TEST(what_is_split_is_joined_again) {
  for (const std::size_t n : {0, 1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 1000, 4097}) {
    const Bytes from = noise(n);
    // Exactly as long as they must be, so that ASan sees whatever is touched beside them.
    Bytes planes(n);
    Bytes back(n);
    split_planes(planes.data(), from.data(), n);
    for (std::size_t i = 0; i < n; ++i)
      CHECK_EQ(planes[i % 2 * ((n + 1) / 2) + i / 2], from[i]);
    join_planes(back.data(), planes.data(), n);
    CHECK(back == from);
  }
}
