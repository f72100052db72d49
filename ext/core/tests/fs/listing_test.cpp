// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Naming what is there, a few keys at a time, while records come and go: what is there all the time
// is named, and nothing that never was.
#include <random>
#include <set>
#include <vector>

#include "disk/index.h"
#include "fs/index.h"
#include "support/check.h"

using namespace kvstrata;

namespace {

class DiskRecords {
 public:
  void add(const Digest& key) { index_.set(key, DiskPlace{.sequence = ++sequence_}); }
  void remove(const Digest& key) { index_.erase(key); }
  std::uint64_t list(std::uint64_t cursor, std::size_t most, std::vector<Digest>* keys) {
    return index_.list(cursor, most, keys);
  }

 private:
  DiskIndex index_;
  std::uint64_t sequence_ = 0;
};

class FsRecords {
 public:
  void add(const Digest& key) { index_.add(key, 4096, 0); }
  void remove(const Digest& key) { index_.remove(key); }
  std::uint64_t list(std::uint64_t cursor, std::size_t most, std::vector<Digest>* keys) {
    return index_.list(cursor, most, keys);
  }

 private:
  FsIndex index_;
};

using Random = std::mt19937_64;

// Keys whose hashes meet often: few bits of the first eight bytes differ.
Digest random_key(Random& random, std::uint64_t bits) {
  Digest key{};
  const std::uint64_t hash = random() & bits;
  const std::uint64_t rest = random();
  std::memcpy(key.data(), &hash, sizeof(hash));
  std::memcpy(key.data() + 8, &rest, sizeof(rest));
  return key;
}

template <typename Records>
void check_listing(std::uint64_t seed, std::uint64_t bits) {
  Random random(seed);
  Records records;
  std::set<Digest> there, ever;
  const auto churn = [&](int count, bool only_add) {
    for (int i = 0; i < count; ++i) {
      if (!only_add && random() % 2 == 0 && !there.empty()) {
        auto gone = there.lower_bound(random_key(random, bits));
        if (gone == there.end()) gone = there.begin();
        records.remove(*gone);
        there.erase(gone);
      } else if (const Digest key = random_key(random, bits); there.insert(key).second) {
        records.add(key);
        ever.insert(key);
      }
    }
  };
  churn(static_cast<int>(random() % 3000), true);
  std::set<Digest> stays = there;
  std::set<Digest> named;
  const std::size_t most = 64 + random() % 64;
  std::uint64_t cursor = 0;
  std::size_t calls = 0;
  do {
    std::vector<Digest> page;
    cursor = records.list(cursor, most, &page);
    CHECK(page.size() <= most);
    named.insert(page.begin(), page.end());
    churn(static_cast<int>(random() % 40), random() % 4 == 0);
    std::erase_if(stays, [&](const Digest& key) { return !there.contains(key); });
    CHECK(++calls < 100'000);
  } while (cursor != 0);
  for (const Digest& key : stays)
    CHECK(named.contains(key));
  for (const Digest& key : named)
    CHECK(ever.contains(key));
}

constexpr std::uint64_t kAll = ~std::uint64_t{0};
constexpr std::uint64_t kCrowded = 0xfff;

}  // namespace

TEST(a_disk_index_names_what_stays_while_others_come_and_go) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    check_listing<DiskRecords>(seed, kAll);
    check_listing<DiskRecords>(seed, kCrowded);
  }
}

TEST(an_fs_index_names_what_stays_while_others_come_and_go) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    check_listing<FsRecords>(seed, kAll);
    check_listing<FsRecords>(seed, kCrowded);
  }
}

TEST(a_cursor_that_never_was_names_nothing_that_is_not_there) {
  DiskIndex index;
  index.set(Digest{1}, DiskPlace{.sequence = 1});
  for (const std::uint64_t cursor : {kAll, kAll >> 8, std::uint64_t{63} << 56, std::uint64_t{1}}) {
    std::vector<Digest> keys;
    std::uint64_t at = cursor;
    do
      at = index.list(at, 8, &keys);
    while (at != 0);
    for (const Digest& key : keys)
      CHECK(key == Digest{1});
  }
}

TEST(an_index_that_has_emptied_is_named_in_short_calls) {
  DiskIndex index;
  Random random(1);
  std::vector<Digest> keys;
  for (int i = 0; i < 100'000; ++i)
    keys.push_back(random_key(random, kAll));
  for (const Digest& key : keys)
    index.set(key, DiskPlace{.sequence = 1});
  for (std::size_t i = 1; i < keys.size(); ++i)
    index.erase(keys[i]);
  std::vector<Digest> named;
  std::size_t calls = 0;
  std::uint64_t cursor = 0;
  do {
    cursor = index.list(cursor, 64, &named);
    calls += 1;
  } while (cursor != 0);
  CHECK(calls > 10);
  CHECK(named == std::vector{keys[0]});
}
