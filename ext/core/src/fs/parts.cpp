// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/parts.h"

#include <algorithm>
#include <cassert>

namespace kvstrata {

using State = FsPartState;

bool FsParts::join(PutItem& item) {
  const auto same = std::ranges::find_if(parts_, [&](const auto& numbered) {
    const FsPart& part = numbered.second;
    return part.key == item.key && part.length == item.length && !part.cancelled &&
           part.state != State::kSettled;
  });
  if (same == parts_.end()) return false;
  item.copy = same->first;
  same->second.askers += 1;
  return true;
}

FsPart& FsParts::make(std::uint64_t number, PutItem& item) {
  item.copy = number;
  FsPart& part = parts_[number];
  part = {.key = item.key, .length = item.length, .askers = 1};
  return part;
}

void FsParts::settle(FsPart& part, PutOutcome outcome) noexcept {
  assert(part.state == State::kWriting || part.state == State::kClaimed);
  part.state = State::kSettled;
  part.outcome = outcome;
}

std::vector<std::uint64_t> FsParts::claim_written() {
  std::vector<std::uint64_t> claimed;
  for (auto& [number, part] : parts_) {
    if (part.state != State::kWritten) continue;
    part.state = State::kClaimed;
    claimed.push_back(number);
  }
  return claimed;
}

bool FsParts::cancel(const Digest& key) {
  bool any = false;
  for (auto& [number, part] : parts_) {
    if (part.key != key || part.state == State::kSettled || part.cancelled) continue;
    part.cancelled = true;
    any = true;
  }
  return any;
}

void FsParts::end(Lock& lock, std::span<PutItem> batch, const Publish& publish) {
  // This includes parts of other batches that items of this batch have joined: a thread that needs
  // a part publishes it.
  changed_.wait(lock, [&] {
    return std::ranges::none_of(batch, [&](const PutItem& item) {
      return item.copy != 0 && at(item.copy).state == State::kWriting;
    });
  });
  std::vector<std::uint64_t> mine;
  for (const PutItem& item : batch) {
    if (item.copy == 0 || at(item.copy).state != State::kWritten) continue;
    at(item.copy).state = State::kClaimed;
    mine.push_back(item.copy);
  }
  publish(lock, std::move(mine));
  for (PutItem& item : batch) {
    if (item.copy == 0) continue;
    const auto part = parts_.find(item.copy);
    changed_.wait(lock, [&] { return part->second.state == State::kSettled; });
    const bool made_it = item.status == PutStatus::kStored;
    if (made_it || part->second.outcome.first != PutStatus::kStored)
      set_outcome(item, part->second.outcome);
    if (--part->second.askers == 0) parts_.erase(part);
    item.copy = 0;
  }
}

}  // namespace kvstrata
