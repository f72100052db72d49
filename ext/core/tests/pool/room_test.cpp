#include <array>

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
  CHECK_OK(validate(*f.pool));
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
  CHECK_OK(validate(*f.pool));
}

namespace {

// Hits on prompts of two models of equal sizes and habits, by model; the pool has room for a third.
std::array<std::size_t, 2> hits_of_models(double cost) {
  Fixture f(256, "VALUE", 1'024);
  const Key identities[2] = {Key{{11, 12, 13, 14}}, Key{{21, 22, 23, 24}}};
  for (std::uint8_t model = 0; model < 2; ++model)
    f.pool->set_model(identities[model], model + 1);
  f.pool->set_cost(1, cost);
  std::array<std::size_t, 2> hits{};
  std::uint64_t random = 1;
  for (std::uint64_t number = 1; number < 6'000; ++number) {
    random = random * 6'364'136'223'846'793'005u + 1'442'695'040'888'963'407u;
    const std::size_t model = random >> 40 & 1;
    const auto keys = chain((random >> 33) % 100 * 2 + model, 4);
    f.pool->set_time(number * 1'000'000'000);
    const LeaseResult lease = f.lease(keys, {0});
    if (lease.ticket != 0) f.pool->release(lease.ticket, -1);
    if (number >= 3'000) hits[model] += lease.n_chunks;
    const ReserveResult reserved = f.reserve(keys, 0, nullptr, kRecordBytes, 0, identities[model]);
    for (std::uint32_t i = 0; i < keys.size(); ++i) {
      if (reserved.outcomes[i] == static_cast<std::uint8_t>(ReserveOutcome::kReserved)) {
        f.write(reserved.extents[i], keys[i], 7, identities[model]);
        CHECK_EQ(f.commit_one(reserved.ticket, i), CommitOutcome::kCommitted);
      }
    }
    f.pool->learn();
  }
  CHECK_OK(validate(*f.pool));
  return hits;
}

}  // namespace

TEST(of_two_models_in_a_pool_the_chunks_of_the_dearer_one_stay) {
  const auto equal = hits_of_models(1), dearer = hits_of_models(4);
  CHECK(equal[0] < equal[1] * 12 / 10 && equal[1] < equal[0] * 12 / 10);
  CHECK(dearer[0] > equal[0] * 13 / 10);
  CHECK(dearer[0] > dearer[1] * 2);
}
