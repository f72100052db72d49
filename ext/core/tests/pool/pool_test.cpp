#include <unistd.h>
#include <array>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

TEST(a_commit_checks_key_identity_length_and_checksums) {
  Fixture f;
  const auto keys = chain(1, 6);
  const auto reserved = f.reserve(keys);
  const auto at = [&](int i) { return f.pool->extents_address() + reserved.extents[i].offset; };
  f.write(reserved.extents[0], keys[0]);
  // 1: never written.
  f.write(reserved.extents[2], keys[3]);  // another key
  f.write(reserved.extents[3], keys[3]);
  at(3)[300] ^= 1;  // a flipped bit in the header
  f.write({reserved.extents[4].offset, kRecordBytes - 100, 0, 0, 0}, keys[4]);  // shorter
  RecordSpec other;
  keys[5].store(other.key.data());
  CHECK_OK(seal_record(at(5), kRecordBytes, other, &kPayloadBytes, 1));  // another identity
  const auto outcomes = f.commit(reserved.ticket, {0, 1, 2, 3, 4, 5});
  CHECK_EQ(outcomes[0], CommitOutcome::kCommitted);
  for (int i = 1; i < 6; ++i)
    CHECK_EQ(outcomes[i], CommitOutcome::kBadRecord);
  CHECK_OK(f.pool->validate());
  // What was refused is given back.
  CHECK_EQ(f.count(EntryState::kReserved), 0);
  CHECK_EQ(copy(f.pool->stats().used_bytes), kRecordBytes);
}

TEST(the_servers_own_loads_have_no_session_share) {
  Fixture f(64);
  const std::uint32_t a = f.row(1);
  const auto count = [](const ReserveResult& result) {
    return copy(static_cast<std::uint64_t>(
        std::count(result.outcomes.begin(), result.outcomes.end(),
                   static_cast<std::uint8_t>(ReserveOutcome::kReserved))));
  };
  CHECK_EQ(count(f.reserve(chain(1, 20), a)), 8);
  const auto own = f.reserve(chain(2, 20), 0);
  CHECK_EQ(count(own), 20);
  // What hung loads left behind does not count either.
  Hold hold;
  CHECK_OK(f.pool->hold_reserved(own.ticket, 0, &hold));
  CHECK_EQ(f.pool->abort(own.ticket, {}, true), 20);
  CHECK_EQ(copy(f.count(EntryState::kQuarantined)), 1);
  CHECK_EQ(count(f.reserve(chain(3, 20), 0)), 20);
  CHECK_OK(f.pool->validate());
}

TEST(each_refusal_names_its_reason) {
  Fixture f(64, "LRU", 8);
  const std::uint32_t a = f.row(1);
  CHECK_EQ(first(f.reserve(chain(1, 1), a, nullptr, 65 * kRecordBytes).outcomes),
           ReserveOutcome::kTooLarge);
  f.pool->set_quota(3, 2 * kRecordBytes);
  const auto quota = f.reserve(chain(2, 3), a, nullptr, kRecordBytes, 3);
  CHECK_EQ(quota.outcomes[1], ReserveOutcome::kReserved);
  CHECK_EQ(quota.outcomes[2], ReserveOutcome::kQuota);
  const auto limit = f.reserve(chain(3, 7), a);
  CHECK_EQ(limit.outcomes[5], ReserveOutcome::kReserved);
  CHECK_EQ(limit.outcomes[6], ReserveOutcome::kSessionLimit);  // 8 of 64 extents are a row's share
  CHECK_EQ(first(f.reserve(chain(4, 1), 0).outcomes), ReserveOutcome::kEntriesFull);
  CHECK_EQ(first(f.reserve(chain(3, 1), 0).outcomes), ReserveOutcome::kInFlight);
  CHECK_OK(f.pool->validate());
}

