#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

TEST(what_was_being_written_for_long_is_new_when_it_is_committed) {
  Fixture f(16, "LRU");
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

TEST(a_tenant_at_its_quota_loses_the_end_of_its_oldest_prompt_however_long_that_is) {
  Fixture f(1'024, "VALUE", 2'048);
  f.pool->set_quota(7, 700 * kRecordBytes);
  const auto old = chain(1, 600);
  f.store({old.begin(), old.begin() + 10}, 0, kRecordBytes, 7);
  f.pool->release(f.lease({old.begin(), old.begin() + 10}, {0}).ticket, -1);
  f.store(old, 0, kRecordBytes, 7);
  f.store(chain(2, 400), 0, kRecordBytes, 7);
  CHECK_EQ(f.peek(old), 300);
  CHECK_EQ(f.peek(chain(2, 400)), 400);
  f.pool->set_quota(7, -1);
  f.pool->set_quota(7, 700 * kRecordBytes);
  f.store(chain(3, 300), 0, kRecordBytes, 7);
  CHECK_EQ(f.peek(old), 0);
  CHECK_EQ(f.peek(chain(2, 400)), 400);
  CHECK_OK(f.pool->validate());
}
