// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What the stateful test against the oracle (tests/model/native/test_registry.py) does not reach:
// threads, the bound on bytes, and tags that nobody's digests are.
#include "registry/registry.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "registry/cells.h"
#include "support/check.h"
#include "support/records.h"

namespace kvstrata {

// One try of a reader; `found` runs between its look at a cell and its second look at the seqlock.
struct RegistryProbe {
  template <typename Found>
  static bool try_read(const Registry& registry, Tag tag, Found found) {
    const auto found_slot = [&](Slot slot, std::uint32_t) { found(slot); };
    return registry.try_read(tag, found_slot);
  }
};

}  // namespace kvstrata

using namespace kvstrata;

namespace {

std::unique_ptr<Registry> make(std::uint64_t max_bytes = 256 << 20, std::uint32_t max_slots = 64) {
  std::unique_ptr<Registry> registry;
  CHECK(Registry::create(max_bytes, max_slots, &registry).ok());
  return registry;
}

Tag mixed(std::uint64_t number) {
  number += 0x9e3779b97f4a7c15;
  number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9;
  number = (number ^ number >> 27) * 0x94d049bb133111eb;
  return (number ^ number >> 31) & kTagMask;
}

std::vector<Tag> tags_of(std::uint64_t begin, std::uint64_t end) {
  std::vector<Tag> tags;
  for (; begin < end; ++begin)
    tags.push_back(mixed(begin));
  return tags;
}

// In 16 partitions, so that few of them make a partition grow many times.
Tag crowded(std::uint64_t number) {
  return mixed(number) & ~(Tag{0x3F} << 58);
}

std::vector<Tag> crowded_tags(std::uint64_t begin, std::uint64_t end) {
  std::vector<Tag> tags;
  for (; begin < end; ++begin)
    tags.push_back(crowded(begin));
  return tags;
}

std::vector<Slot> holders_of(Registry& registry, Tag tag) {
  std::vector<Slot> holders;
  registry.lookup(tag, &holders);
  std::sort(holders.begin(), holders.end());
  return holders;
}

std::uint64_t admit(Registry& registry, Slot slot, std::vector<Tag> tags) {
  std::uint64_t added = 0;
  CHECK(registry.admit(slot, std::span(tags), &added).ok());
  return added;
}

std::uint64_t evict(Registry& registry, Slot slot, std::vector<Tag> tags) {
  std::uint64_t removed = 0;
  CHECK(registry.evict(slot, std::span(tags), &removed).ok());
  return removed;
}

Slot open(Registry& registry, std::uint16_t group = 0) {
  const Slot slot = registry.open_slot(group);
  CHECK(slot != kNoSlot);
  CHECK(registry.publish(slot, kNoSlot).ok());
  return slot;
}

void sweep_all(Registry& registry) {
  while (registry.sweep(1) != 0) {
  }
}

TEST(a_tag_that_all_hold_is_one_and_shrinks_again) {
  const auto registry = make(256 << 20, 5000);
  std::vector<Slot> slots;
  for (int i = 0; i < 5000; ++i)
    slots.push_back(open(*registry, static_cast<std::uint16_t>(i)));
  const std::vector<Tag> tags = tags_of(0, 3);
  for (const Slot slot : slots) {
    CHECK_EQ(admit(*registry, slot, tags), 3u);
    CHECK_EQ(admit(*registry, slot, tags), 0u);
  }
  std::sort(slots.begin(), slots.end());
  for (const Tag tag : tags)
    CHECK(holders_of(*registry, tag) == slots);
  CHECK_EQ(registry->usage().shared_tags, 3u);
  const std::vector<Candidate> best = registry->lookup_prefix(std::span(tags), {.best = 5000});
  CHECK_EQ(best.size(), 5000u);
  for (const Candidate& each : best)
    CHECK_EQ(each.chunks, 3u);
  for (std::size_t at = 0; at < slots.size(); ++at) {
    if (at % 2 == 0) {
      CHECK_EQ(evict(*registry, slots[at], tags), 3u);
      CHECK_EQ(evict(*registry, slots[at], tags), 0u);
    } else {
      CHECK(registry->retire(slots[at]).ok());
    }
  }
  CHECK(holders_of(*registry, tags[0]).empty());
  sweep_all(*registry);
  CHECK_EQ(registry->usage().shared_tags, 0u);
  CHECK_EQ(registry->usage().placements, 0u);
}

TEST(no_more_is_taken_than_the_bound_and_what_is_there_stays) {
  constexpr std::uint64_t kBound = 24 << 20;
  const auto registry = make(kBound);
  const Slot slot = open(*registry);
  std::uint64_t admitted = 0;
  Status status;
  for (std::uint64_t begin = 0; status.ok(); begin += 10'000) {
    CHECK(begin < 20'000'000);
    std::vector<Tag> tags = tags_of(begin, begin + 10'000);
    status = registry->admit(slot, std::span(tags), &admitted);
  }
  CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(StatusCode::kNoSpace));
  CHECK_EQ(registry->usage().placements, admitted);
  CHECK(admitted > 1'500'000);
  CHECK_EQ(registry->usage().refused, 0u);
  CHECK(registry->usage().bytes < kBound + (8 << 20));
  for (std::uint64_t number = 0; number < admitted; number += 101)
    CHECK_EQ(holders_of(*registry, mixed(number)).size(), 1u);
  CHECK(registry->retire(slot).ok());
  sweep_all(*registry);
  CHECK_EQ(admit(*registry, open(*registry), tags_of(0, 100'000)), 100'000u);
}

TEST(tags_that_are_no_digests_are_refused_and_cost_others_nothing) {
  const auto registry = make();
  const Slot slot = open(*registry);
  std::vector<Tag> crowd;
  for (std::uint64_t number = 0; number < 100'000; ++number)
    crowd.push_back(number << (64 - kTagBits));  // one partition, one home
  std::uint64_t added = 0;
  CHECK(registry->admit(slot, std::span(crowd), &added).ok());
  CHECK(added < 1000);
  CHECK_EQ(registry->usage().refused, crowd.size() - added);
  CHECK_EQ(registry->usage().placements, added);
  std::uint64_t found = 0;
  for (const Tag tag : crowd)
    found += holders_of(*registry, tag).size();
  CHECK_EQ(found, added);
  // Others at the same place make lists of them, or find no room; counts stay right.
  for (int i = 0; i < 6; ++i) {
    const Slot more = open(*registry);
    std::uint64_t more_added = 0;
    CHECK(registry->admit(more, std::span(crowd), &more_added).ok());
  }
  CHECK_EQ(admit(*registry, slot, tags_of(0, 1000)), 1000u);
  std::uint64_t keys = 0;
  for (Slot each = slot; each < slot + 7; ++each)
    keys += registry->slot(each).keys;
  CHECK_EQ(registry->usage().placements, keys);
  found = 0;
  for (const Tag tag : crowd)
    found += holders_of(*registry, tag).size();
  CHECK_EQ(found + 1000, keys);
  for (Slot each = slot; each < slot + 7; ++each)
    CHECK(registry->retire(each).ok());
  sweep_all(*registry);
  CHECK_EQ(registry->usage().placements, 0u);
  CHECK_EQ(registry->usage().shared_tags, 0u);
}

TEST(holders_of_one_tag_in_several_lines_are_all_found_whichever_goes) {
  for (const bool swept : {false, true}) {
    const auto registry = make();
    const Slot filler = open(*registry);
    const std::vector<Slot> slots{open(*registry), open(*registry), open(*registry)};
    const Tag tag = 0;
    const auto go = [&](Slot slot) {
      if (swept) {
        CHECK(registry->retire(slot).ok());
        sweep_all(*registry);
      } else {
        CHECK_EQ(evict(*registry, slot, {tag}), 1u);
      }
    };
    // The first fills the home line up, so the others lie behind it.
    CHECK_EQ(admit(*registry, slots[0], {tag}), 1u);
    for (Tag number = 1; number < 8; ++number)
      CHECK_EQ(admit(*registry, filler, {number << (64 - kTagBits)}), 1u);
    CHECK_EQ(admit(*registry, slots[1], {tag}), 1u);
    CHECK_EQ(admit(*registry, slots[2], {tag}), 1u);
    CHECK(holders_of(*registry, tag) == slots);
    go(slots[1]);
    CHECK(holders_of(*registry, tag) == (std::vector<Slot>{slots[0], slots[2]}));
    go(slots[0]);
    CHECK(holders_of(*registry, tag) == std::vector<Slot>{slots[2]});
  }
}

// Each tag belongs to one instance by its number, so a reader knows each wrong answer by itself. A
// writer reports, evicts and departs, another sweeps and opens the slots again for other instances;
// some tags are everybody's, and all lie in few partitions, which grow and shrink all the while.
TEST(what_changes_under_a_reader_means_nothing_to_it) {
  const auto registry = make();
  const Slot slot = open(*registry);
  const Tag tag = crowded(0);
  CHECK_EQ(admit(*registry, slot, {tag}), 1u);

  int calls = 0;
  CHECK(RegistryProbe::try_read(*registry, tag, [&](Slot) { ++calls; }));
  CHECK_EQ(calls, 1);

  // A cell that is added does not make what was read wrong.
  Tag other = 0;
  for (std::uint64_t number = 1; (other ^ tag) >> 54 != 0 || other == 0; ++number)
    other = crowded(number);
  CHECK(RegistryProbe::try_read(*registry, tag, [&](Slot) { admit(*registry, slot, {other}); }));

  // One that is removed does, and so does a partition that is built anew.
  CHECK(!RegistryProbe::try_read(*registry, tag, [&](Slot) { evict(*registry, slot, {tag}); }));
  CHECK_EQ(admit(*registry, slot, {tag}), 1u);
  CHECK(!RegistryProbe::try_read(*registry, tag, [&](Slot) {
    const std::uint64_t before = registry->usage().rebuilds;
    for (std::uint64_t number = 1; registry->usage().rebuilds < before + 64; number += 4096)
      admit(*registry, slot, crowded_tags(number, number + 4096));
  }));

  // And a list of many holders that loses one.
  Slot last = kNoSlot;
  for (std::uint16_t group = 1; group <= 8; ++group) {
    last = open(*registry, group);
    CHECK_EQ(admit(*registry, last, {tag}), 1u);
  }
  CHECK_EQ(registry->usage().shared_tags, 1u);
  bool first = true;
  CHECK(!RegistryProbe::try_read(*registry, tag, [&](Slot) {
    if (std::exchange(first, false)) evict(*registry, last, {tag});
  }));
}

TEST(readers_never_see_a_placement_that_was_not_admitted) {
  constexpr std::uint32_t kInstances = 6;
  constexpr std::uint64_t kKeys = 3000;
  constexpr int kRounds = 60;
  const auto registry = make(64 << 20, 8);
  const auto tag_of = [](std::uint64_t instance, std::uint64_t number) {
    // In two partitions.
    return (mixed(instance << 32 | number) & (~Tag{0} >> 10)) | (number % 2) << 54;
  };
  const auto everybodys = [&](std::uint64_t number) { return tag_of(kInstances, number); };
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<std::uint64_t> seen{0};

  std::vector<std::thread> readers;
  for (std::uint64_t reader = 0; reader < 2; ++reader) {
    readers.emplace_back([&, reader] {
      std::uint64_t seed = reader;
      std::vector<Slot> holders;
      while (!stop.load(std::memory_order_relaxed)) {
        const std::uint64_t drawn = mixed(++seed) >> 8;
        const std::uint64_t instance = drawn % kInstances;
        const std::uint64_t number = drawn / 64 % kKeys;
        // The group comes with the answer, so it is that of the slot as it was then.
        const std::vector<Tag> chain{tag_of(instance, number), tag_of(instance, number + 1)};
        for (const Candidate& each : registry->lookup_prefix(std::span(chain), {.best = 8})) {
          wrong += each.group != instance;
          ++seen;
        }
        const std::vector<Tag> shared{everybodys(number % 16)};
        std::set<std::uint16_t> groups;
        for (const Candidate& each : registry->lookup_prefix(std::span(shared), {.best = 8})) {
          wrong += each.group >= kInstances || !groups.insert(each.group).second;
          ++seen;
        }
        holders.clear();
        registry->lookup(tag_of(kInstances + 1, number), &holders);  // never admitted
        wrong += holders.size();
      }
    });
  }
  std::thread sweeper([&] {
    std::vector<std::uint8_t> bytes;
    while (!stop.load(std::memory_order_relaxed)) {
      registry->sweep(1);
      bytes.clear();
      registry->dump(0, &bytes);
    }
  });

  std::vector<Slot> current(kInstances, kNoSlot);
  bool bad = false;
  for (int round = 0; round < kRounds && !bad; ++round) {
    const auto instance =
        static_cast<std::uint32_t>(mixed(static_cast<std::uint64_t>(round)) % kInstances);
    std::vector<Tag> tags;
    for (std::uint64_t number = 0; number < kKeys; ++number)
      tags.push_back(tag_of(instance, number));
    for (std::uint64_t number = 0; number < 16; ++number)
      tags.push_back(everybodys(number));
    const Slot slot = registry->open_slot(static_cast<std::uint16_t>(instance));
    if (slot == kNoSlot) {  // none swept yet: change what is there
      std::uint64_t count = 0;
      for (std::uint32_t each = 0; each < kInstances; ++each) {
        if (current[each] == kNoSlot || each == instance) continue;
        std::vector<Tag> some;
        for (std::uint64_t number = 0; number < kKeys; number += 3)
          some.push_back(tag_of(each, number));
        for (std::uint64_t number = 0; number < 16; number += 2)
          some.push_back(everybodys(number));
        bad |= !registry->evict(current[each], std::span(some), &count).ok();
        bad |= !registry->admit(current[each], std::span(some), &count).ok();
      }
      continue;
    }
    std::uint64_t added = 0;
    bad |= !registry->admit(slot, std::span(tags), &added).ok();
    bad |= added != tags.size();
    bad |= !registry->publish(slot, current[instance]).ok();
    current[instance] = slot;
    if (round % 5 == 4 && current[(instance + 1) % kInstances] != kNoSlot) {
      bad |= !registry->retire(current[(instance + 1) % kInstances]).ok();
      current[(instance + 1) % kInstances] = kNoSlot;
    }
  }
  while (seen.load() < 1000)
    std::this_thread::yield();
  stop = true;
  for (std::thread& reader : readers)
    reader.join();
  sweeper.join();
  CHECK(!bad);
  CHECK_EQ(wrong.load(), 0u);
  sweep_all(*registry);
  for (std::uint32_t instance = 0; instance < kInstances; ++instance) {
    for (std::uint64_t number = 0; number < kKeys; ++number) {
      const std::vector<Slot> holders = holders_of(*registry, tag_of(instance, number));
      CHECK_EQ(holders.size(), current[instance] == kNoSlot ? 0u : 1u);
    }
  }
}

TEST(several_writers_lose_nothing) {
  const auto registry = make(64 << 20);
  std::vector<Slot> slots;
  for (std::uint16_t group = 0; group < 4; ++group)
    slots.push_back(open(*registry, group));
  std::vector<std::thread> writers;
  std::atomic<std::uint64_t> added{0};
  for (std::uint64_t writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer] {
      // Half of them everybody's, half of these evicted again.
      std::vector<Tag> tags = tags_of(writer * 20'000, writer * 20'000 + 20'000);
      const std::vector<Tag> shared = tags_of(1 << 30, (1 << 30) + 20'000);
      tags.insert(tags.end(), shared.begin(), shared.end());
      std::uint64_t mine = 0;
      std::uint64_t gone = 0;
      bool fine = registry->admit(slots[writer], std::span(tags), &mine).ok();
      fine =
          registry->evict(slots[writer], std::span(shared).subspan(0, 10'000), &gone).ok() && fine;
      if (fine) added += mine - gone;
    });
  }
  for (std::thread& writer : writers)
    writer.join();
  CHECK_EQ(added.load(), 4u * 30'000u);
  CHECK_EQ(registry->usage().placements, 4u * 30'000u);
  for (std::uint64_t number = 0; number < 20'000; ++number)
    CHECK_EQ(holders_of(*registry, mixed((1 << 30) + number)).size(), number < 10'000 ? 0u : 4u);
}

TEST(what_is_dumped_can_be_restored_while_readers_read_and_grows_as_before) {
  constexpr std::uint64_t kTags = 200'000;  // some 12,000 in a partition
  const auto registry = make();
  for (int group = 0; group < 6; ++group)  // so many holders that the first tags have lists
    admit(*registry, open(*registry, 0), crowded_tags(0, group == 0 ? kTags : 10));
  std::vector<std::uint8_t> bytes;
  for (std::uint32_t partition = 0; partition < kRegistryPartitions; ++partition)
    registry->dump(partition, &bytes);
  const kvstrata::testing::TestFolder folder;
  const std::string path = folder / "dump";
  kvstrata::testing::write_file(path, std::string(bytes.begin(), bytes.end()));
  const auto restored = make();
  const Slot slot = open(*restored, 0);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done)
      CHECK(holders_of(*restored, crowded(kTags - 1)).size() <= 1);
  });
  std::uint64_t added = 0;
  CHECK(restored->restore(path, 0, bytes.size(), std::vector<Slot>(1 << 16, slot), &added).ok());
  done = true;
  reader.join();
  CHECK_EQ(added, kTags + 50);
  CHECK_EQ(restored->slot(slot).keys, kTags + 50);
  CHECK_EQ(holders_of(*restored, crowded(0)).size(), 6u);
  CHECK_EQ(admit(*restored, slot, crowded_tags(10, 2 * kTags)), kTags);
  const auto small = make(1 << 20);
  std::vector<Slot> to(1 << 16, open(*small, 0));
  CHECK(small->restore(path, 0, bytes.size(), to, &added).code() == StatusCode::kNoSpace);
  to.back() = 2;  // not open
  CHECK(small->restore(path, 0, bytes.size(), to, &added).code() == StatusCode::kBadArgument);
}

}  // namespace
