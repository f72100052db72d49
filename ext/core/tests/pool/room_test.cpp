#include <vector>

#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

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
