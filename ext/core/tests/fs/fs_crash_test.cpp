// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// SIGKILL before and after each kind of system call: what `fs` acknowledged is there afterwards,
// whole, and the cap holds. The child is a real process with a real directory. (A killed process
// loses no page cache; what a power cut loses is another test's matter.)
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "support/check.h"
#include "support/fs_records.h"
#include "support/hooked_files.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::array<std::uint32_t, 3> kPayloads = {3'000, 20'000, 70'000};
constexpr std::uint64_t kCap = 1 << 20;
constexpr int kLifeNumbers = 500;

std::uint32_t payload_of(int number) {
  return kPayloads[static_cast<std::size_t>(number) % kPayloads.size()];
}

// Puts numbered records from two threads in batches of five and says each that was acknowledged;
// dies at the nth use of a call.
[[noreturn]] void live(const std::string& base, std::uint64_t cap, int first, int said,
                       const std::string& call, int nth, bool before) {
  static HookedFiles files;
  static std::atomic<int> uses{0};
  const auto die = [=](const std::string& now) {
    if (now == call && ++uses == nth) ::kill(::getpid(), SIGKILL);
  };
  if (before)
    files.before = [die](const std::string& now, const std::string&) {
      die(now);
      return Status();
    };
  else
    files.after = [die](const std::string& now, const std::string&) { die(now); };
  auto* const connector = new FsConnector(fs_options(base, cap), files);
  if (!connector->open({.instance_id = "child"}).empty()) ::_exit(3);
  std::atomic<int> next{first};
  const auto work = [&] {
    for (int begin = next += 5; begin < first + kLifeNumbers; begin = next += 5) {
      std::vector<Record> records;
      for (int number = begin - 5; number < begin; ++number)
        records.emplace_back(number, payload_of(number));
      const std::vector<PutItem> items = put_all(*connector, records);
      for (std::size_t i = 0; i < items.size(); ++i) {
        const int number = begin - 5 + static_cast<int>(i);
        if (items[i].status == PutStatus::kStored &&
            ::write(said, &number, sizeof(number)) != sizeof(number))
          ::_exit(4);
      }
    }
  };
  std::thread other(work);
  work();
  other.join();
  ::_exit(5);  // nothing killed it
}

// The numbers that a child acknowledged before it was killed.
std::vector<int> acknowledged_in_a_life(const std::string& base, std::uint64_t cap, int first,
                                        const std::string& call, int nth, bool before) {
  std::array<int, 2> ends{};
  CHECK_EQ(::pipe(ends.data()), 0);
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    ::close(ends[0]);
    live(base, cap, first, ends[1], call, nth, before);
  }
  ::close(ends[1]);
  std::vector<int> said;
  for (int number; ::read(ends[0], &number, sizeof(number)) == sizeof(number);)
    said.push_back(number);
  ::close(ends[0]);
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  return said;
}

void examine(const std::string& base, std::uint64_t cap, const std::vector<int>& acknowledged,
             const std::vector<int>& latest) {
  FsConnector connector(fs_options(base, cap), posix_files());
  CHECK_EQ(connector.open({.instance_id = "parent"}), std::string());
  const ConnectorUsage usage = connector.usage();
  const OnDisk found = on_disk(base);
  CHECK_EQ(found.parts, 0U);
  CHECK_EQ(usage.records, found.records);
  CHECK_EQ(usage.used_bytes, found.charge);
  if (cap == 0) {
    for (const int number : acknowledged)
      CHECK(exists(connector, number));
  } else {
    CHECK(usage.used_bytes <= cap);
    // Batches beyond what was said may have taken their room already, and are said in any order.
    std::uint64_t newest = 0;
    for (std::size_t i = latest.size(); i-- > 0 && newest < cap / 4;) {
      newest += fs_charge(payload_of(latest[i])) + 4096;
      if (newest < cap / 4) CHECK(exists(connector, latest[i]));
    }
  }
  // Everything with a name is whole, acknowledged or not.
  for (int number = 0; number < 2 * kLifeNumbers; ++number) {
    if (exists(connector, number))
      CHECK(load_one(connector, number, payload_of(number)) == LoadStatus::kLoaded);
    else if (number % 97 == 0)
      CHECK(stored(connector, {number}, payload_of(number)));
  }
}

}  // namespace

TEST(acknowledged_records_survive_a_kill_at_each_system_call) {
  for (const char* call :
       {"make_folder", "create", "write", "truncate", "sync", "rename", "sync_folder", "unlink"}) {
    for (const bool before : {true, false}) {
      for (const std::uint64_t cap : {std::uint64_t{0}, kCap}) {
        if (cap == 0 && std::string(call) == "unlink") continue;  // nothing is unlinked then
        const TestFolder folder;
        const std::string base = folder.path + "/kv";
        std::vector<int> acknowledged;
        int life = 0;
        for (const int nth : {1, 150}) {
          const std::vector<int> latest =
              acknowledged_in_a_life(base, cap, kLifeNumbers * life, call, nth, before);
          acknowledged.insert(acknowledged.end(), latest.begin(), latest.end());
          examine(base, cap, acknowledged, latest);
          life += 1;
        }
        CHECK(!acknowledged.empty());
      }
    }
  }
}
