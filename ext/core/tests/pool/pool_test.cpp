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
  const auto reserved = f.reserve(keys, f.row(1));
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
  CHECK_OK(validate(*f.pool));
  // What was refused is given back.
  CHECK_EQ(f.count(EntryState::kReserved), 0);
  CHECK_EQ(copy(f.pool->stats().used_bytes), kRecordBytes);
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
  CHECK_OK(validate(*f.pool));
  f.store(chain(9, 4));
  CHECK_EQ(f.peek(chain(9, 4)), 4);
  CHECK_EQ(f.pool->clear(-1).dropped, kMaxProbeLines * kLineSlots + 4);
  CHECK_OK(validate(*f.pool));
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
                            nullptr, false, &lease)
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
  CHECK_OK(validate(*f.pool));
  CHECK_EQ(copy(f.pool->stats().leased_bytes), 0);
  CHECK_EQ(copy(f.pool->stats().pinned_bytes), 0);
}
