// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// FsConnector: publishing written parts.
#include <utility>

#include "base/clock.h"
#include "fs/connector.h"

namespace kvstrata {

namespace {

// A record may need a directory for itself, and one for that.
constexpr std::size_t kNamesOfRecord = 2;

}  // namespace

// Publishes and settles parts, those for which the medium had no name free once more. REQUIRES:
// this thread has claimed them, and has no mark.
void FsConnector::publish(Lock& lock, std::vector<std::uint64_t> claimed) {
  std::vector<std::uint64_t> unnamed;
  bool again = false;
  for (;;) {
    if (claimed.empty()) {
      if (unnamed.empty()) return;
      (void)evict(lock, 0, unnamed.size() * kNamesOfRecord);
      claimed = std::exchange(unnamed, {});
      again = true;
    }
    std::vector<std::uint64_t> marked;
    std::vector<std::uint64_t> later;  // another thread has marked their keys
    for (const std::uint64_t number : claimed) {
      const bool free = marks_.try_emplace(parts_.at(number).key, Mark::kPublishing).second;
      (free ? marked : later).push_back(number);
    }
    if (marked.empty())
      changed_.wait(lock);
    else
      publish_marked(lock, marked, again ? nullptr : &unnamed);
    claimed = std::move(later);
  }
}

// Publishes and settles parts, and unmarks their keys. Parts for which the medium had no name free
// stay claimed and get into `unnamed`, if that is not null. REQUIRES: this thread has marked the
// keys, which are all different.
void FsConnector::publish_marked(Lock& lock, std::span<const std::uint64_t> marked,
                                 std::vector<std::uint64_t>* unnamed) {
  std::vector<std::uint64_t> chosen;
  std::vector<std::uint64_t> not_needed;
  std::vector<FsFiles::Publication> items;
  std::vector<std::string> needless;
  for (const std::uint64_t number : marked) {
    const FsPart& part = parts_.at(number);
    const FsRecord* const there = index_.find(part.key);
    if (part.cancelled || (there != nullptr && there->length == part.length)) {
      not_needed.push_back(number);
      needless.push_back(paths_.part(part.key, number));
    } else {
      chosen.push_back(number);
      FsFiles::Publication& item = items.emplace_back();
      item.key = part.key;
      item.part = paths_.part(part.key, number);
      item.keeps_part = unnamed != nullptr;
    }
  }
  lock.unlock();
  for (const std::string& path : needless)
    files_.discard(path);
  files_.publish(items);
  lock.lock();
  const std::int64_t now_ns = now_unix_ns();
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    FsPart& part = parts_.at(chosen[i]);
    if (items[i].renamed && index_.find(part.key) != nullptr) index_.remove(part.key);
    if (items[i].status.ok()) {
      index_.add(part.key, part.length, now_ns).parent = part.parent;
      settle(part, {PutStatus::kStored, Reason::kNone});
    } else if (unnamed != nullptr && !items[i].renamed && is_no_space(items[i].status)) {
      unnamed->push_back(chosen[i]);
    } else {
      settle(part, put_refusal(file_reason(items[i].status)));
    }
  }
  // A record that continues another one uses it.
  for (const std::uint64_t number : chosen) {
    FsRecord* const record = index_.find(parts_.at(number).key);
    if (record != nullptr) index_.used(*record);
  }
  for (const std::uint64_t number :
       not_needed) {  // the record exists, or its key was deleted since
    FsPart& part = parts_.at(number);
    settle(part, {part.cancelled ? PutStatus::kStored : PutStatus::kExists, Reason::kNone});
  }
  for (const std::uint64_t number : marked)
    marks_.erase(parts_.at(number).key);
  changed_.notify_all();
}

void FsConnector::settle(FsPart& part, PutOutcome outcome) {
  parts_.settle(part, outcome);
  parts_charge_ -= fs_charge(part.length);
}

}  // namespace kvstrata
