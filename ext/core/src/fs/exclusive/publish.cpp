// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// FsConnector: publishing written parts.
#include "fs/exclusive/connector.h"

#include "base/clock.h"

namespace kvstrata {

// Publishes and settles parts. REQUIRES: this thread has claimed them, and has no mark.
void FsConnector::publish(Lock& lock, std::vector<std::uint64_t> claimed) {
  while (!claimed.empty()) {
    std::vector<std::uint64_t> marked;
    std::vector<std::uint64_t> later;  // another thread has marked their keys
    for (const std::uint64_t number : claimed) {
      const bool free = marks_.try_emplace(parts_.at(number).key, Mark::kPublishing).second;
      (free ? marked : later).push_back(number);
    }
    if (marked.empty())
      changed_.wait(lock);
    else
      publish_marked(lock, marked);
    claimed = std::move(later);
  }
}

// Publishes and settles parts, and unmarks their keys. REQUIRES: this thread has marked the keys,
// which are all different.
void FsConnector::publish_marked(Lock& lock, std::span<const std::uint64_t> marked) {
  std::vector<std::uint64_t> chosen;
  std::vector<FsFiles::Publication> items;
  std::vector<std::string> needless;
  for (const std::uint64_t number : marked) {
    const FsPart& part = parts_.at(number);
    const FsRecord* const there = index_.find(part.key);
    if (part.cancelled || (there != nullptr && there->length == part.length)) {
      needless.push_back(paths_.part(part.key, number));
    } else {
      chosen.push_back(number);
      FsFiles::Publication& item = items.emplace_back();
      item.key = part.key;
      item.part = paths_.part(part.key, number);
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
      index_.add(part.key, part.length, now_ns);
      settle(part, FsPartEvent::kPublished, {PutStatus::kStored, Reason::kNone});
    } else {
      settle(part, FsPartEvent::kPublishFailed, put_refusal(file_reason(items[i].status)));
    }
  }
  for (const std::uint64_t number : marked) {
    FsPart& part = parts_.at(number);
    // A part that was not needed: its record exists, or its key was deleted after the put.
    if (part.state == FsPartState::kClaimed)
      settle(part, FsPartEvent::kNeedless,
             {part.cancelled ? PutStatus::kStored : PutStatus::kExists, Reason::kNone});
    marks_.erase(part.key);
  }
  changed_.notify_all();
}

void FsConnector::settle(FsPart& part, FsPartEvent event, PutOutcome outcome) {
  parts_.settle(part, event, outcome);
  parts_charge_ -= fs_charge(part.length);
}

}  // namespace kvstrata
