#include "pool/value.h"

#include <vector>

#include "support/check.h"
#include "support/pool_validation.h"

using namespace kvstrata;

namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

struct Fixture {
  std::vector<EntryLocal> entries = std::vector<EntryLocal>(4096);
  Value policy;
  std::uint64_t second = 1'000;

  explicit Fixture(const char* name, double depth_cost = 0)
      : policy(name, depth_cost, entries.data(), 4096) {
    pass(0);
  }
  void pass(std::uint64_t seconds) {
    second += seconds;
    policy.tell_time(second * kSecond);
  }
  void insert(std::uint32_t entry, std::uint16_t depth = 0) {
    entries[entry] = EntryLocal{};
    entries[entry].traits.depth = depth;
    entries[entry].used_at = policy.now();
    policy.insert(entry);
  }
  std::uint32_t evict() {
    const std::uint32_t entry = policy.victim(0);
    if (entry != kNoEntry) policy.remove(entry, entry, true);
    return entry;
  }
  float best_of_new(std::size_t depth, std::uint64_t tag = 1ULL << 40) {
    return policy.worth_of_new(policy.traits_of_new(tag, depth));
  }
  // Enough requests for a lesson, and the lesson.
  void learn(Learner* learner) {
    for (std::uint32_t i = 0; i < Value::kLearnRequests; ++i)
      policy.count_request();
    Lesson lesson;
    CHECK(policy.begin_lesson(&lesson));
    policy.teach(learner->learn(lesson));
  }
};

// Chunks at depth 1 return after a minute; those at depth 100 never do.
void live(Fixture& f, Learner* learner) {
  for (int round = 0; round < 400; ++round) {
    for (std::uint32_t i = 0; i < 10; ++i) {
      f.insert(i, 1);
      f.insert(100 + i, 100);
    }
    f.pass(60);
    for (std::uint32_t i = 0; i < 10; ++i)
      f.policy.touch(i);
    f.pass(600);
    for (std::uint32_t i = 0; i < 10; ++i) {
      f.policy.remove(i, i, false);
      f.policy.remove(100 + i, 100 + i, false);
    }
  }
  f.learn(learner);
}

}  // namespace

TEST(what_was_in_use_until_now_outlives_what_was_not) {
  Fixture f("LRU");
  for (std::uint32_t i = 0; i < 10; ++i) {
    f.insert(i);
    f.pass(1);
  }
  f.entries[0].leases = f.entries[1].pins = 1;
  CHECK_EQ(f.policy.victim(0), 2);
  f.entries[0].leases = f.entries[1].pins = 0;
  f.policy.unblocked(0, true);
  f.policy.unblocked(1, false);
  CHECK_EQ(f.evict(), 1);
  for (std::uint32_t i = 2; i < 10; ++i)
    CHECK_EQ(f.evict(), i);
  CHECK_EQ(f.evict(), 0);
  CHECK_EQ(f.evict(), kNoEntry);
}

TEST(before_anything_is_learnt_the_oldest_of_equal_chunks_leaves_and_none_is_refused) {
  Fixture f("VALUE");
  for (std::uint32_t i = 0; i < 10; ++i) {
    f.insert(i);
    f.pass(10);
  }
  CHECK(f.best_of_new(0) > f.policy.worth(9));
  for (std::uint32_t i = 0; i < 10; ++i)
    CHECK_EQ(f.evict(), i);
}

TEST(a_kind_that_returns_stays_and_one_that_never_does_leaves_though_it_is_newer) {
  Fixture f("VALUE");
  Learner learner;
  live(f, &learner);
  f.insert(1, 1);
  f.pass(30);
  f.insert(2, 100);
  CHECK(f.best_of_new(100) < f.policy.worth(1));
  CHECK(f.best_of_new(1) > f.best_of_new(100));
  CHECK_EQ(f.evict(), 2);
  // Once the minute has passed, nothing says that the other will still return.
  f.insert(2, 100);
  f.pass(400);
  f.insert(3, 1);
  f.pass(1);
  CHECK(f.policy.worth(1) < f.policy.worth(3));
}

TEST(lessons_survive_and_damaged_ones_are_refused) {
  Fixture f("VALUE");
  Learner learner;
  live(f, &learner);
  const std::string saved = learner.save();
  CHECK(saved.size() < (1u << 20));
  Learner restored;
  CHECK(restored.restore(saved));
  CHECK(restored.save() == saved);
  Fixture next("VALUE");
  next.policy.resume(&restored);
  next.insert(1, 1);
  next.pass(30);
  next.insert(2, 100);
  CHECK_EQ(next.evict(), 2);
  std::string bad = saved;
  bad[bad.size() - 1] = static_cast<char>(0xFF);  // a count that is not a number, or below zero
  CHECK(!Learner().restore(bad));
  CHECK(!Learner().restore(saved.substr(0, saved.size() - 1)));
  CHECK(!Learner().restore("KVKINDS9"));
  CHECK(Learner().restore(saved.substr(0, 8)));
}

