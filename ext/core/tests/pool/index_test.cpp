#include "pool/index.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "support/check.h"
#include "support/keys.h"

using namespace kvstrata;

namespace {

// An index in this process's private memory, with the calls of its only writer.
struct Memory {
  IndexLayout layout;
  Mapping mapping;
  IndexView view;

  explicit Memory(std::uint64_t capacity) : layout(IndexLayout::of(capacity)) {
    CHECK_OK(Mapping::anonymous(layout.file_bytes, &mapping));
    view = IndexView(mapping.address(), layout);
  }
  void put(std::uint32_t entry, const Key& key, EntryState state = EntryState::kReady) {
    view.write_entry(entry, key, 4096ULL * entry, 4096);
    view.set_state(entry, state);
    CHECK(view.link(entry, key));
  }
  void take(std::uint32_t entry, const Key& key) {
    view.unlink(entry, key);
    view.set_state(entry, EntryState::kFree);
  }
};

std::vector<std::uint8_t> packed(const std::vector<Key>& keys) {
  std::vector<std::uint8_t> bytes(keys.size() * kKeyBytes);
  for (std::size_t i = 0; i < keys.size(); ++i)
    keys[i].store(bytes.data() + i * kKeyBytes);
  return bytes;
}

}  // namespace

TEST(confirmed_guesses_agree_with_find_batch_whatever_was_guessed) {
  constexpr std::uint32_t kCount = 300;
  Memory index(kCount);
  for (std::uint32_t i = 0; i < kCount; i += 3)
    index.put(i, make_key(i));
  // A stale entry: it still has a key that is linked nowhere, or under another entry.
  index.take(6, make_key(6));
  index.take(9, make_key(9));
  index.put(10, make_key(9));
  std::vector<Key> keys;
  for (std::uint32_t i = 0; i < kCount; ++i)
    keys.push_back(make_key(i));
  const auto bytes = packed(keys);
  const std::vector<std::uint64_t> beside(kCount);
  std::vector<std::uint32_t> expected(kCount);
  index.view.find_batch(bytes.data(), kCount, expected.data(), beside.data(),
                        sizeof(std::uint64_t));
  CHECK_EQ(expected[6], kNoEntry);
  CHECK_EQ(expected[9], 10);
  for (std::uint32_t shift : {0, 1, 3, 299}) {
    std::vector<std::uint32_t> entries(kCount);
    for (std::uint32_t i = 0; i < kCount; ++i)
      entries[i] = shift == 1 ? kNoEntry : (i + shift) % kCount;
    index.view.confirm_batch(bytes.data(), kCount, entries.data());
    CHECK(entries == expected);
  }
  std::vector<std::uint32_t> guesses(kCount);
  index.view.prefetch_lines(bytes.data(), kCount);
  index.view.guess_batch(bytes.data(), kCount, guesses.data(), beside.data(),
                         sizeof(std::uint64_t));
  CHECK(guesses == expected);
}

TEST(an_entry_that_stays_half_changed_is_a_miss) {
  Memory index(10);
  const Key key = make_key(1);
  index.put(3, key);
  const auto bytes = packed({key});
  CHECK_EQ(index.view.peek(bytes.data(), 1, 1), 1);
  index.view.begin_change(3);
  CHECK_EQ(index.view.peek(bytes.data(), 1, 1), 0);
  index.view.end_change(3, EntryState::kReady);
  CHECK_EQ(index.view.peek(bytes.data(), 1, 1), 1);
}

TEST(lines_overflow_into_the_next_ones_up_to_a_bound) {
  Memory index(1000);
  std::vector<Key> keys;
  // Keys with one home line near the end, so that probing wraps around.
  for (std::uint64_t i = 0; i <= kMaxProbeLines * kLineSlots; ++i) {
    Key key = make_key(i);
    key.word[0] = (key.word[0] & ~0xFFFFFFFFULL) | 0xFFFFFF00ULL;
    keys.push_back(key);
  }
  constexpr std::uint32_t kReach = kMaxProbeLines * kLineSlots;
  const std::uint64_t home = index.view.home_of(keys[0].word[0]);
  CHECK(home + kMaxProbeLines > index.view.bucket_lines());
  for (std::uint32_t i = 0; i < kReach; ++i) {
    index.put(i, keys[i]);
    CHECK_EQ(index.view.probe_length(home), i / kLineSlots);
  }
  for (std::uint32_t i = 0; i < kReach; ++i)
    CHECK_EQ(index.view.find(keys[i]), i);
  index.view.write_entry(150, keys[kReach], 0, 4096);
  CHECK(!index.view.link(150, keys[kReach]));
  CHECK_EQ(index.view.find(keys[kReach]), kNoEntry);
  // In whatever order entries are taken out, the rest are still found.
  std::mt19937 random(7);
  std::vector<std::uint32_t> order(kReach);
  for (std::uint32_t i = 0; i < kReach; ++i)
    order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (std::uint32_t gone = 0; gone < kReach; ++gone) {
    index.take(order[gone], keys[order[gone]]);
    for (std::uint32_t i = 0; i < kReach; ++i) {
      CHECK_EQ(index.view.find(keys[order[i]]), i <= gone ? kNoEntry : order[i]);
      CHECK_EQ(index.view.peek(packed({keys[order[i]]}).data(), 1, 1), i <= gone ? 0 : 1);
    }
  }
  CHECK_EQ(index.view.probe_length(home), 0);
}