TEST(a_row_may_always_reserve_one_extent) {
  Fixture f(64);
  const std::uint32_t a = f.row(1);
  const auto big = f.reserve(chain(1, 2), a, nullptr, 32 * kRecordBytes);
  CHECK_EQ(big.outcomes[0], ReserveOutcome::kReserved);
  CHECK_EQ(big.outcomes[1], ReserveOutcome::kSessionLimit);
}

TEST(a_corrupt_extent_is_dropped_when_it_is_verified) {
  Fixture f;
  const std::uint32_t a = f.row(1);
  const auto keys = chain(1, 3);
  f.store(keys);
  const auto lease = f.lease(keys, {a});
  f.pool->extents_address()[lease.extents[1].offset + 5000] ^= 1;
  bool dropped = false;
  CHECK_OK(f.pool->mark_bad(keys[0], nullptr, &dropped));
  CHECK(!dropped);
  CHECK_OK(f.pool->mark_bad(keys[1], nullptr, &dropped));
  CHECK(dropped);
  CHECK_EQ(f.peek(keys), 1);
  CHECK_EQ(f.count(EntryState::kQuarantined), 1);  // still leased
  CHECK_OK(f.pool->validate());
  CHECK(f.pool->release(lease.ticket, a));
  CHECK_EQ(f.count(EntryState::kQuarantined), 0);
  f.store(keys);
  CHECK_EQ(f.peek(keys), 3);
  CHECK_OK(f.pool->validate());
}

TEST(an_orphan_finds_its_parent_again) {
  Fixture f;
  const auto keys = chain(1, 4);
  f.store(keys);
  CHECK_EQ(f.pool->remove(packed({keys[1]}).data(), 1), 1);
  CHECK_EQ(f.peek(keys), 1);
  f.store(keys);
  CHECK_EQ(f.peek(keys), 4);
  CHECK_OK(f.pool->validate());
  // Asked for in an order that would make a circle, nothing is linked wrongly.
  f.store({keys[3], keys[2], keys[1], keys[0]});
  CHECK_OK(f.pool->validate());
}

TEST(keys_made_to_collide_are_refused_and_cost_nobody_else) {
  Fixture f(256, "LRU", 2048);
  std::vector<Key> keys;
  for (std::uint64_t i = 0; i < kMaxProbeLines * kLineSlots + 2; ++i) {
    keys.push_back(make_key(i));
    keys.back().word[0] &= ~0xFFFFFFFFULL;
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto reserved = f.reserve({keys[i]});
    const bool fits = i < kMaxProbeLines * kLineSlots;
    CHECK_EQ(first(reserved.outcomes),
             fits ? ReserveOutcome::kReserved : ReserveOutcome::kEntriesFull);
    if (!fits) continue;
    f.write(reserved.extents[0], keys[i]);
    CHECK_EQ(f.commit_one(reserved.ticket, 0), CommitOutcome::kCommitted);
  }
  CHECK_OK(f.pool->validate());
  f.store(chain(9, 4));
  CHECK_EQ(f.peek(chain(9, 4)), 4);
  CHECK_EQ(f.pool->clear(-1).dropped, kMaxProbeLines * kLineSlots + 4);
  CHECK_OK(f.pool->validate());
}

TEST(events_tell_what_happened_and_are_bounded) {
  Fixture f(16);
  for (std::uint64_t p = 0; p < 20; ++p)
    f.store(chain(p, 1));
  std::uint64_t lost = 0;
  const auto events = f.pool->take_events(&lost);
  std::size_t inserted = 0, evicted = 0;
  for (const Event& event : events) {
    inserted += event.kind == EventKind::kInserted;
    evicted += event.kind == EventKind::kEvicted;
    CHECK_EQ(event.bytes, kRecordBytes);
  }
  CHECK_EQ(inserted, 20);
  CHECK_EQ(evicted, 4);
  CHECK_EQ(lost, 0);
  CHECK(f.pool->take_events(&lost).empty());
}

