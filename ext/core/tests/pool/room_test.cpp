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
