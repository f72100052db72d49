// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Random stories of members that share a directory of `fs`: one runs at a time, and at each call of
// the file layer another may go on, stand still for longer than the lease, or die. At each of these
// places the cap holds for what lies there.
#include <algorithm>
#include <condition_variable>
#include <map>
#include <thread>

#include "fs/shared/connector.h"
#include "support/amount.h"
#include "support/check.h"
#include "support/fs_records.h"
#include "support/hooked_files.h"
#include "support/volatile_files.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kCap = 300'000;
constexpr int kMembers = 3;
constexpr int kKeys = 60;
constexpr std::uint64_t kBusySteps = 6'000;
const std::string kBase = "/kv";

std::uint32_t payload_of(int number) {
  return 500 + static_cast<std::uint32_t>(number % 4) * 5'000;
}

class Story {
 public:
  explicit Story(std::uint64_t seed)
      : random_(seed), switch_percent_(3 + static_cast<unsigned>(random_.below(60))), seed_(seed) {
    times_.clock = [this] { return now_ns_; };
  }

  void tell() {
    {
      std::unique_lock lock(mutex_);
      for (int i = 0; i < kMembers; ++i)
        start();
      turn_ = 0;
    }
    changed_.notify_all();
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return members_[i].ended; });
    }
    for (std::thread& thread : threads_)
      thread.join();
    examine();
  }

  std::uint64_t evictions = 0;
  std::uint64_t takeovers = 0;
  std::uint64_t stored_count = 0;
  std::uint64_t refused = 0;
  std::uint64_t most = 0;

 private:
  struct Member {
    bool ended = false;
    bool dead = false;
    std::uint64_t frozen_until = 0;
  };

  // REQUIRES: the mutex.
  void start() {
    const std::size_t who = members_.size();
    members_.emplace_back();
    threads_.emplace_back([this, who] { live(who); });
  }

  void live(std::size_t who) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return turn_ == who; });
    }
    {
      HookedFiles files(below_);
      files.before = [&](const std::string& call, const std::string& path) {
        const Status status = pause(who);
        if (status.ok() && call == "unlink" && path.ends_with(".kvc")) left_[path] = step_;
        if (path.ends_with(".kvc"))
          history_[path] += "\n  step " + std::to_string(step_) + " member " + std::to_string(who) +
                            (status.ok() ? " " : " failed ") + call;
        return status;
      };
      FsOptions options = fs_options(kBase, kCap);
      options.own_threads = false;
      FsSharedConnector connector(options, files, times_);
      if (connector.open({.instance_id = "story"}).empty()) {
        Random own(seed_ * 1000 + who);
        while (step_ < kBusySteps && !members_[who].dead)
          act(connector, own);
        std::vector<ConnectorCount> counts;
        connector.counts(&counts);
        for (const ConnectorCount& count : counts) {
          if (std::string(count.name) == "evicted_records") evictions += count.value;
          if (std::string(count.name) == "takeovers") takeovers += count.value;
        }
      }
    }
    std::unique_lock lock(mutex_);
    members_[who].ended = true;
    if (step_ < kBusySteps) start();
    choose(who);
    changed_.notify_all();
  }

  void act(FsSharedConnector& connector, Random& own) {
    const std::uint64_t what = own.below(100);
    const int number = static_cast<int>(own.below(kKeys));
    if (what < 45) {
      std::vector<Record> records;
      for (std::uint64_t i = 0; i <= own.below(4); ++i) {
        const int each = static_cast<int>(own.below(kKeys));
        records.emplace_back(each, payload_of(each));
      }
      const std::uint64_t began = step_;
      const std::vector<PutItem> items = put_all(connector, records);
      for (const PutItem& item : items) {
        refused += item.status == PutStatus::kThrottled;
        if (item.status != PutStatus::kStored && item.status != PutStatus::kExists) continue;
        stored_count += 1;
        std::uint64_t& since = acknowledged_[FsPaths(kBase, "tmp").record(item.key)];
        since = std::max(since, began);
      }
    } else if (what < 60) {
      const LoadStatus status = load_one(connector, number, payload_of(number));
      CHECK(status != LoadStatus::kCorrupt);
    } else if (what < 66) {
      (void)removed(connector, number);
    } else if (what < 67) {
      connector.clear();
    } else {
      connector.tick();
    }
  }

  // Lets others go on.
  Status pause(std::size_t who) {
    std::unique_lock lock(mutex_);
    if (members_[who].dead) return Status(StatusCode::kOsError, "dead", EIO);
    step_ += 1;
    now_ns_ += static_cast<std::int64_t>(random_.below(20'000'000));
    check_cap();
    if (step_ < kBusySteps && random_.below(300) == 0)
      members_[who].frozen_until = step_ + random_.below(1'500);
    if (step_ < kBusySteps && random_.below(900) == 0) members_[who].dead = true;
    if (random_.chance(switch_percent_) || members_[who].frozen_until > step_) {
      choose(who);
      changed_.notify_all();
      changed_.wait(lock, [&] { return turn_ == who; });
    }
    return members_[who].dead ? Status(StatusCode::kOsError, "dead", EIO) : Status();
  }

  // Whose turn it is. REQUIRES: the mutex.
  void choose(std::size_t who) {
    std::vector<std::size_t> ready;
    std::size_t first = members_.size();
    for (std::size_t i = 0; i < members_.size(); ++i) {
      if (members_[i].ended) continue;
      if (members_[i].frozen_until <= step_) ready.push_back(i);
      if (first == members_.size() || members_[i].frozen_until < members_[first].frozen_until)
        first = i;
    }
    if (!ready.empty())
      turn_ = ready[random_.below(ready.size())];
    else
      turn_ = first < members_.size() ? first : who;
  }

  std::uint64_t charge_below(const std::string& path) {
    std::uint64_t charge = 0;
    std::vector<FolderEntry> entries;
    if (!below_.list(path, &entries).ok()) return 0;
    for (const FolderEntry& entry : entries) {
      if (entry.is_folder && entry.name[0] != '.') charge += charge_below(path + "/" + entry.name);
      FileStat stat;
      if (entry.is_file && entry.name[0] != '.' && below_.stat(path + "/" + entry.name, &stat).ok())
        charge += fs_charge(stat.length);
    }
    return charge;
  }

  void check_cap() {
    const std::uint64_t charge = charge_below(kBase);
    most = std::max(most, charge);
    if (charge <= kCap) return;
    kvstrata::testing::fail(__FILE__, __LINE__,
                            "seed " + std::to_string(seed_) + ", step " + std::to_string(step_) +
                                ": " + std::to_string(charge) + " bytes lie there");
  }

  // What was acknowledged, and that nobody has unlinked since its put began, is there and whole.
  void examine() {
    FsOptions options = fs_options(kBase);  // without a cap: it evicts nothing
    options.own_threads = false;
    FsSharedConnector connector(options, below_, times_);
    CHECK_EQ(connector.open({}), std::string());
    for (int number = 0; number < kKeys; ++number) {
      const std::string path = FsPaths(kBase, "tmp").record(numbered_key(number));
      const auto since = acknowledged_.find(path);
      const bool must =
          since != acknowledged_.end() && (!left_.contains(path) || left_[path] < since->second);
      if (must && !exists(connector, number))
        kvstrata::testing::fail(__FILE__, __LINE__,
                                "seed " + std::to_string(seed_) + ": " + path +
                                    " is not there, acknowledged by a put since step " +
                                    std::to_string(since->second) + history_[path]);
      if (exists(connector, number))
        CHECK(load_one(connector, number, payload_of(number)) == LoadStatus::kLoaded);
    }
  }

  VolatileFiles below_;
  Random random_;
  const unsigned switch_percent_;
  const std::uint64_t seed_;
  FsSharedTimes times_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Member> members_;
  std::deque<std::thread> threads_;
  std::size_t turn_ = SIZE_MAX;

  // Of whoever has the turn.
  std::uint64_t step_ = 0;
  std::int64_t now_ns_ = 0;
  std::map<std::string, std::uint64_t> left_;
  std::map<std::string, std::string> history_;
  std::map<std::string, std::uint64_t> acknowledged_;
};

}  // namespace

TEST(the_cap_holds_and_nothing_acknowledged_is_lost_whoever_dies_or_stands_still) {
  std::uint64_t first = 1;
  auto count = amount<std::uint64_t>(3, 12);
  if (const char* const seed = std::getenv("KVSTRATA_SHARED_STORY")) {
    first = std::strtoull(seed, nullptr, 10);
    count = 1;
  }
  if (const char* const stories = std::getenv("KVSTRATA_SHARED_STORIES"))
    count = std::strtoull(stories, nullptr, 10);
  std::uint64_t evictions = 0;
  std::uint64_t takeovers = 0;
  std::uint64_t stored_count = 0;
  std::uint64_t refused = 0;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Story story(seed);
    story.tell();
    evictions += story.evictions;
    takeovers += story.takeovers;
    stored_count += story.stored_count;
    refused += story.refused;
  }
  std::printf("%llu stories: stored %llu, refused %llu, evicted %llu, takeovers %llu\n",
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(stored_count),
              static_cast<unsigned long long>(refused), static_cast<unsigned long long>(evictions),
              static_cast<unsigned long long>(takeovers));
  CHECK(evictions > 0 && takeovers > 0 && stored_count > refused / 4);
}