TEST(prefault_covers_the_pool_and_stops_on_close) {
  Fixture f(4096);
  CHECK_OK(f.pool->prefault_start(2));
  CHECK_EQ(f.pool->prefault_start(2).code(), StatusCode::kExists);
  while (f.pool->prefault().done_bytes() < f.pool->extents_bytes() &&
         f.pool->prefault().error() == 0) {
    std::this_thread::yield();
  }
  CHECK_EQ(f.pool->prefault().error(), 0);
  CHECK_EQ(copy(f.pool->stats().prefaulted_bytes), f.pool->extents_bytes());
  f.pool->close();
}

TEST(threads_may_do_everything_at_once) {
  Fixture f(96, "LRU", 256);
  std::vector<std::uint32_t> rows;
  for (std::uint8_t i = 0; i < 4; ++i)
    rows.push_back(f.row(i + 1));
  std::atomic<std::uint64_t> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      Pool& pool = *f.pool;
      for (int step = 0; step < 300; ++step) {
        const auto keys = chain(random() % 24, 1 + random() % 6);
        const auto raw = packed(keys);
        std::uint8_t identity[32];
        kIdentity.store(identity);
        switch (random() % 5) {
          case 0:
          case 1: {
            ReserveRequest request;
            request.keys = raw.data();
            request.n_keys = keys.size();
            request.record_bytes = kRecordBytes;
            request.row = rows[t];
            request.identity = identity;
            ReserveResult result;
            if (!pool.reserve(request, &result).ok()) wrong += 1;
            std::vector<std::uint32_t> mine;
            for (std::uint32_t i = 0; i < keys.size(); ++i) {
              if (result.outcomes[i] != 0) continue;
              std::uint8_t* record = pool.extents_address() + result.extents[i].offset;
              std::memset(record + 4096, static_cast<int>(keys[i].word[0] & 0xFF), kPayloadBytes);
              RecordSpec spec;
              keys[i].store(spec.key.data());
              kIdentity.store(spec.identity.data());
              spec.chunk_tokens = 1;
              if (!seal_record(record, kRecordBytes, spec, &kPayloadBytes, 1).ok()) wrong += 1;
              mine.push_back(i);
            }
            if (random() % 4 == 0) {
              if (pool.abort(result.ticket, mine, false) != mine.size()) wrong += 1;
            } else {
              std::vector<std::uint8_t> outcomes(mine.size());
              if (!pool.commit(result.ticket, mine, true, outcomes.data()).ok()) wrong += 1;
              for (const std::uint8_t outcome : outcomes)
                wrong += outcome != 0;
            }
            break;
          }
          case 2: {
            LeaseResult lease;
            const std::uint32_t row = rows[t];
            if (!pool.lease(raw.data(), keys.size(), std::array<std::uint32_t, 1>{}, {&row, 1},
                            nullptr, &lease)
                     .ok())
              wrong += 1;
            for (std::size_t i = 0; i < lease.extents.size(); ++i) {
              const std::uint8_t* payload = pool.extents_address() + lease.extents[i].offset + 4096;
              for (std::uint32_t b = 0; b < kPayloadBytes; b += 512) {
                wrong += payload[b] != (keys[i].word[0] & 0xFF);
              }
            }
            if (lease.ticket != 0 && !pool.release(lease.ticket, row)) wrong += 1;
            break;
          }
          case 3: {
            Hold hold;
            if (pool.hold(keys[0], nullptr, &hold).ok() &&
                hold.address()[5000] != (keys[0].word[0] & 0xFF))
              wrong += 1;
            break;
          }
          case 4:
            pool.peek(raw.data(), keys.size(), 1);
            if (random() % 20 == 0) pool.clear(-1);
            if (random() % 20 == 0) pool.stats();
            break;
        }
      }
    });
  }
  for (auto& thread : threads)
    thread.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK_OK(f.pool->validate());
  CHECK_EQ(copy(f.pool->stats().leased_bytes), 0);
  CHECK_EQ(copy(f.pool->stats().pinned_bytes), 0);
}
