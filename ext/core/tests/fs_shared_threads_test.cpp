// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// `fs` in a shared directory with its threads: several threads of two servers at once, for
// ThreadSanitizer above all. What they may find is checked, not when.
#include <random>
#include <thread>

#include "fs_records.h"
#include "kvstrata/fs_shared.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint32_t kPayload = 9'000;
constexpr int kNumbers = 120;
const std::uint64_t kCapacity = 64 * fs_charge(record_header_bytes(1) + kPayload);

std::unique_ptr<FsSharedConnector> join(const std::string& base) {
  FsSharedTimes times;
  times.lease = std::chrono::milliseconds(300);
  times.beat = std::chrono::milliseconds(20);
  times.put_wait = std::chrono::milliseconds(200);
  auto member =
      std::make_unique<FsSharedConnector>(fs_options(base, kCapacity), posix_files(), times);
  CHECK_EQ(member->open({.instance_id = "test"}), std::string());
  return member;
}

// As the threads of a server's lanes.
void work(FsSharedConnector& member, unsigned seed) {
  std::mt19937 chance(seed);
  for (int turn = 0; turn < 60; ++turn) {
    const int number = static_cast<int>(chance() % kNumbers);
    switch (chance() % 6) {
      case 0:
      case 1:
      case 2:
        for (const PutItem& item :
             put_all(member, records_of({number, (number + 1) % kNumbers, number}, kPayload)))
          CHECK(item.status != PutStatus::kFailed);
        break;
      case 3:
      case 4: {
        const LoadStatus status = load_one(member, number, kPayload);
        CHECK(status == LoadStatus::kLoaded || status == LoadStatus::kAbsent);
        break;
      }
      default:
        (void)removed(member, number);
        (void)member.usage();
        std::vector<ConnectorCount> counts;
        member.counts(&counts);
        std::vector<Digest> evicted;
        member.take_evicted(&evicted);
    }
  }
}

}  // namespace

TEST(threads_of_two_servers_find_whole_records_and_keep_the_cap) {
  TestFolder folder;
  const std::string base = folder.path + "/kv";
  const auto stays = join(base);
  for (unsigned round = 0; round < 3; ++round) {
    // The second one comes and goes, at times as the janitor.
    const auto guest = join(base);
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 6; ++number)
      threads.emplace_back(work, std::ref(number % 2 == 0 ? *stays : *guest), 10 * round + number);
    for (std::thread& thread : threads)
      thread.join();
    CHECK(on_disk(base).charge <= kCapacity);
    guest->close();
  }
}
