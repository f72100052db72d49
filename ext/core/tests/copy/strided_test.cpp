// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/strided.h"

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "support/check.h"

using namespace kvstrata;

namespace {

std::vector<unsigned char> bytes_of(std::size_t n) {
  std::vector<unsigned char> bytes(n);
  std::mt19937 draw(static_cast<unsigned>(n));
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<unsigned char>(draw()); });
  return bytes;
}

Status copy_one(const StridedCopy& copy, std::span<const unsigned char> source,
                std::span<unsigned char> target) {
  const std::span<const unsigned char> sources[] = {source};
  return copy_strided({&copy, 1}, sources, target);
}

}  // namespace

TEST(a_copy_is_what_its_loops_say) {
  // A transposed array of 3 x 5 runs of 7 bytes.
  const std::vector<unsigned char> source = bytes_of(4 + 3 * 5 * 7);
  std::vector<unsigned char> target(2 + 5 * 3 * 7, 0);
  StridedCopy copy{0, 2, 4, 2, 7, {}};
  copy.loops[0] = {3, 35, 7};
  copy.loops[1] = {5, 7, 21};
  CHECK_OK(copy_one(copy, source, target));
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 5; ++j) {
      for (std::size_t k = 0; k < 7; ++k) {
        CHECK_EQ(int{target[2 + j * 21 + i * 7 + k]}, int{source[4 + i * 35 + j * 7 + k]});
      }
    }
  }
  CHECK_EQ(int{target[0]} + int{target[1]}, 0);
}

TEST(what_leaves_a_side_is_refused_and_nothing_is_written) {
  const std::vector<unsigned char> source = bytes_of(64);
  std::vector<unsigned char> target(64, 0xA5);
  const std::span<const unsigned char> sources[] = {source};
  const StridedCopy good{0, 0, 0, 0, 64, {}};
  StridedCopy fits{0, 2, 0, 0, 16, {}};
  fits.loops[0] = {4, 16, 16};
  fits.loops[1] = {1, UINT64_MAX, UINT64_MAX};
  const auto refused = [&](const std::function<void(StridedCopy&)>& change) {
    StridedCopy copies[] = {good, fits};
    change(copies[1]);
    const Status status = copy_strided(copies, sources, target);
    CHECK(status.code() == StatusCode::kBadArgument);
    CHECK_EQ(status.detail(2), 1);
    CHECK(std::all_of(target.begin(), target.end(), [](unsigned char b) { return b == 0xA5; }));
  };
  refused([](StridedCopy& c) { c.source = 1; });
  refused([](StridedCopy& c) { c.run_bytes = 0; });
  refused([](StridedCopy& c) { c.loop_count = 9; });
  refused([](StridedCopy& c) { c.loops[0].count = 0; });
  refused([](StridedCopy& c) { c.source_offset = 1; });
  refused([](StridedCopy& c) { c.target_offset = 1; });
  refused([](StridedCopy& c) { c.loops[0].source_stride = 17; });
  refused([](StridedCopy& c) { c.loops[0].target_stride = 17; });
  refused([](StridedCopy& c) { c.loops[1].count = 2; });
  refused([](StridedCopy& c) { c.loops[0].count = UINT64_MAX; });
  refused([](StridedCopy& c) { c.source_offset = UINT64_MAX; });
  refused([](StridedCopy& c) { c.run_bytes = UINT64_MAX; });
  const StridedCopy copies[] = {good, fits};
  CHECK_OK(copy_strided(copies, sources, target));
  CHECK(target == source);
}
