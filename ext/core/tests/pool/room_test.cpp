#include <vector>

#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

TEST(a_full_pool_that_is_in_use_says_so) {
  Fixture f(16);
  const std::uint32_t a = f.row(1);
  std::vector<Hold> holds(16);
  for (std::uint64_t p = 0; p < 16; ++p) {
    f.store(chain(p, 1));
    CHECK_OK(f.pool->hold(make_key(p * 1000), nullptr, &holds[p]));
  }
  const auto refused = f.reserve(chain(50, 2), a);
  CHECK_EQ(refused.ticket, 0);
  CHECK_EQ(refused.outcomes[0], ReserveOutcome::kPoolPinned);
  CHECK_EQ(refused.outcomes[1], ReserveOutcome::kPoolPinned);
  CHECK_OK(f.pool->validate());
  holds[3].drop();
  CHECK_EQ(first(f.reserve(chain(50, 1), a).outcomes), ReserveOutcome::kReserved);
}

TEST(a_tenant_over_its_quota_makes_room_from_its_own) {
  Fixture f(64);
  f.pool->set_quota(7, 4 * kRecordBytes);
  f.store(chain(100, 2), 0, kRecordBytes, 1);
  for (std::uint64_t p = 0; p < 10; ++p)
    f.store(chain(p, 2), 0, kRecordBytes, 7);
  CHECK_EQ(f.peek(chain(100, 2)), 2);
  CHECK_EQ(f.peek(chain(9, 2)), 2);
  CHECK_EQ(f.peek(chain(8, 2)), 2);
  CHECK_EQ(f.peek(chain(7, 2)), 0);
  CHECK_EQ(copy(f.pool->stats().evicted_by_quota), 16);
  CHECK_OK(f.pool->validate());
  // A quota that comes later counts what is there.
  f.pool->set_quota(7, -1);
  CHECK_OK(f.pool->validate());
  f.pool->set_quota(1, 2 * kRecordBytes);
  CHECK_OK(f.pool->validate());
  f.store(chain(101, 1), 0, kRecordBytes, 1);
  CHECK_EQ(f.peek(chain(100, 2)), 1);
  CHECK_OK(f.pool->validate());
}

TEST(a_size_that_comes_late_gets_its_share) {
  Fixture f(512, "LRU", 2048);
  for (std::uint64_t p = 0; p < 200; ++p)
    f.store(chain(p, 4));
  // Larger and smaller extents than the geometry was made for, alone and in turn.
  for (std::uint64_t p = 1000; p < 1300; ++p) {
    const std::uint64_t bytes[] = {40 * 4096, 5 * 4096 - 1, 2 * 4096, 3 * 4096};
    const auto keys = chain(p, 2);
    f.store(keys, 0, bytes[p % 4]);
    CHECK_EQ(f.peek(keys), 2);
    if (p % 20 == 0) CHECK_OK(f.pool->validate());
  }
  std::uint64_t newest = 0;
  while (f.peek(chain(1299 - newest, 2)) == 2)
    ++newest;
  CHECK(newest >= 20);
}

TEST(the_watermark_evicts_the_share_it_names) {
  Fixture f;
  f.options.watermark = 0.75;
  f.options.watermark_ratio = 0.5;
  Files files;
  CHECK_OK(Pool::create(files.index, files.extents, f.options, &f.pool));
  for (std::uint64_t p = 0; p < 12; ++p)
    f.store(chain(p, 4));
  CHECK_EQ(f.pool->evict_to_watermark(), 0);
  f.store(chain(20, 4));
  const auto preview = f.pool->victims_preview(26 * kRecordBytes);
  CHECK_EQ(preview.size(), 26);
  CHECK_EQ(f.pool->evict_to_watermark(), 26 * kRecordBytes);
  for (const Key& key : preview)
    CHECK_EQ(f.peek({key}), 0);
  CHECK_EQ(f.peek(chain(20, 4)), 4);
  CHECK_OK(f.pool->validate());
}

TEST(what_was_being_written_for_long_is_new_when_it_is_committed) {
  for (const char* policy : {"LRU", "ARC", "S3FIFO"}) {
    Fixture f(16, policy);
    const auto slow = chain(1, 1);
    const auto reserved = f.reserve(slow, f.row(1));
    for (std::uint64_t p = 10; p < 60; ++p)
      f.store(chain(p, 2));
    f.write(reserved.extents[0], slow[0]);
    CHECK_EQ(f.commit_one(reserved.ticket, 0), CommitOutcome::kCommitted);
    f.store(chain(100, 2));
    CHECK_EQ(f.peek(slow), 1);
    CHECK_OK(f.pool->validate());
  }
}
