// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The engines of a decision whose costs are the lowest.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

namespace kvstrata {

struct LowestCosts {
  double limit = 0.0;  // the highest cost of a near-tie
  double last = 0.0;   // the highest of the `count` lowest costs
};

// `near_share`: costs at most this share above the lowest are a near-tie. REQUIRES: there is a
// cost, `count` is at least 1, and no cost is NaN. May throw bad_alloc.
[[nodiscard]] inline LowestCosts lowest_costs(std::span<const double> costs, std::size_t count,
                                              double near_share) {
  std::vector<double> lowest(std::min(count, costs.size()));
  std::ranges::partial_sort_copy(costs, lowest);
  return {lowest.front() + std::abs(lowest.front()) * near_share, lowest.back()};
}

}  // namespace kvstrata