TEST(a_reader_survives_any_bytes) {
  Memory index(64);
  std::vector<Key> keys;
  for (std::uint32_t i = 0; i < 64; ++i)
    keys.push_back(make_key(i));
  const auto wanted = packed(keys);
  std::mt19937_64 random(11);
  auto* bytes = static_cast<std::uint8_t*>(index.mapping.address());
  for (int round = 0; round < 300; ++round) {
    for (std::size_t at = index.layout.buckets_offset; at + 8 <= index.layout.cold_offset;
         at += 8) {
      // Mostly plausible entry numbers, so that walks go far and in circles.
      std::uint64_t word = random();
      if (round % 2 == 0) word = ((random() % 66) << 32) | (random() % 66);
      std::memcpy(bytes + at, &word, 8);
    }
    CHECK(index.view.peek(wanted.data(), keys.size(), 1) <= keys.size());
  }
}

TEST(a_reader_answers_nothing_without_a_fresh_heartbeat) {
  const int fd = memfd_create("index", MFD_CLOEXEC);
  const IndexLayout layout = IndexLayout::of(10);
  CHECK_EQ(ftruncate(fd, static_cast<off_t>(layout.file_bytes)), 0);
  Mapping mapping;
  CHECK_OK(Mapping::map(fd, layout.file_bytes, true, true, &mapping));
  IndexView view(mapping.address(), layout);
  view.header().magic = kIndexMagic;
  view.header().format_version = kIndexFormatVersion;
  view.header().entry_capacity = 10;
  view.header().bucket_lines = layout.bucket_lines;
  view.seal_static_header();
  const Key key = make_key(1);
  view.write_entry(0, key, 0, 4096);
  view.set_state(0, EntryState::kReady);
  CHECK(view.link(0, key));
  IndexReader reader;
  FormatMismatch mismatch;
  CHECK_OK(IndexReader::open(fd, &reader, &mismatch));
  const auto bytes = packed({key});
  CHECK_EQ(reader.peek(bytes.data(), 1, 1), 0);  // no heartbeat yet
  store_word(view.header().heartbeat_ns, monotonic_ns());
  CHECK_EQ(reader.peek(bytes.data(), 1, 1), 1);
  store_word(view.header().heartbeat_ns, monotonic_ns() - 2 * kHeartbeatLimitNs);
  CHECK_EQ(reader.peek(bytes.data(), 1, 1), 0);
  store_word(view.header().heartbeat_ns, monotonic_ns() + 100 * kHeartbeatLimitNs);
  CHECK_EQ(reader.peek(bytes.data(), 1, 1), 0);
  close(fd);
}

TEST(readers_that_race_with_the_writer_find_every_stable_key_and_no_absent_one) {
  constexpr std::uint32_t kCapacity = 64;
  constexpr std::uint32_t kStable = 8;
  constexpr int kRounds = 3000;
  Memory index(kCapacity);
  std::vector<Key> stable;
  for (std::uint32_t i = 0; i < kStable; ++i) {
    stable.push_back(make_key(1'000'000 + i));
    index.put(i, stable.back());
  }
  std::vector<Key> churn;
  for (std::uint64_t i = 0; i < 100; ++i)
    churn.push_back(make_key(i));
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<std::uint64_t> answers{0};
  const auto stable_bytes = packed(stable);
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&, r] {
      std::mt19937 random(static_cast<unsigned>(r));
      do {
        if (index.view.peek(stable_bytes.data(), kStable, 1) != kStable) wrong += 1;
        const auto absent = packed({make_key(5'000'000 + random() % 1000)});
        if (index.view.peek(absent.data(), 1, 1) != 0) wrong += 1;
        const auto some = packed({churn[random() % churn.size()], churn[random() % churn.size()]});
        answers += index.view.peek(some.data(), 2, 1);
      } while (!stop.load());
    });
  }
  std::mt19937 random(99);
  std::vector<int> holds(kCapacity, -1);
  std::vector<bool> present(churn.size(), false);
  for (int round = 0; round < kRounds; ++round) {
    const std::uint32_t entry = kStable + random() % (kCapacity - kStable);
    if (holds[entry] >= 0) {
      const auto key = static_cast<std::size_t>(holds[entry]);
      index.take(entry, churn[key]);
      present[key] = false;
      holds[entry] = -1;
      continue;
    }
    const std::size_t key = random() % churn.size();
    if (present[key]) continue;
    index.put(entry, churn[key], EntryState::kReserved);
    index.view.set_state(entry, EntryState::kReady);
    present[key] = true;
    holds[entry] = static_cast<int>(key);
  }
  stop = true;
  for (auto& reader : readers)
    reader.join();
  CHECK_EQ(wrong.load(), 0);
}
