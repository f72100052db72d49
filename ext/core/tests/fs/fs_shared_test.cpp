// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// `fs` in a directory that several members share, turn by turn on a clock of the test's.
#include "fs/shared/connector.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <future>

#include "support/check.h"
#include "support/fs_records.h"
#include "support/hooked_files.h"
#include "support/volatile_files.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint32_t kPayload = 1'000;
const std::uint64_t kCharge = fs_charge(record_header_bytes(1) + kPayload);

std::uint64_t count(Connector& connector, const std::string& name) {
  std::vector<ConnectorCount> counts;
  connector.counts(&counts);
  const auto found =
      std::ranges::find_if(counts, [&](const ConnectorCount& each) { return each.name == name; });
  CHECK(found != counts.end());
  return found->value;
}

// Members on one directory; each has its turn when the test says so.
struct Shared {
  explicit Shared(std::uint64_t capacity_bytes = 0) : capacity(capacity_bytes) {
    times.clock = [this] { return now_ns; };
  }
  std::unique_ptr<FsSharedConnector> make(FileLayer& files = posix_files()) {
    FsOptions options = fs_options(base, capacity);
    options.own_threads = false;
    return std::make_unique<FsSharedConnector>(options, files, times);
  }
  std::unique_ptr<FsSharedConnector> join(FileLayer& files = posix_files()) {
    auto member = make(files);
    CHECK_EQ(member->open({.instance_id = "test"}), std::string());
    return member;
  }
  void pass(std::chrono::milliseconds time) { now_ns += std::chrono::nanoseconds(time).count(); }
  // So many rounds, a tenth of a second apart.
  void turns(const std::vector<FsSharedConnector*>& members, int rounds) {
    for (int round = 0; round < rounds; ++round) {
      pass(std::chrono::milliseconds(100));
      for (FsSharedConnector* const member : members)
        member->tick();
    }
  }
  TestFolder folder;
  std::string base = folder.path + "/kv";
  std::uint64_t capacity;
  std::int64_t now_ns = 1;
  FsSharedTimes times;
};

}  // namespace

TEST(what_one_member_puts_another_finds_loads_and_deletes) {
  Shared shared;
  const auto one = shared.join();
  const auto other = shared.join();
  CHECK(stored(*one, {1, 2}, kPayload));
  CHECK(exists(*other, 1));
  CHECK(load_one(*other, 1, kPayload) == LoadStatus::kLoaded);
  CHECK(put_all(*other, records_of({2}, kPayload))[0].status == PutStatus::kExists);
  CHECK(removed(*other, 1));
  CHECK(!exists(*one, 1));
  CHECK(load_one(*one, 1, kPayload) == LoadStatus::kAbsent);
  CHECK_EQ(other->clear(), 1U);
  CHECK(!exists(*one, 2));
}

TEST(the_cap_holds_for_what_all_members_put) {
  Shared shared(48 * kCharge);
  const auto one = shared.join();
  const auto other = shared.join();
  shared.turns({one.get(), other.get()}, 2);
  int number = 0;
  int refused = 0;
  for (int round = 0; round < 100; ++round) {
    for (FsSharedConnector* const member : {one.get(), other.get()}) {
      if (!stored(*member, {++number}, kPayload)) ++refused;
      CHECK(on_disk(shared.base).charge <= 48 * kCharge);
    }
    shared.turns({one.get(), other.get()}, 2);
  }
  CHECK(on_disk(shared.base).records >= 30);
  CHECK_EQ(refused, 0);
  CHECK_EQ(count(*one, "janitor"), 1U);
  CHECK_EQ(count(*other, "janitor"), 0U);
  CHECK(count(*one, "evicted_records") > 0);
  std::vector<Digest> evicted;
  one->take_evicted(&evicted);
  CHECK_EQ(evicted.size(), count(*one, "evicted_records"));
}

TEST(a_record_that_was_loaded_stays_and_older_ones_leave) {
  Shared shared(32 * kCharge);
  const auto one = shared.join();
  const auto other = shared.join();
  shared.turns({one.get(), other.get()}, 2);
  CHECK(stored(*one, {0}, kPayload));
  for (int number = 1; number < 100; ++number) {
    CHECK(stored(*one, {number}, kPayload));
    shared.turns({one.get(), other.get()}, 1);
    CHECK(load_one(*other, 0, kPayload) == LoadStatus::kLoaded);
  }
}

