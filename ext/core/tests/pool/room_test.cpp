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

namespace {

std::uint64_t bytes_of(Fixture& f, std::uint32_t tenant) {
  for (const TenantStats& one : f.pool->stats().tenants) {
    if (one.tenant == tenant) return one.bytes / kRecordBytes;
  }
  return 0;
}

void set_quota(Fixture& f, std::uint32_t tenant, std::int64_t records) {
  CHECK(f.pool->set_quota(tenant, records < 0 ? records : records * std::int64_t{kRecordBytes}));
}

void pass_second(Fixture& f) {
  static std::uint64_t second = 0;
  f.pool->set_time(++second * 1'000'000'000);
}

// Looks prompts of one chunk up, one a second, and stores them; returns how many got an extent.
int flood(Fixture& f, std::uint32_t tenant, int n, std::uint64_t first) {
  int stored = 0;
  for (int i = 0; i < n; ++i) {
    const auto keys = chain(first + static_cast<std::uint64_t>(i), 1);
    pass_second(f);
    CHECK_EQ(f.lease(keys, {0}).ticket, 0);
    const auto reserved = f.reserve(keys, 0, nullptr, kRecordBytes, tenant);
    if (reserved.ticket == 0) continue;
    f.write(reserved.extents[0], keys[0]);
    CHECK_EQ(f.commit_one(reserved.ticket, 0), CommitOutcome::kCommitted);
    stored += 1;
  }
  return stored;
}

}  // namespace

TEST(quotas_that_take_all_of_l1_leave_nothing_to_others_and_each_to_its_tenant) {
  Fixture f(16, "LRU");
  set_quota(f, 1, 8);
  set_quota(f, 2, 8);
  CHECK_EQ(flood(f, 1, 30, 100) + flood(f, 2, 30, 200), 60);
  const auto refused = f.reserve(chain(300, 1), 0, nullptr, kRecordBytes, 0);
  CHECK_EQ(refused.outcomes[0], ReserveOutcome::kQuota);
  // Nor does what a tenant uses itself count against others.
  std::vector<std::uint64_t> leases;
  for (std::uint64_t last = 122; last < 130; ++last)
    leases.push_back(f.lease(chain(last, 1), {0}).ticket);
  CHECK_EQ(f.reserve(chain(400, 1), 0, nullptr, kRecordBytes, 1).outcomes[0],
           ReserveOutcome::kQuota);
  CHECK_EQ(bytes_of(f, 2), 8);
  // More than there is was promised: then each comes as far as its quota by the order of all.
  set_quota(f, 3, 2);
  CHECK_EQ(flood(f, 3, 5, 500), 5);
  CHECK_EQ(bytes_of(f, 3), 2);
  CHECK_EQ(bytes_of(f, 1) + bytes_of(f, 2), 14);
  CHECK_OK(validate(*f.pool));
}

TEST(no_more_tenants_than_the_limit_have_quotas_and_one_that_ends_makes_room) {
  Fixture f(16, "LRU");
  for (std::uint32_t tenant = 10; tenant < 10 + kMaxQuotas; ++tenant)
    set_quota(f, tenant, 1);
  CHECK(!f.pool->set_quota(1, 1));
  set_quota(f, 10, -1);
  set_quota(f, 1, 1);
  CHECK_EQ(flood(f, 1, 20, 500), 20);
  CHECK_OK(validate(*f.pool));
}

TEST(a_tenant_within_its_quota_gets_room_whatever_the_chunks_of_others_are_worth) {
  Fixture f(64, "VALUE", 256);
  const auto hot = chain(1, 64);
  for (std::uint64_t request = 0; request < 2'000; ++request) {
    pass_second(f);
    // Prompts that never come back, and later one that does.
    if (request < 1'000) flood(f, 2, 1, 10'000 + request);
    if (request == 1'000) f.store(hot, 0, kRecordBytes, 1);
    if (request > 1'000) f.pool->release(f.lease({hot.end() - 20, hot.end()}, {0}).ticket, -1);
    f.pool->learn();
  }
  const auto reserve = [&](std::uint64_t prompt, std::uint32_t tenant) {
    return f.reserve(chain(prompt, 1), f.row(1), nullptr, kRecordBytes, tenant).outcomes[0];
  };
  set_quota(f, 3, 1);
  CHECK_EQ(reserve(20'000, 2), ReserveOutcome::kWorthLess);
  CHECK_EQ(reserve(20'001, 3), ReserveOutcome::kReserved);
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
