// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Rendezvous hashing: a key ranks all engines by the hashes of their names, so an engine that comes
// or goes moves only its keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvstrata {

// 2^64 divided by the golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 3, 6.4).
inline constexpr std::uint64_t kRankMultiplier = 0x9E3779B97F4A7C15;

// The place of the hash that the key ranks first. REQUIRES: there is one.
[[nodiscard]] constexpr std::size_t ranked_first(std::uint64_t key,
                                                 std::span<const std::uint64_t> hashes) noexcept {
  std::size_t best = 0;
  std::uint64_t best_weight = 0;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const std::uint64_t weight = (key ^ hashes[i]) * kRankMultiplier;
    if (i == 0 || weight > best_weight) {
      best = i;
      best_weight = weight;
    }
  }
  return best;
}

}  // namespace kvstrata