TEST(a_janitor_that_leaves_is_followed_at_once_and_one_that_dies_after_the_lease) {
  Shared shared(48 * kCharge);
  auto one = shared.join();
  const auto other = shared.join();
  shared.turns({one.get(), other.get()}, 2);
  one->close();
  shared.turns({other.get()}, 1);
  CHECK_EQ(count(*other, "janitor"), 1U);
  one = shared.join();
  shared.turns({one.get(), other.get()}, 2);
  CHECK_EQ(count(*one, "janitor"), 0U);
  // From here on the janitor has no turn any more.
  shared.turns({one.get()}, 25);
  CHECK_EQ(count(*one, "janitor"), 0U);
  shared.turns({one.get()}, 10);
  CHECK_EQ(count(*one, "janitor"), 1U);
  CHECK_EQ(count(*one, "takeovers"), 1U);
}

TEST(a_janitor_that_stood_still_is_an_ordinary_member_afterwards) {
  Shared shared(48 * kCharge);
  const auto one = shared.join();
  const auto other = shared.join();
  shared.turns({one.get(), other.get()}, 2);
  CHECK(stored(*one, {1, 2, 3, 4, 5, 6}, kPayload));
  shared.turns({other.get()}, 40);
  CHECK_EQ(count(*other, "janitor"), 1U);
  shared.turns({one.get(), other.get()}, 2);
  CHECK_EQ(count(*one, "janitor"), 0U);
  for (int number = 10; number < 150; ++number) {
    FsSharedConnector& member = number % 2 == 0 ? *one : *other;
    (void)stored(member, {number}, kPayload);
    shared.turns({one.get(), other.get()}, 2);
    CHECK(on_disk(shared.base).charge <= 48 * kCharge);
  }
  CHECK(exists(*one, 149) || exists(*one, 148));
}

TEST(without_a_janitor_what_was_granted_is_used_up_and_then_puts_are_refused) {
  Shared shared(64 * kCharge);
  const auto one = shared.join();
  HookedFiles files;
  const auto other = shared.join(files);
  shared.turns({one.get(), other.get()}, 3);
  shared.pass(std::chrono::milliseconds(200));
  std::string reason;
  int stored_count = 0;
  for (int number = 0; number < 80; ++number) {
    const PutItem item = put_all(*other, records_of({number}, kPayload))[0];
    if (item.status == PutStatus::kThrottled) {
      reason = item.reason;
      break;
    }
    ++stored_count;
  }
  CHECK_EQ(reason, std::string("capacity"));
  CHECK(stored_count >= 1 && stored_count < 16 && count(*other, "throttled") == 1);
  // And once nobody holds the office any more, nor can follow, that is said.
  files.before = [](const std::string& call, const std::string& path) {
    return call == "create" && path.find("/janitor.") != std::string::npos
               ? Status(StatusCode::kOsError, "injected", EIO)
               : Status();
  };
  shared.pass(std::chrono::seconds(10));
  const PutItem item = put_all(*other, records_of({80}, kPayload))[0];
  CHECK(item.status == PutStatus::kThrottled);
  CHECK_EQ(std::string(item.reason), std::string("no_janitor"));
  CHECK(count(*other, "throttled_no_janitor") == 1);
}

TEST(a_server_alone_and_those_that_share_keep_each_other_out) {
  Shared shared;
  auto member = shared.join();
  FsConnector alone(fs_options(shared.base), posix_files());
  CHECK(alone.open({}).find("belongs to another running server (pid ") != std::string::npos);
  member->close();
  CHECK_EQ(alone.open({}), std::string());
  const std::string wrong = shared.make()->open({});
  CHECK(wrong.find("that does not share it; give each server a directory of its own, or set "
                   "\"shared\": true for all of them") != std::string::npos);
}

TEST(members_with_another_cap_or_another_temporary_directory_are_refused) {
  Shared shared(48 * kCharge);
  auto member = shared.join();
  shared.capacity = 49 * kCharge;
  const std::string wrong = shared.make()->open({});
  CHECK(wrong.find("!capacity_gb: " + std::to_string(49 * kCharge) + " bytes here, but " +
                   std::to_string(48 * kCharge) + " bytes in a server that shares") == 0);
  FsOptions options = fs_options(shared.base, 48 * kCharge);
  options.own_threads = false;
  options.relative_tmp_dir = "other tmp";
  const std::string tmp = FsSharedConnector(options, posix_files(), shared.times).open({});
  CHECK(tmp.find("!relative_tmp_dir: 'other%20tmp' here, but 'tmp' in a server") == 0);
  member->close();
  CHECK_EQ(shared.make()->open({}), std::string());
}

