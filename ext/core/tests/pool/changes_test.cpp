// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/changes.h"

#include <poll.h>

#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

using Held = std::map<std::uint16_t, std::set<std::uint64_t>>;

void take_in(Held& held, const ChangedTiers& changed) {
  for (const TierChanges& one : changed.tiers) {
    std::set<std::uint64_t>& tags = held[one.tier];
    if (one.cleared) tags.clear();
    for (const std::uint64_t tag : one.gone)
      tags.erase(tag);
    tags.insert(one.came.begin(), one.came.end());
  }
}

void make(Held& held, std::uint16_t tier, Change change, std::uint64_t tag) {
  if (change == Change::kCame) held[tier].insert(tag);
  if (change == Change::kGone) held[tier].erase(tag);
  if (change == Change::kEmptied) held[tier].clear();
}

bool readable(int fd) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, 0) == 1;
}

}  // namespace

TEST(a_reader_that_applies_all_changes_ends_with_what_is_held) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    Changes changes;
    Held held, known;
    std::uint64_t cursor = changes.next();
    for (int i = 0; i < 400; ++i) {
      const auto tier = static_cast<std::uint16_t>(random() % 3);
      const std::uint64_t kind = random() % 40;
      const Change change = kind == 0   ? Change::kEmptied
                            : kind < 20 ? Change::kGone
                                        : Change::kCame;
      const std::uint64_t tag = change == Change::kEmptied ? 0 : random() % 32;
      changes.note(tier, change, tag);
      make(held, tier, change, tag);
      ChangedTiers changed;
      if (random() % 50 == 0 && changes.read(cursor, 1 + random() % 100, &changed)) {
        take_in(known, changed);
        cursor = changed.next;
      }
    }
    while (changes.wait(cursor)) {
      ChangedTiers changed;
      CHECK(changes.read(cursor, 64, &changed));
      take_in(known, changed);
      cursor = changed.next;
    }
    for (std::uint16_t tier = 0; tier < 3; ++tier)
      CHECK(held[tier] == known[tier]);
  }
}

TEST(no_tag_is_named_twice_and_a_clear_hides_what_was_before_it) {
  Changes changes;
  for (const std::uint64_t tag : {1, 2, 3})
    changes.note(1, Change::kCame, tag);
  changes.note(1, Change::kEmptied, 0);
  changes.note(1, Change::kCame, 2);
  changes.note(1, Change::kGone, 2);
  changes.note(1, Change::kCame, 2);
  ChangedTiers changed;
  CHECK(changes.read(0, 100, &changed));
  CHECK_EQ(changed.next, 7u);
  CHECK_EQ(changed.tiers.size(), 1u);
  CHECK(changed.tiers[0].cleared);
  CHECK(changed.tiers[0].gone.empty());
  CHECK(changed.tiers[0].came == std::vector<std::uint64_t>{2});
}

TEST(a_cursor_that_the_ring_has_overwritten_is_too_old_and_so_is_one_from_elsewhere) {
  Changes changes;
  for (std::uint64_t tag = 0; tag < kChanges; ++tag)
    changes.note(0, Change::kCame, tag);
  ChangedTiers changed;
  CHECK(changes.read(0, 5, &changed));
  CHECK(changed.tiers[0].came == (std::vector<std::uint64_t>{4, 3, 2, 1, 0}));
  changes.note(0, Change::kGone, 7);
  CHECK(!changes.read(0, 5, &changed));
  CHECK(!changes.read(kChanges + 2, 5, &changed));
  // Across the end of the ring.
  ChangedTiers last;
  CHECK(changes.read(kChanges - 2, 5, &last));
  CHECK_EQ(last.next, kChanges + 1);
  CHECK(last.tiers[0].gone == std::vector<std::uint64_t>{7});
  CHECK_EQ(last.tiers[0].came.size(), 2u);
}

TEST(the_descriptor_is_readable_after_the_first_change_that_somebody_waits_for) {
  Changes changes;
  CHECK_OK(changes.begin());
  CHECK_OK(changes.begin());
  changes.note(0, Change::kCame, 1);
  CHECK(!readable(changes.fd()));
  CHECK(changes.wait(0));
  CHECK(!changes.wait(1));
  changes.note(0, Change::kCame, 2);
  CHECK(readable(changes.fd()));
  changes.drain();
  changes.note(0, Change::kCame, 3);
  CHECK(!readable(changes.fd()));
}

TEST(a_lagging_reader_is_refused_and_never_reads_what_was_overwritten_meanwhile) {
  // Two writers, each with tags of its own in ascending order: a reader never sees a gap.
  Changes changes;
  constexpr std::uint64_t kTags = 600'000;
  std::atomic<int> running{2};
  auto write = [&](std::uint16_t tier) {
    for (std::uint64_t tag = 0; tag < kTags; ++tag)
      changes.note(tier, Change::kCame, tag);
    running.fetch_sub(1);
  };
  std::thread first(write, 1), second(write, 2);
  std::uint64_t cursor = 0, refused = 0;
  std::map<std::uint16_t, std::uint64_t> expected;
  bool in_order = true;
  while (running.load() != 0 || changes.wait(cursor)) {
    ChangedTiers changed;
    if (!changes.read(cursor, 4'096, &changed)) {
      refused += 1;
      cursor = changes.next();
      expected.clear();
      continue;
    }
    for (const TierChanges& one : changed.tiers) {
      auto [known, fresh] = expected.emplace(one.tier, one.came.back());
      for (auto tag = one.came.rbegin(); tag != one.came.rend(); ++tag)
        in_order &= *tag == known->second++;
    }
    cursor = changed.next;
  }
  first.join();
  second.join();
  CHECK(in_order);
  CHECK_EQ(changes.next(), 2 * kTags);
}

TEST(a_commit_and_an_eviction_are_changes_of_tier_0) {
  Fixture f(16, "LRU");
  const auto keys = chain(1, 1);
  f.store(keys);
  ChangedTiers changed;
  CHECK(f.pool->changes().read(0, 10, &changed));
  CHECK_EQ(changed.tiers.size(), 1u);
  CHECK_EQ(changed.tiers[0].tier, 0);
  CHECK(changed.tiers[0].came == std::vector<std::uint64_t>{keys[0].word[0]});
  for (std::uint64_t p = 10; p < 60; ++p)
    f.store(chain(p, 2));
  ChangedTiers later;
  CHECK(f.pool->changes().read(changed.next, 1'000, &later));
  CHECK_EQ(later.tiers[0].gone.front() == keys[0].word[0] || later.tiers[0].gone.size() > 1, true);
}
