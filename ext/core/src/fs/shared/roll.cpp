// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/shared/roll.h"

#include <algorithm>
#include <string>

namespace kvstrata {

namespace {

// Time between two probes of a server's lock.
constexpr std::int64_t kProbeNs = 1'000'000'000;

}  // namespace

bool FsRoll::all_known() const noexcept {
  return std::ranges::all_of(sharers_, [](const auto& numbered) { return numbered.second.known; });
}

std::vector<std::pair<std::uint64_t, FsRoll::Sharer*>> FsRoll::living() {
  std::vector<std::pair<std::uint64_t, Sharer*>> living;
  for (auto& [id, sharer] : sharers_) {
    if (!sharer.gone && sharer.there && sharer.state.left == 0) living.emplace_back(id, &sharer);
  }
  return living;
}

bool FsRoll::hear(const FsSharedFolder::Listing& listing, const FsSharerState& own, bool known,
                  std::int64_t clock_ns) {
  bool any_new = false;
  for (const auto* const group : {&listing.locks, &listing.sharers}) {
    for (const std::uint64_t id : *group) {
      const auto [sharer, is_new] = sharers_.try_emplace(id);
      if (is_new) sharer->second.known = known;
      any_new = any_new || is_new;
    }
  }
  Sharer& self = sharers_[own_id_];
  self.state = own;
  self.there = self.known = true;
  for (auto& [id, sharer] : sharers_) {
    if (id != own_id_ && !sharer.gone)
      hear_one(id, sharer, std::ranges::binary_search(listing.locks, id), clock_ns);
  }
  return any_new;
}

void FsRoll::hear_one(std::uint64_t id, Sharer& sharer, bool has_lock, std::int64_t clock_ns) {
  std::string holder;
  if (!has_lock) {
    sharer.gone = true;
  } else if (!sharer.probed_ns || clock_ns - *sharer.probed_ns >= kProbeNs) {
    sharer.probed_ns = clock_ns;
    sharer.gone = folder_.lock(id, &sharer.lock, &holder).ok();
  }
  // A server that was found gone before this read writes nothing more.
  const Status status = folder_.read_sharer(id, &sharer.state);
  if (status.ok()) {
    sharer.there = true;
  } else if (!is_not_there(status)) {
    garbage_ += 1;
    sharer.there = true;  // its file exists, and its content is unknown
  }
}

bool FsRoll::wants_scan() const noexcept {
  return std::ranges::any_of(sharers_, [](const auto& numbered) {
    const Sharer& sharer = numbered.second;
    return sharer.state.scan_asks != sharer.scan_asks || (sharer.gone && !sharer.known);
  });
}

void FsRoll::scan_began() {
  for (auto& [id, sharer] : sharers_) {
    sharer.next_base_bytes = sharer.state.settled_bytes;
    sharer.next_base_tally = sharer.state.tally;
    sharer.in_scan = true;
    sharer.gone_before_scan = sharer.gone;
    sharer.scan_asks = sharer.state.scan_asks;
  }
}

std::vector<std::uint64_t> FsRoll::scan_ended() {
  std::vector<std::uint64_t> forgotten;
  for (auto at = sharers_.begin(); at != sharers_.end();) {
    auto& [id, sharer] = *at;
    if (!sharer.in_scan) {  // the server came onto the roll while the scan ran
      ++at;
      continue;
    }
    sharer.base_bytes = sharer.next_base_bytes;
    sharer.base_tally = sharer.next_base_tally;
    if (!sharer.gone_before_scan) {
      ++at;
      continue;
    }
    folder_.forget_sharer(id);
    forgotten.push_back(id);
    at = sharers_.erase(at);
  }
  return forgotten;
}

}  // namespace kvstrata