TEST(rubbish_among_the_files_of_those_who_share_is_ignored) {
  Shared shared(48 * kCharge);
  const std::string place = shared.base + "/.kvstrata.shared/";
  std::filesystem::create_directories(place);
  for (const char* name : {"README", "member.7", "lock.7", "member.x", "janitor.", "janitor.007",
                           "janitor.99999999999999999999", "temp.5", "janitor.12"})
    std::ofstream(place + name) << "rubbish\n";
  std::filesystem::create_directories(place + "member.9");
  const auto one = shared.join();
  shared.turns({one.get()}, 40);
  CHECK_EQ(count(*one, "janitor"), 1U);
  CHECK(count(*one, "unreadable_files") > 0);
  for (int number = 0; number < 80; ++number) {
    CHECK(stored(*one, {number}, kPayload));
    CHECK(on_disk(shared.base).charge <= 48 * kCharge);
    shared.turns({one.get()}, 1);
  }
}

TEST(those_who_lose_all_their_files_find_together_again) {
  Shared shared(48 * kCharge);
  const auto one = shared.join();
  const auto other = shared.join();
  shared.turns({one.get(), other.get()}, 3);
  std::filesystem::remove_all(shared.base + "/.kvstrata.shared");
  shared.turns({one.get(), other.get()}, 60);
  CHECK_EQ(count(*one, "janitor") + count(*other, "janitor"), 1U);
  CHECK(stored(*one, {1}, kPayload));
  CHECK(stored(*other, {2}, kPayload));
}

TEST(a_full_file_system_evicts_for_the_member_that_asks) {
  Shared shared;
  HookedFiles files;
  std::atomic<std::size_t> room = 5;
  files.before = [&](const std::string& call, const std::string& path) {
    return call == "write" && path.ends_with(".part") && on_disk(shared.base).records >= room
               ? Status(StatusCode::kOsError, "injected", ENOSPC)
               : Status();
  };
  const auto one = shared.join(files);
  for (int number = 0; number < 10; ++number)
    CHECK(stored(*one, {number}, kPayload));
  CHECK(exists(*one, 9));
  CHECK(!exists(*one, 0));
  room = 0;
  const PutItem item = put_all(*one, records_of({99}, kPayload))[0];
  CHECK(item.status == PutStatus::kThrottled);
  CHECK_EQ(std::string(item.reason), std::string("disk_full"));
}

TEST(parts_of_the_dead_are_counted_and_removed_when_they_are_old) {
  Shared shared(8 * kCharge);
  const auto one = shared.join();
  const std::string part = shared.base + "/tmp/" + std::string(64, 'a') + ".77.part";
  {
    std::ofstream file(part);
    file << std::string(4 * kCharge, 'x');
  }
  one->clear();
  shared.turns({one.get()}, 2);
  for (int number = 0; number < 20; ++number) {
    CHECK(stored(*one, {number}, kPayload));
    shared.turns({one.get()}, 1);
    CHECK(on_disk(shared.base).charge <= 8 * kCharge);
  }
  std::filesystem::last_write_time(
      part, std::filesystem::file_time_type::clock::now() - std::chrono::minutes(11));
  one->clear();
  shared.turns({one.get()}, 2);
  CHECK(!std::filesystem::exists(part));
}

TEST(a_report_about_a_corrupt_copy_does_not_touch_the_one_put_since) {
  Shared shared;
  const auto one = shared.join();
  const auto other = shared.join();
  CHECK(stored(*one, {1}, kPayload));
  const Record room(1, kPayload, false);
  LoadItem item;
  item.key = room.key;
  item.bytes = room.bytes;
  item.length = room.length;
  one->load(std::span(&item, 1));
  CHECK(item.status == LoadStatus::kLoaded);
  CHECK(removed(*other, 1));
  CHECK(stored(*other, {1}, kPayload));
  one->remove_corrupt(item);
  CHECK(exists(*one, 1));
  one->load(std::span(&item, 1));
  one->remove_corrupt(item);
  CHECK(!exists(*one, 1));
}
