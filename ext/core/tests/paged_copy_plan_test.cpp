// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The walk of ext/cuda/paged_copy.cu, run on the CPU: every byte of the copy is met exactly once,
// at the right address, whatever the number of thread blocks.
#include "../../cuda/paged_copy_plan.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"

using namespace kvstrata::cuda;

namespace {

struct Shape {
  uint32_t sections;
  uint32_t blocks;
  uint64_t run_bytes;
  uint64_t block_stride_bytes;
  uint64_t section_stride_bytes;
};

constexpr uint64_t kSectionSpacing = uint64_t{1} << 40;
constexpr uint64_t kBuffer = uint64_t{1} << 20;
constexpr uint32_t kEngineBlocks = 1000;

std::vector<uint64_t> section_addresses(const Shape& shape) {
  std::vector<uint64_t> sections(shape.sections);
  for (uint32_t s = 0; s < shape.sections; ++s) {
    sections[s] = (s + 1) * kSectionSpacing;
  }
  return sections;
}

std::vector<int32_t> shuffled_ids(const Shape& shape, unsigned seed) {
  std::vector<int32_t> ids(kEngineBlocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
  ids.resize(shape.blocks);
  return ids;
}

// Start in the buffer -> (start in the engine, length), as the kernel's thread blocks would copy.
std::map<uint64_t, std::pair<uint64_t, uint64_t>> walk(const Shape& shape,
                                                       const std::vector<uint64_t>& sections,
                                                       const std::vector<int32_t>& ids,
                                                       uint32_t thread_blocks) {
  std::map<uint64_t, std::pair<uint64_t, uint64_t>> copied;
  const int error = for_each_launch(
      sections.data(), shape.sections, shape.block_stride_bytes, shape.run_bytes, ids.data(),
      shape.blocks, kBuffer, shape.section_stride_bytes, [&](const CopyLaunch& launch) {
        for (uint32_t thread_block = 0; thread_block < thread_blocks; ++thread_block) {
          for (uint64_t i = thread_block; i < launch.tile_count(); i += thread_blocks) {
            const Tile tile = tile_at(launch, i);
            CHECK(copied.emplace(tile.buffer, std::pair{tile.engine, tile.bytes}).second);
          }
        }
        return 0;
      });
  CHECK_EQ(error, 0);
  return copied;
}

void expect_exact_cover(const Shape& shape, uint32_t thread_blocks) {
  const auto sections = section_addresses(shape);
  const auto ids = shuffled_ids(shape, shape.blocks);
  CHECK(arguments_are_valid(sections.data(), shape.sections, kEngineBlocks,
                            shape.block_stride_bytes, shape.run_bytes, ids.data(), shape.blocks,
                            kBuffer, shape.section_stride_bytes, thread_blocks));
  const auto copied = walk(shape, sections, ids, thread_blocks);
  auto next = copied.begin();
  for (uint32_t s = 0; s < shape.sections; ++s) {
    for (uint32_t b = 0; b < shape.blocks; ++b) {
      uint64_t done = 0;
      while (done < shape.run_bytes) {
        CHECK(next != copied.end());
        CHECK_EQ(next->first,
                 kBuffer + s * shape.section_stride_bytes + b * shape.run_bytes + done);
        CHECK_EQ(next->second.first,
                 sections[s] + uint64_t(ids[b]) * shape.block_stride_bytes + done);
        CHECK_EQ(next->second.second % kVectorBytes, 0u);
        CHECK(next->second.second > 0);
        done += next->second.second;
        ++next;
      }
      CHECK_EQ(done, shape.run_bytes);
    }
  }
  CHECK(next == copied.end());
}

}  // namespace

TEST(every_run_is_copied_once_whatever_the_number_of_thread_blocks) {
  for (const uint32_t thread_blocks : {1u, 2u, 7u, 132u}) {
    expect_exact_cover({3, 5, 16, 16, 80}, thread_blocks);
    expect_exact_cover({2, 16, kTileBytes, 2 * kTileBytes, 16 * kTileBytes + 4096}, thread_blocks);
    expect_exact_cover({64, 16, 65536, 131072, 16 * 65536}, thread_blocks);
    expect_exact_cover({1, 1, 3 * kTileBytes + 48, 4 * kTileBytes, 3 * kTileBytes + 48},
                       thread_blocks);
  }
}

TEST(a_copy_larger_than_one_launch_is_cut_without_gap_or_overlap) {
  expect_exact_cover({kMaxSections + 1, 3, 64, 64, 192}, 4);
  expect_exact_cover({2, kMaxBlocks + 1, 64, 128, (kMaxBlocks + 1) * 64}, 4);
  expect_exact_cover({2 * kMaxSections + 5, 2 * kMaxBlocks + 9, 16, 16, (2 * kMaxBlocks + 9) * 16},
                     4);
}

TEST(the_first_error_of_a_launch_ends_the_copy) {
  const Shape shape{2, 2 * kMaxBlocks, 16, 16, 2 * kMaxBlocks * 16};
  const auto sections = section_addresses(shape);
  const auto ids = shuffled_ids(shape, 1);
  int launches = 0;
  CHECK_EQ(
      for_each_launch(sections.data(), shape.sections, shape.block_stride_bytes, shape.run_bytes,
                      ids.data(), shape.blocks, kBuffer, shape.section_stride_bytes,
                      [&](const CopyLaunch&) {
                        launches += 1;
                        return 700;
                      }),
      700);
  CHECK_EQ(launches, 1);
}

TEST(arguments_that_would_touch_foreign_memory_are_refused) {
  const uint64_t section = kSectionSpacing;
  const int32_t id = 9;
  const auto valid = [](uint64_t section_address, uint32_t engine_blocks, uint64_t stride,
                        uint64_t run, int32_t block, uint64_t buffer, uint64_t section_stride,
                        uint32_t thread_blocks) {
    return arguments_are_valid(&section_address, 1, engine_blocks, stride, run, &block, 1, buffer,
                               section_stride, thread_blocks);
  };
  CHECK(valid(section, 10, 64, 64, id, kBuffer, 64, 1));
  CHECK(!valid(section, 9, 64, 64, id, kBuffer, 64, 1));
  CHECK(!valid(section, 10, 64, 64, -1, kBuffer, 64, 1));
  CHECK(!valid(section + 8, 10, 64, 64, id, kBuffer, 64, 1));
  CHECK(!valid(0, 10, 64, 64, id, kBuffer, 64, 1));
  CHECK(!valid(section, 10, 48, 64, id, kBuffer, 64, 1));
  CHECK(!valid(section, 10, 72, 64, id, kBuffer, 64, 1));
  CHECK(!valid(section, 10, 64, 56, id, kBuffer, 64, 1));
  CHECK(!valid(section, 10, 64, 0, id, kBuffer, 64, 1));
  CHECK(!valid(section, 10, 64, 64, id, kBuffer + 4, 64, 1));
  CHECK(!valid(section, 10, 64, 64, id, 0, 64, 1));
  CHECK(!valid(section, 10, 64, 64, id, kBuffer, 48, 1));
  CHECK(!valid(section, 10, 64, 64, id, kBuffer, 64, 0));
}
