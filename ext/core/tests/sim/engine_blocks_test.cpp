// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "sim/engine_blocks.h"

#include <numeric>
#include <vector>

#include "support/check.h"

using namespace kvstrata::sim;

namespace {

// Random keys come and go in a table that is as full as it may be.
TEST(a_full_table_finds_what_it_has) {
  constexpr std::size_t kKeys = 300;
  KeyTable table(kKeys);
  std::vector<std::uint64_t> keys(kKeys);
  for (std::size_t i = 0; i < kKeys; ++i) {
    keys[i] = i * 0x9e3779b97f4a7c15 & ~std::uint64_t{0xf0};  // many want one cell
    table.set(keys[i], static_cast<std::uint32_t>(i));
  }
  for (std::size_t round = 0; round < kKeys; ++round) {
    const std::size_t gone = round * 7 % kKeys;
    table.erase(keys[gone]);
    for (std::size_t i = 0; i < kKeys; ++i) {
      CHECK(table.find(keys[i]) == (i == gone ? KeyTable::kNone : i));
    }
    table.set(keys[gone], static_cast<std::uint32_t>(gone));
  }
}

// A prefix is found after its blocks were released, until others take them.
TEST(a_prefix_is_found_until_its_blocks_are_taken) {
  std::vector<std::uint32_t> tokens(16), others(16, 7);
  std::iota(tokens.begin(), tokens.end(), 0);
  EngineBlocks blocks(4, 4, true);
  std::vector<std::uint64_t> removed;
  Sequence first{.tokens = tokens}, again{.tokens = tokens}, other{.tokens = others};
  CHECK(blocks.admit(first, 9) == 0);
  CHECK(blocks.grow(first, 9, removed));
  CHECK(!blocks.grow(other, 8, removed));
  blocks.release(first);
  CHECK(blocks.free() == 4 && removed.empty());
  CHECK(blocks.admit(again, 9) == 2);
  CHECK(blocks.admit(other, 16) == -1);
  blocks.release(again);
  CHECK(blocks.grow(other, 16, removed));
  CHECK(removed == (std::vector<std::uint64_t>{first.keys[1], first.keys[0]}));
  CHECK(!blocks.clear());
  blocks.release(other);
  CHECK(blocks.clear());
}

// Decoders open and fill their blocks in the order of the steps.
TEST(decoders_open_and_fill_blocks_in_the_order_of_steps) {
  std::vector<std::uint32_t> tokens(16, 1), others(16, 2);
  EngineBlocks blocks(8, 4, true);
  std::vector<std::uint64_t> removed;
  std::vector<Change> changes;
  Sequence one{.tokens = tokens}, two{.tokens = others};
  CHECK(blocks.grow(one, 4, removed) && blocks.grow(two, 3, removed));
  std::vector<Decoder> decoders{{&one, 4}, {&two, 3}};
  CHECK(!blocks.fits(decoders, 13));
  CHECK(blocks.fits(decoders, 5));
  blocks.decode(decoders, 5, changes, removed);
  const std::vector<std::vector<std::size_t>> expected{{0, 0, 0}, {0, 1, 1}, {1, 1, 0},
                                                       {3, 0, 2}, {4, 0, 0}, {4, 1, 2}};
  CHECK(changes.size() == expected.size());
  for (std::size_t i = 0; i < changes.size(); ++i) {
    CHECK(changes[i].step == expected[i][0] && changes[i].number == expected[i][1]);
    CHECK(changes[i].full == expected[i][2]);
  }
  CHECK(decoders[0].computed == 9 && one.stored == 2 && two.stored == 2);
}

}  // namespace
