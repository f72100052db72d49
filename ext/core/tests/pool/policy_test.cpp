#include "pool/policy.h"

#include <algorithm>
#include <vector>

#include "support/check.h"

using namespace kvstrata;

namespace {

constexpr std::uint32_t kEntries = 4096;

struct Fixture {
  std::vector<EntryLocal> entries = std::vector<EntryLocal>(kEntries);
  std::unique_ptr<EvictionPolicy> policy;

  explicit Fixture(const char* name) : policy(make_policy(name, entries.data())) {
    CHECK(policy != nullptr);
  }
  void insert(std::uint32_t entry, std::uint64_t fingerprint, std::uint32_t cls = 0) {
    entries[entry] = EntryLocal{};
    entries[entry].cls = static_cast<std::uint8_t>(cls);
    policy->admit(fingerprint, cls);
    policy->insert(entry, fingerprint, cls);
  }
  std::uint32_t evict(std::uint32_t cls = 0) {
    const std::uint32_t entry = policy->victim(cls);
    if (entry != kNoEntry) policy->remove(entry, entry, true);
    return entry;
  }
};

}  // namespace

TEST(what_was_in_use_until_now_outlives_what_was_not) {
  Fixture f("LRU");
  for (std::uint32_t i = 0; i < 10; ++i)
    f.insert(i, i);
  f.entries[0].leases = f.entries[1].pins = 1;
  CHECK_EQ(f.policy->victim(0), 2);
  f.entries[0].leases = f.entries[1].pins = 0;
  f.policy->unblocked(0, true);
  f.policy->unblocked(1, false);
  CHECK_EQ(f.evict(), 1);
  for (std::uint32_t i = 2; i < 10; ++i)
    CHECK_EQ(f.evict(), i);
  CHECK_EQ(f.evict(), 0);
}

TEST(a_scan_does_not_flush_what_is_used_again_and_again) {
  for (const char* name : {"ARC", "S3FIFO"}) {
    Fixture f(name);
    // 20 hot entries, used twice before a scan of 2000 keys passes through a cache of 100.
    for (std::uint32_t i = 0; i < 20; ++i)
      f.insert(i, i);
    for (int twice = 0; twice < 2; ++twice) {
      for (std::uint32_t i = 0; i < 20; ++i)
        f.policy->touch(i);
    }
    std::vector<std::uint32_t> spare;
    for (std::uint32_t i = 20; i < 100; ++i)
      spare.push_back(i);
    for (std::uint64_t key = 1000; key < 3000; ++key) {
      if (spare.empty()) {
        const std::uint32_t victim = f.policy->victim(0);
        CHECK(victim != kNoEntry);
        f.policy->remove(victim, 100'000 + victim, true);
        spare.push_back(victim);
      }
      const std::uint32_t entry = spare.back();
      spare.pop_back();
      CHECK(entry >= 20);
      f.insert(entry, key);
    }
  }
}

TEST(arc_gives_recency_more_room_when_what_it_dropped_comes_back) {
  Fixture f("ARC");
  for (std::uint32_t i = 0; i < 50; ++i)
    f.insert(i, i);
  for (std::uint32_t i = 0; i < 25; ++i)
    f.policy->touch(i);
  // Recent: 25..49, frequent: 0..24. Without adaptation the recent list is drained first.
  const std::uint32_t first = f.policy->victim(0);
  CHECK_EQ(first, 25);
  for (int i = 0; i < 20; ++i) {
    const std::uint32_t victim = f.policy->victim(0);
    CHECK(victim >= 25);
    f.policy->remove(victim, victim, true);
  }
  // They come back: each is known and goes to the frequent list, and the recent list may grow.
  for (std::uint32_t i = 25; i < 45; ++i)
    f.insert(i, i);
  CHECK(f.policy->victim(0) < 25);
}

TEST(s3fifo_remembers_what_left_the_small_queue) {
  Fixture f("S3FIFO");
  for (std::uint32_t i = 0; i < 50; ++i)
    f.insert(i, i);
  const std::uint32_t victim = f.policy->victim(0);
  CHECK_EQ(victim, 0);
  f.policy->remove(victim, 0, true);
  f.insert(0, 0);  // known: goes to the main queue
  std::vector<std::uint32_t> order;
  for (int i = 0; i < 44; ++i)
    order.push_back(f.evict());
  CHECK(std::find(order.begin(), order.end(), 0u) == order.end());
}
