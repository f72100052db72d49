// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// `fs` in a directory that two servers share, each with its own background threads and called from
// several threads at once; mainly for ThreadSanitizer. Each outcome is checked against those that
// are allowed at any time, because the order of the operations is not known.
#include <random>
#include <thread>

#include "fs/shared/connector.h"
#include "support/fs_records.h"

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
  auto server =
      std::make_unique<FsSharedConnector>(fs_options(base, kCapacity), posix_files(), times);
  CHECK_EQ(server->open({.instance_id = "test"}), std::string());
  return server;
}

// Does what one thread of a server's lanes does: puts, loads, deletes and asks for numbers.
void work(FsSharedConnector& server, unsigned seed) {
  std::mt19937 chance(seed);
  for (int turn = 0; turn < 60; ++turn) {
    const int number = static_cast<int>(chance() % kNumbers);
    switch (chance() % 6) {
      case 0:
      case 1:
      case 2:
        for (const PutItem& item :
             put_all(server, records_of({number, (number + 1) % kNumbers, number}, kPayload)))
          CHECK(item.status != PutStatus::kFailed);
        break;
      case 3:
      case 4: {
        const LoadStatus status = load_one(server, number, kPayload);
        CHECK(status == LoadStatus::kLoaded || status == LoadStatus::kAbsent);
        break;
      }
      default:
        (void)removed(server, number);
        (void)server.usage();
        std::vector<ConnectorCount> counts;
        server.counts(&counts);
        std::vector<Digest> evicted;
        server.take_evicted(&evicted);
    }
  }
}

}  // namespace

TEST(threads_of_two_servers_find_whole_records_and_keep_the_cap) {
  TestFolder folder;
  const std::string base = folder.path + "/kv";
  const auto stays = join(base);
  for (unsigned round = 0; round < 3; ++round) {
    // The second server joins and leaves in each round, and is sometimes the janitor.
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