TEST(a_deeper_chunk_costs_more_to_compute_and_a_tail_is_worth_nothing) {
  Fixture f("VALUE", 0.01);
  f.insert(1, 400);
  f.insert(2, 0);
  f.entries[3] = EntryLocal{};
  f.entries[3].traits.is_tail = 1;
  f.entries[3].used_at = f.policy.now();
  f.policy.insert(3);
  for (const std::uint32_t entry : {3u, 2u, 1u})
    CHECK_EQ(f.evict(), entry);
}

TEST(age_alone_orders_all_kinds_and_refuses_nothing) {
  Fixture f("VALUE");
  Learner learner;
  live(f, &learner);
  f.insert(1, 100);
  f.pass(1);
  f.insert(2, 1);
  f.policy.use_age_alone();
  CHECK(f.best_of_new(100) > f.policy.worth(2));
  f.pass(1);
  f.policy.touch(1);
  CHECK_EQ(f.evict(), 2);
  CHECK_EQ(f.evict(), 1);
}

TEST(a_load_that_is_used_at_once_is_no_return) {
  Fixture f("VALUE");
  f.insert(1);
  f.entries[1].traits.was_loaded = 1;
  f.pass(1);
  f.policy.touch(1);
  CHECK_EQ(f.entries[1].traits.pause + 0, kNoPause + 0);
  f.pass(60);
  f.policy.touch(1);
  CHECK_EQ(f.entries[1].traits.pause + 0, 7);  // octaves: below 1 s, 2, 4, 8, 16, 32, 64 s
}

TEST(a_key_that_comes_back_after_it_left_has_its_real_pause) {
  Fixture f("VALUE");
  const std::uint64_t evicted = 7ULL << 33 | 5, refused = 9ULL << 33 | 6, cleared = 8ULL << 33 | 7;
  f.insert(1);
  f.insert(2);
  f.policy.remove(1, evicted, true);
  f.policy.remove(2, cleared, false);
  f.policy.refused(refused);
  f.pass(60);
  CHECK_EQ(f.policy.traits_of_new(evicted, 3).pause + 0, 7);
  CHECK_EQ(f.policy.traits_of_new(refused, 3).pause + 0, 7);
  CHECK_EQ(f.policy.traits_of_new(cleared, 3).pause + 0, 0);
  CHECK_EQ(f.policy.traits_of_new(evicted ^ 1ULL << 40, 3).pause + 0, 0);
}

// Those with hint 4 of the first group return after a minute and those with hint 1 never do; what
// the second group says is the opposite of what comes.
void live_with_hints(Fixture& f, Learner* learner) {
  constexpr Hint kSaid[] = {{4, 0}, {1, 1}, {1, 0}, {4, 1}};
  for (int round = 0; round < 400; ++round) {
    for (std::uint32_t i = 0; i < 40; ++i) {
      f.insert(i);
      CHECK(f.policy.hint(i, kSaid[i / 10]));
    }
    f.pass(60);
    for (std::uint32_t i = 0; i < 20; ++i)
      f.policy.touch(i);
    f.pass(600);
    for (std::uint32_t i = 0; i < 40; ++i)
      f.policy.remove(i, i, false);
  }
  f.learn(learner);
}

TEST(a_hint_is_worth_what_became_of_chunks_that_the_same_group_said_it_of) {
  Fixture f("VALUE");
  Learner learner;
  live_with_hints(f, &learner);
  for (const std::uint8_t liar : {0, 1}) {
    f.insert(1);
    f.insert(2);
    CHECK(f.policy.hint(1, {4, liar}));
    CHECK(f.policy.hint(2, {1, liar}));
    CHECK(!f.policy.hint(2, {1, liar}));
    f.pass(30);
    CHECK_EQ(f.policy.worth(1) > f.policy.worth(2), liar == 0);
    CHECK_EQ(f.evict(), liar == 0 ? 2 : 1);
    CHECK_EQ(f.evict(), liar == 0 ? 1 : 2);
  }
}

TEST(a_hint_holds_until_the_chunk_is_used_again_and_not_for_the_same_request) {
  Fixture f("VALUE");
  f.insert(1);
  CHECK(f.policy.hint(1, {15, 6}));
  f.policy.touch(1, true);
  CHECK_EQ(f.entries[1].traits.hint, 15);
  f.pass(100);
  f.policy.touch(1);
  CHECK_EQ(f.entries[1].traits.hint, 0);
  CHECK_EQ(f.entries[1].traits.pause, 8);
  CHECK(!f.policy.hint(2, {1, 0}));  // not in the pool
  f.insert(3);
  f.entries[3].traits.was_loaded = 1;
  CHECK(f.policy.hint(3, {1, 5}));
  f.policy.touch(3);
  CHECK_EQ(f.entries[3].traits.pause, kNoPause);
  for (const std::uint32_t entry : {1u, 3u})
    f.policy.remove(entry, entry, false);
  CHECK_EQ(listed(f.policy, 0), 0);
  Fixture lru("LRU");
  lru.insert(1);
  CHECK(!lru.policy.hint(1, {1, 0}));
}
