#include "pool/slab.h"

#include <memory>
#include <random>
#include <vector>

#include "support/check.h"
#include "support/pool_validation.h"

using namespace kvstrata;

namespace {

struct Space {
  std::uint64_t slab_bytes = 0;
  std::vector<std::uint64_t> table = std::vector<std::uint64_t>(kMaxSlabs, 0);
  std::unique_ptr<SlabMap> map;

  explicit Space(std::uint64_t bytes) : map(std::make_unique<SlabMap>(bytes, &slab_bytes, table)) {}
  std::uint32_t cls(std::uint64_t bytes) {
    bool recycled = false;
    return map->class_for(bytes, &recycled);
  }
};

constexpr std::uint64_t kPage = 4096;

}  // namespace

TEST(extents_of_one_size_fill_the_pool_to_its_last_whole_extent) {
  for (const std::uint64_t pages : {1, 3, 7, 33, 100, 511}) {
    Space space(1024 * kPage);
    const std::uint32_t cls = space.cls(pages * kPage);
    std::uint64_t count = 0;
    SlabPlace place;
    while (space.map->allocate(cls, static_cast<std::uint32_t>(count), nullptr, &place)) {
      CHECK(place.offset + pages * kPage <= 1024 * kPage);
      count += 1;
    }
    CHECK_EQ(count, 1024 / pages);
    CHECK_OK(validate(*space.map));
  }
}

TEST(an_empty_slab_changes_class) {
  Space space(64 * kPage);
  const std::uint32_t small = space.cls(2 * kPage);
  std::vector<SlabPlace> places(32);
  for (std::uint32_t i = 0; i < 32; ++i)
    CHECK(space.map->allocate(small, i, nullptr, &places[i]));
  const std::uint32_t large = space.cls(8 * kPage);
  SlabPlace place;
  CHECK(!space.map->allocate(large, 100, nullptr, &place));
  // Four neighbouring slabs of one small extent each.
  for (const SlabPlace& p : places) {
    if (p.offset >= 16 * kPage && p.offset < 24 * kPage) space.map->free(p.run, p.slot);
  }
  CHECK(space.map->allocate(large, 100, nullptr, &place));
  CHECK_EQ(place.offset, 16 * kPage);
  CHECK_OK(validate(*space.map));
  CHECK(!space.map->allocate(small, 101, nullptr, &place));
}

TEST(the_window_with_the_oldest_last_use_is_offered_and_blocked_ones_are_not) {
  Space space(64 * kPage);
  const std::uint32_t small = space.cls(2 * kPage);
  for (std::uint32_t i = 0; i < 32; ++i) {
    SlabPlace place;
    CHECK(space.map->allocate(small, i, nullptr, &place));
    space.map->run(place.run).newest = 100 + (i * 7) % 32;
  }
  const std::uint32_t other = space.cls(2 * kPage - 0);
  CHECK_EQ(other, small);
  const std::uint32_t page = space.cls(kPage);
  SlabMap::Window window;
  CHECK(space.map->oldest_window(page, 0, 0, &window));
  CHECK_EQ(window.newest, 100);
  CHECK_EQ(window.slabs, 1);
  space.map->run(window.first).blocked = 1;
  const std::uint32_t first = window.first;
  CHECK(space.map->oldest_window(page, 0, 0, &window));
  CHECK_EQ(window.newest, 101);
  CHECK(window.first != first);
  const std::uint32_t second = window.first;
  CHECK(space.map->oldest_window(page, 0, 1ULL << second, &window));
  CHECK_EQ(window.newest, 102);
  space.map->run(window.first).retry_at = 50;
  CHECK(space.map->oldest_window(page, 49, 1ULL << second, &window));
  CHECK_EQ(window.newest, 103);
  CHECK(space.map->oldest_window(page, 50, 1ULL << second, &window));
  CHECK_EQ(window.newest, 102);
  // A class is offered nothing of its own.
  CHECK(!space.map->oldest_window(small, 0, 0, &window));
}

TEST(a_table_of_any_bytes_is_survived) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 500; ++round) {
    Space space(500 * kPage);
    const std::uint32_t cls = space.cls((1 + random() % 20) * kPage);
    for (std::uint32_t i = 0; i < 40; ++i) {
      SlabPlace place;
      static_cast<void>(space.map->allocate(cls, i, nullptr, &place));
    }
    for (int flips = 0; flips < 5; ++flips) {
      space.table[random() % kMaxSlabs] ^= 1ULL << (random() % 64);
    }
    if (round % 10 == 0) space.slab_bytes = random() >> (random() % 64);
    SlabMap again(500 * kPage, &space.slab_bytes, space.table);
    static_cast<void>(again.restore());
    again.finish_restore();
    CHECK_OK(validate(again));
    bool recycled = false;
    const std::uint32_t other = again.class_for(7 * kPage, &recycled);
    SlabPlace place;
    CHECK(other != kNoClass);
    CHECK(again.allocate(other, 1, nullptr, &place));
    CHECK_OK(validate(again));
  }
}
